//! Whatever pod comes: no panic, what is refused says where and what to do, and twice is once.

use crate::support::{check_patch, config, violations};
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::strategy::Union;
use serde_json::{Value, json};
use shmesh_injector::inject;

/// The first most of the time, else any of the others: a pod with ten odd things says nothing of any of them.
fn mostly<T: Clone + std::fmt::Debug + 'static>(values: Vec<T>) -> impl Strategy<Value = T> {
    let (usual, others) = (values[0].clone(), values[1..].to_vec());
    Union::new_weighted(vec![(12, Just(usual).boxed()), (1, select(others).boxed())])
}

fn link(name: &'static str) -> impl Strategy<Value = Value> {
    let scope = mostly(vec![
        None,
        Some("pod"),
        Some("pool/radio"),
        Some("pool/wide"),
        Some("pool/none"),
        Some("claim/du"),
        Some("claim/shmesh"),
        Some("claim/shmesh-2"),
        Some("claim/Du"),
        Some("node"),
    ]);
    let side = mostly(vec![None, None, Some("primary"), Some("secondary")]);
    let containers = prop::option::weighted(0.1, subsequence(vec!["a", "b", "c"], 1..=2));
    let pools = select(vec![
        json!(null),
        json!({}),
        json!({"cpu_msg": {"pool_len": 7}}),
        json!({"cpu_large": {"buf_size_bytes": 1 << 30, "pool_len": 3}}),
    ]);
    let backing = select(vec![
        json!({}),
        json!({"backing": "memfd"}),
        json!({"backing": "memfd", "memory": {"huge_pages": "hugetlb"}}),
        json!({"memory": {"file_mode": "0660"}}),
    ]);
    (scope, side, containers, pools, backing).prop_map(move |(scope, side, containers, pools, backing)| {
        let mut link = json!({"name": name});
        let members = link.as_object_mut().unwrap();
        // A pool or claim without a side is one refusal of many; it would hide the others.
        let side = side.or(scope.filter(|scope| scope.contains('/')).map(|_| "primary"));
        members.extend(scope.map(|scope| ("scope".into(), scope.into())));
        members.extend(side.map(|side| ("side".into(), side.into())));
        members.extend(containers.map(|names| ("containers".into(), names.into())));
        if !pools.is_null() {
            members.insert("pools".into(), pools);
        }
        members.extend(backing.as_object().unwrap().clone());
        link
    })
}

fn container(name: &'static str) -> impl Strategy<Value = Value> {
    let context =
        mostly(vec![json!(null), json!({"runAsUser": 1}), json!({"runAsUser": 2}), json!({"runAsUser": 0})]);
    let mounts = mostly(vec![
        json!(null),
        json!(null),
        json!([]),
        json!([{"name": "v", "mountPath": "/data"}]),
        json!([{"name": "v", "mountPath": "/dev/shm"}]),
    ]);
    let limits = mostly(vec![
        json!(null),
        json!(null),
        json!({"memory": "1Gi", "cpu": 1}),
        json!({"memory": "100Ki"}),
        json!({"shmesh.io/shm": "1"}),
        json!({"shmesh.io/radio": 1}),
    ]);
    (context, mounts, limits).prop_map(move |(context, mounts, limits)| {
        let mut context = context;
        if context.is_object() {
            context["allowPrivilegeEscalation"] = false.into();
        }
        json!({"name": name, "image": "i", "securityContext": context, "volumeMounts": mounts, "resources": {"limits": limits}})
    })
}

fn pod() -> impl Strategy<Value = Value> {
    let links = (link("one"), link("two"), link("three"));
    let links = (links, 1..=3_usize).prop_map(|((a, b, c), count)| {
        // A list in one line is YAML, too.
        Value::from(Vec::from_iter([a, b, c].into_iter().take(count))).to_string()
    });
    let text =
        prop_oneof![9 => links, 1 => any::<String>(), 1 => Just("- name: a\n  ring: {len: -1}".to_owned())];
    let chosen = mostly(vec![None, None, None, Some("a"), Some("a, c"), Some("x"), Some(",")]);
    let size = mostly(vec![None, None, None, Some("64Mi"), Some("1Ki"), Some("much")]);
    let of_pod = mostly(vec![
        json!({"runAsUser": 1}),
        json!(null),
        json!({"runAsUser": 1, "fsGroup": 5}),
        json!({"runAsNonRoot": true}),
    ]);
    let flags = mostly(vec![
        json!({}),
        json!({}),
        json!({}),
        json!({"hostPID": true}),
        json!({"hostIPC": true}),
        json!({"hostUsers": false}),
        json!({"resourceClaims": [{"name": "ipc", "resourceClaimName": "du"}, {"name": "shmesh"}]}),
        json!({"resourceClaims": [{"name": "du", "resourceClaimTemplateName": "t"}]}),
        json!({"volumes": null}),
        json!({"initContainers": []}),
    ]);
    (text, chosen, size, of_pod, flags, (container("a"), container("b"), container("c"))).prop_map(
        |(text, chosen, size, of_pod, flags, (a, b, c))| {
            let mut pod = json!({
                "metadata": {"name": "p", "annotations": {"shmesh.io/links": text}},
                "spec": {"securityContext": of_pod, "containers": [a, b], "initContainers": [c]},
            });
            let annotations = pod["metadata"]["annotations"].as_object_mut().unwrap();
            annotations.extend(chosen.map(|text| ("shmesh.io/containers".into(), text.into())));
            annotations.extend(size.map(|text| ("shmesh.io/size".into(), text.into())));
            pod["spec"].as_object_mut().unwrap().extend(flags.as_object().unwrap().clone());
            pod
        },
    )
}

/// The pod shares a pool or a claim instead, or as well.
fn sharing_pod() -> impl Strategy<Value = Value> {
    let pool = mostly(vec![
        "radio",
        "claim/du",
        "claim/shmesh",
        "wide",
        "closed",
        "none",
        "",
        "claim/",
        "pool/radio",
    ]);
    let library = mostly(vec![Some("posix"), None, None, None, Some("sysv")]);
    let preload = mostly(vec![
        json!(null),
        json!(null),
        json!([{"name": "LD_PRELOAD", "value": "/a.so"}]),
        json!([{"name": "LD_PRELOAD", "value": ""}]),
        json!([{"name": "LD_PRELOAD"}, {"name": "LD_PRELOAD", "value": "/b.so"}]),
        json!([{"name": "LD_PRELOAD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
        json!([{"name": "LD_PRELOAD", "value": 3}]),
    ]);
    let only = mostly(vec![true, false]);
    (pod(), pool, only, library, preload).prop_map(|(mut pod, pool, is_only, library, preload)| {
        pod["spec"]["containers"][0]["env"] = preload;
        let annotations = pod["metadata"]["annotations"].as_object_mut().unwrap();
        annotations.insert("shmesh.io/share".into(), pool.into());
        annotations.extend(library.map(|text| ("shmesh.io/as".into(), text.into())));
        if is_only {
            annotations.remove("shmesh.io/links");
            annotations.remove("shmesh.io/size");
        }
        pod
    })
}

/// Any document at all, around words that mean something here.
fn nonsense() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        select(vec![
            "shmesh",
            "shmesh-library",
            "Always",
            "/dev/shm",
            "- name: a",
            "1Gi",
            "radio",
            "posix",
            "claim/du",
            "du",
            "LD_PRELOAD"
        ])
        .prop_map(Value::from),
    ];
    let keys = select(vec![
        "metadata",
        "annotations",
        "shmesh.io/links",
        "shmesh.io/share",
        "shmesh.io/as",
        "env",
        "value",
        "shmesh.io/size",
        "spec",
        "containers",
        "initContainers",
        "volumes",
        "name",
        "resources",
        "limits",
        "memory",
        "affinity",
        "labels",
        "resourceClaims",
        "resourceClaimName",
        "claims",
        "securityContext",
    ]);
    leaf.prop_recursive(6, 64, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map(keys.clone().prop_map(str::to_owned), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn holds(pod: &Value) -> bool {
    match inject(pod, "default", &config()) {
        Ok(once) => {
            check_patch(pod, &once);
            let twice = inject(&once.pod, "default", &config()).unwrap();
            assert_eq!((twice.operations, &twice.pod), (Vec::new(), &once.pod));
            true
        }
        Err(refusal) => {
            let said = refusal.to_string();
            assert!(refusal.line > 0 && refusal.column > 0 && !refusal.what.is_empty(), "{said}");
            assert!(refusal.remedy.split(' ').count() > 1 || refusal.remedy == "shorten it", "{said}");
            assert!(said.starts_with("metadata.annotations[shmesh.io/"), "{said}");
            assert!(said.ends_with(&format!("(line {}, column {})", refusal.line, refusal.column)), "{said}");
            false
        }
    }
}

/// Four properties, in so many cases each.
macro_rules! properties {
    ($($(#[$attribute:meta])* $module:ident: $cases:expr;)+) => {$(
        mod $module {
            use super::*;

            proptest! {
                #![proptest_config(ProptestConfig { cases: $cases, ..ProptestConfig::default() })]

                $(#[$attribute])*
                #[test]
                fn any_pod(pod in pod()) {
                    holds(&pod);
                }

                $(#[$attribute])*
                #[test]
                fn any_sharing_pod(pod in sharing_pod()) {
                    holds(&pod);
                }

                $(#[$attribute])*
                #[test]
                fn any_document(pod in nonsense()) {
                    holds(&pod);
                }

                $(#[$attribute])*
                #[test]
                fn injection_keeps_pod_security_restricted(pod in prop_oneof![pod(), sharing_pod()]) {
                    if let Ok(injected) = inject(&pod, "default", &config()) {
                        prop_assert_eq!(violations(&injected.pod), violations(&pod));
                    }
                }
            }
        }
    )+};
}

properties! {
    quick: 20;
    #[ignore = "long: 1,000 pods of each kind"] long: 1000;
}

/// The generator makes pods of both kinds; else the properties above would say little.
#[test]
fn generated_pods_are_injected_or_refused() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    for pods in [pod().boxed(), sharing_pod().boxed()] {
        let injected = (0..200).filter(|_| holds(&pods.new_tree(&mut runner).unwrap().current())).count();
        assert!((8..180).contains(&injected), "{injected} of 200");
    }
}
