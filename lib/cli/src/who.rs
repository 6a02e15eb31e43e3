//! `shmesh who`: lists the processes on a link, as known to its sidecar.

use std::io::Write;

use anyhow::Context;
use serde_json::{Value, json};
use shmesh::ErrorKind;
use shmesh::client::{Client, PeerIdentity, Pod, Process, ProcessList, Seat};
use shmesh::inspect::{SeatView, View};

use crate::args::{LinkArgs, Output};
use crate::people;
use crate::table::Table;

pub(crate) const EXAMPLES: &str = "\
Asks the sidecar of the link. TGID is the process id in the node's pid namespace; device keys are granted by it. Without a sidecar the command shows the seats in shared memory and says so; their pids are written by the
processes themselves and are not verified.

The sidecar answers only processes in its pid namespace that run as its user or as root. In a pod, run the command in the
sidecar's container:
  kubectl exec my-pod -c shmesh -- shmesh who fronthaul

Examples:
  shmesh who fronthaul
  shmesh who fronthaul --output json | jq '.processes[] | select(.exports > 0) | .bare_tgid'";

/// The source of the answer.
enum ProcessSource {
    Sidecar(ProcessList),
    /// The segments, because no sidecar keeps the link: a participant serves it, or no process does.
    Segments {
        served_by: Option<&'static str>,
        seats: Vec<SeatView>,
    },
}

/// Prints the processes on the link.
pub(crate) fn run(args: &LinkArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let answer = ask(args)?;
    match args.output {
        Output::Text => text(args, &answer, out),
        Output::Json => {
            serde_json::to_writer_pretty(&mut *out, &whole_json(args, &answer))?;
            Ok(writeln!(out)?)
        }
    }
}

fn ask(args: &LinkArgs) -> anyhow::Result<ProcessSource> {
    let dir = &args.dir.dir;
    let seen = |served_by| {
        let seats = View::open(dir, &args.link)?.seats();
        Ok(ProcessSource::Segments { served_by, seats })
    };
    let processes = Client::connect(dir, args.link.as_str()).and_then(|mut client| client.processes());
    match processes {
        Ok(Some(processes)) => Ok(ProcessSource::Sidecar(processes)),
        Ok(None) => seen(Some("participant")),
        Err(error) if matches!(error.kind(), ErrorKind::NoBroker { .. }) => seen(None),
        Err(error) => Err(error).with_context(|| format!("cannot list the processes on link {}", args.link)),
    }
}

fn text(args: &LinkArgs, answer: &ProcessSource, out: &mut dyn Write) -> anyhow::Result<()> {
    let all = match answer {
        ProcessSource::Sidecar(all) => all,
        ProcessSource::Segments { served_by, seats } => return segments_text(args, *served_by, seats, out),
    };
    let mut table =
        Table::new(&[">TGID", ">START", ">UID", "POD", ">SESSIONS", "SEATS", ">EXPORTS", ">IMPORTS"]);
    for process in &all.processes {
        let identity = identity(process);
        table.row([
            identity.bare_tgid.to_string(),
            identity.start_time.to_string(),
            identity.uid.to_string(),
            identity.pod.as_ref().map_or_else(|| "-".to_owned(), pod),
            process.sessions.to_string(),
            seats(&process.seats),
            process.exports.to_string(),
            process.imports.to_string(),
        ]);
    }
    writeln!(out, "link {}, kept by a sidecar", args.link)?;
    table.print(2, out)?;
    if all.unidentified > 0 {
        writeln!(out, "  and {} of unidentified processes", sessions(all.unidentified))?;
    }
    for seat in &all.unclaimed {
        let side = side(seat);
        writeln!(
            out,
            "  seat {}, {side}: pid {} as written by the process itself, not known to the sidecar",
            seat.seat, seat.pid
        )?;
    }
    Ok(())
}

fn segments_text(
    args: &LinkArgs,
    served_by: Option<&str>,
    seats: &[SeatView],
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let by =
        if served_by.is_none() { "not served by any process" } else { "served by one of its participants" };
    writeln!(
        out,
        "link {}, {by}: no sidecar keeps it, so this list is from shared memory and not verified",
        args.link
    )?;
    let mut table = Table::new(&[">SEAT", "SIDE", ">PID", ">START", "STATE"]);
    for seat in seats {
        table.row([
            seat.participant.seat.to_string(),
            seat.participant.word.side().to_string(),
            seat.participant.word.pid().to_string(),
            seat.participant.start_time.to_string(),
            people::state(seat).to_owned(),
        ]);
    }
    if table.is_empty() { Ok(writeln!(out, "  no participants")?) } else { Ok(table.print(2, out)?) }
}

fn identity(process: &Process) -> PeerIdentity {
    process.identity.clone().unwrap_or_default()
}

/// `namespace/name`, or its uid as long as its name is not known.
fn pod(pod: &Pod) -> String {
    let name = if pod.name.is_empty() { pod.uid.clone() } else { format!("{}/{}", pod.namespace, pod.name) };
    if pod.confirmed { name } else { format!("{name} (not confirmed)") }
}

/// `3 primary, 4 secondary`.
fn seats(seats: &[Seat]) -> String {
    if seats.is_empty() {
        return "-".to_owned();
    }
    let texts = seats.iter().map(|seat| format!("{} {}", seat.seat, side(seat)));
    texts.collect::<Vec<_>>().join(", ")
}

fn side(seat: &Seat) -> &'static str {
    if seat.side == 2 { "secondary" } else { "primary" }
}

fn sessions(count: u32) -> String {
    crate::human::plural(count.into(), "session")
}

fn whole_json(args: &LinkArgs, answer: &ProcessSource) -> Value {
    let link = args.link.as_str();
    match answer {
        ProcessSource::Segments { served_by, seats } => json!({
            "link": link,
            "served_by": served_by,
            "participants": seats.iter().map(people::json).collect::<Value>(),
        }),
        ProcessSource::Sidecar(all) => json!({
            "link": link,
            "served_by": "sidecar",
            "processes": all.processes.iter().map(process_json).collect::<Value>(),
            "unidentified_sessions": all.unidentified,
            "unclaimed_seats": all.unclaimed.iter().map(seat_json).collect::<Value>(),
        }),
    }
}

fn process_json(process: &Process) -> Value {
    let identity = identity(process);
    let pod = identity.pod.as_ref().map(|pod| {
        json!({
            "uid": pod.uid,
            "namespace": pod.namespace,
            "name": pod.name,
            "container": pod.container,
            "service_account": pod.service_account,
            "confirmed": pod.confirmed,
        })
    });
    json!({
        "bare_tgid": identity.bare_tgid,
        "start_time": identity.start_time,
        "uid": identity.uid,
        "gid": identity.gid,
        "pod": pod,
        "sessions": process.sessions,
        "seats": process.seats.iter().map(seat_json).collect::<Value>(),
        "exports": process.exports,
        "imports": process.imports,
    })
}

fn seat_json(seat: &Seat) -> Value {
    json!({ "seat": seat.seat, "side": side(seat), "pid": seat.pid })
}
