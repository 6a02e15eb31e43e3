//! After deleting pods and release, nodes have no files, sockets or resources left.

use anyhow::Result;

use crate::node;

use super::{Setup, two_pods};

pub(super) async fn run(setup: &Setup<'_>, namespace: &str) -> Result<()> {
    two_pods::start(setup, namespace).await?;
    let nodes = node::with_plugin(setup).await?;
    setup.cluster.delete_namespace(namespace).await?;
    for node in &nodes {
        node::swept(setup, node).await?;
    }
    setup.release.uninstall().await?;
    for node in &nodes {
        node::has_nothing(setup, node).await?;
        node::is_clean(setup, node).await?;
    }
    Ok(())
}
