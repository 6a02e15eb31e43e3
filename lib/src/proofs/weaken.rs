//! Mutation tests without a build for each: under loom, one place in the code uses a weaker ordering than it asks for.
//!
//! `SHMESH_WEAKEN=ring/spsc.rs:87` makes every ordering on that line `Relaxed` (and removes a fence), `...:87:acquire`
//! removes only the acquiring half, `...:87:release` only the releasing one. `SHMESH_SITES=1` prints each place that asks
//! for more than `Relaxed` when it is first reached.

use std::collections::BTreeSet;
use std::panic::Location;
use std::sync::atomic::Ordering;
use std::sync::{LazyLock, Mutex};

struct Mutation {
    file: String,
    line: u32,
    half: Option<String>,
}

static MUTATION: LazyLock<Option<Mutation>> = LazyLock::new(|| {
    let text = std::env::var("SHMESH_WEAKEN").ok()?;
    let mut parts = text.split(':');
    let file = format!("src/{}", parts.next()?);
    let line = parts.next()?.parse().expect("FILE:LINE or FILE:LINE:HALF");
    Some(Mutation { file, line, half: parts.next().map(Into::into) })
});
static SITES: LazyLock<Option<Mutex<BTreeSet<(&'static str, u32)>>>> =
    LazyLock::new(|| std::env::var_os("SHMESH_SITES").map(|_| Mutex::default()));

/// Returns the ordering to use where the caller asks for `order`.
#[track_caller]
pub(crate) fn weakened(order: Ordering) -> Ordering {
    if order == Ordering::Relaxed || (MUTATION.is_none() && SITES.is_none()) {
        return order;
    }
    let at = Location::caller();
    if let Some(sites) = &*SITES
        && sites.lock().expect("not poisoned").insert((at.file(), at.line()))
    {
        eprintln!("site {}:{} {order:?}", at.file(), at.line());
    }
    match &*MUTATION {
        Some(m) if m.line == at.line() && at.file().ends_with(&m.file) => match (m.half.as_deref(), order) {
            (Some("acquire"), Ordering::AcqRel | Ordering::SeqCst) => Ordering::Release,
            (Some("release"), Ordering::AcqRel | Ordering::SeqCst) => Ordering::Acquire,
            (Some("acquire"), Ordering::Release) | (Some("release"), Ordering::Acquire) => order,
            _ => Ordering::Relaxed,
        },
        _ => order,
    }
}
