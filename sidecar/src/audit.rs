//! The audit log: one JSON object per line, never a key.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

use crate::broker::Record;

/// Where records go.
#[derive(Debug)]
pub(crate) enum AuditLog {
    /// Into the log of the sidecar.
    Log,
    /// To standard output.
    Output,
    /// To a file.
    File(File),
}

impl AuditLog {
    pub(crate) fn open(path: Option<&Path>) -> Result<Self> {
        match path {
            None => Ok(Self::Log),
            Some(path) if path == Path::new("-") => Ok(Self::Output),
            Some(path) => OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .map(Self::File)
                .with_context(|| format!("cannot open the audit log {}", path.display())),
        }
    }

    pub(crate) fn write(&mut self, record: &Record) {
        let line = record.to_line() + "\n";
        let written = match self {
            Self::Log => {
                tracing::info!(target: "audit", "{}", line.trim_end());
                Ok(())
            }
            Self::Output => std::io::stdout().write_all(line.as_bytes()),
            Self::File(file) => file.write_all(line.as_bytes()),
        };
        if let Err(error) = written {
            tracing::error!(%error, "the audit log cannot be written");
        }
    }
}
