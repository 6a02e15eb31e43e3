//! The pods of a node, followed at the double of the API server.

use std::rc::Rc;

use k8s_openapi::api::core::v1::Pod as PodKind;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use shmesh_fake_kubelet::{ApiError, ApiServer, Clock, Verb};

use super::*;

const PHY: &str = "1111";

fn error(code: u16, reason: &'static str, message: &str) -> ApiError {
    ApiError { code, reason, message: message.to_owned() }
}

fn create(server: &ApiServer, namespace: &str, name: &str, node: &str, status: Value) -> String {
    let account = format!("sa-{name}");
    let pod = json!({
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"nodeName": node, "serviceAccountName": account, "containers": [{"name": "phy"}]},
        "status": status,
    });
    let pod: PodKind = serde_json::from_value(pod).unwrap();
    server.create(&pod).unwrap().metadata.uid.unwrap()
}

fn delete(server: &ApiServer, name: &str) {
    server.delete::<PodKind>("radio", name).unwrap();
}

/// A server, and the pods of node n1 in it, which are followed until the test ends.
fn followed() -> (ApiServer, Rc<NodePods>) {
    followed_by(NodePods::new())
}

fn followed_by(pods: NodePods) -> (ApiServer, Rc<NodePods>) {
    let server = ApiServer::new(Clock::runtime());
    let pods = Rc::new(pods);
    let (of_task, client) = (Rc::clone(&pods), server.client("identity"));
    tokio::task::spawn_local(async move { of_task.follow("n1", async || Ok(client.clone())).await });
    (server, pods)
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let limit = Instant::now() + Duration::from_secs(3600);
    while !is_so() {
        assert!(Instant::now() < limit, "not within an hour of virtual time: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Runs on one thread in virtual time, as the service does in real time.
fn run(test: impl Future<Output = ()>) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().start_paused(true).build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

fn name(pods: &NodePods, uid: &str) -> Option<String> {
    pods.find(Some(uid), PHY).map(|pod| format!("{}/{}", pod.namespace, pod.name))
}

#[test]
fn pods_of_the_node_are_confirmed_by_their_uid() {
    run(async {
        let (server, pods) = followed();
        let ids = json!({"containerStatuses": [{"name": "phy", "containerID": "containerd://1111", "ready": true,
            "restartCount": 0, "image": "i", "imageID": ""}]});
        let old = create(&server, "radio", "old", "n1", ids);
        let elsewhere = create(&server, "radio", "elsewhere", "n2", json!({}));
        let ended = ["Failed", "Succeeded"]
            .map(|phase| create(&server, "radio", &phase.to_lowercase(), "n1", json!({"phase": phase})));
        pods.is_listed().wait_for(|is_listed| *is_listed).await.unwrap();
        let found = pods.find(Some(&old), PHY).unwrap();
        let pod = Pod {
            uid: old.clone(),
            namespace: "radio".into(),
            name: "old".into(),
            container: "phy".into(),
            container_id: PHY.into(),
            service_account: "sa-old".into(),
            confirmed: true,
        };
        assert_eq!(found, pod);
        assert_eq!(pods.find(None, PHY).as_ref(), Some(&pod), "CRI-O without a pod slice");
        assert_eq!(pods.find(None, "2222"), None);
        assert_eq!(name(&pods, &elsewhere), None);
        assert_eq!(ended.map(|uid| name(&pods, &uid)), [None, None]);

        // It is confirmed before the kubelet has reported its container.
        let new = create(&server, "radio", "new", "n1", json!({}));
        until("the new pod is known", || name(&pods, &new).is_some()).await;
        let found = pods.find(Some(&new), "3333").unwrap();
        assert_eq!((found.container.as_str(), found.confirmed), ("", true));
        assert_eq!(found.service_account, "sa-new");
        delete(&server, "new");
        until("the pod is forgotten", || name(&pods, &new).is_none()).await;
        assert_eq!(name(&pods, &old).unwrap(), "radio/old");

        // The same name again is another pod.
        let again = create(&server, "radio", "new", "n1", json!({}));
        assert_ne!(again, new);
        until("its successor is known", || name(&pods, &again).is_some()).await;
        assert_eq!(name(&pods, &new), None);
        assert_eq!(server.count(|_| true), 1);
    });
}

#[test]
fn known_pods_keep_their_names_without_the_api_server() {
    run(async {
        let (server, pods) = followed();
        let [kept, gone] = ["kept", "gone"].map(|name| create(&server, "radio", name, "n1", json!({})));
        pods.is_listed().wait_for(|is_listed| *is_listed).await.unwrap();
        server.stop();
        sleep(Duration::from_secs(600)).await;
        assert!(name(&pods, &kept).is_some() && name(&pods, &gone).is_some());
        // What happened meanwhile is seen afterwards.
        delete(&server, "gone");
        let new = create(&server, "radio", "new", "n1", json!({}));
        server.resume();
        until("the new pod is known", || name(&pods, &new).is_some()).await;
        assert_eq!((name(&pods, &gone), name(&pods, &kept)), (None, Some("radio/kept".into())));
    });
}

#[test]
fn expired_watch_begins_anew() {
    run(async {
        let (server, pods) = followed();
        let gone = create(&server, "radio", "gone", "n1", json!({}));
        pods.is_listed().wait_for(|is_listed| *is_listed).await.unwrap();
        // The watch is not open while its log of changes is lost.
        server.fail(Verb::Watch, "pods", 1, error(410, "Expired", "too old resource version"));
        server.stop();
        delete(&server, "gone");
        let new = create(&server, "radio", "new", "n1", json!({}));
        server.compact();
        server.resume();
        until("the watch begins anew", || name(&pods, &new).is_some()).await;
        assert_eq!(name(&pods, &gone), None);
    });
}

#[test]
fn refused_requests_are_repeated_with_delays() {
    run(async {
        let (server, pods) = followed();
        let pod = create(&server, "radio", "du", "n1", json!({}));
        server.fail(Verb::Watch, "pods", u32::MAX, error(403, "Forbidden", "not yet"));
        sleep(Duration::from_secs(3600)).await;
        assert!(!*pods.is_listed().borrow() && name(&pods, &pod).is_none());
        // With the delays at their longest, every 15 to 30 seconds.
        let requests = server.count(|_| true);
        assert!((100..300).contains(&requests), "{requests}");
    });
}

#[test]
fn servers_that_cannot_mark_the_end_of_the_list_are_followed_too() {
    run(async {
        let (server, pods) = followed();
        let [kept, gone] = ["kept", "gone"].map(|name| create(&server, "radio", name, "n1", json!({})));
        server.fail(
            Verb::Watch,
            "pods",
            1,
            error(422, "Invalid", "sendInitialEvents is forbidden for watch"),
        );
        until("both are known", || [&kept, &gone].iter().all(|uid| name(&pods, uid).is_some())).await;
        assert!(!*pods.is_listed().borrow(), "the first bookmark comes after a minute");
        pods.is_listed().wait_for(|is_listed| *is_listed).await.unwrap();
        assert_eq!(name(&pods, &kept).unwrap(), "radio/kept");
        // The watch begins anew: what it does not bring is forgotten at the first bookmark.
        server.stop();
        delete(&server, "gone");
        server.compact();
        server.resume();
        until("the pod is forgotten", || name(&pods, &gone).is_none()).await;
        assert_eq!(name(&pods, &kept).unwrap(), "radio/kept");
    });
}

#[test]
fn watch_that_ends_in_the_middle_of_the_list_begins_anew() {
    run(async {
        let (server, pods) = followed();
        server.fail(
            Verb::Watch,
            "pods",
            1,
            error(422, "Invalid", "sendInitialEvents is forbidden for watch"),
        );
        let first = create(&server, "radio", "first", "n1", json!({}));
        until("it is known", || name(&pods, &first).is_some()).await;
        // No bookmark has said which pods these were.
        server.stop();
        delete(&server, "first");
        let second = create(&server, "radio", "second", "n1", json!({}));
        server.resume();
        until("the pods are listed", || *pods.is_listed().borrow()).await;
        assert_eq!((name(&pods, &first), name(&pods, &second)), (None, Some("radio/second".into())));
    });
}

#[test]
fn pod_that_is_too_large_costs_only_its_own_name() {
    run(async {
        let limit = 64 << 10;
        let (server, pods) = followed_by(NodePods { event_limit: limit, ..NodePods::new() });
        let pod = |name: &str, bytes: usize| {
            let pod = json!({
                "metadata": {"namespace": "radio", "name": name},
                "spec": {"nodeName": "n1", "containers": [{"name": "phy", "args": ["x".repeat(bytes)]}]},
            });
            server.create(&serde_json::from_value::<PodKind>(pod).unwrap()).unwrap().metadata.uid.unwrap()
        };
        // Together they have more than the limit, as lists had.
        let large: Vec<_> = (0..40).map(|at| pod(&format!("large{at}"), limit / 2)).collect();
        // Of which each is in one piece, and in several.
        let too_large = [pod("more", limit), pod("much-more", 20 * limit)];
        let small = pod("small", 1);
        pods.is_listed().wait_for(|is_listed| *is_listed).await.unwrap();
        assert!(large.iter().all(|uid| name(&pods, uid).is_some()));
        assert_eq!(too_large.each_ref().map(|uid| name(&pods, uid)), [None, None]);
        assert_eq!(name(&pods, &small).unwrap(), "radio/small");
        // The same while the watch is open.
        let (too_large, small) = (pod("later", 20 * limit), pod("small-later", 1));
        until("the small one is known", || name(&pods, &small).is_some()).await;
        assert_eq!((name(&pods, &too_large), server.count(|_| true)), (None, 1));
    });
}

#[test]
fn pod_that_grows_too_large_is_forgotten_after_its_end() {
    run(async {
        let limit = 64 << 10;
        let (server, pods) = followed_by(NodePods { event_limit: limit, ..NodePods::new() });
        let uid = create(&server, "radio", "du", "n1", json!({}));
        until("it is known", || name(&pods, &uid).is_some()).await;
        let note = json!({"metadata": {"annotations": {"note": "x".repeat(2 * limit)}}});
        let of_radio = kube::Api::<PodKind>::namespaced(server.client("test"), "radio");
        of_radio.patch("du", &PatchParams::default(), &Patch::Merge(note)).await.unwrap();
        delete(&server, "du");
        until("it is forgotten", || name(&pods, &uid).is_none()).await;
    });
}

#[test]
fn closed_watches_do_not_turn_into_a_loop() {
    run(async {
        let (server, pods) = followed();
        let pod = create(&server, "radio", "du", "n1", json!({}));
        pods.is_listed().wait_for(|is_listed| *is_listed).await.unwrap();
        server.fail(Verb::Watch, "pods", u32::MAX, error(410, "Expired", "always"));
        sleep(Duration::from_secs(3600)).await;
        assert_eq!(name(&pods, &pod).unwrap(), "radio/du");
        let requests = server.count(|_| true);
        assert!(requests < 300, "{requests} requests in an hour");
    });
}

#[test]
fn quiet_watch_is_opened_again_from_where_it_was() {
    run(async {
        let (server, pods) = followed();
        pods.is_listed().wait_for(|is_listed| *is_listed).await.unwrap();
        sleep(Duration::from_secs(3600)).await;
        let watches = server.count(|request| request.verb == Verb::Watch);
        assert!((12..16).contains(&watches), "{watches}");
        let pod = create(&server, "radio", "du", "n1", json!({}));
        until("the watch is open", || name(&pods, &pod).is_some()).await;
    });
}

#[test]
fn pods_and_containers_beyond_the_limits_are_not_kept() {
    run(async {
        let (server, pods) = followed();
        let status = |at: usize| {
            json!({"name": format!("c{at}"), "containerID": format!("containerd://{at}"),
            "ready": true, "restartCount": 0, "image": "i", "imageID": ""})
        };
        let all: Vec<_> = (0..MAX_CONTAINERS_PER_POD + 1).map(status).collect();
        let large = create(&server, "radio", "large", "n1", json!({"containerStatuses": all}));
        pods.is_listed().wait_for(|is_listed| *is_listed).await.unwrap();
        let container = |id: usize| pods.find(Some(&large), &id.to_string()).unwrap().container;
        assert_eq!(container(MAX_CONTAINERS_PER_POD - 1), format!("c{}", MAX_CONTAINERS_PER_POD - 1));
        assert_eq!(container(MAX_CONTAINERS_PER_POD), "");
        for at in 1..=MAX_PODS {
            create(&server, "radio", &format!("p{at}"), "n1", json!({}));
        }
        until("as many as are kept", || pods.by_uid.borrow().len() == MAX_PODS).await;
        let last = server.get::<PodKind>("radio", &format!("p{MAX_PODS}")).unwrap().metadata.uid.unwrap();
        sleep(Duration::from_secs(60)).await;
        assert_eq!((name(&pods, &last), pods.by_uid.borrow().len()), (None, MAX_PODS));
    });
}
