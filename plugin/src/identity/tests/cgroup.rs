//! Paths as real nodes print them, and what hostile containers could make of them.

use super::*;

const UID: &str = "9a5f0e5c-7d6b-4c1e-8f3a-2b6d1c0e4f57";
const SLICE: &str = "9a5f0e5c_7d6b_4c1e_8f3a_2b6d1c0e4f57";
const CID: &str = "4f1c2a9be07d3586a1b2c3d4e5f60718293a4b5c6d7e8f900112233445566778";
const OTHER: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const STATIC: &str = "d1f4a2b8c35e6f7091a2b3c4d5e6f708";

/// Which layout, the text with U, S, C, O and T for the constants above, and whose uid it is.
type Row = (&'static str, &'static str, Option<&'static str>);

const IN_POD: &[Row] = &[
    (
        "containerd, systemd, v2, burstable",
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podS.slice/cri-containerd-C.scope",
        Some(UID),
    ),
    (
        "containerd, systemd, v2, guaranteed",
        "0::/kubepods.slice/kubepods-podS.slice/cri-containerd-C.scope",
        Some(UID),
    ),
    (
        "containerd, systemd, v2, best effort",
        "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podS.slice/cri-containerd-C.scope",
        Some(UID),
    ),
    (
        "containerd, systemd, v1",
        "12:pids:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podS.slice/cri-containerd-C.scope\n1:name=systemd:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podS.slice/cri-containerd-C.scope\n0::/system.slice/containerd.service",
        Some(UID),
    ),
    (
        "containerd, cgroupfs, v1, guaranteed",
        "9:name=systemd:/kubepods/podU/C\n4:memory:/kubepods/podU/C\n1:cpu,cpuacct:/kubepods/podU/C\n0::/",
        Some(UID),
    ),
    ("containerd, cgroupfs, v2, burstable", "0::/kubepods/burstable/podU/C", Some(UID)),
    ("containerd, cgroupfs, best effort", "0::/kubepods/besteffort/podU/C", Some(UID)),
    (
        "containerd whose driver is not the kubelet's",
        "11:devices:/system.slice/containerd.service/kubepods-besteffort-podS.slice:cri-containerd:C",
        Some(UID),
    ),
    ("the same, at the root", "0::/kubepods-podS.slice:cri-containerd:C", Some(UID)),
    (
        "CRI-O, systemd, v2",
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podS.slice/crio-C.scope",
        Some(UID),
    ),
    (
        "CRI-O, crun's inner cgroup",
        "0::/kubepods.slice/kubepods-podS.slice/crio-C.scope/container",
        Some(UID),
    ),
    ("CRI-O, cgroupfs", "0::/kubepods/burstable/podU/crio-C", Some(UID)),
    ("CRI-O without the pod's slice", "0::/machine.slice/crio-C.scope", None),
    (
        "Docker, systemd",
        "1:name=systemd:/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podS.slice/docker-C.scope",
        Some(UID),
    ),
    ("Docker, cgroupfs", "10:memory:/kubepods/burstable/podU/C", Some(UID)),
    ("kind, v1", "12:pids:/docker/O/kubepods/burstable/podU/C", Some(UID)),
    (
        "kind, v2, systemd",
        "0::/system.slice/docker-O.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-podS.slice/cri-containerd-C.scope",
        Some(UID),
    ),
    (
        "kind, v2, inside the node",
        "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-podS.slice/cri-containerd-C.scope",
        Some(UID),
    ),
    ("kind before 0.20, cgroupfs", "0::/kubelet/kubepods/besteffort/podU/C", Some(UID)),
    ("static pod, cgroupfs", "4:memory:/kubepods/burstable/podT/C", Some(STATIC)),
    (
        "static pod, systemd",
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podT.slice/cri-containerd-C.scope",
        Some(STATIC),
    ),
    ("private cgroup namespace, measured on v1", "4:memory:/../../../podU/C", Some(UID)),
    ("private cgroup namespace, sibling pod", "0::/../../podU/C", Some(UID)),
    (
        "private cgroup namespace, systemd",
        "0::/../../kubepods-burstable-podS.slice/cri-containerd-C.scope",
        Some(UID),
    ),
    ("systemd inside the container", "0::/kubepods/podU/C/init.scope", Some(UID)),
    ("Docker inside the container", "0::/kubepods/podU/C/docker/O", Some(UID)),
    ("a cgroup that was removed", "0::/kubepods/podU/C (deleted)", Some(UID)),
];

const NOT_IN_POD: &[&str] = &[
    "",
    "0::/",
    "0::/init.scope",
    "0::/user.slice/user-1000.slice/session-3.scope",
    "0::/system.slice/kubelet.service",
    "0::/system.slice/containerd.service",
    "0::/docker/C",
    "0::/system.slice/docker-C.scope",
    "0::/machine.slice/libpod-C.scope",
    "0::/../..",
    // A pod's cgroup itself, and conmon beside the container: no container.
    "0::/kubepods/burstable/podU",
    "0::/kubepods.slice/kubepods-podS.slice/crio-conmon-C.scope",
    // Near misses: digits too few, capitals, no hex, something before or behind.
    "0::/kubepods/podU0/C",
    "0::/kubepods/pod9A5F0E5C-7d6b-4c1e-8f3a-2b6d1c0e4f57/C",
    "0::/kubepods/pod9a5f0e5c7d6b-4c1e-8f3a-2b6d-1c0e4f57/C",
    "0::/kubepods/podU/C0",
    "0::/kubepods/podU/xC",
    "0::/kubepods/podgT/C",
    "kubepods/podU/C",
    "0:/kubepods/podU/C",
];

fn text(pattern: &str) -> String {
    pattern
        .split_inclusive(['U', 'S', 'C', 'O', 'T'])
        .map(|piece| {
            let (head, end) = piece.split_at(piece.len().saturating_sub(1));
            let end = match end {
                "U" => UID,
                "S" => SLICE,
                "C" => CID,
                "O" => OTHER,
                "T" => STATIC,
                other => other,
            };
            format!("{head}{end}")
        })
        .collect()
}

fn container(pattern: &str) -> Result<ContainerRef, NoContainer> {
    CgroupRoots::default().container(&text(pattern))
}

fn expected(uid: Option<&str>) -> Result<ContainerRef, NoContainer> {
    Ok(ContainerRef { pod_uid: uid.map(str::to_owned), container_id: CID.to_owned() })
}

#[test]
fn every_known_cgroup_layout_is_parsed() {
    for (name, pattern, uid) in IN_POD {
        // "CRI-O" and "Docker" are only names: the pattern is what is replaced.
        assert_eq!(container(pattern), expected(*uid), "{name}: {pattern}");
    }
}

#[test]
fn other_cgroups_are_not_in_a_pod() {
    for pattern in NOT_IN_POD {
        assert_eq!(container(pattern), Err(NoContainer::NotInPod), "{pattern}");
    }
}

#[test]
fn container_cannot_fake_identity_with_nested_cgroups() {
    let forged = "0::/kubepods/podU/C/kubepods/podT/O";
    assert_eq!(container(forged), expected(Some(UID)));
    let below_a_private_root = "0::/../../podU/C/podT/O";
    assert_eq!(container(below_a_private_root), expected(Some(UID)));
}

#[test]
fn contradicting_hierarchies_are_ambiguous() {
    assert_eq!(container("2:pids:/kubepods/podU/C\n1:cpu:/kubepods/podT/C"), Err(NoContainer::Ambiguous));
    assert_eq!(container("2:pids:/kubepods/podU/C\n1:cpu:/kubepods/podU/O"), Err(NoContainer::Ambiguous));
}

#[test]
fn nested_cluster_uses_its_own_pods() {
    for (own, inner, outer) in [
        (
            "0::/kubepods/podT/O/kubelet/kubepods/burstable/pod00000000-0000-0000-0000-000000000000/C",
            "0::/kubepods/podT/O/kubelet/kubepods/podU/C",
            "0::/kubepods/podT/C",
        ),
        (
            "0::/kubepods.slice/kubepods-podT.slice/cri-containerd-O.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-podT.slice/cri-containerd-O.scope",
            "0::/kubepods.slice/kubepods-podT.slice/cri-containerd-O.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-podS.slice/cri-containerd-C.scope",
            "0::/kubepods.slice/kubepods-podT.slice/cri-containerd-C.scope",
        ),
    ] {
        let roots = CgroupRoots::of_own(&text(own));
        assert_eq!(roots.container(&text(inner)), expected(Some(UID)), "{inner}");
        // One of the outer cluster is not below our root: it is what it is out there.
        assert_eq!(roots.container(&text(outer)), expected(Some(STATIC)), "{outer}");
    }
}

#[test]
fn roots_are_empty_outside_pods() {
    for own in ["0::/", "0::/kubepods/podU/C", "0::/../..", "0::/system.slice/x.service"] {
        let roots = CgroupRoots::of_own(&text(own));
        assert_eq!(roots.container(&text("0::/kubepods/burstable/podU/C")), expected(Some(UID)), "{own}");
    }
}

proptest::proptest! {
    // Generating such strings is slow.
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_text_does_not_panic(own: String, text: String) {
        let _ = CgroupRoots::of_own(&own).container(&text);
    }

    #[test]
    fn arbitrary_paths_do_not_panic(
        own in "([0-9]{0,2}:[a-z,=]{0,8}:?(/(\\.\\.|kubepods|pod[0-9a-f]{32}|[0-9a-f]{64}|(x-)?pod[0-9a-f_]{36}\\.slice|crio-[0-9a-f]{64}\\.scope|:|é))*\n){0,3}",
        text in "([0-9]{0,2}:[a-z,=]{0,8}:?(/(\\.\\.|kubepods|pod[0-9a-f]{32}|[0-9a-f]{64}|(x-)?pod[0-9a-f_]{36}\\.slice|crio-[0-9a-f]{64}\\.scope|:|é))*\n){0,3}",
    ) {
        if let Ok(container) = CgroupRoots::of_own(&own).container(&text) {
            proptest::prop_assert_eq!(container.container_id.len(), 64);
        }
    }
}
