//! Requests to the API server.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, Namespace, Node, Pod, ServiceAccount};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, ListParams, LogParams, Patch, PatchParams, PostParams,
};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde_json::{Value, json};

use crate::wait::{Pace, PollResult};

/// Field manager for objects that the tests write.
const MANAGER: &str = "shmesh-e2e";

/// A connection to a cluster.
#[derive(Clone)]
pub(crate) struct Cluster {
    client: Client,
    pub(crate) pace: Pace,
}

impl Cluster {
    /// Connects to the cluster and checks that it answers.
    pub(crate) async fn connect(kubeconfig: &Path, pace: Pace) -> Result<Self> {
        let shown = kubeconfig.display();
        let read = Kubeconfig::read_from(kubeconfig).with_context(|| format!("cannot read {shown}"))?;
        let mut config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default())
            .await
            .with_context(|| format!("{shown} does not say how to reach a cluster"))?;
        // A poll must time out so that the next one can start.
        (config.connect_timeout, config.read_timeout) =
            (Some(Duration::from_secs(10)), Some(Duration::from_secs(30)));
        let url = config.cluster_url.clone();
        let client = Client::try_from(config).with_context(|| format!("cannot use {shown}"))?;
        let cluster = Self { client, pace };
        cluster.nodes().await.with_context(|| format!("the API server {url} of {shown} does not answer"))?;
        Ok(cluster)
    }

    fn pods_in(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    pub(crate) async fn nodes(&self) -> Result<Vec<Node>> {
        let nodes = Api::<Node>::all(self.client.clone()).list(&ListParams::default()).await;
        Ok(nodes.context("cannot list nodes")?.items)
    }

    /// Returns `NAMESPACE/NAME` of all plugins of any release.
    pub(crate) async fn plugins(&self) -> Result<Vec<String>> {
        let ours = ListParams::default().labels("app.kubernetes.io/name=shmesh");
        let sets =
            Api::<DaemonSet>::all(self.client.clone()).list(&ours).await.context("cannot list DaemonSets")?;
        let named = |set: DaemonSet| {
            format!(
                "{}/{}",
                set.metadata.namespace.unwrap_or_default(),
                set.metadata.name.unwrap_or_default()
            )
        };
        Ok(sets.items.into_iter().map(named).collect())
    }

    /// Creates a namespace. Fails if it exists, so that foreign namespaces are never used or deleted.
    pub(crate) async fn make_namespace(&self, name: &str, pod_security: &str) -> Result<()> {
        let labels = json!({"pod-security.kubernetes.io/enforce": pod_security});
        let namespace = serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}}))?;
        match Api::<Namespace>::all(self.client.clone()).create(&PostParams::default(), &namespace).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 409 => {
                bail!(
                    "the namespace {name} exists already: run kubectl delete namespace {name}, or choose another --namespace"
                )
            }
            Err(error) => Err(error).with_context(|| format!("cannot create the namespace {name}")),
        }
    }

    /// Deletes a namespace and waits until it is gone.
    pub(crate) async fn delete_namespace(&self, name: &str) -> Result<()> {
        let namespaces = Api::<Namespace>::all(self.client.clone());
        let what = format!("the deletion of namespace {name} and of all objects in it");
        let mut is_asked = false;
        self.pace
            .until(&what, async || {
                if !is_asked {
                    match namespaces.delete(name, &DeleteParams::default()).await {
                        Err(kube::Error::Api(status)) if status.code == 404 => {
                            return Ok(PollResult::There(()));
                        }
                        other => drop(other?),
                    }
                    is_asked = true;
                }
                let Some(still) = namespaces.get_opt(name).await? else { return Ok(PollResult::There(())) };
                let conditions = still.status.and_then(|status| status.conditions).unwrap_or_default();
                let of_it =
                    conditions.into_iter().filter(|one| one.status == "True").filter_map(|one| one.message);
                Ok(PollResult::NotYet(format!(
                    "it is being deleted; {}",
                    of_it.collect::<Vec<_>>().join("; ")
                )))
            })
            .await
    }

    /// Creates a pod; unknown fields are errors.
    pub(crate) async fn apply(&self, pod: &Value) -> Result<()> {
        self.apply_object("pod", &ApiResource::erase::<Pod>(&()), pod).await
    }

    /// Creates a ResourceClaim; unknown fields are errors.
    pub(crate) async fn apply_claim(&self, claim: &Value) -> Result<()> {
        self.apply_object("claim", &ApiResource::erase::<ResourceClaim>(&()), claim).await
    }

    /// Creates a service account; unknown fields are errors.
    pub(crate) async fn apply_service_account(&self, account: &Value) -> Result<()> {
        self.apply_object("service account", &ApiResource::erase::<ServiceAccount>(&()), account).await
    }

    async fn apply_object(&self, kind: &str, resource: &ApiResource, object: &Value) -> Result<()> {
        let text = |key: &str| {
            object["metadata"][key].as_str().with_context(|| format!("a {kind} without metadata.{key}"))
        };
        let (namespace, name) = (text("namespace")?, text("name")?);
        let objects: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, resource);
        let mut params = PatchParams::apply(MANAGER).force();
        params.field_validation = Some(kube::api::ValidationDirective::Strict);
        // The webhook may be unavailable for a moment after its pod was replaced.
        let what = format!("the {kind} {namespace}/{name}");
        self.pace
            .until(&what, async || match objects.patch(name, &params, &Patch::Apply(object)).await {
                Ok(_) => Ok(PollResult::There(())),
                // The service account appears a moment after its namespace.
                Err(kube::Error::Api(status)) if status.message.contains("looking up service account") => {
                    Ok(PollResult::NotYet(status.message))
                }
                Err(kube::Error::Api(status)) if (400..500).contains(&status.code) && status.code != 429 => {
                    Ok(PollResult::Never(status.message))
                }
                Err(error) => Err(error.into()),
            })
            .await
    }

    pub(crate) async fn pod(&self, namespace: &str, name: &str) -> Result<Pod> {
        let pod = self.pods_in(namespace).get_opt(name).await;
        let pod = pod.with_context(|| format!("cannot read the pod {namespace}/{name}"))?;
        pod.with_context(|| format!("there is no pod {namespace}/{name}"))
    }

    /// Deletes a pod and waits until it is gone.
    pub(crate) async fn delete_pod(&self, namespace: &str, name: &str) -> Result<()> {
        let pods = self.pods_in(namespace);
        let deleted = pods.delete(name, &DeleteParams::default()).await;
        deleted.with_context(|| format!("cannot delete the pod {namespace}/{name}"))?;
        let look = async || match pods.get_opt(name).await? {
            None => Ok(PollResult::There(())),
            Some(pod) => Ok(PollResult::NotYet(crate::pods::describe(&pod))),
        };
        self.pace.until(&format!("the end of the pod {namespace}/{name}"), look).await
    }

    /// Returns the pods with these labels; an empty string selects all.
    pub(crate) async fn pods(&self, namespace: &str, labels: &str) -> Result<Vec<Pod>> {
        let found = self.pods_in(namespace).list(&ListParams::default().labels(labels)).await;
        Ok(found.with_context(|| format!("cannot list pods in {namespace}"))?.items)
    }

    pub(crate) async fn events(&self, namespace: &str) -> Result<Vec<Event>> {
        let found =
            Api::<Event>::namespaced(self.client.clone(), namespace).list(&ListParams::default()).await;
        Ok(found.with_context(|| format!("cannot list events in {namespace}"))?.items)
    }

    /// Returns the last lines of the log of a container or its previous instance.
    pub(crate) async fn log(
        &self,
        namespace: &str,
        pod: &str,
        container: &str,
        previous: bool,
    ) -> Result<String> {
        let params = LogParams {
            container: Some(container.to_owned()),
            tail_lines: Some(40),
            previous,
            ..LogParams::default()
        };
        let log = self.pods_in(namespace).logs(pod, &params).await;
        log.with_context(|| format!("cannot read the log of {namespace}/{pod}, container {container}"))
    }
}
