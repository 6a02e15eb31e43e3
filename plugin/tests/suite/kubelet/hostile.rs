//! Requests that no kubelet makes. Each is refused with a status that says why, and the plugin goes on.

use std::io::Write;
use std::os::unix::net::UnixStream;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use shmesh_kubelet_api::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, Empty,
    PreferredAllocationRequest,
};
use tonic::Code;

use crate::kubelet::plugin::*;

fn request(ids: impl IntoIterator<Item = String>) -> AllocateRequest {
    AllocateRequest {
        container_requests: vec![ContainerAllocateRequest { devices_ids: ids.into_iter().collect() }],
    }
}

fn ids(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|&id| id.to_owned()).collect()
}

fn unit(at: usize) -> String {
    format!("u{at}")
}

#[tokio::test]
async fn each_invalid_request_has_its_status_code() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start_with(&["shm.numa=false"]);
    place.all_there().await;
    let mut client = client(&place, SHM).await;
    let cases = [
        (request(ids(&["u16"])), Code::NotFound, "no device \"u16\""),
        (request(ids(&["u0", "../../etc", "u1"])), Code::NotFound, "../../etc"),
        (
            request(ids(&["u0", "u1", "u0"])),
            Code::InvalidArgument,
            "\"u0\" of shmesh.io/shm is requested twice",
        ),
        (request([]), Code::InvalidArgument, "at least one"),
        (AllocateRequest::default(), Code::InvalidArgument, "0 containers"),
        (
            AllocateRequest { container_requests: vec![ContainerAllocateRequest::default(); 5000] },
            Code::InvalidArgument,
            "5000 containers",
        ),
        (request((0..100_000).map(unit)), Code::NotFound, "no device \"u16\""),
        (request((0..100_000).map(|_| unit(0))), Code::InvalidArgument, "twice"),
        // Within what is read.
        (request(["x".repeat(4 << 20)]), Code::NotFound, "no device"),
        (request((0..200_000).map(|at| format!("{at:020}"))), Code::NotFound, "no device"),
        // Beyond it.
        (request(["x".repeat(9 << 20)]), Code::OutOfRange, "too large"),
    ];
    for (request, code, part) in cases {
        let status = client.allocate(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(part) && status.message().len() < 300, "{status:?}");
    }
    let preferred =
        |available: Vec<String>, must_include: Vec<String>, allocation_size| PreferredAllocationRequest {
            container_requests: vec![ContainerPreferredAllocationRequest {
                available_device_ids: available,
                must_include_device_ids: must_include,
                allocation_size,
            }],
        };
    let all: Vec<_> = (0..16).map(unit).collect();
    for (request, code) in [
        (preferred(all.clone(), vec![], 17), Code::InvalidArgument),
        (preferred(all.clone(), vec![], -1), Code::InvalidArgument),
        (preferred(all.clone(), vec![], i32::MIN), Code::InvalidArgument),
        (preferred(all.clone(), ids(&["u1", "u2"]), 1), Code::InvalidArgument),
        (preferred(ids(&["u1"]), ids(&["u2"]), 1), Code::InvalidArgument),
        (preferred(ids(&["u1", "u1"]), vec![], 1), Code::InvalidArgument),
        (preferred(ids(&["x"]), vec![], 1), Code::NotFound),
        (PreferredAllocationRequest::default(), Code::InvalidArgument),
    ] {
        assert_eq!(client.get_preferred_allocation(request).await.unwrap_err().code(), code);
    }
    assert!(
        plugin
            .metric("shmesh_plugin_refused_allocations_total{resource=\"shmesh.io/shm\",reason=\"unknown_device\"}")
            .unwrap()
            >= 5.0
    );
    // And after all that.
    let response = client.allocate(request(all)).await.unwrap().into_inner();
    assert_eq!(response.container_responses[0].cdi_devices[0].name, "shmesh.io/shm=1Gi");
    place.all_there().await;
}

#[tokio::test]
async fn garbage_on_the_socket_is_survived() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start();
    place.all_there().await;
    let socket = place.plugin_sockets().pop().unwrap();
    let before = std::fs::read_dir(format!("/proc/{}/fd", plugin.pid())).unwrap().count();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let mut runner = TestRunner::new(Config::with_cases(200));
    runner
        .run(&(any::<bool>(), proptest::collection::vec(any::<u8>(), 0..4096)), |(speaks, bytes)| {
            let mut stream = UnixStream::connect(&socket).unwrap();
            let begin = if speaks { preface.as_slice() } else { &[] };
            // It may have been closed by then.
            let _ = stream.write_all(&[begin, &bytes].concat());
            Ok(())
        })
        .unwrap();
    // A frame of four megabytes, and frames without end.
    for flood in [vec![0xff; 4 << 20], [preface, vec![0; 4 << 20]].concat()] {
        let _ = UnixStream::connect(&socket).unwrap().write_all(&flood);
    }
    // Connections that say nothing, and one that is cut in the middle.
    let silent: Vec<_> = (0..200).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    let status = place.node.add_pod(pod("p", &[(SHM, 1), (POOL, 1), (GPU, 1)])).await;
    assert_eq!(status.phase, shmesh_fake_kubelet::Phase::Running, "{status:?}");
    drop(silent);
    let fds = || std::fs::read_dir(format!("/proc/{}/fd", plugin.pid())).unwrap().count();
    until("descriptors are closed", || fds() <= before + 1).await;
}

#[tokio::test]
async fn many_streams_can_end_at_once() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start();
    place.all_there().await;
    let fds = || std::fs::read_dir(format!("/proc/{}/fd", plugin.pid())).unwrap().count();
    let before = fds();
    let mut streams = Vec::new();
    for _ in 0..50 {
        let mut client = client(&place, SHM).await;
        let mut stream = client.list_and_watch(Empty {}).await.unwrap().into_inner();
        assert_eq!(stream.message().await.unwrap().unwrap().devices.len(), 16);
        streams.push((client, stream));
    }
    plugin.shows("shmesh_plugin_streams{resource=\"shmesh.io/shm\"}", |count| count == 51.0).await;
    drop(streams);
    plugin.shows("shmesh_plugin_streams{resource=\"shmesh.io/shm\"}", |count| count == 1.0).await;
    until("descriptors are closed", || fds() <= before + 1).await;
    place.all_there().await;
}

#[tokio::test]
async fn repeated_refusals_are_rate_limited_in_the_log() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start();
    place.all_there().await;
    let mut client = client(&place, SHM).await;
    for _ in 0..1000 {
        client.allocate(request(ids(&["unknown"]))).await.unwrap_err();
    }
    let denied =
        "shmesh_plugin_refused_allocations_total{resource=\"shmesh.io/shm\",reason=\"unknown_device\"}";
    assert_eq!(plugin.metric(denied), Some(1000.0), "all are counted");
    let refused = plugin.end_and_tell().iter().filter(|line| line.contains("\"request refused\"")).count();
    // Five, and one a minute should the machine be that slow.
    assert!((5..20).contains(&refused), "{refused}");
}
