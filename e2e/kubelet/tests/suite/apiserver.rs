//! Behaviours 34 to 38: the double of the API server, as a client of it sees them.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node as CoreNode;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::Api;
use kube::api::{
    DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, WatchEvent, WatchParams,
};
use serde_json::{Value, json};
use shmesh_fake_kubelet::{ApiError, ApiServer, Clock, Pod, Verb};
use tokio_stream::StreamExt as _;

use crate::{D, claim, class, slice};

fn server() -> ApiServer {
    ApiServer::new(Clock::runtime())
}

fn slices(server: &ApiServer) -> Api<ResourceSlice> {
    Api::all(server.client("test"))
}

fn claims(server: &ApiServer) -> Api<ResourceClaim> {
    Api::namespaced(server.client("test"), "default")
}

fn code(error: kube::Error) -> (u16, String) {
    match error {
        kube::Error::Api(status) => (status.code, status.message.clone()),
        other => panic!("{other}"),
    }
}

fn version<K: kube::ResourceExt>(object: &K) -> u64 {
    object.resource_version().unwrap().parse().unwrap()
}

/// Reads the next events of a watch: the kind of each, and the name of its object.
async fn events<K>(
    stream: impl tokio_stream::Stream<Item = Result<WatchEvent<K>, kube::Error>>,
    count: usize,
) -> Vec<(&'static str, String)>
where
    K: kube::ResourceExt,
{
    let stream = stream.take(count).map(|event| match event.unwrap() {
        WatchEvent::Added(object) => ("ADDED", object.name_any()),
        WatchEvent::Modified(object) => ("MODIFIED", object.name_any()),
        WatchEvent::Deleted(object) => ("DELETED", object.name_any()),
        WatchEvent::Bookmark(bookmark) => {
            ("BOOKMARK", bookmark.metadata.annotations.into_keys().next().unwrap_or_default())
        }
        WatchEvent::Error(status) => ("ERROR", format!("{} {}", status.code, status.message)),
    });
    tokio::time::timeout(Duration::from_secs(3600), stream.collect()).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn b34_objects_have_versions_and_identical_write_keeps_version() {
    let server = server();
    let api = slices(&server);
    let created = api.create(&PostParams::default(), &slice("a", "node", &["d0"])).await.unwrap();
    assert!(created.metadata.uid.is_some() && created.metadata.generation == Some(1));
    let again = api.create(&PostParams::default(), &slice("a", "node", &["d0"])).await.unwrap_err();
    let text = "resourceslices.resource.k8s.io \"a\" already exists";
    assert_eq!(code(again), (409, text.to_owned()));

    let same = api.replace("a", &PostParams::default(), &created).await.unwrap();
    assert_eq!(version(&same), version(&created));
    let mut changed = created.clone();
    changed.spec.devices = slice("a", "node", &["d0", "d1"]).spec.devices;
    let changed = api.replace("a", &PostParams::default(), &changed).await.unwrap();
    assert!(version(&changed) > version(&created) && changed.metadata.generation == Some(2));
    let stale = api.replace("a", &PostParams::default(), &created).await.unwrap_err();
    let text = "Operation cannot be fulfilled on resourceslices.resource.k8s.io \"a\": the object has been modified; please apply your changes to the latest version and try again";
    assert_eq!(code(stale), (409, text.to_owned()));

    let mut moved = changed.clone();
    moved.spec.node_name = Some("other".to_owned());
    let moved = api.replace("a", &PostParams::default(), &moved).await.unwrap_err();
    let text = "ResourceSlice.resource.k8s.io \"a\" is invalid: spec.nodeName: Invalid value: \"other\": field is immutable";
    assert_eq!(code(moved), (422, text.to_owned()));
    let missing = api.get("b").await.unwrap_err();
    assert_eq!(code(missing), (404, "resourceslices.resource.k8s.io \"b\" not found".to_owned()));
    assert_eq!(server.count(|request| request.verb == Verb::Create && request.agent == "test"), 2);
    assert_eq!(server.count(|request| request.verb.is_write() && request.resource == "resourceslices"), 6);
}

#[tokio::test(start_paused = true)]
async fn b34_slices_that_no_server_accepts_are_invalid() {
    let server = server();
    let api = slices(&server);
    let refused = async |change: &dyn Fn(&mut ResourceSlice)| {
        let mut slice = slice("a", "node", &["d0"]);
        change(&mut slice);
        let text = code(api.create(&PostParams::default(), &slice).await.unwrap_err()).1;
        text.split(" is invalid: ").last().unwrap().to_owned()
    };
    let names = |count: usize| (0..count).map(|n| format!("d{n}")).collect::<Vec<_>>();
    let many = |slice: &mut ResourceSlice, count: usize| {
        let device = slice.spec.devices.as_ref().unwrap()[0].clone();
        let named = |name: String| k8s_openapi::api::resource::v1::Device { name, ..device.clone() };
        slice.spec.devices = Some(names(count).into_iter().map(named).collect());
    };
    let too_many = refused(&|slice| many(slice, 129)).await;
    assert_eq!(too_many, "spec.devices: Too many: 129: must have at most 128 items");
    let twice = refused(&|slice| {
        slice.spec.devices.as_mut().unwrap().extend(crate::slice("a", "n", &["d0"]).spec.devices.unwrap())
    })
    .await;
    assert_eq!(twice, "spec.devices[1].name: Duplicate value: \"d0\"");
    let nowhere = refused(&|slice| slice.spec.node_name = None).await;
    assert!(nowhere.starts_with("spec: Invalid value: exactly one of `nodeName`"), "{nowhere}");
    let named = refused(&|slice| slice.spec.devices.as_mut().unwrap()[0].name = "D_0".to_owned()).await;
    assert!(named.starts_with("spec.devices[0].name: Invalid value: \"D_0\""), "{named}");
}

#[tokio::test(start_paused = true)]
async fn b34_policy_of_a_capacity_must_fit_it() {
    let server = server();
    let with = |value: &str, policy: Value| {
        let mut slice = slice("a", "node", &["d0"]);
        let device = json!({
            "name": "d0", "allowMultipleAllocations": true,
            "capacity": {"c": {"value": value, "requestPolicy": policy}},
        });
        slice.spec.devices = Some(vec![serde_json::from_value(device).unwrap()]);
        slice
    };
    let range = |default: &str, min: &str, step: &str| json!({"default": default, "validRange": {"min": min, "step": step}});
    let to = |max: &str| json!({"default": "2", "validRange": {"min": "2", "step": "2", "max": max}});
    let values = |default: &str, values: &[&str]| json!({"default": default, "validValues": values});
    for (value, policy, said) in [
        (
            "1",
            range("1", "1", "1"),
            "validRange.step: Invalid value: \"1\": one step 2 is larger than capacity value: 1",
        ),
        (
            "2Mi",
            range("2Mi", "2Mi", "2Mi"),
            "validRange.step: Invalid value: \"2Mi\": one step 4Mi is larger than capacity value: 2Mi",
        ),
        (
            "1Mi",
            range("2Mi", "2Mi", "2Mi"),
            "validRange.min: Invalid value: \"2Mi\": min is larger than capacity value: 1Mi",
        ),
        ("8", range("1", "2", "2"), "validRange.min: Invalid value: \"1\": default is less than min: 2"),
        (
            "8",
            range("3", "2", "2"),
            "validRange.step: Invalid value: \"3\": value is not a multiple of a given step (2) from (2)",
        ),
        ("8", to("1"), "validRange.max: Invalid value: \"2\": min is larger than max: 1"),
        ("8", to("10"), "validRange.max: Invalid value: \"10\": max is larger than capacity value: 8"),
        (
            "8",
            to("5"),
            "validRange.step: Invalid value: \"5\": value is not a multiple of a given step (2) from (2)",
        ),
        (
            "8",
            json!({"validRange": {"min": "1"}}),
            "default: Required value: required when validRange is defined",
        ),
        (
            "8",
            values("1", &["2", "4"]),
            "validValues: Invalid value: \"1\": default value is not valid according to the requestPolicy",
        ),
        (
            "8",
            values("2", &["4", "2"]),
            "validValues[1]: Invalid value: \"2\": values must be sorted in ascending order",
        ),
        (
            "1",
            values("2", &["2"]),
            "validValues[0]: Invalid value: \"2\": option is larger than capacity value: 1",
        ),
    ] {
        let refused = server.create(&with(value, policy)).unwrap_err().to_string();
        assert!(
            refused.ends_with(&format!("capacity[c].requestPolicy.{said}")),
            "{refused} ends with {said}"
        );
    }
    for (value, policy) in [("1", values("1", &["1"])), ("2", range("1", "1", "1")), ("8", to("8"))] {
        server.create(&with(value, policy)).unwrap();
        server.delete::<ResourceSlice>("", "a").unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn b35_a_watch_resumes_selects_and_sends_bookmarks() {
    let server = server();
    let api = slices(&server);
    server.create(&slice("a", "node", &[])).unwrap();
    server.create(&slice("b", "other", &[])).unwrap();
    let listed = api.list(&ListParams::default().fields("spec.nodeName=node")).await.unwrap();
    assert_eq!(listed.items.len(), 1);
    let from = listed.metadata.resource_version.unwrap();
    let params = WatchParams::default().fields("spec.nodeName=node");
    let stream = api.watch(&params, &from).await.unwrap();
    server.create(&slice("c", "node", &[])).unwrap();
    server.create(&slice("d", "other", &[])).unwrap();
    server.update::<ResourceSlice>("", "c", |slice| slice.spec.pool.generation = 2).unwrap();
    server.delete::<ResourceSlice>("", "c").unwrap();
    let seen = events(stream, 4).await;
    let c = |kind| (kind, "c".to_owned());
    assert_eq!(seen[..3], [c("ADDED"), c("MODIFIED"), c("DELETED")]);
    assert_eq!(seen[3], ("BOOKMARK", String::new()), "after a minute");

    // Without a version, and as a list that is streamed.
    let stream = api.watch(&params, "0").await.unwrap();
    assert_eq!(events(stream, 1).await, [("ADDED", "a".to_owned())]);
    let stream = api.watch(&WatchParams::streaming_lists(), "0").await.unwrap();
    let all = events(stream, 4).await;
    assert_eq!(all[3], ("BOOKMARK", "k8s.io/initial-events-end".to_owned()));
    let unsupported = api.list(&ListParams::default().fields("spec.pool.name=x")).await.unwrap_err();
    assert_eq!(code(unsupported), (400, "field label not supported: spec.pool.name".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn b35_a_watch_from_a_forgotten_version_is_gone_and_one_with_a_limit_ends() {
    let server = server();
    let api = slices(&server);
    server.create(&slice("a", "node", &[])).unwrap();
    server.compact();
    let stream = api.watch(&WatchParams::default(), "1").await.unwrap();
    assert_eq!(events(stream, 9).await, [("ERROR", "410 too old resource version: 1 (2)".to_owned())]);

    let before = server_time();
    let stream = api.watch(&WatchParams::default().timeout(20), "2").await.unwrap();
    assert_eq!(events(stream, 9).await, []);
    assert_eq!(before.elapsed().as_secs(), 20);

    // An outage cuts watches, and refuses requests.
    let stream = api.watch(&WatchParams::default(), "2").await.unwrap();
    server.stop();
    let mut stream = std::pin::pin!(stream);
    assert!(stream.next().await.is_none_or(|event| event.is_err()));
    api.list(&ListParams::default()).await.unwrap_err();
    server.resume();
    api.list(&ListParams::default()).await.unwrap();
    let error = ApiError { code: 429, reason: "TooManyRequests", message: "slow down".to_owned() };
    server.fail(Verb::List, "resourceslices", 1, error);
    assert_eq!(code(api.list(&ListParams::default()).await.unwrap_err()), (429, "slow down".to_owned()));
    api.list(&ListParams::default()).await.unwrap();
}

fn server_time() -> tokio::time::Instant {
    tokio::time::Instant::now()
}

#[tokio::test(start_paused = true)]
async fn b36_apply_creates_merges_and_removes_and_others_fields_are_conflicts() {
    let server = server();
    let api = slices(&server);
    let config = |devices: &[&str], label: Option<&str>| {
        let mut config = serde_json::to_value(slice("a", "node", devices)).unwrap();
        if let Some(label) = label {
            config["metadata"]["labels"] = json!({ "x": label });
        }
        config
    };
    let params = PatchParams::apply("driver");
    let apply =
        async |config: Value, params: &PatchParams| api.patch("a", params, &Patch::Apply(&config)).await;
    let created = apply(config(&["d0"], Some("1")), &params).await.unwrap();
    let same = apply(config(&["d0"], Some("1")), &params).await.unwrap();
    assert_eq!(version(&created), version(&same));
    let changed = apply(config(&["d0", "d1"], None), &params).await.unwrap();
    assert_eq!((changed.spec.devices.unwrap().len(), changed.metadata.labels), (2, None));

    // An edit by hand takes the field from the driver, which gets it back by force only.
    let api = slices(&server);
    let merge = json!({"spec": {"devices": [{"name": "mine"}]}});
    api.patch("a", &PatchParams::default(), &Patch::Merge(&merge)).await.unwrap();
    let config = config(&["d0"], None);
    let refused = api.patch("a", &params, &Patch::Apply(&config)).await.unwrap_err();
    let text = "Apply failed with 1 conflict: conflict with \"test using Update\": .spec.devices";
    assert_eq!(code(refused), (409, text.to_owned()));
    let forced = api.patch("a", &params.clone().force(), &Patch::Apply(&config)).await.unwrap();
    assert_eq!(forced.spec.devices.unwrap()[0].name, "d0");
    api.patch("a", &params, &Patch::Apply(&config)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn b37_status_is_apart_and_collections_and_finalizers() {
    let server = server();
    let api = claims(&server);
    let mut with_status = claim("c", None);
    with_status.status = Some(Default::default());
    with_status.status.as_mut().unwrap().reserved_for = Some(Vec::new());
    server.create(&slice("a", "node", &["d0"])).unwrap();
    server.create(&class()).unwrap();
    api.create(&PostParams::default(), &with_status).await.unwrap();
    let allocated = server.allocate("default", "c", "node").unwrap();

    let entry = json!([{"driver": D, "pool": "node", "device": "d0", "data": {"ready": true}}]);
    let patch = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"},
        "status": {"devices": entry},
    });
    let params = PatchParams::apply("driver");
    let main = api.patch("c", &params, &Patch::Apply(&patch)).await.unwrap();
    assert_eq!(main.status.unwrap().devices, None, "the main resource ignores it");
    let patched = api.patch_status("c", &params, &Patch::Apply(&patch)).await.unwrap();
    let status = patched.status.clone().unwrap();
    assert_eq!((status.devices.unwrap().len(), status.allocation), (1, allocated.status.unwrap().allocation));
    let mut wrong = patch.clone();
    wrong["status"]["devices"][0]["device"] = json!("d1");
    let refused = api.patch_status("c", &params, &Patch::Apply(&wrong)).await.unwrap_err();
    let text = "ResourceClaim.resource.k8s.io \"c\" is invalid: status.devices[0]: Invalid value: must be an allocated device in the claim";
    assert_eq!(code(refused), (422, text.to_owned()));
    let mut edited = patched.clone();
    edited.spec.devices = None;
    assert_eq!(code(api.replace("c", &PostParams::default(), &edited).await.unwrap_err()).0, 422);

    // Allocated, it stays until it is released.
    let other = Preconditions { uid: Some("x".to_owned()), resource_version: None };
    let refused = api.delete("c", &DeleteParams::default().preconditions(other)).await;
    assert_eq!(code(refused.err().unwrap()).0, 409);
    api.delete("c", &DeleteParams::default()).await.unwrap();
    assert!(api.get("c").await.unwrap().metadata.deletion_timestamp.is_some());
    server.update::<ResourceClaim>("default", "c", |claim| claim.metadata.finalizers = None).unwrap();
    assert_eq!(code(api.get("c").await.unwrap_err()).0, 404);

    server.create(&slice("b", "node", &[])).unwrap();
    server.create(&slice("c", "other", &[])).unwrap();
    let selected = ListParams::default().fields(&format!("spec.nodeName=node,spec.driver={D}"));
    slices(&server).delete_collection(&DeleteParams::default(), &selected).await.unwrap();
    let left: Vec<ResourceSlice> = server.list();
    assert_eq!(left.into_iter().map(|slice| slice.metadata.name.unwrap()).collect::<Vec<_>>(), ["c"]);
}

#[tokio::test]
async fn b37_clients_in_other_processes_connect_by_tcp() {
    let server = server();
    let address = server.listen().await.unwrap();
    let config = kube::config::Kubeconfig::from_yaml(&ApiServer::kubeconfig(address)).unwrap();
    let config = kube::Config::from_custom_kubeconfig(config, &Default::default()).await.unwrap();
    let client = kube::Client::try_from(config).unwrap();
    assert_eq!(client.apiserver_version().await.unwrap().git_version, "v1.36.2");
    let nodes: Api<CoreNode> = Api::all(client);
    let mut node = CoreNode::default();
    node.metadata.name = Some("a".to_owned());
    nodes.create(&PostParams::default(), &node).await.unwrap();
    for n in 0..5 {
        node.metadata.name = Some(format!("b{n}"));
        server.create(&node).unwrap();
    }
    let page = nodes.list(&ListParams::default().limit(4)).await.unwrap();
    let token = page.metadata.continue_.clone().unwrap();
    let rest = nodes.list(&ListParams::default().limit(4).continue_token(&token)).await.unwrap();
    assert_eq!((page.items.len(), rest.items.len(), rest.metadata.continue_), (4, 2, None));
}

#[tokio::test(start_paused = true)]
async fn b38_claims_are_allocated_to_devices_of_one_node() {
    let server = server();
    server.create(&class()).unwrap();
    server.create(&slice("a", "node-a", &["d0"])).unwrap();
    server.create(&slice("b", "node-b", &["d0", "d1"])).unwrap();
    for name in ["first", "second", "third"] {
        server.create(&claim(name, None)).unwrap();
    }
    let nodes = ["node-a", "node-b"];
    let pod = |name: &str, claim: &str| Pod::new(name).claim("c", claim);
    assert_eq!(server.schedule(&pod("p", "first"), &nodes), Ok("node-a".to_owned()));
    // The claim is on its node now, whatever node is preferred, and its device is taken.
    assert_eq!(server.schedule(&pod("q", "first"), &["node-b", "node-a"]), Ok("node-a".to_owned()));
    assert_eq!(server.schedule(&pod("r", "second"), &nodes), Ok("node-b".to_owned()));
    let both = Pod::new("s").claim("c", "third").claim("d", "first");
    let reasons = server.schedule(&both, &nodes).unwrap_err();
    assert_eq!(
        reasons,
        "node node-a: cannot allocate all devices of resourceclaim \"third\"; node node-b: resourceclaim \"first\" not available on the node"
    );
    let third: ResourceClaim = server.get("default", "third").unwrap();
    assert_eq!(third.status, None, "nothing is kept of an attempt that fails");

    let first: ResourceClaim = server.get("default", "first").unwrap();
    assert_eq!(first.status.unwrap().reserved_for.unwrap().len(), 2);
    server.release("p");
    assert!(server.schedule(&pod("t", "third"), &["node-a"]).is_err(), "another pod still uses it");
    server.release("q");
    assert_eq!(server.schedule(&pod("t", "third"), &["node-a"]), Ok("node-a".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn b38_shared_devices_are_consumed_in_rounded_shares_until_they_are_full() {
    let server = server();
    server.create(&class()).unwrap();
    let mut shared = slice("a", "node", &["domain"]);
    let device = &mut shared.spec.devices.as_mut().unwrap()[0];
    *device = serde_json::from_value(json!({
        "name": "domain", "allowMultipleAllocations": true,
        "attributes": {"kind": {"string": "domain"}},
        "capacity": {"bytes": {"value": "100Mi", "requestPolicy": {
            "default": "64Mi", "validRange": {"min": "2Mi", "step": "2Mi"}}}},
    }))
    .unwrap();
    server.create(&shared).unwrap();
    let bytes = |name: &str, bytes: Option<&str>| {
        server.create(&claim(name, bytes)).unwrap();
        let claim = server.allocate("default", name, "node").map_err(|error| error.to_string())?;
        let results = claim.status.unwrap().allocation.unwrap().devices.unwrap().results.unwrap();
        Ok::<_, String>((
            results[0].consumed_capacity.clone().unwrap()["bytes"].0.clone(),
            results[0].share_id.clone(),
        ))
    };
    let (default, first) = bytes("a", None).unwrap();
    let (rounded, second) = bytes("b", Some("3M")).unwrap();
    assert_eq!((default.as_str(), rounded.as_str()), ("64Mi", "4Mi"));
    assert!(first.is_some() && first != second);
    assert_eq!(
        bytes("c", Some("33Mi")),
        Err("cannot allocate all devices of resourceclaim \"c\"".to_owned())
    );
    assert_eq!(bytes("d", Some("32Mi")).unwrap().0, "32Mi");

    // One request never takes a device twice, two requests do.
    let mut twice = claim("e", None);
    let requests = twice.spec.devices.as_mut().unwrap().requests.as_mut().unwrap();
    requests[0].exactly.as_mut().unwrap().count = Some(2);
    requests[0].exactly.as_mut().unwrap().capacity = None;
    for name in ["a", "b", "d"] {
        server.update::<ResourceClaim>("default", name, |claim| claim.status = None).unwrap();
    }
    server.create(&twice).unwrap();
    assert!(server.allocate("default", "e", "node").is_err());
    let requests =
        |claim: &mut ResourceClaim| claim.spec.devices.as_mut().unwrap().requests.as_mut().unwrap().clone();
    let mut two = claim("f", Some("2Mi"));
    let mut list = requests(&mut two);
    list.push(k8s_openapi::api::resource::v1::DeviceRequest { name: "second".to_owned(), ..list[0].clone() });
    let names: Vec<_> = list.iter().map(|request| request.name.clone()).collect();
    let opaque = |n: u8| json!({"driver": "x.io", "parameters": {"n": n}});
    let configs = json!([{"requests": names, "opaque": opaque(1)}, {"opaque": opaque(2)}]);
    let spec = two.spec.devices.as_mut().unwrap();
    spec.requests = Some(list);
    spec.config = serde_json::from_value(configs).unwrap();
    server.create(&two).unwrap();
    let allocated = server.allocate("default", "f", "node").unwrap();
    let allocated = allocated.status.unwrap().allocation.unwrap().devices.unwrap();
    assert_eq!(allocated.results.unwrap().len(), 2);
    // A configuration is repeated for each request that it names.
    let configs = allocated.config.unwrap();
    let which: Vec<_> =
        configs.into_iter().map(|one| one.opaque.unwrap().parameters.0["n"].clone()).collect();
    assert_eq!(which, [1, 1, 2]);
}

#[tokio::test(start_paused = true)]
async fn b38_selectors_taints_and_incomplete_pools() {
    let server = server();
    server.create(&class()).unwrap();
    let of_kind = |name: &str, kind: &str| json!({"name": name, "attributes": {"kind": {"string": kind}}});
    let devices = json!([of_kind("x0", "x"), of_kind("x1", "x"), of_kind("y1", "y")]);
    let mut pool = slice("a", "node", &[]);
    pool.spec.devices = serde_json::from_value(devices).unwrap();
    pool.spec.pool.resource_slice_count = 2;
    server.create(&pool).unwrap();
    let request = |name: &str, kind: &str| {
        let expression = format!("device.attributes['{D}'].kind == '{kind}'");
        json!({"name": name, "exactly": {
            "deviceClassName": "class", "selectors": [{"cel": {"expression": expression}}]}})
    };
    let mut both = claim("both", None);
    both.spec.devices =
        serde_json::from_value(json!({"requests": [request("y", "y"), request("x", "x")]})).unwrap();
    server.create(&both).unwrap();
    assert!(server.allocate("default", "both", "node").is_err(), "one slice of the pool is missing");
    server.update::<ResourceSlice>("", "a", |slice| slice.spec.pool.resource_slice_count = 1).unwrap();
    let chosen = |claim: ResourceClaim| -> BTreeMap<String, String> {
        let results = claim.status.unwrap().allocation.unwrap().devices.unwrap().results.unwrap();
        results.into_iter().map(|result| (result.request, result.device)).collect()
    };
    let allocated = chosen(server.allocate("default", "both", "node").unwrap());
    assert_eq!(allocated, [("x".to_owned(), "x0".to_owned()), ("y".to_owned(), "y1".to_owned())].into());

    let taint = json!([{"key": "shmesh.io/draining", "effect": "NoSchedule"}]);
    server
        .update::<ResourceSlice>("", "a", |slice| {
            slice.spec.devices.as_mut().unwrap()[1].taints = serde_json::from_value(taint.clone()).unwrap();
        })
        .unwrap();
    server.create(&claim("tainted", None)).unwrap();
    assert!(server.allocate("default", "tainted", "node").is_err());
    server
        .update::<ResourceSlice>("", "a", |slice| slice.spec.devices.as_mut().unwrap()[1].taints = None)
        .unwrap();
    assert_eq!(chosen(server.allocate("default", "tainted", "node").unwrap())["r"], "x1");
}
