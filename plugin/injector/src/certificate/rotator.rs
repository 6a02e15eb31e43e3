//! One rotation step: read, renew if due, publish, present.

use std::time::{Duration, SystemTime};

use anyhow::Result;

use super::resolver::is_accepted;
use super::{Bundle, CertResolver, CertStore, StoredCert, make};

/// Rotates the certificate of one replica.
#[derive(Debug)]
pub struct CertRotator<S> {
    store: S,
    served: CertResolver,
    names: Vec<String>,
    lifetime: Duration,
    presented: Option<Bundle>,
    /// Published in the last step, to be presented in the next one, when API servers know its authority.
    announced: Option<Bundle>,
}

/// The outcome of a rotation step.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RotationStep {
    /// Whether a new certificate was issued and stored.
    pub made: bool,
    /// Whether the `caBundle` was changed.
    pub published: bool,
    /// Whether another certificate is presented now.
    pub presented: bool,
    /// Expiry of the presented certificate, in seconds since 1970.
    pub until: u64,
}

/// Attempts per step when replicas write concurrently.
const TRIES: usize = 4;

impl<S: CertStore> CertRotator<S> {
    /// Creates a rotator for a server with these names.
    #[must_use]
    pub fn new(store: S, served: CertResolver, names: Vec<String>, lifetime: Duration) -> Self {
        Self { store, served, names, lifetime, presented: None, announced: None }
    }

    /// Reads the stored certificate, renews it if it is due or invalid, publishes its authorities and
    /// presents it.
    ///
    /// A new certificate is presented one step after its authority was published, unless the current one is
    /// unusable.
    ///
    /// # Errors
    /// The store does not answer; the previous certificate stays in use.
    pub async fn step(&mut self, now: SystemTime) -> Result<RotationStep> {
        let mut rotation = RotationStep::default();
        let mut current = None;
        for _ in 0..TRIES {
            let found = self.store.read().await?;
            if let Some(bundle) = found.bundle.as_ref().filter(|bundle| self.is_good(bundle, now)) {
                current = Some(bundle.clone());
                break;
            }
            let bundle = make(&self.names, self.lifetime, now, found.bundle.as_ref())?;
            if self.store.write(&StoredCert { bundle: None, ..found }, &bundle).await? {
                rotation.made = true;
                current = Some(bundle);
                break;
            }
        }
        let Some(current) = current else {
            anyhow::bail!("other replicas keep writing the certificate concurrently")
        };

        let is_needed = self.presented.as_ref().is_none_or(|presented| presented.terms.is_over(now));
        if is_needed {
            rotation.presented = self.present(&current)?;
        }
        rotation.published = self.store.publish(&current.authorities).await?;
        if !is_needed && !rotation.published && self.announced.as_ref() == Some(&current) {
            rotation.presented = self.present(&current)?;
        }
        self.announced = Some(current);
        rotation.until = self.presented.as_ref().map_or(0, |presented| presented.terms.until);
        Ok(rotation)
    }

    fn is_good(&self, bundle: &Bundle, now: SystemTime) -> bool {
        bundle.terms.names == self.names && !bundle.terms.is_due(now) && is_accepted(bundle, now)
    }

    fn present(&mut self, bundle: &Bundle) -> Result<bool> {
        if self.presented.as_ref() == Some(bundle) {
            return Ok(false);
        }
        self.served.present(bundle)?;
        self.presented = Some(bundle.clone());
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::MemoryStore;
    use super::*;

    const LIFE: Duration = Duration::from_secs(90 * 86_400);

    fn rotator(store: &MemoryStore) -> CertRotator<MemoryStore> {
        CertRotator::new(store.clone(), CertResolver::default(), vec!["injector.shmesh.svc".into()], LIFE)
    }

    fn start() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
    }

    fn presented(rotator: &CertRotator<MemoryStore>) -> &Bundle {
        rotator.presented.as_ref().unwrap()
    }

    #[tokio::test]
    async fn concurrent_replicas_share_one_certificate() {
        let store = MemoryStore::default();
        let (mut a, mut b) = (rotator(&store), rotator(&store));
        let (first, second) = tokio::join!(a.step(start()), b.step(start()));
        let (first, second) = (first.unwrap(), second.unwrap());
        assert_eq!(usize::from(first.made) + usize::from(second.made), 1);
        assert!(first.presented && second.presented);
        assert_eq!(presented(&a), presented(&b));
        assert_eq!(store.published(), presented(&a).authorities);
    }

    /// A store on which another replica writes first, once.
    struct RacingStore(MemoryStore, std::sync::atomic::AtomicBool, Bundle);

    impl CertStore for RacingStore {
        async fn read(&self) -> Result<StoredCert> {
            self.0.read().await
        }

        async fn write(&self, found: &StoredCert, bundle: &Bundle) -> Result<bool> {
            if !self.1.swap(true, std::sync::atomic::Ordering::Relaxed) {
                self.0.spoil(Some(self.2.clone()));
            }
            self.0.write(found, bundle).await
        }

        async fn publish(&self, authorities: &str) -> Result<bool> {
            self.0.publish(authorities).await
        }
    }

    #[tokio::test]
    async fn slower_rotator_uses_certificate_of_faster_one() {
        let names = vec!["injector.shmesh.svc".to_owned()];
        let theirs = make(&names, LIFE, start(), None).unwrap();
        let store = RacingStore(MemoryStore::default(), false.into(), theirs.clone());
        let mut rotator = CertRotator::new(store, CertResolver::default(), names, LIFE);
        let rotation = rotator.step(start()).await.unwrap();
        assert!(!rotation.made && rotation.presented);
        assert_eq!(rotator.presented, Some(theirs));
    }

    #[tokio::test]
    async fn renewal_publishes_both_authorities_before_presenting() {
        let store = MemoryStore::default();
        let (mut a, mut b) = (rotator(&store), rotator(&store));
        a.step(start()).await.unwrap();
        b.step(start()).await.unwrap();
        let old = presented(&a).clone();
        let later = start() + LIFE / 2;
        assert_eq!(
            a.step(later).await.unwrap(),
            RotationStep { until: old.terms.until, ..RotationStep::default() }
        );

        let due = start() + LIFE * 2 / 3;
        let rotation = a.step(due).await.unwrap();
        assert!(rotation.made && rotation.published && !rotation.presented);
        assert_eq!(presented(&a), &old, "not before API servers know the new authority");
        assert!(store.published().contains(super::super::first(&old.authorities)), "b presents the old one");
        assert!(a.step(due).await.unwrap().presented);
        let new = presented(&a).clone();
        assert_ne!(new, old);
        assert!(!new.terms.is_due(due));
        // The other replica follows without issuing one.
        assert!(!b.step(due).await.unwrap().made);
        assert!(b.step(due).await.unwrap().presented);
        assert_eq!(presented(&b), &new);

        let third = due + LIFE;
        a.step(third).await.unwrap();
        assert_eq!(store.published().matches("BEGIN CERTIFICATE").count(), 2, "authorities do not pile up");
        assert!(
            a.presented.as_ref().unwrap().terms.until > super::super::seconds(third),
            "an expired one is of no use"
        );
    }

    #[tokio::test]
    async fn damaged_certificate_is_replaced() {
        let store = MemoryStore::default();
        let mut rotator = rotator(&store);
        rotator.step(start()).await.unwrap();
        let good = presented(&rotator).clone();
        let other = make(&["other.svc".to_owned()], LIFE, start(), None).unwrap();
        let expired = make(&good.terms.names, Duration::ZERO, start() - LIFE, None).unwrap();
        for spoiled in [
            None,
            Some(Bundle { key: other.key.clone(), ..good.clone() }),
            Some(Bundle { certificate: String::new(), ..good.clone() }),
            Some(Bundle { authorities: "nonsense".into(), ..good.clone() }),
            Some(Bundle { authorities: other.authorities.clone(), ..good.clone() }),
            Some(Bundle { terms: good.terms.clone(), ..other.clone() }),
            Some(Bundle { terms: good.terms.clone(), ..expired }),
            Some(other),
        ] {
            store.spoil(spoiled);
            assert!(rotator.step(start()).await.unwrap().made);
            assert!(rotator.step(start()).await.unwrap().presented);
            assert_eq!(presented(&rotator).terms.names, good.terms.names);
        }
        store.publish("").await.unwrap();
        assert!(rotator.step(start()).await.unwrap().published, "the caBundle is kept current");
    }

    #[tokio::test]
    async fn unavailable_api_server_keeps_the_certificate() {
        let store = MemoryStore::default();
        let mut rotator = rotator(&store);
        rotator.step(start()).await.unwrap();
        let before = presented(&rotator).clone();
        store.fail(true);
        rotator.step(start() + LIFE).await.unwrap_err();
        assert_eq!(presented(&rotator), &before);
        store.fail(false);
        assert!(rotator.step(start() + LIFE).await.unwrap().presented);
    }
}
