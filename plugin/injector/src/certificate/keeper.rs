//! One step of keeping: read, replace what is due, publish, present.

use std::time::{Duration, SystemTime};

use anyhow::Result;

use super::served::is_accepted;
use super::{Bundle, Found, Served, Store, make};

/// Keeps the certificate of one replica.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> anyhow::Result<()> {
/// use std::time::{Duration, SystemTime};
/// use shmesh_injector::certificate::{Keeper, Memory, Served};
/// let (store, served) = (Memory::default(), Served::default());
/// let names = vec!["injector.shmesh.svc".to_owned()];
/// let mut keeper = Keeper::new(store.clone(), served.clone(), names, Duration::from_secs(86_400));
/// let stepped = keeper.step(SystemTime::now()).await?;
/// assert!(stepped.made && stepped.presented && served.is_there());
/// assert!(store.published().contains("BEGIN CERTIFICATE"));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Keeper<S> {
    store: S,
    served: Served,
    names: Vec<String>,
    lifetime: Duration,
    presented: Option<Bundle>,
    /// Published at the last step, to be presented at the next: by then API servers know its authority.
    announced: Option<Bundle>,
}

/// What a step did.
///
/// ```
/// let nothing = shmesh_injector::certificate::Stepped::default();
/// assert!(!nothing.made && !nothing.published && !nothing.presented);
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Stepped {
    /// A certificate was made and stored.
    pub made: bool,
    /// The API server was told of other authorities.
    pub published: bool,
    /// Another certificate is presented.
    pub presented: bool,
    /// Until when the presented one is good, in seconds after 1970.
    pub until: u64,
}

/// How often two replicas may be in each other's way within one step.
const TRIES: usize = 4;

impl<S: Store> Keeper<S> {
    /// A keeper for a server of these names.
    #[must_use]
    pub fn new(store: S, served: Served, names: Vec<String>, lifetime: Duration) -> Self {
        Self { store, served, names, lifetime, presented: None, announced: None }
    }

    /// Reads what there is, replaces it if it is due or broken, tells the API server, and presents it.
    ///
    /// What is presented is only changed for what has been published at an earlier step, unless it is of no use any more.
    ///
    /// # Errors
    /// The store does not answer. What was presented stays.
    pub async fn step(&mut self, now: SystemTime) -> Result<Stepped> {
        let mut stepped = Stepped::default();
        let mut current = None;
        for _ in 0..TRIES {
            let found = self.store.read().await?;
            if let Some(bundle) = found.bundle.as_ref().filter(|bundle| self.is_good(bundle, now)) {
                current = Some(bundle.clone());
                break;
            }
            let bundle = make(&self.names, self.lifetime, now, found.bundle.as_ref())?;
            if self.store.write(&Found { bundle: None, ..found }, &bundle).await? {
                stepped.made = true;
                current = Some(bundle);
                break;
            }
        }
        let Some(current) = current else { anyhow::bail!("others write the certificate at the same time") };

        let is_needed = self.presented.as_ref().is_none_or(|presented| presented.terms.is_over(now));
        if is_needed {
            stepped.presented = self.present(&current)?;
        }
        stepped.published = self.store.publish(&current.authorities).await?;
        if !is_needed && !stepped.published && self.announced.as_ref() == Some(&current) {
            stepped.presented = self.present(&current)?;
        }
        self.announced = Some(current);
        stepped.until = self.presented.as_ref().map_or(0, |presented| presented.terms.until);
        Ok(stepped)
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
    use super::super::Memory;
    use super::*;

    const LIFE: Duration = Duration::from_secs(90 * 86_400);

    fn keeper(store: &Memory) -> Keeper<Memory> {
        Keeper::new(store.clone(), Served::default(), vec!["injector.shmesh.svc".into()], LIFE)
    }

    fn start() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
    }

    fn presented(keeper: &Keeper<Memory>) -> &Bundle {
        keeper.presented.as_ref().unwrap()
    }

    #[tokio::test]
    async fn two_replicas_agree() {
        let store = Memory::default();
        let (mut a, mut b) = (keeper(&store), keeper(&store));
        let (first, second) = tokio::join!(a.step(start()), b.step(start()));
        let (first, second) = (first.unwrap(), second.unwrap());
        assert_eq!(usize::from(first.made) + usize::from(second.made), 1);
        assert!(first.presented && second.presented);
        assert_eq!(presented(&a), presented(&b));
        assert_eq!(store.published(), presented(&a).authorities);
    }

    /// A store on which somebody else is faster, once.
    struct Raced(Memory, std::sync::atomic::AtomicBool, Bundle);

    impl Store for Raced {
        async fn read(&self) -> Result<Found> {
            self.0.read().await
        }

        async fn write(&self, found: &Found, bundle: &Bundle) -> Result<bool> {
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
    async fn who_is_slower_takes_what_is_there() {
        let names = vec!["injector.shmesh.svc".to_owned()];
        let theirs = make(&names, LIFE, start(), None).unwrap();
        let store = Raced(Memory::default(), false.into(), theirs.clone());
        let mut keeper = Keeper::new(store, Served::default(), names, LIFE);
        let stepped = keeper.step(start()).await.unwrap();
        assert!(!stepped.made && stepped.presented);
        assert_eq!(keeper.presented, Some(theirs));
    }

    #[tokio::test]
    async fn it_is_replaced_before_it_expires_and_both_authorities_are_known_meanwhile() {
        let store = Memory::default();
        let (mut a, mut b) = (keeper(&store), keeper(&store));
        a.step(start()).await.unwrap();
        b.step(start()).await.unwrap();
        let old = presented(&a).clone();
        let later = start() + LIFE / 2;
        assert_eq!(a.step(later).await.unwrap(), Stepped { until: old.terms.until, ..Stepped::default() });

        let due = start() + LIFE * 2 / 3;
        let stepped = a.step(due).await.unwrap();
        assert!(stepped.made && stepped.published && !stepped.presented);
        assert_eq!(presented(&a), &old, "not before API servers know the new authority");
        assert!(store.published().contains(super::super::first(&old.authorities)), "b presents the old one");
        assert!(a.step(due).await.unwrap().presented);
        let new = presented(&a).clone();
        assert_ne!(new, old);
        assert!(!new.terms.is_due(due));
        // The other one follows, and makes none.
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
    async fn what_somebody_spoils_is_repaired() {
        let store = Memory::default();
        let mut keeper = keeper(&store);
        keeper.step(start()).await.unwrap();
        let good = presented(&keeper).clone();
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
            assert!(keeper.step(start()).await.unwrap().made);
            assert!(keeper.step(start()).await.unwrap().presented);
            assert_eq!(presented(&keeper).terms.names, good.terms.names);
        }
        store.publish("").await.unwrap();
        assert!(keeper.step(start()).await.unwrap().published, "the caBundle is kept current");
    }

    #[tokio::test]
    async fn while_the_api_server_is_away_nothing_changes() {
        let store = Memory::default();
        let mut keeper = keeper(&store);
        keeper.step(start()).await.unwrap();
        let before = presented(&keeper).clone();
        store.fail(true);
        keeper.step(start() + LIFE).await.unwrap_err();
        assert_eq!(presented(&keeper), &before);
        store.fail(false);
        assert!(keeper.step(start() + LIFE).await.unwrap().presented);
    }
}
