//! The audit log: one JSON object per line, never a key.
//!
//! Written by a thread of its own: a disk or a reader that is slow must not hold up the hub. What cannot be written in time is
//! counted and said.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use anyhow::{Context, Result};

use crate::broker::Record;

/// Records that wait to be written.
const QUEUE_MAX: usize = 4096;

/// Where records go.
#[derive(Debug)]
pub(crate) struct AuditLog {
    /// `None`: into the log of the sidecar.
    writer: Option<(SyncSender<String>, JoinHandle<()>)>,
    lost: u64,
}

impl AuditLog {
    pub(crate) fn open(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else { return Ok(Self { writer: None, lost: 0 }) };
        let mut out: Box<dyn Write + Send> = if path == Path::new("-") {
            Box::new(std::io::stdout())
        } else {
            let file = OpenOptions::new().create(true).append(true).open(path);
            Box::new(file.with_context(|| format!("cannot open the audit log {}", path.display()))?)
        };
        let (queue, lines) = sync_channel::<String>(QUEUE_MAX);
        let thread = std::thread::Builder::new().name("audit".into()).spawn(move || {
            for line in lines {
                if let Err(error) = out.write_all(line.as_bytes()) {
                    tracing::error!(%error, "the audit log cannot be written");
                }
            }
        });
        Ok(Self { writer: Some((queue, thread.context("cannot start a thread")?)), lost: 0 })
    }

    pub(crate) fn write(&mut self, record: &Record) {
        let line = record.to_line() + "\n";
        let Some((queue, _)) = &self.writer else {
            tracing::info!(target: "audit", "{}", line.trim_end());
            return;
        };
        match queue.try_send(line) {
            Ok(()) if self.lost > 0 => {
                tracing::error!(lost = self.lost, "the audit log was too slow for these records");
                self.lost = 0;
            }
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => self.lost += 1,
        }
    }

    /// Waits until all is written.
    pub(crate) fn close(&mut self) {
        if let Some((queue, thread)) = self.writer.take() {
            drop(queue);
            let _ = thread.join();
        }
    }
}
