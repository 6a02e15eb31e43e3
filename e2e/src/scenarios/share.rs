//! A pool for programs that know nothing of shmesh.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;

use crate::pods;
use crate::wait::PollResult;

use super::Setup;

/// The writer keeps running. The reader succeeds once it has read the writer's message and written its own.
fn exchanged(pod: Pod) -> PollResult<Pod> {
    if pods::name(&pod) == "writer" { pods::ready(pod) } else { pods::succeeded(pod) }
}

pub(super) async fn run(setup: &Setup<'_>, namespace: &str) -> Result<()> {
    setup.start(pods::SHARE, namespace, exchanged).await?;
    let writer = setup.cluster.pod(namespace, "writer").await?;
    let count = pods::containers(&writer).count();
    ensure!(count == 1, "the writer has {count} containers, and a pool without links adds none");
    Ok(())
}
