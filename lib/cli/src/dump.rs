//! `shmesh dump`: the queued messages of a link and the owners of its buffers.

use std::io::Write;

use serde_json::{Value, json};
use shmesh::config::LinkName;
use shmesh::inspect::{BufferState, HeldBuffer, QueuedMessage, RingView, Snapshot, TableView, View};
use shmesh::{SeatIndex, Side};
use shmesh_sys::quantity::Bytes;

use crate::args::{Dir, Output};
use crate::table::Table;
use crate::{human, ls, nvipc, people};

const EXAMPLES: &str = "\
Works on a link in use and after a crash, without changing the link or stopping participants. While a link is in use, each
line is consistent, but the sums can be off by messages that moved in the meantime.

  loaned    being written by a participant        queued    sent, not received
  borrowed  received by a participant             orphaned  its owner has died; recovery frees it

Examples:
  shmesh dump fronthaul
  shmesh dump fronthaul --payload 64 --limit 5     first bytes of five messages per direction
  shmesh dump fronthaul --output json | jq '.pool_use[] | select(.orphaned > 0)'";

/// Parses the number of bytes that `--payload` shows.
fn payload_bytes(text: &str) -> Result<u32, String> {
    match text.parse::<Bytes>().map(|Bytes(bytes)| u32::try_from(bytes)) {
        Ok(Ok(bytes @ 0..=65_536)) => Ok(bytes),
        Ok(_) => Err("must be 64Ki at most".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// The options of `shmesh dump`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the link
    #[arg(value_name = "LINK")]
    link: LinkName,
    #[command(flatten)]
    dir: Dir,
    /// Maximum number of messages per direction and buffers per pool
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Show the first N bytes of each part of a message
    #[arg(long, value_name = "N", default_value = "0", value_parser = payload_bytes)]
    payload: u32,
    /// Output format: text or JSON
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Output::Text)]
    output: Output,
}

/// Prints the messages and buffers of the link.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let view = match View::open(&args.dir.dir, &args.link) {
        Ok(view) => view,
        Err(error) => {
            let Some(theirs) = nvipc::seen(&args.dir.dir, &args.link) else { return Err(error.into()) };
            return match args.output {
                Output::Text => nvipc::dump(&args.link, &theirs, args.limit, out),
                Output::Json => {
                    serde_json::to_writer_pretty(&mut *out, &nvipc::json(&args.link, &theirs))?;
                    Ok(writeln!(out)?)
                }
            };
        }
    };
    let snapshot = view.snapshot();
    match args.output {
        Output::Text => text(args, &view, &snapshot, out),
        Output::Json => {
            serde_json::to_writer_pretty(&mut *out, &whole_json(args, &view, &snapshot))?;
            Ok(writeln!(out)?)
        }
    }
}

fn text(args: &Args, view: &View, snapshot: &Snapshot, out: &mut dyn Write) -> anyhow::Result<()> {
    let backing = format!("{:?}", view.backing()).to_lowercase();
    let bytes = human::bytes(view.bytes());
    let notify =
        view.spin_us().map_or("no notification".to_owned(), |us| format!("spins {us} µs before it sleeps"));
    let (mode, len) = (ls::mode(view), view.ring_len());
    writeln!(out, "link {}: ring {mode} {len}, {bytes}, {backing}, {notify}", view.name())?;
    if let Some(payload) = view.payload_type() {
        writeln!(out, "typed messages of {payload}")?;
    }

    let mut table = Table::new(&[">seat", "side", ">pid", "state"]);
    for seat in &snapshot.seats {
        let word = seat.participant.word;
        let asleep = if seat.asleep { ", asleep" } else { "" };
        let state = format!("{}{asleep}{}", people::state(seat), people::place(seat));
        table.row([
            seat.participant.seat.to_string(),
            word.side().to_string(),
            word.pid().to_string(),
            state,
        ]);
    }
    section("participants", &table, out)?;

    for ring in &snapshot.rings {
        let to = if ring.from == Side::Primary { Side::Secondary } else { Side::Primary };
        let waiting = human::plural(ring.queued.len() as u64, "message");
        let received = human::count(ring.received);
        writeln!(
            out,
            "\n{}, {} to {to}: {waiting} queued, {received} received before",
            ring.name(),
            ring.from
        )?;
        messages(args, view, snapshot, ring, out)?;
    }

    if let Some(requests) = &snapshot.requests {
        let replies = match requests.replies {
            1 => "1 reply queued".to_owned(),
            count => format!("{count} replies queued"),
        };
        writeln!(
            out,
            "\nrequests, secondary to primary: {} queued, {} pending, {replies} for a client; each client may have {} pending",
            human::plural(requests.queued as u64, "request"),
            requests.pending,
            requests.window
        )?;
    }

    let mut table = Table::new(&[
        "pool",
        ">buffers",
        ">free",
        ">loaned",
        ">queued",
        ">borrowed",
        ">orphaned",
        ">damaged",
    ]);
    for view in &snapshot.tables {
        let counts = counts(view).map(|(_, count)| count.to_string());
        table.row([pool_name(view).to_owned(), view.len.to_string()].into_iter().chain(counts));
    }
    section("pools", &table, out)?;

    let mut table = Table::new(&["buffer", "hand", "by"]);
    let mut more = 0;
    for view in &snapshot.tables {
        // Queued buffers were listed with their messages.
        let held: Vec<&HeldBuffer> =
            view.held.iter().filter(|held| !matches!(held.hand, BufferState::Queued(_))).collect();
        more += held.len().saturating_sub(args.limit);
        for held in held.into_iter().take(args.limit) {
            let by = match held.hand {
                BufferState::Orphaned(None) => "a message that has ended".to_owned(),
                hand => seat_of(hand).map_or_else(String::new, |seat| who(snapshot, seat)),
            };
            table.row([format!("{}[{}]", pool_name(view), held.index), word(held.hand).to_owned(), by]);
        }
    }
    section("loaned and received", &table, out)?;
    Ok(rest(more, out)?)
}

fn section(title: &str, table: &Table, out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "\n{title}")?;
    if table.is_empty() { writeln!(out, "  none") } else { table.print(2, out) }
}

fn rest(more: usize, out: &mut dyn Write) -> std::io::Result<()> {
    if more > 0 { writeln!(out, "  and {more} more; --limit shows them") } else { Ok(()) }
}

fn messages(
    args: &Args,
    view: &View,
    snapshot: &Snapshot,
    ring: &RingView,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    if ring.queued.is_empty() {
        return Ok(());
    }
    let shown = || ring.queued.iter().take(args.limit);
    let mut table =
        Table::new(&[">position", ">msg_id", ">cell_id", ">msg", "in", ">data", "in", "sent by", ""]);
    for message in shown() {
        let place = match (message.inline, message.buffer) {
            (true, None) => "slot".to_owned(),
            (true, Some(cell)) => format!("inline[{cell}]"),
            (false, Some(buffer)) => format!("cpu_msg[{buffer}]"),
            (false, None) => "-".to_owned(),
        };
        let (data, data_place) = message.data.map_or_else(
            || ("-".to_owned(), String::new()),
            |(pool, index, len)| (human::bytes(len.into()), format!("{pool}[{index}]")),
        );
        table.row([
            message.position.to_string(),
            message.msg_id.to_string(),
            message.cell_id.to_string(),
            human::bytes(message.msg_len.into()),
            place,
            data,
            data_place,
            message.sender.map_or_else(|| "-".to_owned(), |seat| who(snapshot, seat)),
            message.wrong.map_or_else(String::new, |what| format!("DAMAGED: {what}")),
        ]);
    }
    table.print(2, out)?;
    for message in shown().filter(|_| args.payload > 0) {
        let (msg, data) = view.payload(ring.from, message, args.payload as usize);
        for (part, bytes) in [("msg", msg), ("data", data)] {
            for line in human::hex(&bytes) {
                writeln!(out, "  {} {part:4}  {line}", message.position)?;
            }
        }
    }
    Ok(rest(ring.queued.len().saturating_sub(args.limit), out)?)
}

/// `seat 3, pid 4711 dead`.
fn who(snapshot: &Snapshot, seat: SeatIndex) -> String {
    match snapshot.seat(seat) {
        Some(view) => format!("seat {seat}, pid {} {}", view.participant.word.pid(), people::state(view)),
        None => format!("seat {seat}, empty by now"),
    }
}

fn pool_name(view: &TableView) -> &'static str {
    view.pool.map_or("inline", shmesh::config::PoolId::name)
}

fn word(hand: BufferState) -> &'static str {
    match hand {
        BufferState::Free => "free",
        BufferState::Loaned(_) => "loaned",
        BufferState::Queued(_) => "queued",
        BufferState::Borrowed(_) => "borrowed",
        BufferState::Orphaned(_) => "orphaned",
        BufferState::Damaged => "damaged",
    }
}

fn seat_of(hand: BufferState) -> Option<SeatIndex> {
    match hand {
        BufferState::Loaned(seat) | BufferState::Queued(seat) | BufferState::Borrowed(seat) => Some(seat),
        BufferState::Orphaned(seat) => seat,
        BufferState::Free | BufferState::Damaged => None,
    }
}

fn counts(view: &TableView) -> [(&'static str, usize); 6] {
    let count = |wanted: &str| view.count(|hand| word(hand) == wanted);
    [
        ("free", view.free()),
        ("loaned", count("loaned")),
        ("queued", count("queued")),
        ("borrowed", count("borrowed")),
        ("orphaned", count("orphaned")),
        ("damaged", count("damaged")),
    ]
}

fn whole_json(args: &Args, view: &View, snapshot: &Snapshot) -> Value {
    let mut link = ls::view_json(view);
    link["participants"] = snapshot.seats.iter().map(people::json).collect();
    link["rings"] = snapshot
        .rings
        .iter()
        .map(|ring| {
            let messages = ring.queued.iter().take(args.limit);
            json!({
                "ring": ring.name(),
                "from": ring.from.to_string(),
                "received": ring.received,
                "queued": ring.queued.len(),
                "messages": messages.map(|message| message_json(args, view, ring, message)).collect::<Value>(),
            })
        })
        .collect();
    link["requests"] = ls::requests_json(snapshot);
    link["pool_use"] = snapshot.tables.iter().map(|table| table_json(args, table)).collect();
    link
}

fn message_json(args: &Args, view: &View, ring: &RingView, message: &QueuedMessage) -> Value {
    let data =
        message.data.map(|(pool, index, len)| json!({ "pool": pool.name(), "index": index, "len": len }));
    let mut json = json!({
        "position": message.position,
        "inline": message.inline,
        "buffer": message.buffer,
        "sender": message.sender.map(SeatIndex::value),
        "msg_id": message.msg_id,
        "cell_id": message.cell_id,
        "msg_len": message.msg_len,
        "data": data,
        "wrong": message.wrong,
    });
    if args.payload > 0 {
        let (msg, data) = view.payload(ring.from, message, args.payload as usize);
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        json["msg_hex"] = hex(&msg).into();
        json["data_hex"] = hex(&data).into();
    }
    json
}

fn table_json(args: &Args, view: &TableView) -> Value {
    let held = view.held.iter().take(args.limit).map(|held| {
        json!({ "index": held.index, "hand": word(held.hand), "seat": seat_of(held.hand).map(SeatIndex::value) })
    });
    let mut json = json!({ "pool": pool_name(view), "buffers": view.len, "held": held.collect::<Value>() });
    for (name, count) in counts(view) {
        json[name] = count.into();
    }
    json
}
