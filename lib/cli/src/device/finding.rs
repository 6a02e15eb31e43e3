//! The results of all checks, as a table and as JSON.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Value;

/// The result of one check.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum CheckStatus {
    /// The check has passed.
    Ok,
    /// The check has failed.
    Fail,
    /// It works with a restriction, such as a limit, that is worth knowing.
    Note,
    /// The check was not run.
    Skip,
}

/// The result of one part of a step.
#[derive(Clone, Debug, Serialize)]
pub(super) struct CheckResult {
    /// The step of the plan, and its part.
    pub(super) id: String,
    pub(super) status: CheckStatus,
    /// For people: the observation in one line.
    pub(super) shown: String,
    /// For programs: the observation as numbers, with units in the names.
    pub(super) value: Value,
}

/// The overall result of all checks.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    Works,
    Fails,
    NoDevice,
}

/// The report of all checks.
#[derive(Clone, Debug, Serialize)]
pub(super) struct CheckReport {
    pub(super) verdict: Verdict,
    /// The name of the device, as the driver reports it.
    pub(super) device: String,
    pub(super) findings: Vec<CheckResult>,
}

impl CheckReport {
    pub(super) fn of(device: String, findings: Vec<CheckResult>) -> Self {
        let fails = findings.iter().any(|finding| finding.status == CheckStatus::Fail);
        Self { verdict: if fails { Verdict::Fails } else { Verdict::Works }, device, findings }
    }
}

/// Writes one result for people, and flushes: they see which step takes long, or does not end.
pub(super) fn line(result: &CheckResult, out: &mut dyn Write) -> io::Result<()> {
    let word = match result.status {
        CheckStatus::Ok => "ok",
        CheckStatus::Fail => "FAIL",
        CheckStatus::Note => "note",
        CheckStatus::Skip => "skip",
    };
    writeln!(out, "{:<35}  {word:<4}  {}", result.id, result.shown)?;
    out.flush()
}

pub(super) fn verdict(report: &CheckReport, out: &mut dyn Write) -> io::Result<()> {
    let end = match report.verdict {
        Verdict::Works => format!("{}: memory can be shared between processes", report.device),
        Verdict::Fails => format!(
            "{}: memory cannot be shared between processes as needed; the failed steps above name the reasons",
            report.device
        ),
        Verdict::NoDevice => {
            "no device was found, so nothing was checked; links in host memory work without one".to_owned()
        }
    };
    writeln!(out, "\n{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_is_enough() {
        let finding = |status| CheckResult {
            id: "P1 2 MiB".to_owned(),
            status,
            shown: "it is so".to_owned(),
            value: Value::Null,
        };
        let of = |statuses: &[CheckStatus]| {
            CheckReport::of("a GPU".to_owned(), statuses.iter().map(|status| finding(*status)).collect())
                .verdict
        };
        assert_eq!(of(&[CheckStatus::Ok, CheckStatus::Note, CheckStatus::Skip]), Verdict::Works);
        assert_eq!(of(&[CheckStatus::Ok, CheckStatus::Fail]), Verdict::Fails);
        let mut out = Vec::new();
        let report = CheckReport::of("a GPU".to_owned(), vec![finding(CheckStatus::Fail)]);
        line(&finding(CheckStatus::Fail), &mut out).unwrap();
        verdict(&report, &mut out).unwrap();
        let out = String::from_utf8(out).unwrap();
        assert!(
            out.starts_with("P1 2 MiB")
                && out.contains("  FAIL  it is so\n")
                && out.ends_with("the failed steps above name the reasons\n"),
            "{out}"
        );
    }
}
