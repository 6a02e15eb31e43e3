//! Tracks which pods hold which resources, as the kubelet lists them, and garbage-collects unused pools, and unused
//! links in pools that are in use.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use shmesh_daemon::log_limit::LogLimit;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::REPEATED_LOG;
use crate::config::Config;
use crate::domain::SharedClaims;
use crate::events::{EventType, Events};
use crate::handover::Ownership;
use crate::kubelet::{AllocationTimes, held};
use crate::metrics::Metrics;
use crate::pools::{IdleTimer, UnusedLinks, sweep, used};
use crate::resource::allocate::UsageByResource;
use crate::resource::{Resource, ResourceKind};

/// The current configuration and the advertised resources.
type Resources = watch::Receiver<(Config, Vec<Arc<Resource>>)>;

/// The results of earlier rounds for a pool.
#[derive(Default)]
struct PoolState {
    idle: IdleTimer<Instant>,
    links: UnusedLinks,
}

/// Runs until the task is dropped.
pub(crate) async fn run(
    resources: Resources,
    allocation_times: Arc<AllocationTimes>,
    metrics: Metrics,
    events: Events,
    claims: Option<SharedClaims>,
    ownership: Ownership,
) {
    let mut pools = HashMap::<String, PoolState>::new();
    let mut log = REPEATED_LOG;
    loop {
        let collecting = ownership.collect().await;
        if let Some(claims) = &claims {
            claims.collect().await;
        }
        collect(&resources, &allocation_times, &metrics, &events, claims.as_ref(), &mut pools, &mut log)
            .await;
        drop(collecting);
        let every = resources.borrow().0.sweep.interval_seconds;
        tokio::time::sleep(Duration::from_secs(every.into())).await;
    }
}

async fn collect(
    resources: &Resources,
    allocation_times: &Arc<AllocationTimes>,
    metrics: &Metrics,
    events: &Events,
    claims: Option<&SharedClaims>,
    pools: &mut HashMap<String, PoolState>,
    log: &mut LogLimit,
) {
    let (config, resources) = resources.borrow().clone();
    let asked = SystemTime::now();
    // The kubelet lists devices of device plugins; pools of claims are in the store.
    let held = match claims {
        Some(claims) => claims.held_pools(config.domain.clone()).await,
        None => held(&config.seen(&config.kubelet.pod_resources_socket)).await,
    };
    let held = match held {
        Ok(held) => held,
        Err(error) => {
            // Without the list, no pod is known to be dead.
            if let Some(suppressed) = log.allow(tokio::time::Instant::now().into_std()) {
                let error = format!("{error:#}");
                warn!(error, suppressed, "it is not known who uses the pools, so they are not swept");
            }
            metrics.not_listed();
            pools.values_mut().for_each(|pool| pool.idle.unknown());
            return;
        }
    };
    for resource in resources {
        metrics.hold(&resource, &held);
        let ResourceKind::Pool(pool) = &resource.kind else { continue };
        let directory = config.seen(&pool.directory);
        let grace = Duration::from_secs(config.sweep.grace_seconds.into());
        let is_held = is_held(&held, &pool.name);
        let last = allocation_times.last(&resource.name);
        let state = pools.entry(pool.name.clone()).or_default();
        let is_unused = state.idle.poll(Instant::now(), is_held, last, grace);
        let is_enabled = config.sweep.enabled;
        let mut links = std::mem::take(&mut state.links);
        let (allocation_times, name) = (Arc::clone(allocation_times), resource.name.clone());
        // On a blocking thread: a pool may have many files.
        let done = tokio::task::spawn_blocking(move || {
            let swept = match (is_enabled, is_unused) {
                (false, _) => None,
                (true, true) => Some(sweep(&directory, asked, || allocation_times.last(&name) == last)),
                (true, false) => Some(links.collect(&directory, Instant::now(), grace)),
            };
            (swept, links, used(&directory).0)
        });
        let Ok((swept, links, bytes)) = done.await else { continue };
        state.links = links;
        metrics.pool_used(&pool.name, bytes);
        if let Some(swept) = swept.filter(|swept| swept.files > 0) {
            metrics.swept(&pool.name, swept.files, swept.bytes);
            info!(pool = pool.name, files = swept.files, bytes = swept.bytes, "swept files of dead pods");
            let note =
                format!("{}: removed {} files of dead pods, {} bytes", pool.name, swept.files, swept.bytes);
            events.say(EventType::Normal, "PoolSwept", note);
        }
        if let Some(swept) = swept.filter(|swept| swept.failures > 0)
            && let Some(suppressed) = log.allow(tokio::time::Instant::now().into_std())
        {
            warn!(
                pool = pool.name,
                failures = swept.failures,
                suppressed,
                "cannot remove files of dead pods: their directories require CAP_DAC_OVERRIDE"
            );
            let note = format!("{}: cannot remove {} files of dead pods", pool.name, swept.failures);
            events.say(EventType::Warning, "PoolNotSwept", note);
        }
    }
}

/// Whether any container holds the pool, under the current or a previous domain.
fn is_held(held: &UsageByResource, pool: &str) -> bool {
    held.iter().any(|(resource, (containers, _))| {
        *containers > 0 && resource.rsplit_once('/').is_some_and(|(_, name)| name == pool)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_is_held_under_a_previous_domain() {
        let held = UsageByResource::from([("old.example/a".into(), (1, 1)), ("shmesh.io/b".into(), (0, 0))]);
        assert!(is_held(&held, "a"));
        assert!(!is_held(&held, "b") && !is_held(&held, "old.example/a") && !is_held(&held, ""));
    }
}
