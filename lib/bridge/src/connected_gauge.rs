//! The metric that says whether the other side of a session answers.

use std::fmt;
use std::sync::Arc;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

/// Labels of a session's metrics: the link and the far node.
pub(crate) type SessionLabels = Vec<(&'static str, String)>;

/// The gauge of one session, 1 while the other side answers. It is exported for as long as one of its clones exists: a node that has gone
/// is no longer one that does not answer.
#[derive(Clone, Default)]
pub struct ConnectedGauge(Arc<ExportedGauge>);

#[derive(Default)]
struct ExportedGauge {
    family: Family<SessionLabels, Gauge>,
    labels: SessionLabels,
    gauge: Gauge,
}

impl ConnectedGauge {
    /// Exports the gauge, with the value 0.
    pub(crate) fn new(family: &Family<SessionLabels, Gauge>, labels: SessionLabels) -> Self {
        let gauge = family.get_or_create_owned(&labels);
        gauge.set(0);
        Self(Arc::new(ExportedGauge { family: family.clone(), labels, gauge }))
    }

    /// Sets it, and returns whether it has changed.
    pub(crate) fn set(&self, is_connected: bool) -> bool {
        self.0.gauge.set(i64::from(is_connected)) != i64::from(is_connected)
    }
}

impl fmt::Debug for ConnectedGauge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ConnectedGauge").field(&self.0.labels).finish()
    }
}

impl Drop for ExportedGauge {
    fn drop(&mut self) {
        self.family.remove(&self.labels);
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn gauge_is_exported_while_it_exists() {
        let family = Family::<SessionLabels, Gauge>::default();
        let mut registry = Registry::default();
        registry.register("connected", "help", family.clone());
        let text = || {
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            text
        };
        let gauge = ConnectedGauge::new(&family, vec![("node", "edge".to_owned())]);
        assert!(text().contains("connected{node=\"edge\"} 0"), "{}", text());
        let clone = gauge.clone();
        assert!(gauge.set(true) && !clone.set(true));
        drop(gauge);
        assert!(text().contains("connected{node=\"edge\"} 1"), "{}", text());
        drop(clone);
        assert!(!text().contains("edge"), "{}", text());
    }
}
