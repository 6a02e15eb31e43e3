//! All nodes with a plugin advertise resources, and the tests of the chart pass.

use anyhow::{Result, ensure};

use crate::node;

use super::Setup;

pub(super) const ALL: [&str; 3] = ["shmesh.io/shm", "shmesh.io/fronthaul", "shmesh.io/agent"];

pub(super) async fn run(setup: &Setup<'_>) -> Result<()> {
    let nodes = node::with_plugin(setup).await?;
    ensure!(!nodes.is_empty(), "there is no plugin on any node: see plugin.nodeSelector");
    for name in nodes {
        node::advertises(setup, &name, &ALL).await?;
    }
    setup.release.test().await
}
