//! Registration, claims and health, over sockets.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kubelet_dra::{Claims, DeviceHealth, HealthState};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::json;
use shmesh_fake_kubelet::{ApiServer, Clock};
use shmesh_kubelet_api::dra::dra_plugin_client::DraPluginClient;
use shmesh_kubelet_api::dra::{Claim, NodePrepareResourcesRequest};
use shmesh_kubelet_api::drahealth::NodeWatchResourcesRequest;
use shmesh_kubelet_api::drahealth::dra_resource_health_client::DraResourceHealthClient;
use shmesh_kubelet_api::pluginregistration::RegistrationStatus;
use shmesh_kubelet_api::pluginregistration::registration_client::RegistrationClient;
use shmesh_kubelet_api::{dra_v1beta1, drahealth};
use tokio::sync::Semaphore;
use tonic::transport::Channel;

use crate::support::{
    ClaimTable, DRIVER, Instance, TestDriver, claim, connect, prepare, settings, unprepare, until,
};

fn wanted(name: &str) -> Claim {
    Claim { namespace: "default".into(), uid: format!("{name}-uid"), name: name.into() }
}

#[tokio::test]
async fn kubelet_finds_it_and_calls_both_versions() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let claims = ClaimTable::of([claim("a", Some(DRIVER))]);
    let instance = Instance::start(root.path(), "i1", claims, TestDriver::default()).await;
    let info = instance.info().await;
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", DRIVER));
    assert_eq!(info.supported_versions, ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth"]);
    assert_eq!(Path::new(&info.endpoint), root.path().join(DRIVER).join("dra-i1.sock"));

    let mut registration = RegistrationClient::new(connect(&instance.settings.registration()).await);
    for (plugin_registered, error) in [(false, "version is unknown"), (true, "")] {
        let status = RegistrationStatus { plugin_registered, error: error.into() };
        registration.notify_registration_status(status).await.expect("it answers");
    }

    let channel = instance.endpoint().await;
    let request = NodePrepareResourcesRequest { claims: vec![wanted("a")] };
    let answer =
        DraPluginClient::new(channel.clone()).node_prepare_resources(request).await.expect("it answers");
    let prepared = &answer.get_ref().claims["a-uid"];
    assert_eq!(prepared.error, "");
    let device = &prepared.devices[0];
    assert_eq!((device.pool_name.as_str(), device.device_name.as_str()), ("n1", "d0"));
    assert_eq!(device.share_id.as_deref(), Some("s1"));
    assert_eq!(
        (&device.request_names, &device.cdi_device_ids),
        (&vec!["gpu".into()], &vec!["example.com/gpu=d0".into()])
    );

    let mut old = dra_v1beta1::dra_plugin_client::DraPluginClient::new(channel.clone());
    let Claim { namespace, uid, name } = wanted("a");
    let claims = vec![dra_v1beta1::Claim { namespace, uid, name }];
    let request = dra_v1beta1::NodePrepareResourcesRequest { claims: claims.clone() };
    let answer = old.node_prepare_resources(request).await.expect("it answers").into_inner();
    assert_eq!(answer.claims["a-uid"].devices[0].request_names, ["gpu"]);
    let request = dra_v1beta1::NodeUnprepareResourcesRequest { claims };
    let answer = old.node_unprepare_resources(request).await.expect("it answers").into_inner();
    assert_eq!(answer.claims["a-uid"].error, "");
    assert_eq!(unprepare(&channel, vec![wanted("a")]).await, [("a-uid".into(), String::new())]);

    let work = |call: &str| [format!("{call} a"), format!("{call} a done")];
    let registered = ["registered Err(\"version is unknown\")".into(), "registered Ok(())".into()];
    let calls = [registered, work("prepare"), work("prepare"), work("unprepare"), work("unprepare")];
    assert_eq!(instance.driver.log(), calls.concat());
    instance.end().await;
    let left: Vec<_> = std::fs::read_dir(root.path().join(DRIVER)).expect("it is there").flatten().collect();
    assert_eq!(left.len(), 1, "only the lock is left: {left:?}");
}

#[tokio::test]
async fn each_claim_fails_for_itself() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let ours = Some(DRIVER);
    let mut deleted = claim("deleted", ours);
    deleted.metadata.deletion_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH));
    let mut replaced = claim("replaced", ours);
    replaced.metadata.uid = Some("other-uid".into());
    let claims = ["a", "refused", "silent", "panics", "foreign"].map(|name| claim(name, ours));
    let others = [deleted, replaced, claim("pending", None), claim("theirs", Some("other.example.com"))];
    let table = ClaimTable::of(claims.into_iter().chain(others));
    let instance = Instance::start(root.path(), "i1", table, TestDriver::default()).await;
    let channel = instance.endpoint().await;
    let names = [
        "a", "deleted", "foreign", "gone", "offline", "panics", "pending", "refused", "replaced", "silent",
        "theirs",
    ];
    let mut results = prepare(&channel, names.map(wanted).into()).await;
    results.sort();
    let expected = [
        ("a", 1, ""),
        ("deleted", 1, ""),
        (
            "foreign",
            0,
            "driver gpu.example.com prepared device n1/d9, which is not allocated to claim default/foreign: this is a bug of the driver",
        ),
        ("gone", 0, "claim default/gone does not exist any more: it had uid gone-uid"),
        ("offline", 0, "claim default/offline cannot be read from the API server: connection refused"),
        ("panics", 0, "claim default/panics was not prepared: the driver failed; its log says more"),
        ("pending", 0, "claim default/pending is not allocated: the scheduler has not chosen devices for it"),
        ("refused", 0, "there is no memory left"),
        (
            "replaced",
            0,
            "claim default/replaced was replaced: the pod's claim has uid replaced-uid, and the claim that exists now has uid other-uid; create the pod again to use it",
        ),
        ("silent", 0, "the driver failed without a reason"),
        ("theirs", 0, "claim default/theirs is allocated, but has no device of driver gpu.example.com"),
    ];
    let expected = expected.map(|(name, devices, error)| (format!("{name}-uid"), devices, error.to_owned()));
    assert_eq!(results, expected);
    // To revert a claim needs no claim: it may be gone.
    let mut results =
        unprepare(&channel, ["gone", "offline", "refused", "replaced"].map(wanted).into()).await;
    results.sort();
    let expected = [("gone", ""), ("offline", ""), ("refused", "it is busy"), ("replaced", "")];
    assert_eq!(results, expected.map(|(name, error)| (format!("{name}-uid"), error.to_owned())));
    instance.end().await;
}

#[test]
fn each_uid_of_any_request_has_one_entry() {
    const NAMES: [&str; 6] = ["a", "refused", "silent", "foreign", "offline", "gone"];
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let root = tempfile::tempdir().expect("a temporary directory");
    let table = ClaimTable::of(NAMES[..4].iter().map(|name| claim(name, Some(DRIVER))));
    let instance = runtime.block_on(Instance::start(root.path(), "i1", table, TestDriver::default()));
    let channel = runtime.block_on(instance.endpoint());
    let text = || {
        prop_oneof![Just(String::new()), ".{0,3}", prop::sample::select(&NAMES[..]).prop_map(String::from)]
    };
    let uid = prop_oneof![3 => prop::sample::select(&NAMES[..]).prop_map(|name| format!("{name}-uid")), 1 => text()];
    let one = (text(), uid, text()).prop_map(|(namespace, uid, name)| Claim { namespace, uid, name });
    let mut runner =
        TestRunner::new(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) });
    let result = runner.run(&prop::collection::vec(one, 0..12), |claims| {
        let uids: BTreeSet<String> = claims.iter().map(|claim| claim.uid.clone()).collect();
        let prepared: BTreeSet<_> =
            runtime.block_on(prepare(&channel, claims.clone())).into_iter().map(|(uid, ..)| uid).collect();
        prop_assert_eq!(&prepared, &uids);
        let reverted: BTreeSet<_> =
            runtime.block_on(unprepare(&channel, claims)).into_iter().map(|(uid, _)| uid).collect();
        prop_assert_eq!(&reverted, &uids);
        Ok(())
    });
    runtime.block_on(instance.end());
    result.expect("each request has its entries");
}

#[tokio::test]
async fn two_names_for_one_uid_are_refused() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let table = ClaimTable::of([claim("a", Some(DRIVER)), claim("b", Some(DRIVER))]);
    let instance = Instance::start(root.path(), "i1", table, TestDriver::default()).await;
    let channel = instance.endpoint().await;
    let other = Claim { uid: "a-uid".into(), ..wanted("b") };
    let results = prepare(&channel, vec![wanted("a"), other, wanted("a")]).await;
    assert_eq!(
        results,
        [("a-uid".into(), 0, "claims default/a and default/b have the same uid a-uid".into())]
    );
    assert_eq!(prepare(&channel, vec![wanted("a"), wanted("a")]).await, [("a-uid".into(), 1, String::new())]);
    instance.end().await;
}

#[tokio::test]
async fn few_claims_are_prepared_at_a_time_and_each_alone() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let names: Vec<String> = (0..30).map(|number| format!("c{number}")).collect();
    let table = ClaimTable::of(names.iter().map(|name| claim(name, Some(DRIVER))));
    let permits = Arc::new(Semaphore::new(0));
    let driver = TestDriver { permits: Some(permits.clone()), ..TestDriver::default() };
    let instance = Instance::start(root.path(), "i1", table, driver).await;
    let channel = instance.endpoint().await;
    let all = || names.iter().map(|name| wanted(name)).collect::<Vec<_>>();
    let (first, second) = (tokio::spawn(batch(channel.clone(), all())), tokio::spawn(batch(channel, all())));
    let running = || *instance.driver.running.lock().expect("no test panicked");
    until(|| running().0 == 8).await;
    permits.add_permits(1_000);
    for results in [first, second] {
        let results = results.await.expect("it does not panic");
        assert_eq!(results.len(), 30);
        assert!(results.iter().all(|(_, devices, error)| *devices == 1 && error.is_empty()), "{results:?}");
    }
    assert_eq!(running(), (0, 8));
    let log = instance.driver.log();
    for name in &names {
        // Two calls for the same claim, one after the other.
        let (begin, end) = (format!("prepare {name}"), format!("prepare {name} done"));
        let of_claim: Vec<_> = log.iter().filter(|line| **line == begin || **line == end).collect();
        assert_eq!(of_claim, [&begin, &end, &begin, &end]);
    }
    instance.end().await;
}

async fn batch(channel: Channel, claims: Vec<Claim>) -> Vec<(String, usize, String)> {
    prepare(&channel, claims).await
}

#[tokio::test]
async fn health_comes_at_once_and_when_it_changes() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let instance = Instance::start(root.path(), "i1", ClaimTable::default(), TestDriver::default()).await;
    let mut client = DraResourceHealthClient::new(instance.endpoint().await);
    let mut stream =
        client.node_watch_resources(NodeWatchResourcesRequest {}).await.expect("it answers").into_inner();
    assert_eq!(stream.message().await.expect("it lasts").expect("a list").devices, []);
    let device = DeviceHealth {
        pool: "n1".into(),
        device: "d0".into(),
        state: HealthState::Unhealthy,
        message: "ü".repeat(2_000),
    };
    instance.health.send_replace(vec![device]);
    let list = stream.message().await.expect("it lasts").expect("a list").devices;
    let id = drahealth::DeviceIdentifier { pool_name: "n1".into(), device_name: "d0".into() };
    assert_eq!((list[0].device.as_ref(), list[0].health()), (Some(&id), drahealth::HealthStatus::Unhealthy));
    assert_eq!(list[0].message.chars().count(), 1_024);
    assert!(list[0].last_updated_time > 1_700_000_000);
    // The stream ends with the driver, and does not delay its end.
    instance.stop.cancel();
    while let Ok(Some(_)) = stream.message().await {}
    instance.end().await;
}

#[tokio::test]
async fn sockets_that_are_deleted_come_back() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let table = ClaimTable::of([claim("a", Some(DRIVER))]);
    let instance = Instance::start(root.path(), "i1", table, TestDriver::default()).await;
    std::fs::remove_dir_all(root.path().join(DRIVER)).expect("it can be removed");
    let (endpoint, registration) = (instance.settings.endpoint(), instance.settings.registration());
    until(|| endpoint.exists() && registration.exists()).await;
    let results = prepare(&instance.endpoint().await, vec![wanted("a")]).await;
    assert_eq!(results, [("a-uid".into(), 1, String::new())]);
    instance.end().await;
}

#[tokio::test]
async fn pending_calls_end_before_the_driver_does() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let permits = Arc::new(Semaphore::new(0));
    let driver = TestDriver { permits: Some(permits.clone()), ..TestDriver::default() };
    let table = ClaimTable::of([claim("a", Some(DRIVER))]);
    let instance = Instance::start(root.path(), "i1", table, driver).await;
    let call = tokio::spawn(batch(instance.endpoint().await, vec![wanted("a")]));
    until(|| instance.driver.log().len() == 1).await;
    instance.stop.cancel();
    let registration = instance.settings.registration();
    until(|| !registration.exists()).await;
    permits.add_permits(1);
    assert_eq!(call.await.expect("it does not panic"), [("a-uid".into(), 1, String::new())]);
    instance.end().await;
}

#[tokio::test]
async fn two_instances_live_side_by_side() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let table = ClaimTable::of([claim("a", Some(DRIVER))]);
    let permits = Arc::new(Semaphore::new(0));
    let driver = TestDriver { permits: Some(permits.clone()), ..TestDriver::default() };
    let old = Instance::start(root.path(), "i1", table.clone(), driver).await;
    let new = Instance::start(root.path(), "i2", table, TestDriver::default()).await;
    assert_ne!(old.info().await.endpoint, new.info().await.endpoint);
    // Their calls do not overlap.
    let first = tokio::spawn(batch(old.endpoint().await, vec![wanted("a")]));
    until(|| old.driver.log().len() == 1).await;
    let second = tokio::spawn(batch(new.endpoint().await, vec![wanted("a")]));
    // Long enough for a call that does not wait; on a slow machine it proves less, and fails never.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(new.driver.log(), [""; 0]);
    permits.add_permits(1);
    for call in [first, second] {
        assert_eq!(call.await.expect("it does not panic"), [("a-uid".into(), 1, String::new())]);
    }
    old.end().await;
    assert!(new.settings.registration().exists());
    assert_eq!(prepare(&new.endpoint().await, vec![wanted("a")]).await[0].1, 1);
    new.end().await;
}

/// Set for the process that a test kills: the directory in which it serves.
const VICTIM: &str = "KUBELET_DRA_TEST_VICTIM";

/// Not a test by itself: the process that `killed_instance_leaves_nothing_in_the_way` kills.
#[tokio::test]
async fn victim() {
    let Some(root) = std::env::var_os(VICTIM) else { return };
    let driver = TestDriver { permits: Some(Arc::new(Semaphore::new(0))), ..TestDriver::default() };
    let table = ClaimTable::of([claim("a", Some(DRIVER))]);
    let instance = Instance::start(Path::new(&root), "victim", table, driver).await;
    instance.task.await.expect("it does not panic").expect("it serves until it is killed");
}

/// A process that ends with its test.
struct Victim(std::process::Child);

impl Victim {
    fn kill(&mut self) {
        self.0.kill().expect("it is a child of this process");
        self.0.wait().expect("it has ended");
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.kill();
    }
}

#[tokio::test]
async fn killed_instance_leaves_nothing_in_the_way() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let victim = Command::new(std::env::current_exe().expect("it has a path"))
        .args(["--exact", "node::victim"])
        .env(VICTIM, root.path())
        .stdout(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut victim = Victim(victim);
    let dead = settings(root.path(), "victim");
    until(|| dead.registration().exists()).await;
    // It dies while it prepares a claim, with the lock that excludes others.
    let call = tokio::spawn(try_prepare(connect(&dead.endpoint()).await));
    until(|| {
        std::fs::File::open(root.path().join(DRIVER).join("serialize.lock"))
            .is_ok_and(|file| file.try_lock().is_err())
    })
    .await;
    victim.kill();
    assert!(call.await.expect("it does not panic").is_err());
    assert!(dead.registration().exists() && dead.endpoint().exists(), "sockets outlive their process");

    let table = ClaimTable::of([claim("a", Some(DRIVER))]);
    let next = Instance::start(root.path(), "next", table, TestDriver::default()).await;
    assert!(!dead.registration().exists() && !dead.endpoint().exists());
    assert_eq!(
        prepare(&next.endpoint().await, vec![wanted("a")]).await,
        [("a-uid".into(), 1, String::new())]
    );
    next.end().await;
}

async fn try_prepare(channel: Channel) -> Result<(), tonic::Status> {
    let request = NodePrepareResourcesRequest { claims: vec![wanted("a")] };
    DraPluginClient::new(channel).node_prepare_resources(request).await.map(drop)
}

#[tokio::test]
async fn claim_that_nests_too_deeply_is_refused_with_the_limit() {
    let server = ApiServer::new(Clock::runtime());
    let create = |name: &str, levels: usize| {
        let parameters = (1..levels).fold(json!({}), |inner, _| json!({ "x": inner }));
        let opaque = json!({"driver": DRIVER, "parameters": parameters});
        let mut wanted = claim(name, Some(DRIVER));
        let request = json!({"name": "gpu", "exactly": {"deviceClassName": "gpu"}});
        let spec = json!({"devices": {"requests": [request], "config": [{"opaque": opaque.clone()}]}});
        wanted.spec = serde_json::from_value(spec).expect("it is a specification");
        let mut status = json!(wanted.status);
        status["allocation"]["devices"]["config"] = json!([{"source": "FromClaim", "opaque": opaque}]);
        wanted.status = serde_json::from_value(status).expect("it is a status");
        server.create(&wanted).expect("it is valid");
    };
    // The allocated parameters are within seven levels: claim, status, allocation, devices, config, its entry, and opaque.
    create("good", 127 - 7);
    create("bad", 128 - 7);
    let client = server.client("driver");
    assert!(Claims::get(&client, "default", "good").await.expect("it can be read").is_some());
    let error = Claims::get(&client, "default", "bad").await.expect_err("it nests too deeply");
    assert!(
        error.contains("default/bad cannot be read: its JSON nests more than 127 levels; create it again"),
        "{error}"
    );
}
