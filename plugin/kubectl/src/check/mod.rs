//! `kubectl shmesh check`: questions about an installation, each with what was seen and a remedy.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | questions, answers, the report |
//! | `state.rs` | the objects of the cluster that questions are asked about |
//! | `installation.rs` | questions about the cluster, the plugin and its nodes |
//! | `claims.rs` | questions about the DRA driver |
//! | `injector.rs` | questions about the injector |
//! | `workloads.rs` | questions about pods with links |
//! | `certificate.rs` | validity of certificates |
//!
//! A question is a pure function of the objects.

mod certificate;
mod claims;
mod injector;
mod installation;
mod state;
mod workloads;

#[cfg(test)]
mod tests;

use std::io::Write;

use serde_json::{Value, json};

use crate::kubectl::Kubectl;
use crate::output::{Color, Format, Style};
use state::ClusterState;

/// Options of `kubectl shmesh check`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct InstallationArgs {
    #[command(flatten)]
    kubectl: Kubectl,
    /// Namespace of the installation; it is found by its labels
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
    /// Output format: text or JSON
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
    output: Format,
    /// Print the questions without asking them
    #[arg(long)]
    list: bool,
}

/// How a question was answered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Outcome {
    /// Nothing has to be done.
    Ok,
    /// The question does not apply to this installation.
    Skipped,
    /// It works, or cannot be seen, and should be looked at.
    Warning,
    /// It does not work.
    Failure,
}

/// The answer to a question.
#[derive(Clone, Debug, Eq, PartialEq)]
struct CheckAnswer {
    outcome: Outcome,
    /// The state that was found.
    seen: String,
    /// The remedy for a warning or a failure.
    remedy: String,
}

/// `Err` ends a question early, for example when an object is missing.
type QuestionResult = Result<CheckAnswer, CheckAnswer>;

/// A question in the list of its group: its name, its text, and its answer.
type QuestionEntry = (&'static str, &'static str, fn(&ClusterState) -> QuestionResult);

/// A question about an installation.
struct CheckQuestion {
    id: &'static str,
    group: &'static str,
    text: &'static str,
    ask: fn(&ClusterState) -> QuestionResult,
}

fn ok(seen: impl Into<String>) -> CheckAnswer {
    CheckAnswer { outcome: Outcome::Ok, seen: seen.into(), remedy: String::new() }
}

fn skipped(seen: impl Into<String>) -> CheckAnswer {
    CheckAnswer { outcome: Outcome::Skipped, seen: seen.into(), remedy: String::new() }
}

fn warning(seen: impl Into<String>, remedy: impl Into<String>) -> CheckAnswer {
    CheckAnswer { outcome: Outcome::Warning, seen: seen.into(), remedy: remedy.into() }
}

fn failure(seen: impl Into<String>, remedy: impl Into<String>) -> CheckAnswer {
    CheckAnswer { outcome: Outcome::Failure, seen: seen.into(), remedy: remedy.into() }
}

/// The first names of a list, and how many more there are.
fn some(names: &[String]) -> String {
    let first = names.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > 3 { format!("{first} and {} more", names.len() - 3) } else { first }
}

/// `1 node`, `2 nodes`.
fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// All questions in the order of the report.
fn questions() -> Vec<CheckQuestion> {
    let groups: [(&str, &[QuestionEntry]); 5] = [
        ("cluster", &installation::CLUSTER),
        ("plugin", &installation::PLUGIN),
        ("claims", &claims::CLAIMS),
        ("injector", &injector::INJECTOR),
        ("pods", &workloads::PODS),
    ];
    let of_group = |(group, entries): (&'static str, &'static [QuestionEntry])| {
        entries.iter().map(move |&(id, text, ask)| CheckQuestion { id, group, text, ask })
    };
    groups.into_iter().flat_map(of_group).collect()
}

impl CheckQuestion {
    fn answer(&self, state: &ClusterState) -> CheckAnswer {
        (self.ask)(state).unwrap_or_else(|answer| answer)
    }
}

/// Asks all questions, and prints the answers. Returns whether there are no failures.
pub(crate) fn check(args: &InstallationArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let questions = questions();
    if args.list {
        for CheckQuestion { id, group, text, .. } in questions {
            writeln!(out, "{group:9} {id:22} {text}")?;
        }
        return Ok(true);
    }
    let state = ClusterState::fetch(&args.kubectl, args.namespace.as_deref());
    let answers: Vec<_> = questions.into_iter().map(|question| (question.answer(&state), question)).collect();
    match args.output {
        Format::Text => print_text(&answers, Style::of_stdout(), out)?,
        Format::Json => {
            let one = |(answer, question): &(CheckAnswer, CheckQuestion)| {
                json!({
                    "id": question.id,
                    "group": question.group,
                    "question": question.text,
                    "outcome": answer.outcome.name(),
                    "seen": answer.seen,
                    "remedy": Some(&answer.remedy).filter(|remedy| !remedy.is_empty()),
                })
            };
            serde_json::to_writer_pretty(&mut *out, &answers.iter().map(one).collect::<Value>())?;
            writeln!(out)?;
        }
    }
    Ok(answers.iter().all(|(answer, _)| answer.outcome != Outcome::Failure))
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Skipped => "skipped",
            Self::Warning => "warning",
            Self::Failure => "failure",
        }
    }

    fn color(self) -> Color {
        match self {
            Self::Ok => Color::Green,
            Self::Skipped => Color::Grey,
            Self::Warning => Color::Yellow,
            Self::Failure => Color::Red,
        }
    }
}

fn print_text(
    answers: &[(CheckAnswer, CheckQuestion)],
    style: Style,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut group = "";
    for (answer, question) in answers {
        if question.group != group {
            group = question.group;
            writeln!(out, "{group}")?;
        }
        let name = answer.outcome.name();
        write!(out, "  {}{:2$}", style.paint(answer.outcome.color(), name), "", 9 - name.len())?;
        style.wrap(11, &format!("{}: {}", question.text, answer.seen), out)?;
        if !answer.remedy.is_empty() {
            write!(out, "{:11}", "")?;
            style.wrap(11, &format!("remedy: {}", answer.remedy), out)?;
        }
    }
    let number = |outcome| answers.iter().filter(|(answer, _)| answer.outcome == outcome).count();
    let (failures, warnings) = (number(Outcome::Failure), number(Outcome::Warning));
    let summary = format!("{}, {}", count(failures, "failure"), count(warnings, "warning"));
    let color = match (failures, warnings) {
        (0, 0) => Color::Green,
        (0, _) => Color::Yellow,
        _ => Color::Red,
    };
    Ok(writeln!(out, "\n{} of {}", style.paint(color, &summary), count(answers.len(), "question"))?)
}
