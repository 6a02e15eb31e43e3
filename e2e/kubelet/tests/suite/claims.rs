//! Behaviours 23 to 33: claims of pods and the drivers that prepare them.

use std::fs;
use std::time::Duration;

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde_json::json;
use shmesh_fake_kubelet::{
    ApiError, ApiServer, Clock, Config, Container, Event, Node, Phase, Pod, Race, Verb,
};
use shmesh_kubelet_api::drahealth::HealthStatus;
use shmesh_kubelet_api::{DRA_V1, DRA_V1BETA1};
use tempfile::TempDir;
use tonic::Status;

use crate::driver::{FakeDriver, Sockets};
use crate::plugin::Outcome;
use crate::{D, SOON, claim, class, count, find, node_with, slice};

const MINUTE: Duration = Duration::from_secs(60);

/// A node with an API server, on which the first removal of slices is over.
async fn claim_node(change: impl FnOnce(&mut Config)) -> (TempDir, Node, ApiServer) {
    let server = ApiServer::new(Clock::runtime());
    server.create(&class()).unwrap();
    let (dir, node) = node_with(|config| {
        config.api = Some(server.clone());
        change(config);
    })
    .await;
    wiped(&node, 1).await;
    (dir, node, server)
}

async fn wiped(node: &Node, times: usize) {
    let wiped = |node: &Node| count(node, |event| matches!(event, Event::SlicesWiped { .. })) >= times;
    node.wait_for(MINUTE, wiped).await.unwrap();
}

/// Starts a driver and waits until the kubelet is connected to it.
async fn connect(node: &Node, driver: &FakeDriver) -> Sockets {
    let connected =
        |node: &Node| count(node, |event| matches!(event, Event::DriverConnection { connected: true, .. }));
    let before = connected(node);
    let sockets = driver.start(node);
    node.wait_for(5 * SOON, |node| connected(node) > before).await.unwrap();
    sockets
}

/// A driver that is connected, and claims `c0` and so on, each allocated on the node.
async fn scene(node: &Node, server: &ApiServer, claims: usize) -> (FakeDriver, Sockets) {
    let driver = FakeDriver::new("a");
    let sockets = connect(node, &driver).await;
    let names: Vec<String> = (0..claims).map(|n| format!("d{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    server.create(&slice("slice", "node", &names)).unwrap();
    for n in 0..claims {
        server.create(&claim(&format!("c{n}"), None)).unwrap();
        server.allocate("default", &format!("c{n}"), "node").unwrap();
    }
    (driver, sockets)
}

/// A pod that uses claims, for which they are reserved.
fn user(server: &ApiServer, name: &str, claims: &[&str]) -> Pod {
    let pod = unreserved(name, claims);
    server.schedule(&pod, &["node"]).unwrap();
    pod
}

fn unreserved(name: &str, claims: &[&str]) -> Pod {
    let container = claims.iter().fold(Container::new("main"), |container, claim| container.claim(claim));
    claims.iter().fold(Pod::new(name), |pod, claim| pod.claim(claim, claim)).container(container)
}

fn uid(server: &ApiServer, claim: &str) -> String {
    server.get::<ResourceClaim>("default", claim).unwrap().metadata.uid.unwrap()
}

fn prepare_error(node: &Node) -> String {
    find(node, |event| match event {
        Event::PrepareFailed { error, .. } => Some(error.clone()),
        _ => None,
    })
}

/// Waits for a state of a driver.
async fn until(limit: Duration, state: impl Fn() -> bool) {
    let holds = async {
        while !state() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(limit, holds).await.unwrap();
}

async fn unprepared(node: &Node, pod: &str) {
    let ended = |event: &Event| matches!(event, Event::Unprepared { pod: ended } if ended == pod);
    node.wait_for(MINUTE, |node| count(node, ended) == 1).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn b23_a_driver_registers_with_the_first_service_of_its_list_that_the_kubelet_knows() {
    let (_dir, node, server) = claim_node(|_| {}).await;
    let (beta, _sockets) = {
        let driver = FakeDriver::new("a");
        driver.script(|script| {
            script.services = vec!["v2.DRAPlugin".into(), DRA_V1BETA1.into(), DRA_V1.into()]
        });
        let sockets = connect(&node, &driver).await;
        (driver, sockets)
    };
    until(SOON, || beta.statuses().len() == 1).await;
    assert!(beta.statuses()[0].plugin_registered);
    server.create(&slice("slice", "node", &["d0"])).unwrap();
    server.create(&claim("c", None)).unwrap();
    let status = node.add_pod(user(&server, "p", &["c"])).await;
    assert_eq!(status.phase, Phase::Running);
    assert_eq!((beta.calls("beta prepare").len(), beta.calls("prepare").len()), (1, 0));
    assert_eq!(status.containers["main"].options.cdi_devices, [format!("{D}/beta={}", uid(&server, "c"))]);
    node.delete_pod("p");
    unprepared(&node, "p").await;
    assert!(beta.prepared().is_empty());
}

#[tokio::test(start_paused = true)]
async fn b23_registrations_that_are_refused() {
    let (_dir, node, _server) = claim_node(|_| {}).await;
    let first = FakeDriver::new("a");
    let sockets = connect(&node, &first).await;
    let refusal = async |driver: &FakeDriver| {
        until(5 * SOON, || !driver.statuses().is_empty()).await;
        assert!(!driver.statuses()[0].plugin_registered);
        driver.statuses()[0].error.clone()
    };
    let same = FakeDriver::new("b");
    let _same = same.start_at(&node, sockets.endpoint.clone());
    let endpoint = sockets.endpoint.display();
    let text = format!(
        "RegisterPlugin error -- plugin registration failed with err: endpoint {endpoint} already registered for DRA driver plugin {D}"
    );
    assert_eq!(refusal(&same).await, text);

    for (name, services, why) in [
        ("c", vec![], "empty list of supported gRPC services (aka supported versions)"),
        (
            "d",
            vec!["v1alpha3"],
            "none of services supported by the plugin ([\"v1alpha3\"]) are supported by the kubelet ([\"v1.DRAPlugin\" \"v1beta1.DRAPlugin\"])",
        ),
    ] {
        let driver = FakeDriver::new(name);
        driver.script(|script| script.services = services.into_iter().map(str::to_owned).collect());
        let sockets = driver.start(&node);
        let endpoint = sockets.endpoint.display();
        let text = format!(
            "RegisterPlugin error -- plugin validation failed with err: invalid supported gRPC versions of DRA driver plugin {D} at endpoint {endpoint}: {why}"
        );
        assert_eq!(refusal(&driver).await, text);
    }
}

#[tokio::test(start_paused = true)]
async fn b24_of_two_instances_the_connected_one_that_registered_last_is_called() {
    let (_dir, node, server) = claim_node(|_| {}).await;
    let (old, mut old_sockets) = scene(&node, &server, 3).await;
    let new = FakeDriver::new("b");
    let mut new_sockets = connect(&node, &new).await;
    node.add_pod(user(&server, "p0", &["c0"])).await;
    assert_eq!((old.calls("prepare").len(), new.calls("prepare").len()), (0, 1));

    let cuts =
        |node: &Node| count(node, |event| matches!(event, Event::DriverConnection { connected: false, .. }));
    new_sockets.cut();
    node.wait_for(SOON, |node| cuts(node) == 1).await.unwrap();
    node.add_pod(user(&server, "p1", &["c1"])).await;
    assert_eq!((old.calls("prepare").len(), new.calls("prepare").len()), (1, 1));

    // With none connected, a call to the newest fails at once.
    old_sockets.cut();
    node.wait_for(SOON, |node| cuts(node) == 2).await.unwrap();
    let before = node.clock().now();
    let status = node.add_pod(user(&server, "p2", &["c2"])).await;
    assert_eq!(status.phase, Phase::Pending);
    assert!(node.clock().now() - before < Duration::from_secs(10));
    let endpoint = new_sockets.endpoint.display();
    let text = format!(
        "prepare dynamic resources: NodePrepareResources: rpc error: code = Unavailable desc = connection error: desc = \"transport: Error while dialing: dial unix {endpoint}: connect: connection refused\""
    );
    assert_eq!(prepare_error(&node), text);

    // The end of a rolling update: the old instance serves again, the new one goes.
    drop(old_sockets);
    new_sockets.stop();
    let third = FakeDriver::new("c");
    let _third = connect(&node, &third).await;
    node.wait_for(2 * MINUTE, |node| node.pod("p2").unwrap().phase == Phase::Running).await.unwrap();
    assert_eq!(third.calls("prepare").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn b25_slices_are_deleted_at_every_start_and_30_s_after_the_last_connection() {
    let (_dir, node, server) = claim_node(|_| {}).await;
    server.create(&slice("foreign", "other", &[])).unwrap();
    server.create(&slice("old", "node", &[])).unwrap();
    let slices = |server: &ApiServer| server.list::<ResourceSlice>().len();
    // The API server fails at first, so the kubelet tries again after one second and two.
    let error = ApiError { code: 500, reason: "InternalError", message: "etcd".to_owned() };
    server.fail(Verb::DeleteCollection, "resourceslices", 2, error);
    let before = node.clock().now();
    node.restart_kubelet().await.unwrap();
    wiped(&node, 2).await;
    assert_eq!((slices(&server), (node.clock().now() - before).as_secs()), (1, 3));

    let driver = FakeDriver::new("a");
    let mut sockets = connect(&node, &driver).await;
    server.create(&slice("new", "node", &[])).unwrap();
    tokio::time::sleep(MINUTE).await;
    assert_eq!(slices(&server), 2, "a connected driver keeps its slices");
    sockets.cut();
    let cut = node.clock().now();
    tokio::time::sleep(Duration::from_secs(20)).await;
    drop(sockets);
    let mut sockets = connect(&node, &driver).await;
    tokio::time::sleep(MINUTE).await;
    assert_eq!(slices(&server), 2, "it was back in time");

    sockets.cut();
    let cut_again = node.clock().now();
    assert!(cut_again > cut);
    wiped(&node, 3).await;
    let (at, driver) = node
        .events()
        .into_iter()
        .rev()
        .find_map(|record| match record.event {
            Event::SlicesWiped { driver, deleted: 1 } => Some((record.at, driver)),
            _ => None,
        })
        .unwrap();
    assert_eq!(driver, D);
    assert!((30..40).contains(&(at - cut_again).as_secs()), "{:?}", at - cut_again);
    assert_eq!(server.list::<ResourceSlice>()[0].metadata.name.as_deref(), Some("foreign"));
}

#[tokio::test(start_paused = true)]
async fn b26_checks_of_a_pod_come_first_and_nothing_is_kept_of_one_that_fails() {
    let (_dir, node, server) = claim_node(|_| {}).await;
    let mut n = 0;
    let mut error = async |pod: Pod| {
        n += 1;
        let (name, pod) = (format!("p{n}"), Pod { uid: format!("p{n}"), name: format!("p{n}"), ..pod });
        assert_eq!(node.add_pod(pod).await.phase, Phase::Pending, "it waits");
        assert!(node.claims().is_empty());
        node.delete_pod(&name);
        prepare_error(&node).replace("prepare dynamic resources: ", "")
    };
    let text = "fetch ResourceClaim c: resourceclaims.resource.k8s.io \"c\" not found";
    assert_eq!(error(unreserved("p", &["c"])).await, text);
    server.create(&claim("c", None)).unwrap();
    let c = uid(&server, "c");
    let text = format!("pod p2 (p2) is not allowed to use ResourceClaim c ({c})");
    assert_eq!(error(unreserved("p", &["c"])).await, text);
    let reserve = |uid: &str| {
        let reserved = json!([{"resource": "pods", "name": uid, "uid": uid}]);
        server
            .update::<ResourceClaim>("default", "c", |claim| {
                let status = claim.status.get_or_insert_default();
                status.reserved_for = serde_json::from_value(reserved).unwrap();
            })
            .unwrap();
    };
    reserve("p3");
    assert_eq!(error(unreserved("p", &["c"])).await, "ResourceClaim c: not allocated");
    server.create(&slice("slice", "node", &["d0"])).unwrap();
    server.allocate("default", "c", "node").unwrap();
    reserve("p4");
    assert_eq!(error(unreserved("p", &["c"])).await, format!("DRA driver {D} is not registered"));
}

#[tokio::test(start_paused = true)]
async fn b27_one_call_for_all_claims_of_a_driver_after_the_checkpoint_and_none_if_prepared() {
    let (_dir, node, server) = claim_node(|_| {}).await;
    let (driver, _sockets) = scene(&node, &server, 2).await;
    driver.script(|script| script.on_prepare = Outcome::Hang);
    let pod = user(&server, "p", &["c0", "c1"]);
    let adding = tokio::spawn({
        let (node, pod) = (node.clone(), pod.clone());
        async move { node.add_pod(pod).await }
    });
    until(SOON, || driver.calls("prepare").len() == 1).await;
    let checkpoint = fs::read_to_string(node.paths().dra_checkpoint()).unwrap();
    for name in ["c0", "c1"] {
        assert!(checkpoint.contains(&uid(&server, name)), "{checkpoint}");
    }
    assert!(!node.claims().iter().any(|claim| claim.prepared));
    driver.script(|script| script.on_prepare = Outcome::Good);
    adding.await.unwrap();
    node.wait_for(3 * MINUTE, |node| node.pod("p").unwrap().phase == Phase::Running).await.unwrap();
    let mut uids = driver.calls("prepare").pop().unwrap();
    uids.sort();
    let mut expected = [uid(&server, "c0"), uid(&server, "c1")];
    expected.sort();
    assert_eq!(uids, expected);

    let calls = driver.calls("prepare").len();
    let status = node.add_pod(user(&server, "q", &["c1"])).await;
    assert_eq!((status.phase, driver.calls("prepare").len()), (Phase::Running, calls));
    let claims = node.claims();
    assert_eq!(claims[1].pods, ["p".to_owned(), "q".to_owned()].into());
    assert!(claims.iter().all(|claim| claim.prepared));
}

#[tokio::test(start_paused = true)]
async fn b28_answers_that_fail_are_events_and_the_pod_waits_60_to_90_s() {
    let (_dir, node, server) = claim_node(|_| {}).await;
    let (driver, _sockets) = scene(&node, &server, 2).await;
    let mut n = 0;
    let mut error = async |change: &dyn Fn(&mut crate::driver::DriverScript)| {
        driver.script(change);
        n += 1;
        let name = format!("p{n}");
        let before = node.clock().now();
        let status = node.add_pod(user(&server, &name, &["c0", "c1"])).await;
        assert_eq!((status.phase, status.reason.as_str()), (Phase::Pending, ""));
        let took = node.clock().now() - before;
        driver.script(|script| {
            (script.on_prepare, script.unknown) = (Outcome::Good, None);
            script.errors.clear();
        });
        node.wait_for(2 * MINUTE, |node| node.pod(&name).unwrap().phase == Phase::Running).await.unwrap();
        let waited = (node.clock().now() - before - took).as_secs();
        assert!((60..=91).contains(&waited), "{waited}");
        let error = prepare_error(&node).replace("prepare dynamic resources: ", "");
        node.delete_pod(&name);
        unprepared(&node, &name).await;
        for claim in ["c0", "c1"] {
            server.allocate("default", claim, "node").unwrap();
        }
        (error, took)
    };
    let fail = Outcome::Fail(Status::internal("no"));
    let (text, _) = error(&|script| script.on_prepare = fail.clone()).await;
    assert_eq!(text, "NodePrepareResources: rpc error: code = Internal desc = no");
    let (text, _) = error(&|script| drop(script.errors.insert("c1".to_owned(), "no room".to_owned()))).await;
    assert_eq!(text, "NodePrepareResources failed for ResourceClaim c1: no room");
    let (text, _) = error(&|script| script.on_prepare = Outcome::Empty).await;
    assert_eq!(text, "NodePrepareResources skipped 2 ResourceClaims");
    let (text, _) = error(&|script| {
        script.unknown = Some("0-unknown".to_owned());
    })
    .await;
    assert_eq!(text, "NodePrepareResources returned result for unknown claim UID 0-unknown");
    let (text, took) = error(&|script| script.on_prepare = Outcome::Hang).await;
    assert_eq!(
        text,
        "NodePrepareResources: rpc error: code = DeadlineExceeded desc = context deadline exceeded"
    );
    assert!((45..50).contains(&took.as_secs()), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn b29_a_restarted_kubelet_prepares_again_for_the_next_pod_only_and_doubles_devices() {
    let (_dir, node, server) = claim_node(|_| {}).await;
    let (driver, _sockets) = scene(&node, &server, 1).await;
    node.add_pod(user(&server, "p", &["c0"])).await;
    node.restart_kubelet().await.unwrap();
    let connected = |event: &Event| matches!(event, Event::DriverConnection { connected: true, .. });
    node.wait_for(5 * SOON, |node| count(node, connected) == 2).await.unwrap();
    assert_eq!(node.pod("p").unwrap().phase, Phase::Running);
    assert_eq!((driver.calls("prepare").len(), node.claims()[0].prepared), (1, false));
    node.restart_container("p", "main").await.unwrap();
    assert_eq!(driver.calls("prepare").len(), 1, "the sandbox is still there");

    let status = node.add_pod(user(&server, "q", &["c0"])).await;
    assert_eq!((status.phase, driver.calls("prepare").len()), (Phase::Running, 2));
    let id = format!("{D}/claim={}", uid(&server, "c0"));
    assert_eq!(
        status.containers["main"].options.cdi_devices,
        [id.clone(), id],
        "restored and prepared again"
    );

    // After a reboot, the sandbox is new.
    node.switch_off().await;
    node.start_kubelet().await.unwrap();
    node.wait_for(3 * MINUTE, |node| node.pod("p").unwrap().phase == Phase::Running).await.unwrap();
    assert!(driver.calls("prepare").len() > 2);
}

#[tokio::test(start_paused = true)]
async fn b30_the_last_pod_unprepares_and_a_failure_is_retried() {
    let (_dir, node, server) = claim_node(|_| {}).await;
    let (driver, _sockets) = scene(&node, &server, 1).await;
    node.add_pod(user(&server, "p", &["c0"])).await;
    node.add_pod(user(&server, "q", &["c0"])).await;
    node.delete_pod("p");
    unprepared(&node, "p").await;
    assert_eq!((driver.calls("unprepare").len(), driver.prepared().len()), (0, 1));

    driver.script(|script| drop(script.errors.insert("c0".to_owned(), "busy".to_owned())));
    node.finish_pod("q");
    let failed = |event: &Event| matches!(event, Event::UnprepareFailed { .. });
    node.wait_for(MINUTE, |node| count(node, failed) == 2).await.unwrap();
    let error = find(&node, |event| match event {
        Event::UnprepareFailed { error, .. } => Some(error.clone()),
        _ => None,
    });
    assert_eq!(
        error,
        "unprepare dynamic resources: NodeUnprepareResources failed for ResourceClaim c0: busy"
    );
    let allocated = |server: &ApiServer| {
        let claim = server.get::<ResourceClaim>("default", "c0").unwrap();
        claim.status.is_some_and(|status| status.allocation.is_some())
    };
    assert!(allocated(&server) && node.is_ending_pods(), "not before the driver has succeeded");
    driver.script(|script| script.errors.clear());
    unprepared(&node, "q").await;
    assert!(driver.prepared().is_empty() && node.claims().is_empty() && !allocated(&server));
}

#[tokio::test(start_paused = true)]
async fn b30_claims_of_pods_deleted_by_force_are_unprepared_within_a_minute() {
    let (_dir, node, server) = claim_node(|_| {}).await;
    let (driver, _sockets) = scene(&node, &server, 2).await;
    node.add_pod(user(&server, "p", &["c0"])).await;
    node.add_pod(user(&server, "q", &["c1"])).await;
    node.kill_kubelet().await;
    node.delete_pod("p");
    node.start_kubelet().await.unwrap();
    assert_eq!(node.claims().len(), 2, "from the checkpoint");
    until(MINUTE + SOON, || driver.prepared().len() == 1).await;
    node.wait_for(SOON, |node| node.claims().len() == 1).await.unwrap();
    assert_eq!(node.claims()[0].name, "c1");
    assert_eq!(driver.calls("unprepare").len(), 1);

    // A pod whose end was interrupted ends with the next kubelet.
    driver.script(|script| script.on_unprepare = Outcome::Hang);
    node.delete_pod("q");
    until(MINUTE, || driver.calls("unprepare").len() == 2).await;
    driver.script(|script| script.on_unprepare = Outcome::Good);
    node.restart_kubelet().await.unwrap();
    unprepared(&node, "q").await;
    assert!(driver.prepared().is_empty());
}

#[tokio::test(start_paused = true)]
async fn b31_containers_get_the_cdi_devices_of_the_requests_that_they_name() {
    let (_dir, node, server) = claim_node(|_| {}).await;
    let (_driver, _sockets) = scene(&node, &server, 2).await;
    let pod = Pod::new("p")
        .claim("x", "c0")
        .claim("y", "c1")
        .container(Container::new("all").claim("y").claim("x"))
        .container(Container::new("request").claim_request("x", "r"))
        .container(Container::new("other").claim_request("x", "s"))
        .container(Container::new("none"));
    server.schedule(&pod, &["node"]).unwrap();
    let status = node.add_pod(pod).await;
    let id = |claim: &str| format!("{D}/claim={}", uid(&server, claim));
    let of = |name: &str| status.containers[name].options.cdi_devices.clone();
    assert_eq!(of("all"), [id("c0"), id("c1")], "in the order of the pod's claims");
    assert_eq!(of("request"), [id("c0")]);
    assert!(of("other").is_empty() && of("none").is_empty());
}

#[tokio::test(start_paused = true)]
async fn b32_health_is_in_the_status_for_30_s_and_its_stream_is_opened_again_after_5_s() {
    let (_dir, node, server) = claim_node(|_| {}).await;
    let (driver, _sockets) = scene(&node, &server, 1).await;
    node.add_pod(user(&server, "p", &["c0"])).await;
    let id = format!("{D}/claim={}", uid(&server, "c0"));
    let health = |node: &Node| node.pod("p").unwrap().containers["main"].devices["claim:c0"][&id].clone();
    assert_eq!(health(&node), "Unknown");
    driver.report(&[("d0", HealthStatus::Healthy)]);
    node.wait_for(SOON, |node| health(node) == "Healthy").await.unwrap();
    driver.report(&[("d0", HealthStatus::Unhealthy)]);
    node.wait_for(SOON, |node| health(node) == "Unhealthy").await.unwrap();
    let changed = find(&node, |event| match event {
        Event::HealthChanged { pods } => Some(pods.clone()),
        _ => None,
    });
    assert_eq!(changed, ["p"]);
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!(health(&node), "Unknown", "the report is too old");

    let streams = driver.calls("health").len();
    let before = node.clock().now();
    driver.cut_streams();
    until(MINUTE, || driver.calls("health").len() > streams).await;
    let took = (node.clock().now() - before).as_secs();
    assert!((5..=7).contains(&took), "{took}");
    node.wait_for(SOON, |node| health(node) == "Unhealthy").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn b33_a_pod_that_never_got_a_claim_takes_it_from_the_only_one_that_has_it() {
    for (race, left) in [(Race::ByName, 0), (Race::Fixed, 1)] {
        let (_dir, node, server) = claim_node(|config| config.race = race).await;
        let (driver, _sockets) = scene(&node, &server, 1).await;
        node.add_pod(user(&server, "p", &["c0"])).await;
        node.add_pod(unreserved("q", &["c0"])).await;
        assert!(prepare_error(&node).contains("is not allowed to use ResourceClaim c0"));
        node.delete_pod("q");
        unprepared(&node, "q").await;
        assert_eq!((driver.prepared().len(), node.claims().len()), (left, left), "{race:?}");
        assert_eq!(node.pod("p").unwrap().phase, Phase::Running);
    }
}

#[tokio::test(start_paused = true)]
async fn b33_a_pod_that_comes_while_a_claim_is_unprepared_is_without_it_and_uids_are_compared() {
    for race in [Race::ByName, Race::Fixed] {
        let (_dir, node, server) = claim_node(|config| config.race = race).await;
        let (driver, _sockets) = scene(&node, &server, 1).await;
        node.add_pod(user(&server, "p", &["c0"])).await;
        driver.script(|script| script.holds = true);
        node.delete_pod("p");
        until(SOON, || driver.calls("unprepare").len() == 1).await;
        let phase = node.add_pod(user(&server, "q", &["c0"])).await.phase;
        driver.script(|script| script.holds = false);
        node.wait_for(2 * MINUTE, |node| count(node, |event| matches!(event, Event::Unprepared { .. })) == 1)
            .await
            .unwrap();
        match race {
            Race::ByName => {
                assert_eq!(phase, Phase::Running, "with the devices that are being removed");
                assert!(node.claims().is_empty());
            }
            Race::Fixed => {
                assert_eq!(phase, Phase::Pending);
                let running = |node: &Node| node.pod("q").unwrap().phase == Phase::Running;
                node.wait_for(2 * MINUTE, running).await.unwrap();
                assert_eq!(node.claims()[0].pods, ["q".to_owned()].into());

                // The claim is deleted by force and created again under the same name.
                let old = uid(&server, "c0");
                server
                    .update::<ResourceClaim>("default", "c0", |claim| claim.metadata.finalizers = None)
                    .unwrap();
                server.delete::<ResourceClaim>("default", "c0").unwrap();
                server.create(&claim("c0", None)).unwrap();
                node.add_pod(user(&server, "r", &["c0"])).await;
                let text = format!(
                    "prepare dynamic resources: old ResourceClaim with same name c0 and different UID {old} still exists (previous pod force-deleted?!)"
                );
                assert_eq!(prepare_error(&node), text);
            }
        }
    }
}
