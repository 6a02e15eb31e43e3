//! The links of this sidecar. A separate task keeps each link and retries until it succeeds, so a link that cannot be
//! kept, or is damaged later, does not affect the others.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use prometheus_client::metrics::counter::Counter;
use shmesh::config::LinkConfig;
use shmesh::inspect::View;
use shmesh::{LinkHost, LinkOptions, MAX_SEATS, Participant, RecoveryStats, SeatIndex, SeatWord};
use shmesh_daemon::descriptor::watched;
use shmesh_daemon::readiness::{Latch, Readiness};
use shmesh_proto::broker::Attached;
use shmesh_sys::file::{FileAtPath, set_nonblocking};
use shmesh_sys::{sigbus, socket};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

/// Pause between two attempts to keep a link. It doubles each time, until the link was kept for `RETRY_MAX`.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(10);
/// How long the start of the pod waits for links that cannot be kept.
const START_LIMIT: Duration = Duration::from_secs(10);
/// Maximum time that one link may delay the others from creating their memory. Links are created one after the other,
/// because each checks how much memory is left.
const TURN_LIMIT: Duration = Duration::from_secs(2);
/// Interval for checking the files of a link.
const LOOK_PERIOD: Duration = Duration::from_secs(10);

/// A link, by its index among the links of this sidecar.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) struct LinkIndex(pub(crate) usize);

/// One link that is kept.
#[derive(Debug)]
pub(crate) struct KeptLink {
    pub(crate) host: LinkHost,
    /// A view of the link for the metrics.
    pub(crate) view: View,
    /// The answer to `Attach`, and its descriptors.
    pub(crate) attached: Attached,
    pub(crate) fds: Vec<Arc<OwnedFd>>,
    files: Vec<FileAtPath>,
}

impl KeptLink {
    /// The damage to the link that was found so far.
    fn damage(&self) -> Option<String> {
        Some(self.view.damage()?.to_string())
    }

    /// As `damage`, and also checks the files: a truncated segment is detected before its missing part is accessed.
    fn look(&self) -> Option<String> {
        let changed = || self.files.iter().find(|file| !file.is_unchanged());
        self.damage()
            .or_else(|| Some(format!("{} was removed, replaced or truncated", changed()?.path().display())))
    }
}

/// All links, kept or not.
#[derive(Debug)]
pub(crate) struct Links {
    all: Vec<LinkEntry>,
    /// The permit for creating memory.
    turn: Semaphore,
    options: LinkOptions,
    has_peer_pidfds: bool,
}

#[derive(Debug)]
struct LinkEntry {
    config: LinkConfig,
    kept: Mutex<Option<Arc<KeptLink>>>,
    latch: Latch,
    failures: Counter,
    /// Notified when a call has found damage.
    is_damaged: Notify,
    /// Seats of participants that died while the link was not kept.
    unrecovered: Mutex<Vec<(SeatIndex, SeatWord)>>,
}

impl LinkEntry {
    fn kept(&self) -> MutexGuard<'_, Option<Arc<KeptLink>>> {
        // The reference is replaced as a whole.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unrecovered(&self) -> MutexGuard<'_, Vec<(SeatIndex, SeatWord)>> {
        // Each entry is complete before the lock is released.
        self.unrecovered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Links {
    pub(crate) fn new(
        dir: &Path,
        configs: &[LinkConfig],
        has_peer_pidfds: bool,
        readiness: &Readiness,
    ) -> Self {
        let slot = |config: &LinkConfig| LinkEntry {
            config: config.clone(),
            kept: Mutex::default(),
            latch: readiness.latch(format!("link {}", config.name)),
            failures: Counter::default(),
            is_damaged: Notify::new(),
            unrecovered: Mutex::default(),
        };
        Self {
            all: configs.iter().map(slot).collect(),
            turn: Semaphore::new(1),
            options: LinkOptions::new().dir(dir).guard_truncation(true),
            has_peer_pidfds,
        }
    }

    pub(crate) fn indices(&self) -> impl Iterator<Item = LinkIndex> + use<> {
        (0..self.all.len()).map(LinkIndex)
    }

    pub(crate) fn name(&self, link: LinkIndex) -> &str {
        self.all[link.0].config.name.as_str()
    }

    /// The link, while it is kept and undamaged.
    pub(crate) fn kept(&self, link: LinkIndex) -> Option<Arc<KeptLink>> {
        let slot = &self.all[link.0];
        let kept = slot.kept().clone()?;
        if kept.damage().is_some() {
            slot.is_damaged.notify_one();
            return None;
        }
        Some(kept)
    }

    /// All links whose files are unchanged.
    pub(crate) fn all_whole(&self) -> Vec<(LinkIndex, Arc<KeptLink>)> {
        let whole = self.all_kept().filter(|(link, kept)| {
            let is_whole = kept.look().is_none();
            if !is_whole {
                self.all[link.0].is_damaged.notify_one();
            }
            is_whole
        });
        whole.collect()
    }

    /// All links that are kept and undamaged.
    pub(crate) fn all_kept(&self) -> impl Iterator<Item = (LinkIndex, Arc<KeptLink>)> {
        self.indices().filter_map(|link| Some((link, self.kept(link)?)))
    }

    /// The participants of a link; none while it is not kept.
    pub(crate) fn participants(&self, link: LinkIndex) -> Vec<Participant> {
        self.kept(link).map_or_else(Vec::new, |kept| kept.host.participants().collect())
    }

    /// Recovers a participant that has died; later, if the link is not kept at the moment.
    pub(crate) fn recover_participant(
        &self,
        link: LinkIndex,
        seat: SeatIndex,
        word: SeatWord,
    ) -> RecoveryStats {
        if let Some(kept) = self.kept(link) {
            return kept.host.recover_participant(seat, word);
        }
        let mut unrecovered = self.all[link.0].unrecovered();
        // A link has this many seats at a time; further entries are older ones.
        if unrecovered.len() < MAX_SEATS {
            unrecovered.push((seat, word));
        }
        RecoveryStats::default()
    }

    /// How often a link could not be kept, or was damaged.
    pub(crate) fn failures(&self, link: LinkIndex) -> u64 {
        self.all[link.0].failures.get()
    }

    /// Gives up links that turned out to be damaged when they were accessed.
    pub(crate) fn look_for_damage(&self) {
        if sigbus::any_damage() {
            self.all_kept().for_each(drop);
        }
    }

    /// Gives up all links and removes their sockets.
    pub(crate) fn release(&self) {
        self.all.iter().for_each(|slot| drop(slot.kept().take()));
    }

    /// Keeps one link until this future is dropped. While it is kept, `serve` accepts participants. Before a new link
    /// of the same name is kept, `forget` forgets the participants of the last one.
    pub(crate) async fn keep<S: Future, F: Future>(
        &self,
        link: LinkIndex,
        serve: impl Fn(AsyncFd<OwnedFd>) -> S,
        forget: impl Fn() -> F,
    ) {
        let slot = &self.all[link.0];
        let (start, mut pause, mut epoch) = (Instant::now(), RETRY_MIN, None);
        loop {
            let reason = match self.attempt(slot).await {
                Ok((kept, listener)) => {
                    if epoch.replace(kept.view.epoch()).is_some_and(|last| last != kept.view.epoch()) {
                        forget().await;
                        slot.unrecovered().clear();
                    }
                    let kept = Arc::new(kept);
                    *slot.kept() = Some(Arc::clone(&kept));
                    // After the link is kept: a later death is recovered at once.
                    for (seat, word) in std::mem::take(&mut *slot.unrecovered()) {
                        kept.host.recover_participant(seat, word);
                    }
                    drop(kept);
                    slot.latch.open();
                    let kept_at = Instant::now();
                    let reason = tokio::select! {
                        _ = serve(listener) => return,
                        reason = self.damaged(link) => reason,
                    };
                    // A link that is damaged repeatedly keeps its backoff.
                    if kept_at.elapsed() >= RETRY_MAX {
                        pause = RETRY_MIN;
                    }
                    reason
                }
                Err(error) => format!("{error:#}"),
            };
            let failures = slot.failures.inc() + 1;
            // The start ends with an attempt at its limit.
            let left = START_LIMIT.saturating_sub(start.elapsed());
            let wait = if left.is_zero() { pause } else { pause.min(left) };
            let retry_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
            tracing::error!(link = %slot.config.name, reason, failures, retry_ms, "link not kept");
            let name = format!("link {}: ", slot.config.name);
            let short = reason.strip_prefix(&name).unwrap_or(&reason);
            if left.is_zero() {
                slot.latch.fail(short);
            } else {
                slot.latch.delay(short);
            }
            tokio::time::sleep(wait).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    /// Waits until a link is damaged, and gives it up. Meanwhile recovers dead participants.
    async fn damaged(&self, link: LinkIndex) -> String {
        let slot = &self.all[link.0];
        loop {
            let damage = slot.kept().as_ref().and_then(|kept| kept.look());
            if let Some(reason) = damage {
                slot.kept().take();
                return reason;
            }
            // Recovers processes that died before they had connected.
            let recovered = slot.kept().as_ref().map(|kept| kept.host.recover()).unwrap_or_default();
            if recovered.participants > 0 {
                tracing::info!(
                    link = self.name(link),
                    participants = recovered.participants,
                    messages = recovered.messages,
                    "dead participants recovered"
                );
            }
            // Also without scrapes of the metrics.
            let _ = tokio::time::timeout(LOOK_PERIOD, slot.is_damaged.notified()).await;
        }
    }

    /// Attempts to keep a link in a separate thread, so that probes are answered and other links get their turn.
    async fn attempt(&self, slot: &LinkEntry) -> Result<(KeptLink, AsyncFd<OwnedFd>)> {
        let turn = self.turn.acquire().await;
        let (options, config) = (self.options.clone(), slot.config.clone());
        let mut keeping = tokio::task::spawn_blocking(move || keep(&options, &config));
        let kept = match tokio::time::timeout(TURN_LIMIT, &mut keeping).await {
            Ok(kept) => kept,
            Err(_) => {
                drop(turn);
                keeping.await
            }
        };
        let kept = kept.context("the thread that keeps the link has panicked")??;
        let listener = listener(&kept, self.has_peer_pidfds).and_then(watched);
        let listener = listener.context("cannot wait for participants")?;
        Ok((kept, listener))
    }
}

/// Creates or adopts one link.
fn keep(options: &LinkOptions, link: &LinkConfig) -> Result<KeptLink> {
    let host = options.keep(link)?;
    let participants = host.participants().count();
    // Participants that died while the link was not kept.
    let recovered = host.recover();
    tracing::info!(
        link = %link.name,
        bytes = host.segment_bytes(),
        backing = ?link.backing,
        participants,
        reaped = recovered.participants,
        "link kept"
    );
    let offer = host.offer();
    let attached = Attached { layout: offer.layout.into(), segments: offer.segments };
    let fds = offer.fds.iter().map(|fd| fd.try_clone_to_owned().map(Arc::new)).collect::<io::Result<_>>();
    let fds = fds.with_context(|| format!("link {}: cannot copy its descriptors", link.name))?;
    let view = host.view();
    // A link whose memory has no names exists here alone, and is not given up because of a file.
    let files = host.files().iter().filter_map(|path| FileAtPath::at(path).ok()).collect();
    Ok(KeptLink { view, host, attached, fds, files })
}

/// The listener of a link, for the event loop.
fn listener(kept: &KeptLink, by_pidfd: bool) -> io::Result<OwnedFd> {
    let listener = kept.host.listener().try_clone_to_owned()?;
    if !by_pidfd {
        // As on a kernel without pidfds of senders.
        socket::ask_for_senders(&listener, false)?;
    }
    set_nonblocking(&listener)?;
    Ok(listener)
}
