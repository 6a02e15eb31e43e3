//! The audit log: one JSON object per line, never a key.
//!
//! | file | concept |
//! |---|---|
//! | `limit.rs` | rate limit per account |
//! | `file.rs` | a rotated file of bounded size |
//!
//! A thread of its own writes it, so that a slow disk or reader does not delay the actor. Records that cannot be written in time, or
//! exceed the rate limit of their account, are counted and reported.

mod file;
mod limit;

use std::io::Write;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use tokio::time::Instant;

use crate::broker::{Millis, Outcome, Record};
use crate::metrics::{Cause, Metrics};
use crate::shares::{Share, Shares};
use file::LogFile;
use limit::{AuditAccount, Limiter};

/// Records that wait to be written: refusals, and the rest. Of each kind one account has at most as many as are free, so that
/// there is always room for another's.
const QUEUE_MAX: [usize; 2] = [1024, 3072];
/// Reports of what was left out: at most one for each account and kind at a time.
const REPORTS_MAX: usize = 2 * (limit::ACCOUNTS_MAX + 1);
/// How long after the first record that was left out their number is written.
const REPORT_AFTER: Duration = Duration::from_secs(10);

/// How long the last records may take to be written.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// The audit log, shared by all tasks that write to it.
#[derive(Clone, Debug)]
pub(crate) struct AuditLog {
    start: Instant,
    metrics: Metrics,
    shared: Arc<Mutex<Shared>>,
}

/// A line to write, and its place in the queue.
type Line = (String, Option<Share<AuditAccount>>);

/// Lines to write; and what says that all are written, by ending.
type LineWriter = (SyncSender<Line>, Receiver<()>);

#[derive(Debug)]
struct Shared {
    /// `None`: into the log of the sidecar.
    writer: Option<LineWriter>,
    limiter: Limiter,
    queued: [Arc<Mutex<Shares<AuditAccount>>>; 2],
    /// Whether a task will report the suppressed records.
    will_report: bool,
    lost: u64,
}

impl AuditLog {
    pub(crate) fn open(path: Option<&Path>, metrics: Metrics) -> Result<Self> {
        let writer = path.map(writer).transpose()?;
        let queued = QUEUE_MAX.map(|max| Arc::new(Mutex::new(Shares::new(max))));
        let shared = Shared { writer, limiter: Limiter::default(), queued, will_report: false, lost: 0 };
        Ok(Self { start: Instant::now(), metrics, shared: Arc::new(Mutex::new(shared)) })
    }

    /// The clock of all records.
    pub(crate) fn now(&self) -> Millis {
        Millis(u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// When that time is, on the clock of the event loop.
    pub(crate) fn instant(&self, at: Millis) -> Instant {
        self.start + Duration::from_millis(at.0)
    }

    pub(crate) fn write(&self, record: &Record) {
        let mut shared = self.shared();
        if shared.limiter.admits(record) {
            let queued = &shared.queued[usize::from(record.outcome != Outcome::Refused)];
            match Share::take(queued, AuditAccount::of(record), 1, 1) {
                Ok(place) => return shared.put(record, Some(place), &self.metrics),
                Err(_) => {
                    shared.limiter.leave_out(record);
                    self.metrics.audit_suppressed(Cause::Queue);
                }
            }
        } else {
            self.metrics.audit_suppressed(Cause::Rate);
        }
        if !std::mem::replace(&mut shared.will_report, true) {
            let log = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(REPORT_AFTER).await;
                log.report();
            });
        }
    }

    /// Writes how many records were left out, and whose.
    fn report(&self) {
        let mut shared = self.shared();
        shared.will_report = false;
        for record in shared.limiter.reports(self.now()) {
            shared.put(&record, None, &self.metrics);
        }
    }

    /// Waits until all is written, unless that takes too long: a reader that is stuck must not hold up the end.
    pub(crate) fn close(&self) {
        self.report();
        if let Some((queue, written)) = self.shared().writer.take() {
            drop(queue);
            if written.recv_timeout(CLOSE_LIMIT) == Err(RecvTimeoutError::Timeout) {
                tracing::error!("the audit log is too slow: its last records are lost");
            }
        }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        // A line is put into the queue whole, or not at all.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    fn put(&mut self, record: &Record, place: Option<Share<AuditAccount>>, metrics: &Metrics) {
        let line = record.to_line();
        let Some((queue, _)) = &self.writer else {
            tracing::info!(target: "audit", "{line}");
            return;
        };
        // The record's own clock starts with the sidecar.
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let line = format!("{{\"time_ms\":{time},{}\n", line.trim_start_matches('{'));
        match queue.try_send((line, place)) {
            Ok(()) if self.lost > 0 => {
                tracing::error!(lost = self.lost, "the audit log was too slow for these records");
                self.lost = 0;
            }
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.lost += 1;
                metrics.audit_suppressed(Cause::Writer);
            }
        }
    }
}

fn writer(path: &Path) -> Result<LineWriter> {
    let mut out: Box<dyn Write + Send> = if path == Path::new("-") {
        Box::new(std::io::stdout())
    } else {
        let file = LogFile::open(path);
        Box::new(file.with_context(|| format!("cannot open the audit log {}", path.display()))?)
    };
    let (queue, lines) = sync_channel::<Line>(QUEUE_MAX.iter().sum::<usize>() + REPORTS_MAX);
    let (writing, written) = channel::<()>();
    let thread = std::thread::Builder::new().name("audit".into()).spawn(move || {
        let _writing = writing;
        for (line, _place) in lines {
            if let Err(error) = out.write_all(line.as_bytes()) {
                tracing::error!(%error, "the audit log cannot be written");
            }
        }
    });
    thread.context("cannot start a thread")?;
    Ok((queue, written))
}
