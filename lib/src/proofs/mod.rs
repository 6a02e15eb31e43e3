//! Proofs: every interleaving of small cases (loom), undefined behaviour (Miri), random sequences (proptest).

#[cfg(not(loom))]
mod names;
#[cfg(not(loom))]
mod oracle;
mod stage;
#[cfg(not(loom))]
mod threads;

#[cfg(loom)]
mod models;
#[cfg(loom)]
pub(crate) mod weaken;
