//! Asks the kubelet which pods hold what, counts it, and empties pools that are nobody's.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use shmesh_daemon::log_limit::LogLimit;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::REPEATED_LOG;
use crate::config::Config;
use crate::events::{EventType, Events};
use crate::kubelet::{AllocationTimes, held};
use crate::metrics::Metrics;
use crate::pools::{IdleTimer, sweep, used};
use crate::resource::allocate::UsageByResource;
use crate::resource::{Resource, ResourceKind};

/// What is configured and advertised.
type Resources = watch::Receiver<(Config, Vec<Arc<Resource>>)>;

/// Runs for ever.
pub(crate) async fn run(
    resources: Resources,
    allocation_times: Arc<AllocationTimes>,
    metrics: Metrics,
    events: Events,
) {
    let mut idle = HashMap::<String, IdleTimer<Instant>>::new();
    let mut said = REPEATED_LOG;
    loop {
        look(&resources, &allocation_times, &metrics, &events, &mut idle, &mut said).await;
        let every = resources.borrow().0.sweep.interval_seconds;
        tokio::time::sleep(Duration::from_secs(every.into())).await;
    }
}

async fn look(
    resources: &Resources,
    allocation_times: &Arc<AllocationTimes>,
    metrics: &Metrics,
    events: &Events,
    idle: &mut HashMap<String, IdleTimer<Instant>>,
    said: &mut LogLimit,
) {
    let (config, resources) = resources.borrow().clone();
    let asked = SystemTime::now();
    let held = match held(&config.seen(&config.kubelet.pod_resources_socket)).await {
        Ok(held) => held,
        Err(error) => {
            // Nobody is known to be dead.
            if let Some(suppressed) = said.allow(tokio::time::Instant::now().into_std()) {
                let error = format!("{error:#}");
                warn!(error, suppressed, "pods are not listed: nothing is swept until they are");
            }
            metrics.not_listed();
            idle.values_mut().for_each(IdleTimer::unknown);
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
        let may_go = idle.entry(pool.name.clone()).or_default().poll(Instant::now(), is_held, last, grace);
        let is_swept = may_go && config.sweep.enabled;
        let (allocation_times, name) = (Arc::clone(allocation_times), resource.name.clone());
        // There may be many files.
        let done = tokio::task::spawn_blocking(move || {
            let swept = is_swept.then(|| sweep(&directory, asked, || allocation_times.last(&name) == last));
            (swept, used(&directory).0)
        });
        let Ok((swept, bytes)) = done.await else { continue };
        metrics.pool_used(&pool.name, bytes);
        if let Some(swept) = swept.filter(|swept| swept.files > 0) {
            metrics.swept(&pool.name, swept.files, swept.bytes);
            info!(
                pool = pool.name,
                files = swept.files,
                bytes = swept.bytes,
                "left by dead pods, taken away"
            );
            let note = format!(
                "{}: {} files of dead pods, {} bytes, taken away",
                pool.name, swept.files, swept.bytes
            );
            events.say(EventType::Normal, "PoolSwept", note);
        }
        if let Some(swept) = swept.filter(|swept| swept.failures > 0)
            && let Some(suppressed) = said.allow(tokio::time::Instant::now().into_std())
        {
            warn!(
                pool = pool.name,
                failures = swept.failures,
                suppressed,
                "left by dead pods, and cannot be taken away: directories of theirs need CAP_DAC_OVERRIDE"
            );
            let note = format!("{}: {} files of dead pods cannot be taken away", pool.name, swept.failures);
            events.say(EventType::Warning, "PoolNotSwept", note);
        }
    }
}

/// Whether any container has the pool, also by the name that it had before the domain was changed.
fn is_held(held: &UsageByResource, pool: &str) -> bool {
    held.iter().any(|(resource, (containers, _))| {
        *containers > 0 && resource.rsplit_once('/').is_some_and(|(_, name)| name == pool)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_held_under_the_domain_of_before() {
        let held = UsageByResource::from([("old.example/a".into(), (1, 1)), ("shmesh.io/b".into(), (0, 0))]);
        assert!(is_held(&held, "a"));
        assert!(!is_held(&held, "b") && !is_held(&held, "old.example/a") && !is_held(&held, ""));
    }
}
