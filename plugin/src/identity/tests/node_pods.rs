//! The pods of a node, followed at the double of the API server.

use std::rc::Rc;

use k8s_openapi::api::core::v1::Pod as PodKind;
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
        assert_eq!(server.count(|request| request.verb == Verb::List), 1);
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
fn expired_watch_lists_the_pods_again() {
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
        until("the pods are listed again", || name(&pods, &new).is_some()).await;
        assert_eq!(name(&pods, &gone), None);
    });
}

#[test]
fn refused_requests_are_repeated_with_delays() {
    run(async {
        let (server, pods) = followed();
        let pod = create(&server, "radio", "du", "n1", json!({}));
        server.fail(Verb::List, "pods", u32::MAX, error(403, "Forbidden", "not yet"));
        sleep(Duration::from_secs(3600)).await;
        assert!(!*pods.is_listed().borrow() && name(&pods, &pod).is_none());
        let requests = server.count(|request| request.verb == Verb::List);
        // With the delays at their longest, every 15 to 30 seconds.
        assert!((100..300).contains(&requests), "{requests}");
    });
}

#[test]
fn list_that_is_too_large_is_not_read() {
    run(async {
        let limit = 64 << 10;
        let (server, pods) = followed_by(NodePods { list_limit: limit, ..NodePods::new() });
        let pod = |at: usize| {
            let pod = json!({
                "metadata": {"namespace": "radio", "name": format!("large{at}")},
                "spec": {"nodeName": "n1", "containers": [{"name": "phy", "args": ["x".repeat(limit / 4)]}]},
            });
            serde_json::from_value::<PodKind>(pod).unwrap()
        };
        let large: Vec<_> = (0..4).map(|at| server.create(&pod(at)).unwrap()).collect();
        sleep(Duration::from_secs(60)).await;
        assert!(!*pods.is_listed().borrow());
        delete(&server, "large0");
        pods.is_listed().wait_for(|is_listed| *is_listed).await.unwrap();
        assert!(name(&pods, large[1].metadata.uid.as_ref().unwrap()).is_some());
    });
}

#[test]
fn closed_watches_do_not_turn_into_a_loop() {
    run(async {
        let (server, pods) = followed();
        let pod = create(&server, "radio", "du", "n1", json!({}));
        server.fail(Verb::Watch, "pods", u32::MAX, error(410, "Expired", "always"));
        pods.is_listed().wait_for(|is_listed| *is_listed).await.unwrap();
        sleep(Duration::from_secs(3600)).await;
        assert_eq!(name(&pods, &pod).unwrap(), "radio/du");
        let requests = server.count(|_| true);
        assert!(requests < 600, "{requests} requests in an hour");
    });
}

#[test]
fn quiet_watch_is_opened_again_from_where_it_was() {
    run(async {
        let (server, pods) = followed();
        pods.is_listed().wait_for(|is_listed| *is_listed).await.unwrap();
        sleep(Duration::from_secs(3600)).await;
        let (lists, watches) = (
            server.count(|request| request.verb == Verb::List),
            server.count(|request| request.verb == Verb::Watch),
        );
        assert_eq!(lists, 1);
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
