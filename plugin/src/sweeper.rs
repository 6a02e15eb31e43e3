//! Asks the kubelet which pods hold what, counts it, and empties pools that are nobody's.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::config::Config;
use crate::kubelet::{Ledger, held};
use crate::metrics::Metrics;
use crate::pools::{Idle, sweep, used};
use crate::resource::{Resource, What};

/// What is configured and advertised.
type Resources = watch::Receiver<(Config, Vec<Arc<Resource>>)>;

/// Runs for ever.
pub(crate) async fn run(resources: Resources, ledger: Arc<Ledger>, metrics: Metrics) {
    let mut idle = HashMap::<String, Idle<Instant>>::new();
    loop {
        look(&resources, &ledger, &metrics, &mut idle).await;
        let every = resources.borrow().0.sweep.interval_seconds;
        tokio::time::sleep(Duration::from_secs(every.into())).await;
    }
}

async fn look(
    resources: &Resources,
    ledger: &Arc<Ledger>,
    metrics: &Metrics,
    idle: &mut HashMap<String, Idle<Instant>>,
) {
    let (config, resources) = resources.borrow().clone();
    let asked = SystemTime::now();
    let held = match held(&config.seen(&config.kubelet.pod_resources_socket)).await {
        Ok(held) => held,
        Err(error) => {
            // Nobody is known to be dead.
            debug!(error = format!("{error:#}"), "pods are not listed");
            metrics.not_listed();
            idle.values_mut().for_each(Idle::unknown);
            return;
        }
    };
    for resource in resources {
        metrics.hold(&resource, &held);
        let What::Pool(pool) = &resource.what else { continue };
        let directory = config.seen(&pool.directory);
        let grace = Duration::from_secs(config.sweep.grace_seconds.into());
        let is_held = held.get(&resource.name).is_some_and(|(containers, _)| *containers > 0);
        let last = ledger.last(&resource.name);
        let may_go = idle.entry(pool.name.clone()).or_default().looked(Instant::now(), is_held, last, grace);
        let is_swept = may_go && config.sweep.enabled;
        let (ledger, name) = (Arc::clone(ledger), resource.name.clone());
        // There may be many files.
        let done = tokio::task::spawn_blocking(move || {
            let swept = is_swept.then(|| sweep(&directory, asked, || ledger.last(&name) == last));
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
        }
        if let Some(swept) = swept.filter(|swept| swept.failures > 0) {
            warn!(pool = pool.name, failures = swept.failures, "left by dead pods, and cannot be taken away");
        }
    }
}
