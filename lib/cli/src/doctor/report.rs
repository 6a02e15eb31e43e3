//! The report: aligned text for people, one JSON object for programs.

use std::io::{self, Write};
use std::path::Path;

use serde_json::json;
use shmesh_sys::terminal::{printable, wrap};

use super::{ExitVerdict, Finding, FindingStatus, verdict};

/// Maximum line width of sentences.
const WIDTH: usize = 110;
/// Indentation of sentences, which start below the value.
const INDENT: usize = 6;

/// The number of findings with this status.
fn count(findings: &[Finding], status: FindingStatus) -> usize {
    findings.iter().filter(|finding| finding.status == status).count()
}

/// Prints one JSON object: verdict, directory, counts, findings.
pub(super) fn json(dir: &Path, findings: &[Finding], out: &mut dyn Write) -> io::Result<()> {
    let verdict = match verdict(findings) {
        ExitVerdict::Works => "works",
        ExitVerdict::Fails => "fails",
    };
    let all = [FindingStatus::Ok, FindingStatus::Note, FindingStatus::Warn, FindingStatus::Fail];
    let counts: serde_json::Map<_, _> =
        all.into_iter().map(|status| (status.word().to_owned(), json!(count(findings, status)))).collect();
    let report = json!({
        "dir": dir.to_string_lossy(),
        "verdict": verdict,
        "counts": counts,
        "findings": findings,
    });
    serde_json::to_writer_pretty(&mut *out, &report)?;
    writeln!(out)
}

/// Prints a line per finding with its sentence below, and a summary at the end.
pub(super) fn text(dir: &Path, findings: &[Finding], out: &mut dyn Write) -> io::Result<()> {
    let wide = findings.iter().map(|finding| finding.id.len()).max().unwrap_or_default();
    for finding in findings {
        writeln!(out, "{:<5} {:<wide$}  {}", finding.status.word(), finding.id, printable(&finding.shown))?;
        for line in wrap(&printable(&finding.means), WIDTH - INDENT) {
            writeln!(out, "{:INDENT$}{line}", "")?;
        }
    }
    writeln!(out)?;
    writeln!(out, "{}", summary(dir, findings))
}

/// The summary in the last line.
fn summary(dir: &Path, findings: &[Finding]) -> String {
    let counts = format!(
        "{} ok, {} note, {} warn, {} fail",
        count(findings, FindingStatus::Ok),
        count(findings, FindingStatus::Note),
        count(findings, FindingStatus::Warn),
        count(findings, FindingStatus::Fail),
    );
    let fatal: Vec<_> = findings
        .iter()
        .filter(|finding| finding.status == FindingStatus::Fail)
        .map(|finding| finding.id)
        .collect();
    let dir = printable(&dir.to_string_lossy());
    if fatal.is_empty() {
        format!("{counts}: links work in {dir}.")
    } else {
        format!("{counts}: links cannot work in {dir} as requested; see {}.", fatal.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<Finding> {
        vec![
            Finding::new("dir.path", FindingStatus::Ok, json!({ "mode": 0o1777 }), "tmpfs\u{1b}[2J", "Fine."),
            Finding::new("syscall.memfd", FindingStatus::Fail, json!(false), "refused", "No memfd."),
        ]
    }

    #[test]
    fn text_is_aligned_and_safe() {
        let mut out = Vec::new();
        text(Path::new("/dev/shm"), &sample(), &mut out).unwrap();
        let out = String::from_utf8(out).unwrap();
        assert!(out.starts_with(
            "ok    dir.path       tmpfs\u{fffd}[2J\n      Fine.\nfail  syscall.memfd  refused\n"
        ));
        assert!(out.ends_with(
            "1 ok, 0 note, 0 warn, 1 fail: links cannot work in /dev/shm as requested; see syscall.memfd.\n"
        ));
    }

    #[test]
    fn json_has_the_four_keys() {
        let mut out = Vec::new();
        json(Path::new("/x"), &sample(), &mut out).unwrap();
        let report: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(report["verdict"], "fails");
        assert_eq!(report["counts"], json!({ "ok": 1, "note": 0, "warn": 0, "fail": 1 }));
        let first = report["findings"][0].as_object().unwrap();
        let keys: std::collections::BTreeSet<_> = first.keys().map(String::as_str).collect();
        assert_eq!(keys, ["id", "means", "status", "value"].into());
        assert_eq!(first["status"], "ok");
    }
}
