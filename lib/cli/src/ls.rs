//! `shmesh ls`: the links of the IPC directory, and the memory of other programs in it.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Context;
use serde_json::{Value, json};
use shmesh::Side;
use shmesh::config::{LinkName, RingMode};
use shmesh::inspect::{FarNode, MemoryFile, Snapshot, View, far_nodes, memory_files, names};
use shmesh_nvipc_wire::LinkSnapshot;
use shmesh_sys::causes::with_causes;

use crate::args::{Dir, Output};
use crate::open_files::{self, Array, FileUsers};
use crate::table::Table;
use crate::{human, nvipc, people};

const EXAMPLES: &str = "\
Links are mapped read-only, so participants are not affected. A link of memfds has no files; its host process is asked instead.

PRIMARY and SECONDARY are process ids, as their own pid namespaces number them. A `dead` process has exited and its buffers are not
yet recovered; an `evicted` one was declared dead and may still run. The reason for each `unknown` is below the table. m2s and
s2m count queued messages, primary to secondary and back; for a broadcast ring, m2s counts those that the slowest reader has not
received, and the line below the table says how many readers there are. A link whose ring is `nvipc` is in NVIPC's own layout.
Damaged links are listed with the reason.

A link that shmesh-bridge carries to another machine has a line below the table for each far node: whether the other bridge answers, the round
trip between the bridges, what crosses per second, and how many messages of the other side are lost. A bridge of another user may be unreadable.

The second table lists files that belong to no link: shared memory of other programs, such as Python's arrays (psm_*), semaphores and System V
segments of libshmesh_posix.so. USE is `leased` if a process uses the file, `stale` if none does (rm --stale removes it), and `unknown` if its
users take no leases. PROCESSES have the file open or mapped, as far as this user and pid namespace can see them.

With --arrays, a third table lists the arrays of the Python package shmesh, by their inodes: they are memory without a file, so those of
all processes that this user and pid namespace can see are listed, whatever their directory.

Examples:
  shmesh ls
  shmesh ls --dir /run/pool/blue
  shmesh ls --output json | jq -r '.links[] | select(.participants | any(.state == \"dead\")) | .name'";

/// The options of `shmesh ls`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    dir: Dir,
    /// List the arrays of the Python package too, of all visible processes
    #[arg(long)]
    arrays: bool,
    /// Output format: text or JSON
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Output::Text)]
    output: Output,
}

/// One link, as far as it can be read.
struct ListedLink {
    name: LinkName,
    seen: shmesh::Result<(View, Snapshot)>,
    /// A link in NVIPC's layout, with what can be read of it.
    theirs: Option<LinkSnapshot>,
    far: Vec<FarNode>,
}

/// Prints the list of links.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let dir = &args.dir.dir;
    let names = names(dir).with_context(|| format!("cannot read the IPC directory {}", dir.display()))?;
    let look = |name: LinkName| {
        let seen = View::open(dir, &name).map(|view| {
            let snapshot = view.snapshot();
            (view, snapshot)
        });
        let theirs = seen.as_ref().err().and_then(|_| nvipc::seen(dir, &name));
        let far = far_nodes(dir, &name).unwrap_or_default();
        ListedLink { name, seen, theirs, far }
    };
    let listed: Vec<ListedLink> = names.into_iter().map(look).collect();
    let files =
        memory_files(dir).with_context(|| format!("cannot read the IPC directory {}", dir.display()))?;
    let users = open_files::users(&files);
    let arrays = args.arrays.then(open_files::arrays);
    match args.output {
        Output::Text => {
            text(args, &listed, out)?;
            files_text(&files, &users, out)?;
            arrays.map_or(Ok(()), |arrays| arrays_text(&arrays, out))
        }
        Output::Json => {
            let links: Vec<Value> = listed.iter().map(link_json).collect();
            let mut listed =
                json!({ "dir": dir.to_string_lossy(), "links": links, "files": files_json(&files, &users) });
            if let (Some(arrays), Some(listed)) = (arrays, listed.as_object_mut()) {
                listed.insert("arrays".to_owned(), arrays_json(&arrays));
            }
            serde_json::to_writer_pretty(&mut *out, &listed)?;
            Ok(writeln!(out)?)
        }
    }
}

fn text(args: &Args, listed: &[ListedLink], out: &mut dyn Write) -> anyhow::Result<()> {
    if listed.is_empty() {
        return Ok(writeln!(out, "no links in {}", args.dir.dir.display())?);
    }
    let mut table = Table::new(&["LINK", "RING", "POOLS", ">SIZE", "PRIMARY", "SECONDARY", ">M2S", ">S2M"]);
    for ListedLink { name, seen, theirs, .. } in listed {
        if let Some(theirs) = theirs {
            table.row(nvipc::row(name, theirs));
            continue;
        }
        let Ok((view, snapshot)) = seen else {
            table.row([name.as_str(), "-", "unusable, see below"].map(str::to_owned));
            continue;
        };
        let pools = view.pools();
        let pools = pools.iter().map(|pool| {
            format!(
                "{} {}x{}",
                pool.pool,
                pool.pool_len,
                human::bytes(pool.buf_size_bytes.into()).replace(' ', "")
            )
        });
        let [m2s, s2m] = &snapshot.rings;
        table.row([
            name.to_string(),
            format!("{} {}", mode(view), view.ring_len()),
            pools.collect::<Vec<_>>().join(", "),
            human::bytes(view.bytes()),
            people::side(&snapshot.seats, Side::Primary),
            people::side(&snapshot.seats, Side::Secondary),
            m2s.queued.len().to_string(),
            s2m.queued.len().to_string(),
        ]);
    }
    table.print(0, out)?;
    for ListedLink { name, seen, far, .. } in listed.iter().filter(|listed| listed.theirs.is_none()) {
        match seen {
            Ok((view, snapshot)) => {
                if let Some(payload) = view.payload_type() {
                    writeln!(out, "link {name}: typed messages of {payload}")?;
                }
                for remark in people::doubts(&snapshot.seats).chain(people::readers(&snapshot.seats)) {
                    writeln!(out, "link {name}: {remark}")?;
                }
                for node in far {
                    writeln!(out, "link {name}: {}", far_text(node))?;
                }
            }
            Err(error) => writeln!(out, "{}", with_causes(error))?,
        }
    }
    Ok(())
}

/// A far node in a sentence.
fn far_text(far: &FarNode) -> String {
    let state = match (far.is_running, far.is_connected) {
        (false, _) => "no bridge runs",
        (true, false) => "no answer",
        (true, true) => "connected",
    };
    let trip = far.round_trip.filter(|_| far.is_connected);
    #[expect(clippy::cast_precision_loss, reason = "numbers that people read")]
    let speed = trip.map_or_else(String::new, |trip| {
        let rate = human::bytes_per_second(far.bytes_per_second as f64);
        format!(", round trip {}, {rate}", human::nanos(trip.as_nanos() as f64))
    });
    let counts = [far.sent, far.received, far.lost].map(human::count);
    let [sent, received, lost] = counts;
    format!("far node {}: {state}{speed}; {sent} sent, {received} received, {lost} lost", far.node)
}

fn far_json(far: &FarNode) -> Value {
    json!({
        "node": far.node,
        "running": far.is_running,
        "connected": far.is_connected,
        "round_trip_us": far.round_trip.map(|trip| trip.as_micros()),
        "sent": far.sent,
        "received": far.received,
        "lost": far.lost,
        "sent_bytes": far.sent_bytes,
        "received_bytes": far.received_bytes,
        "bytes_per_second": far.bytes_per_second,
    })
}

fn files_text(files: &[MemoryFile], users: &[FileUsers], out: &mut dyn Write) -> anyhow::Result<()> {
    if files.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(&["FILE", "KIND", ">SIZE", ">OWNER", "MODE", ">AGE", "USE", "PROCESSES"]);
    for (file, users) in files.iter().zip(users) {
        table.row([
            file.name.to_string_lossy().into_owned(),
            file.kind.name().to_owned(),
            human::bytes(file.bytes),
            format!("{}:{}", file.user, file.group),
            format!("{:04o}", file.mode),
            human::age(file.age),
            file.in_use.name().to_owned(),
            users.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
        ]);
    }
    writeln!(out)?;
    Ok(table.print(0, out)?)
}

fn files_json(files: &[MemoryFile], users: &[FileUsers]) -> Vec<Value> {
    let one = |(file, users): (&MemoryFile, &FileUsers)| {
        json!({
            "name": file.name.to_string_lossy(),
            "kind": file.kind.name(),
            "len": file.len,
            "bytes": file.bytes,
            "user": file.user,
            "group": file.group,
            "mode": format!("{:04o}", file.mode),
            "age_seconds": file.age.as_secs(),
            "marked": file.is_marked,
            "use": file.in_use.name(),
            "processes": users,
        })
    };
    files.iter().zip(users).map(one).collect()
}

fn arrays_text(arrays: &BTreeMap<u64, Array>, out: &mut dyn Write) -> anyhow::Result<()> {
    if arrays.is_empty() {
        return Ok(writeln!(out, "no arrays")?);
    }
    let mut table = Table::new(&["ARRAY", ">SIZE", ">OWNER", ">AGE", "PROCESSES"]);
    for (inode, array) in arrays {
        table.row([
            inode.to_string(),
            human::bytes(array.bytes),
            format!("{}:{}", array.user, array.group),
            human::age(array.age),
            array.users.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
        ]);
    }
    writeln!(out)?;
    Ok(table.print(0, out)?)
}

fn arrays_json(arrays: &BTreeMap<u64, Array>) -> Value {
    let one = |(inode, array): (&u64, &Array)| {
        json!({
            "inode": inode,
            "len": array.len,
            "bytes": array.bytes,
            "user": array.user,
            "group": array.group,
            "age_seconds": array.age.as_secs(),
            "processes": array.users,
        })
    };
    arrays.iter().map(one).collect()
}

/// The ring mode: `spsc`, `mpmc` or `broadcast`.
pub(crate) fn mode(view: &View) -> &'static str {
    match view.ring_mode() {
        RingMode::Spsc => "spsc",
        RingMode::Mpmc => "mpmc",
        RingMode::Broadcast => "broadcast",
    }
}

/// The link as JSON for other programs.
pub(crate) fn view_json(view: &View) -> Value {
    let pools = view.pools();
    let pools = pools.iter().map(|pool| {
        json!({
            "pool": pool.pool.name(),
            "buf_size_bytes": pool.buf_size_bytes,
            "pool_len": pool.pool_len,
            "bytes": pool.bytes,
        })
    });
    json!({
        "name": view.name(),
        "usable": true,
        "backing": format!("{:?}", view.backing()).to_lowercase(),
        "ring": { "mode": mode(view), "len": view.ring_len() },
        "notify": { "enabled": view.spin_us().is_some(), "spin_us": view.spin_us() },
        "payload_type": view.payload_type(),
        "pools": pools.collect::<Vec<_>>(),
        "bytes": view.bytes(),
    })
}

/// The requests of a link; null if it has none.
pub(crate) fn requests_json(snapshot: &Snapshot) -> Value {
    snapshot.requests.map_or(Value::Null, |requests| {
        json!({
            "window": requests.window,
            "made": requests.made,
            "queued": requests.queued,
            "pending": requests.pending,
            "replies": requests.replies,
        })
    })
}

fn link_json(ListedLink { name, seen, theirs, far }: &ListedLink) -> Value {
    if let Some(theirs) = theirs {
        return nvipc::json(name, theirs);
    }
    match seen {
        Err(error) => json!({ "name": name.as_str(), "usable": false, "error": with_causes(error) }),
        Ok((view, snapshot)) => {
            let mut link = view_json(view);
            let [m2s, s2m] = &snapshot.rings;
            link["participants"] = snapshot.seats.iter().map(people::json).collect();
            link["queued"] = json!({ "m2s": m2s.queued.len(), "s2m": s2m.queued.len() });
            link["requests"] = requests_json(snapshot);
            link["far"] = far.iter().map(far_json).collect();
            link["received"] = json!({ "m2s": m2s.received, "s2m": s2m.received });
            link
        }
    }
}
