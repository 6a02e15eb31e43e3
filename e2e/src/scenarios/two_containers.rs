//! An injected link inside a pod.

use anyhow::Result;

use crate::pods;
use crate::traffic::{Talk, flows};

use super::Setup;

pub(super) async fn run(setup: &Setup<'_>, namespace: &str) -> Result<()> {
    setup.start(pods::TWO_CONTAINERS, namespace, pods::ready).await?;
    let pod = "two-containers";
    let pods = setup.cluster.pod(namespace, pod).await?;
    // The sidecar is not part of the applied pod.
    pods::container(&pods, "shmesh")?;
    let talk = |container| Talk { namespace, pod, container };
    flows(&setup.cluster, &[talk("primary"), talk("secondary")]).await
}
