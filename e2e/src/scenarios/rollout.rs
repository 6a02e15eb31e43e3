//! Replaces the plugin ten times while pods are created: none fails.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use crate::pods;

use super::{Setup, upgrade};

/// Replacements of the plugin.
const ROUNDS: u32 = 10;
/// Pods that are created during each.
const PODS: u32 = 20;
/// Pause between two pods, so that they come before, during and after it.
const PAUSE: Duration = Duration::from_millis(500);

pub(super) async fn run(setup: &Setup<'_>, namespace: &str) -> Result<()> {
    for round in 0..ROUNDS {
        let old = upgrade::plugins(setup).await?;
        let (replaced, created) = tokio::join!(
            async {
                setup.release.upgrade_to(&format!("rollout-{round}"), &json!("100%")).await?;
                upgrade::replaced(setup, &old).await
            },
            create(setup, namespace, round)
        );
        created.and(replaced.map(drop)).with_context(|| format!("round {round}"))?;
    }
    Ok(())
}

/// Creates pods in an even rhythm, and waits until all have succeeded.
async fn create(setup: &Setup<'_>, namespace: &str, round: u32) -> Result<()> {
    let mut names = Vec::new();
    for number in 0..PODS {
        let mut pod = pods::prepared(pods::LATE, namespace, setup.args)?.remove(0);
        let name = format!("rollout-{round}-{number}");
        pod["metadata"]["name"] = name.clone().into();
        setup.cluster.apply(&pod).await?;
        names.push(name);
        tokio::time::sleep(PAUSE).await;
    }
    for name in names {
        setup.wait_for(namespace, &name, pods::succeeded).await?;
    }
    Ok(())
}
