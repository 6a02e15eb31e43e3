//! Links in NVIPC's own layout, of which the commands can read only a part.

use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};
use shmesh::config::{LinkName, PoolId};
use shmesh_nvipc_wire::{LinkSnapshot, QueuedMessage};

use crate::human;
use crate::table::Table;

/// Reads the link with this name, if it is in NVIPC's layout.
pub(crate) fn seen(dir: &Path, name: &LinkName) -> Option<LinkSnapshot> {
    LinkSnapshot::open(dir, name.as_str()).ok().flatten()
}

/// The error of commands that do not support this layout, with alternatives.
pub(crate) fn not_here(name: &LinkName, seen: &LinkSnapshot) -> String {
    let lives = if seen.is_served { "its primary is alive" } else { "its primary is gone" };
    format!("link {name} is in NVIPC's layout, and {lives}")
}

/// The pools of the link: id, size and number of buffers, and how many are free.
pub(crate) fn pools(seen: &LinkSnapshot) -> impl Iterator<Item = (PoolId, u32, u32, usize)> + '_ {
    PoolId::ALL.into_iter().filter_map(|id| {
        let pool = seen.pools[id.index()];
        seen.free[id.index()].map(|free| (id, pool.buf_size_bytes, pool.pool_len, free))
    })
}

/// The row of the link in `ls`.
pub(crate) fn row(name: &LinkName, seen: &LinkSnapshot) -> [String; 8] {
    let pools = pools(seen)
        .map(|(id, size, len, _)| format!("{id} {len}x{}", human::bytes(size.into()).replace(' ', "")))
        .collect::<Vec<_>>()
        .join(", ");
    [
        name.to_string(),
        format!("nvipc {}", seen.pools[0].pool_len),
        pools,
        human::bytes(seen.bytes),
        if seen.is_served { "alive" } else { "gone" }.to_owned(),
        "not known".to_owned(),
        seen.m2s.len().to_string(),
        seen.s2m.len().to_string(),
    ]
}

/// The link as JSON for other programs.
pub(crate) fn json(name: &LinkName, seen: &LinkSnapshot) -> Value {
    let message = |at: &QueuedMessage| json!({ "msg_id": at.msg_id, "cell_id": at.cell_id, "msg_len": at.msg_len, "data_len": at.data_len });
    let pools = pools(seen).map(|(id, size, len, free)| {
        json!({ "pool": id.name(), "buf_size_bytes": size, "pool_len": len, "free": free })
    });
    json!({
        "name": name.as_str(),
        "usable": true,
        "layout": "nvipc",
        "primary_alive": seen.is_served,
        "pools": pools.collect::<Vec<_>>(),
        "bytes": seen.bytes,
        "queued": { "m2s": seen.m2s.len(), "s2m": seen.s2m.len() },
        "messages": {
            "m2s": seen.m2s.iter().map(message).collect::<Vec<_>>(),
            "s2m": seen.s2m.iter().map(message).collect::<Vec<_>>(),
        },
    })
}

/// Prints the link as `dump` does, with a maximum number of messages for each direction.
pub(crate) fn dump(
    name: &LinkName,
    seen: &LinkSnapshot,
    limit: usize,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    writeln!(out, "{}: {}", not_here(name, seen), human::bytes(seen.bytes))?;
    for (ring, waiting) in [("m2s", &seen.m2s), ("s2m", &seen.s2m)] {
        writeln!(out, "\n{ring}: {} queued", human::plural(waiting.len() as u64, "message"))?;
        let mut table = Table::new(&[">msg_id", ">cell_id", ">msg_len", ">data_len"]);
        for at in waiting.iter().take(limit) {
            let cells = [at.msg_id, at.cell_id, at.msg_len, at.data_len].map(|number| number.to_string());
            table.row(cells);
        }
        if !waiting.is_empty() {
            table.print(2, out)?;
        }
    }
    let mut table = Table::new(&["pool", ">buffers", ">free"]);
    for (id, _, len, free) in pools(seen) {
        table.row([id.name().to_owned(), len.to_string(), free.to_string()]);
    }
    writeln!(out, "\npools")?;
    table.print(2, out)?;
    Ok(writeln!(out, "\nThis layout does not record which process holds the other buffers.")?)
}
