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
use crate::metrics::{Metrics, SuppressionCause};
use crate::shares::{Share, Shares};
use file::LogFile;
use limit::{AuditAccount, Limiter};

/// Maximum number of queued records: refusals, and others. Of each kind, one account may have at most as many as are
/// free, so that there is always room for another account.
const QUEUE_MAX: [usize; 2] = [1024, 3072];
/// Maximum number of queued reports of suppressed records: one for each account and kind.
const REPORTS_MAX: usize = 2 * (limit::ACCOUNTS_MAX + 1);
/// Time from the first suppressed record to the report.
const REPORT_AFTER: Duration = Duration::from_secs(10);

/// Time limit for writing the last records at shutdown.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// The audit log, shared by all tasks that write to it.
#[derive(Clone, Debug)]
pub(crate) struct AuditLog {
    start: Instant,
    metrics: Metrics,
    shared: Arc<Mutex<Shared>>,
}

/// A line to write, with its place in the queue.
type AuditLine = (String, Option<Share<AuditAccount>>);

/// The queue of lines, and a channel that closes when all are written.
type LineWriter = (SyncSender<AuditLine>, Receiver<()>);

#[derive(Debug)]
struct Shared {
    /// The thread that writes the file; `None` if records go to the sidecar's log.
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

    /// Converts a time of the records to the clock of the event loop.
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
                    self.metrics.audit_suppressed(SuppressionCause::Queue);
                }
            }
        } else {
            self.metrics.audit_suppressed(SuppressionCause::Rate);
        }
        if !std::mem::replace(&mut shared.will_report, true) {
            let log = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(REPORT_AFTER).await;
                log.report();
            });
        }
    }

    /// Writes how many records were suppressed, and of which accounts.
    fn report(&self) {
        let mut shared = self.shared();
        shared.will_report = false;
        for record in shared.limiter.reports(self.now()) {
            shared.put(&record, None, &self.metrics);
        }
    }

    /// Waits until all records are written, up to [`CLOSE_LIMIT`]: a reader that hangs must not delay the shutdown.
    pub(crate) fn close(&self) {
        self.report();
        if let Some((queue, written)) = self.shared().writer.take() {
            drop(queue);
            if written.recv_timeout(CLOSE_LIMIT) == Err(RecvTimeoutError::Timeout) {
                tracing::error!(
                    "the audit log was not written in time at shutdown; its last records are lost"
                );
            }
        }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        // A line is queued as a whole or not at all.
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
                tracing::error!(
                    lost = self.lost,
                    "audit records were dropped, because the audit log is written too slowly"
                );
                self.lost = 0;
            }
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.lost += 1;
                metrics.audit_suppressed(SuppressionCause::Writer);
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
    let (queue, lines) = sync_channel::<AuditLine>(QUEUE_MAX.iter().sum::<usize>() + REPORTS_MAX);
    let (writing, written) = channel::<()>();
    let thread = std::thread::Builder::new().name("audit".into()).spawn(move || {
        let _writing = writing;
        for (line, _place) in lines {
            if let Err(error) = out.write_all(line.as_bytes()) {
                tracing::error!(%error, "cannot write the audit log");
            }
        }
    });
    thread.context("cannot start a thread")?;
    Ok((queue, written))
}
