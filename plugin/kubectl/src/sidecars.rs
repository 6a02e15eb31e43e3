//! `ls`, `who`, `dump` and `top`: the command `shmesh` in the sidecars of pods.

use std::io::{self, IsTerminal, Write};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;
use shmesh::config::LinkName;
use shmesh_injector::SIDECAR;
use shmesh_sys::quantity::Bytes;
use shmesh_sys::table::Table;
use shmesh_sys::terminal::printable;
use shmesh_sys::top::{COLUMNS, COLUMNS_HELP, LinkRow, processes};

use crate::kubectl::{Kubectl, KubectlError, in_parallel};
use crate::output::{Format, Style};
use crate::pods::{full_name, list, name, namespace, number, sidecar_status, text};

/// Options that select pods.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct PodArgs {
    #[command(flatten)]
    kubectl: Kubectl,
    /// Namespace of the pods; default: the namespace of kubectl's context
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
    /// Pods of all namespaces
    #[arg(short = 'A', long, conflicts_with_all = ["namespace", "pod"])]
    all_namespaces: bool,
    /// Pods with these labels
    #[arg(short = 'l', long, value_name = "LABELS", conflicts_with = "pod")]
    selector: Option<String>,
    /// Pods on this node
    #[arg(long, value_name = "NODE", conflicts_with = "pod")]
    node: Option<String>,
    /// Output format: text or JSON
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
    output: Format,
    /// Name of a pod; by default all pods with a sidecar
    #[arg(value_name = "POD")]
    pod: Option<String>,
}

/// Options of `who` and `dump`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct PodLinkArgs {
    /// Name of the link
    #[arg(value_name = "LINK")]
    link: LinkName,
    #[command(flatten)]
    pods: PodArgs,
}

/// Options of `kubectl shmesh top`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = COLUMNS_HELP)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pods: PodArgs,
    /// Seconds between two samples
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// End after N intervals
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

/// The answer of the sidecar of a pod.
type SidecarAnswer<'a> = (&'a Value, Result<String, KubectlError>);

/// A part of a sidecar's answer, for a row of a table.
type Cells = Vec<String>;

impl PodArgs {
    /// The pods with a running sidecar.
    fn select(&self) -> anyhow::Result<Vec<Value>> {
        let node = self.node.as_ref().map(|node| format!("--field-selector=spec.nodeName={node}"));
        let selector = self.selector.as_ref().map(|labels| format!("--selector={labels}"));
        let namespace = self.namespace.as_ref().map(|name| format!("--namespace={name}"));
        let all = self.all_namespaces.then(|| "--all-namespaces".to_owned());
        let options = [&node, &selector, &namespace, &all].into_iter().flatten().map(String::as_str);
        let args: Vec<&str> = ["pods"].into_iter().chain(self.pod.as_deref()).chain(options).collect();
        let found = self.kubectl.get(&args)?;
        let runs = |pod: &Value| {
            sidecar_status(pod).is_some_and(|status| status.pointer("/state/running").is_some())
        };
        let pods: Vec<Value> = found.into_iter().filter(runs).collect();
        if let (Some(pod), true) = (&self.pod, pods.is_empty()) {
            bail!(
                "pod {pod} has no running container {SIDECAR}; of a link between pods, the sidecar is in the pod with side primary"
            );
        }
        if pods.is_empty() {
            eprintln!("no selected pod has a running sidecar; -A selects the pods of all namespaces");
        }
        Ok(pods)
    }

    fn exec_args<'a>(pod: &'a Value, command: &[&'a str]) -> Vec<&'a str> {
        let mut args =
            vec!["exec", "--namespace", namespace(pod), name(pod), "--container", SIDECAR, "--", "shmesh"];
        args.extend(command);
        args
    }

    /// Runs `shmesh` in the sidecars of all pods. `extra` is how long the command runs by itself.
    fn ask<'a>(&self, pods: &'a [Value], command: &[&str], extra: Duration) -> Vec<SidecarAnswer<'a>> {
        let limit = Duration::from_secs(self.kubectl.timeout) + extra;
        let answers =
            in_parallel(pods, |pod| self.kubectl.call_within(&Self::exec_args(pod, command), limit));
        pods.iter().zip(answers).collect()
    }

    /// Parses the answers, prints what failed to standard error, and returns the others and whether all succeeded.
    fn parsed<'a>(answers: Vec<SidecarAnswer<'a>>) -> (Vec<(&'a Value, Value)>, bool) {
        let mut good = Vec::new();
        let total = answers.len();
        for (pod, answer) in answers {
            match answer.map(|text| serde_json::from_str(&text)) {
                Ok(Ok(value)) => good.push((pod, value)),
                Ok(Err(error)) => complain(pod, &format!("the answer of its sidecar is not JSON: {error}")),
                Err(error) => complain(pod, &error.to_string()),
            }
        }
        let is_whole = good.len() == total;
        (good, is_whole)
    }

    /// Answers about one link: pods without it are left out.
    ///
    /// # Errors
    /// No pod has the link.
    fn ask_about<'a>(
        &self,
        link: &LinkName,
        pods: &'a [Value],
        command: &[&str],
    ) -> anyhow::Result<Vec<SidecarAnswer<'a>>> {
        let missing = format!("link {link}: not found");
        let mut answers = self.ask(pods, command, Duration::ZERO);
        answers.retain(|(_, answer)| !answer.as_ref().is_err_and(|error| error.reason.contains(&missing)));
        if answers.is_empty() {
            bail!(
                "no sidecar of the selected pods has a link {link}; list the links with `kubectl shmesh ls`"
            );
        }
        Ok(answers)
    }
}

fn complain(pod: &Value, error: &str) {
    eprintln!("error: pod {}: {}", full_name(pod), printable(error));
}

/// The columns that every row begins with.
fn place(pod: &Value) -> [String; 3] {
    [namespace(pod).to_owned(), name(pod).to_owned(), text(pod, "/spec/nodeName").to_owned()]
}

/// The answer with the pod that gave it.
fn with_place(pod: &Value, mut answer: Value) -> Value {
    if let Some(answer) = answer.as_object_mut() {
        for (key, value) in ["namespace", "pod", "node"].into_iter().zip(place(pod)) {
            answer.insert(key.to_owned(), value.into());
        }
    }
    answer
}

fn print_json(answers: Vec<(&Value, Value)>, out: &mut dyn Write) -> anyhow::Result<()> {
    let all: Vec<Value> = answers.into_iter().map(|(pod, answer)| with_place(pod, answer)).collect();
    serde_json::to_writer_pretty(&mut *out, &all)?;
    Ok(writeln!(out)?)
}

fn print_table<T>(
    heads: &[&str],
    answers: &[(&Value, T)],
    rows: impl Fn(&T) -> Vec<Cells>,
    style: Style,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut table = Table::new(&[&["NAMESPACE", "POD", "NODE"], heads].concat());
    for (pod, answer) in answers {
        for row in rows(answer) {
            table.row(place(pod).into_iter().chain(row));
        }
    }
    if table.is_empty() { Ok(writeln!(out, "no links")?) } else { Ok(style.table(&table, out)?) }
}

/// Prints the links of the pods. Returns whether all sidecars answered.
pub(crate) fn ls(args: &PodArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let pods = args.select()?;
    let (answers, is_whole) = PodArgs::parsed(args.ask(&pods, &["ls", "--output", "json"], Duration::ZERO));
    match args.output {
        Format::Json => print_json(answers, out)?,
        Format::Text => {
            let heads = ["LINK", "RING", ">SIZE", "PRIMARY", "SECONDARY", ">M2S", ">S2M"];
            print_table(&heads, &answers, link_rows, Style::of_stdout(), out)?;
        }
    }
    Ok(is_whole)
}

fn link_rows(answer: &Value) -> Vec<Cells> {
    let row = |link: &Value| {
        if link["usable"] == false {
            return vec![text(link, "/name").to_owned(), format!("unusable: {}", text(link, "/error"))];
        }
        let bytes = link["bytes"].as_u64().unwrap_or_default();
        vec![
            text(link, "/name").to_owned(),
            format!("{} {}", text(link, "/ring/mode"), shown(&link["ring"]["len"])),
            Bytes(bytes).to_string(),
            participants(link, "primary"),
            participants(link, "secondary"),
            shown(&link["queued"]["m2s"]),
            shown(&link["queued"]["s2m"]),
        ]
    };
    list(answer, "/links").map(row).collect()
}

/// A number or a text of an answer; `-` for `null` and for missing keys.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() => format!("{float:.1}"),
            _ => number.to_string(),
        },
        other => other.to_string(),
    }
}

fn participants(link: &Value, side: &str) -> String {
    let of_side = list(link, "/participants").filter(|one| text(one, "/side") == side);
    processes(of_side.map(|one| (u32::try_from(number(one, "/pid")).unwrap_or(0), text(one, "/state"))))
}

/// Prints the processes on a link. Returns whether all sidecars answered.
pub(crate) fn who(args: &PodLinkArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let pods = args.pods.select()?;
    let answers = args.pods.ask_about(&args.link, &pods, &["who", args.link.as_str(), "--output", "json"])?;
    let (answers, is_whole) = PodArgs::parsed(answers);
    match args.pods.output {
        Format::Json => print_json(answers, out)?,
        Format::Text => {
            let heads = ["LINK", ">TGID", ">UID", "CLIENT", ">SESSIONS", "SEATS", ">EXPORTS", ">IMPORTS"];
            print_table(&heads, &answers, process_rows, Style::of_stdout(), out)?;
        }
    }
    Ok(is_whole)
}

fn process_rows(answer: &Value) -> Vec<Cells> {
    let link = text(answer, "/link");
    let row = |process: &Value| {
        let pod = &process["pod"];
        let client = match (text(pod, "/name"), text(pod, "/uid")) {
            ("", "") => "-".to_owned(),
            ("", uid) => uid.to_owned(),
            (name, _) => format!("{}/{name}", text(pod, "/namespace")),
        };
        let seats =
            list(process, "/seats").map(|seat| format!("{} {}", number(seat, "/seat"), text(seat, "/side")));
        let seats = seats.collect::<Vec<_>>().join(", ");
        vec![
            link.to_owned(),
            shown(&process["bare_tgid"]),
            shown(&process["uid"]),
            client,
            shown(&process["sessions"]),
            if seats.is_empty() { "-".to_owned() } else { seats },
            shown(&process["exports"]),
            shown(&process["imports"]),
        ]
    };
    // Without a sidecar in charge the command has only what is in shared memory.
    let seat = |seat: &Value| {
        let client = format!("pid {} {}", shown(&seat["pid"]), text(seat, "/state"));
        let seats = format!("{} {}", number(seat, "/seat"), text(seat, "/side"));
        let none = || "-".to_owned();
        vec![link.to_owned(), none(), none(), client, none(), seats, none(), none()]
    };
    list(answer, "/processes").map(row).chain(list(answer, "/participants").map(seat)).collect()
}

/// Prints the messages and buffers of a link. Returns whether all sidecars answered.
pub(crate) fn dump(args: &PodLinkArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let pods = args.pods.select()?;
    if args.pods.output == Format::Json {
        let command = ["dump", args.link.as_str(), "--output", "json"];
        let (answers, is_whole) = PodArgs::parsed(args.pods.ask_about(&args.link, &pods, &command)?);
        print_json(answers, out)?;
        return Ok(is_whole);
    }
    let answers = args.pods.ask_about(&args.link, &pods, &["dump", args.link.as_str()])?;
    let mut is_whole = true;
    for (at, (pod, answer)) in answers.into_iter().enumerate() {
        match answer {
            Ok(text) => {
                let blank = if at == 0 { "" } else { "\n" };
                writeln!(out, "{blank}pod {} on node {}", full_name(pod), place(pod)[2])?;
                text.lines().try_for_each(|line| writeln!(out, "{}", printable(line)))?;
            }
            Err(error) => {
                is_whole = false;
                complain(pod, &error.to_string());
            }
        }
    }
    Ok(is_whole)
}

/// Prints rates of links at each interval; of one pod on a terminal, shows the screen of `shmesh top`.
pub(crate) fn top(args: &TopArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let interval = args.interval.to_string();
    let is_terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    let pods = args.pods.select()?;
    if let (true, Format::Text, Some(_), [pod]) = (is_terminal, args.pods.output, &args.pods.pod, &*pods) {
        let count = args.count.map(|count| format!("--count={count}"));
        let command: Vec<&str> =
            ["top", "--interval", &interval].into_iter().chain(count.as_deref()).collect();
        let mut exec = PodArgs::exec_args(pod, &command);
        exec.splice(1..1, ["--stdin", "--tty"]);
        let status = args.pods.kubectl.command(&exec).status().context("cannot run kubectl")?;
        return Ok(status.success());
    }
    let mut is_whole = true;
    for round in 1.. {
        let start = Instant::now();
        // Pods come and go.
        let pods = if round == 1 { pods.clone() } else { args.pods.select()? };
        let command = ["top", "--output", "json", "--count", "1", "--interval", &interval];
        let answers = args.pods.ask(&pods, &command, Duration::from_secs(args.interval));
        let (answers, all) = PodArgs::parsed(answers);
        is_whole &= all;
        match args.pods.output {
            Format::Json => {
                for (pod, answer) in answers {
                    writeln!(out, "{}", with_place(pod, answer))?;
                }
            }
            Format::Text => {
                if is_terminal && args.count.is_none() {
                    // To the top left, and clear.
                    write!(out, "\x1b[H\x1b[2J")?;
                }
                is_whole &= print_rates(&answers, Style::of_stdout(), out)?;
            }
        }
        out.flush()?;
        if args.count.is_some_and(|count| round >= count) || pods.is_empty() {
            break;
        }
        // The sidecars wait for the interval, unless none answers.
        thread::sleep(Duration::from_secs(args.interval).saturating_sub(start.elapsed()));
    }
    Ok(is_whole)
}

/// Prints the table of `shmesh top` for all pods, and why links cannot be read. Returns whether all answers are valid.
fn print_rates(answers: &[(&Value, Value)], style: Style, out: &mut dyn Write) -> anyhow::Result<bool> {
    let mut links: Vec<(&Value, Vec<LinkRow>)> = Vec::new();
    for (pod, answer) in answers {
        match serde_json::from_value(answer["links"].clone()) {
            Ok(rows) => links.push((pod, rows)),
            Err(error) => {
                complain(pod, &format!("the answer of its sidecar is not one of `shmesh top`: {error}"))
            }
        }
    }
    let cells = |rows: &Vec<LinkRow>| rows.iter().map(|row| row.cells().to_vec()).collect();
    print_table(&COLUMNS, &links, cells, style, out)?;
    for (pod, rows) in &links {
        for error in rows.iter().filter_map(|row| row.error.as_ref()) {
            style.wrap(0, &format!("pod {}: {error}", full_name(pod)), out)?;
        }
    }
    Ok(links.len() == answers.len())
}
