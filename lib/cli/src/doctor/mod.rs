//! `shmesh doctor`: the limits and features of this machine or container, and their consequences for links.
//!
//! Each family of probes is a file. It reads below a [`Source`] (so that a test can give it a tree of its own), parses
//! with pure functions and returns [`Finding`]s. A fact that cannot be determined is "unknown" with the reason, never
//! an error.

mod cgroup;
mod cpu;
mod dir;
mod identity;
mod isolation;
mod limits;
mod need;
mod pages;
mod report;
mod shm;
mod source;
mod syscalls;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::Serialize;
use serde_json::{Value, json};
use shmesh_sys::quantity::Bytes;
use source::{Source, UnknownFact};

use crate::args::Output;

/// A way to open a pidfd by number, for tests that refuse it.
pub(crate) type PidfdOpen = fn(u32) -> std::io::Result<OwnedFd>;

/// The options of `shmesh doctor`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// IPC directory to check
    #[arg(long, value_name = "DIR", env = "SHMESH_DIR", default_value = "/dev/shm")]
    pub(crate) dir: PathBuf,
    /// Output format: text or JSON
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Output::Text)]
    pub(crate) output: Output,
    /// Check whether links of this total size fit, such as 512Mi
    #[arg(long, value_name = "N")]
    pub(crate) need_bytes: Option<Bytes>,
    /// Opens a pidfd, to try `pidfd_open`; without it the answer is inferred.
    #[arg(skip)]
    pub(crate) pidfd_open: Option<PidfdOpen>,
}

/// The overall result, for the exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExitVerdict {
    /// Links work here: exit status 0.
    Works,
    /// Links cannot work here, or not of the requested size: exit status 1.
    Fails,
}

impl From<ExitVerdict> for ExitCode {
    fn from(verdict: ExitVerdict) -> Self {
        match verdict {
            ExitVerdict::Works => Self::SUCCESS,
            ExitVerdict::Fails => Self::from(1),
        }
    }
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum FindingStatus {
    /// Links work without a disadvantage.
    Ok,
    /// Worth knowing, without a disadvantage.
    Note,
    /// Links work with a disadvantage, or may fail later.
    Warn,
    /// Links cannot work here.
    Fail,
}

impl FindingStatus {
    /// The word in the report.
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// A fact, and its consequence for links.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    /// A stable name of the form `family.thing`.
    id: &'static str,
    /// The fact for programs; `{"unknown": reason}` if it could not be determined.
    value: Value,
    /// The severity of the fact.
    status: FindingStatus,
    /// The consequence for links, and the remedy.
    means: String,
    /// The fact for people.
    #[serde(skip)]
    shown: String,
}

impl Finding {
    /// A fact that was determined.
    fn new(
        id: &'static str,
        status: FindingStatus,
        value: Value,
        shown: impl Into<String>,
        means: impl Into<String>,
    ) -> Self {
        Self { id, value, status, means: means.into(), shown: shown.into() }
    }

    /// A fact that could not be determined; `means` says what to do without it.
    fn unknown(id: &'static str, why: &UnknownFact, means: impl Into<String>) -> Self {
        Self::new(id, FindingStatus::Note, json!({ "unknown": why.0 }), format!("unknown ({why})"), means)
    }
}

/// Runs all probes, prints the findings to `out` and returns whether links work here.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<ExitVerdict> {
    let findings =
        collect(&Source::new("/"), &args.dir, args.need_bytes.map(|Bytes(bytes)| bytes), args.pidfd_open);
    match args.output {
        Output::Text => report::text(&args.dir, &findings, out)?,
        Output::Json => report::json(&args.dir, &findings, out)?,
    }
    Ok(verdict(&findings))
}

/// Whether links work: unless a finding says that they cannot.
fn verdict(findings: &[Finding]) -> ExitVerdict {
    match findings.iter().any(|finding| finding.status == FindingStatus::Fail) {
        true => ExitVerdict::Fails,
        false => ExitVerdict::Works,
    }
}

/// Runs every probe. Facts of the kernel are read below `source`; the directory and the system calls are tried out.
fn collect(source: &Source, dir: &Path, need: Option<u64>, pidfd_open: Option<PidfdOpen>) -> Vec<Finding> {
    let facts = dir::Facts::gather(source, dir);
    let memory = cgroup::memory(source);
    let node = cgroup::node_memory(source);
    let status = source.text("/proc/self/status");
    let cores = cpu::Cores::gather(source, &status);

    let mut findings = shm::findings(&facts);
    findings.push(cgroup::finding(&memory));
    findings.push(cgroup::node_finding(&node));
    if let Some(need) = need {
        let free = facts.space.as_ref().ok().and_then(|space| space.free);
        let room = memory.as_ref().ok().and_then(|memory| memory.room());
        let available = node.as_ref().ok().map(|node| node.available);
        findings.push(need::finding(&need::Capacity { need, free, room, available }));
    }
    findings.extend(limits::findings(source, &status));
    findings.extend(pages::findings(source, facts.mount()));
    findings.extend(isolation::findings(source, &status));
    findings.extend(syscalls::findings(source, &status, &facts.scratch, pidfd_open));
    findings.extend(identity::findings(source, &status));
    findings.extend(cpu::findings(source, &cores));
    findings
}

#[cfg(test)]
mod tests;
