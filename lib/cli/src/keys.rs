//! `shmesh keys`: the device keys of a sidecar, without the keys themselves.

use std::io::Write;

use anyhow::Context;
use serde_json::{Value, json};
use shmesh::ErrorKind;
use shmesh::client::{Client, KeyInfo, Mechanism};
use shmesh::inspect::View;

use crate::args::{LinkArgs, Output};
use crate::human;
use crate::table::Table;

pub(crate) const EXAMPLES: &str = "\
Asks the sidecar of the link for all device keys: exporter, size, importers, admitted processes. HASH identifies a key in the audit
log; keys themselves are never shown. A `closing` key waits for its importers before its memory is freed; an `open` key can be
imported by every process that knows it.

The sidecar answers only processes in its pid namespace that run as its user or as root. In a pod, run the command in the
sidecar's container:
  kubectl exec my-pod -c shmesh -- shmesh keys fronthaul

Examples:
  shmesh keys fronthaul
  shmesh keys fronthaul --output json | jq '[.keys[].size_bytes] | add'
  grep 4f1a09c2d7e6b350 audit.jsonl                history of one key";

/// Prints the device keys.
pub(crate) fn run(args: &LinkArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let dir = &args.dir.dir;
    let asked = Client::connect(dir, args.link.as_str()).and_then(|mut client| client.all_keys());
    let (keys, without) = match asked {
        Err(error) if matches!(error.kind(), ErrorKind::NoBroker { .. }) => {
            // A link without a sidecar has no keys; a link that does not exist is an error.
            View::open(dir, &args.link)?;
            (None, None)
        }
        asked => {
            let keys = asked.with_context(|| format!("cannot ask for the keys of link {}", args.link))?;
            (keys, Some("participant"))
        }
    };
    match args.output {
        Output::Text => text(args, keys.as_deref(), out),
        Output::Json => {
            let served_by = if keys.is_some() { Some("sidecar") } else { without };
            let keys: Value = keys.iter().flatten().map(key_json).collect();
            let all = json!({ "link": args.link.as_str(), "served_by": served_by, "keys": keys });
            serde_json::to_writer_pretty(&mut *out, &all)?;
            Ok(writeln!(out)?)
        }
    }
}

fn text(args: &LinkArgs, keys: Option<&[KeyInfo]>, out: &mut dyn Write) -> anyhow::Result<()> {
    let Some(keys) = keys else {
        let link = &args.link;
        return Ok(writeln!(out, "link {link} has no sidecar, so there are no device keys")?);
    };
    if keys.is_empty() {
        return Ok(writeln!(out, "no device keys")?);
    }
    let mut table =
        Table::new(&["HASH", ">SIZE", "MECHANISM", ">EXPORTER", "IMPORTERS", ">ADMITTED", "STATE"]);
    for key in keys {
        table.row([
            key.hash.clone(),
            human::bytes(key.size),
            mechanism(key).to_owned(),
            key.exporter.to_string(),
            importers(key),
            if key.open { "all".to_owned() } else { key.admitted.to_string() },
            state(key).to_owned(),
        ]);
    }
    Ok(table.print(0, out)?)
}

/// `4711, 4712 and 30 more`.
fn importers(key: &KeyInfo) -> String {
    if key.importers.is_empty() {
        return "-".to_owned();
    }
    let named = key.importers.iter().map(i32::to_string).collect::<Vec<_>>().join(", ");
    match (key.importer_count as usize).saturating_sub(key.importers.len()) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

fn state(key: &KeyInfo) -> &'static str {
    match (key.closing, key.open) {
        (true, _) => "closing",
        (false, true) => "open",
        (false, false) => "",
    }
}

fn mechanism(key: &KeyInfo) -> &'static str {
    match key.mechanism() {
        Mechanism::Unspecified => "unknown",
        Mechanism::Host => "host",
        Mechanism::CudaVmm => "cuda-vmm",
        Mechanism::Ascend => "ascend",
        Mechanism::CudaLegacy => "cuda-legacy",
    }
}

fn key_json(key: &KeyInfo) -> Value {
    json!({
        "hash": key.hash,
        "size_bytes": key.size,
        "mechanism": mechanism(key),
        "exporter": key.exporter,
        "importers": key.importers,
        "importer_count": key.importer_count,
        "admitted": key.admitted,
        "open": key.open,
        "closing": key.closing,
    })
}
