//! A `/dev/shm` with exactly the requested units.

use anyhow::{Result, ensure};

use crate::pods;

use super::Setup;

const SAID: [&str; 3] = ["size 131072 KiB", "filled 134217728", "full"];

pub(super) async fn run(setup: &Setup<'_>, namespace: &str) -> Result<()> {
    setup.start(pods::SIZED, namespace, pods::succeeded).await?;
    let said = setup.cluster.log(namespace, "sized", "sized", false).await?;
    ensure!(said.lines().eq(SAID), "the pod reports {said:?} about its /dev/shm, and should report {SAID:?}");
    Ok(())
}
