//! A link in a ResourceClaim between two pods, whichever is created first.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::pods;
use crate::traffic::{Talk, flows};

use super::Setup;

/// The claim of the sample, which each round has under a name of its own.
const CLAIM: &str = "claim/fronthaul";

pub(super) async fn run(setup: &Setup<'_>, namespace: &str) -> Result<()> {
    setup.release.switch_to_dra().await?;
    for (round, order) in [["phy", "mac"], ["mac", "phy"]].into_iter().enumerate() {
        together(setup, namespace, round, order).await.with_context(|| format!("{} first", order[0]))?;
    }
    Ok(())
}

/// Returns to the device plugin, which the other scenarios need. The kubelet releases claims with the driver only, so the
/// pods must be gone.
pub(super) async fn after(setup: &Setup<'_>) -> Result<()> {
    setup.release.roll_back().await.context("back to the device plugin")
}

/// Returns objects of the sample with the names of a round.
fn of_round(mut objects: Vec<Value>, round: usize) -> Vec<Value> {
    for object in &mut objects {
        let name = format!("{}-{round}", object["metadata"]["name"].as_str().unwrap_or_default());
        object["metadata"]["name"] = name.into();
        if let Some(links) = object["metadata"]["annotations"]["shmesh.io/links"].as_str() {
            object["metadata"]["annotations"]["shmesh.io/links"] =
                links.replace(CLAIM, &format!("{CLAIM}-{round}")).into();
        }
    }
    objects
}

async fn together(setup: &Setup<'_>, namespace: &str, round: usize, order: [&str; 2]) -> Result<()> {
    let names = order.map(|name| format!("{name}-{round}"));
    let all = of_round(pods::prepared(pods::CLAIM, namespace, setup.args)?, round);
    for name in &names {
        let pod = all.iter().find(|pod| pod["metadata"]["name"] == name.as_str());
        setup.cluster.apply(pod.with_context(|| format!("the sample has no pod {name}"))?).await?;
    }
    // Pods may come before their claim.
    for claim in of_round(pods::objects(pods::CLAIM, "ResourceClaim", namespace)?, round) {
        setup.cluster.apply_claim(&claim).await?;
    }
    let mut nodes = Vec::new();
    for name in &names {
        let pod = setup.wait_for(namespace, name, pods::ready).await?;
        let has_affinity = pod.spec.as_ref().is_some_and(|spec| spec.affinity.is_some());
        ensure!(!has_affinity, "the pod {name} has an affinity, and claims need none");
        nodes.push(pods::node(&pod)?.to_owned());
    }
    ensure!(nodes[0] == nodes[1], "the pods of one claim are on the nodes {nodes:?}");
    let talks = [(&names[0], order[0]), (&names[1], order[1])];
    flows(&setup.cluster, &talks.map(|(pod, container)| Talk { namespace, pod, container })).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_round_has_a_claim_of_its_own() {
        let objects = |kind| of_round(pods::objects(pods::CLAIM, kind, "n").unwrap(), 7);
        let [claim] = &objects("ResourceClaim")[..] else {
            panic!("the sample has another number of claims")
        };
        assert_eq!(
            (&claim["metadata"]["name"], &claim["metadata"]["namespace"]),
            (&"fronthaul-7".into(), &"n".into())
        );
        let pods = objects("Pod");
        assert_eq!(pods.iter().map(|pod| &pod["metadata"]["name"]).collect::<Vec<_>>(), ["phy-7", "mac-7"]);
        for pod in pods {
            let links = pod["metadata"]["annotations"]["shmesh.io/links"].as_str().unwrap();
            assert!(links.contains("scope: claim/fronthaul-7\n"), "{links}");
        }
    }
}
