//! `shmesh bench ops`: the cost of single operations on one core, without transfers of cache lines.

use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use shmesh::config::LinkConfig;
use shmesh::{Link, LinkOptions, Side};

use super::measure::{Dist, repeat};
use super::side::{RingModeArg, mode};
use super::{floor, payload};
use crate::child::{die_with_parent, say};

/// The operations: name, payload bytes and description.
pub(super) const OPS: [(&str, usize, &str); 6] = [
    ("cycle", 64, "loan, send, receive, release; 64 B written and read"),
    ("cycle-bare", 8, "the same, 8 B touched"),
    ("inline", 48, "send_inline, receive; 48 B written and read"),
    ("empty-receive", 0, "receive on an empty ring"),
    ("loan-drop", 0, "loan, drop"),
    ("ring", 0, "send and receive alone: loaned before, released after"),
];

/// One test, as passed to its process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct OpSpec {
    pub(super) dir: PathBuf,
    pub(super) name: String,
    pub(super) op: String,
    pub(super) mode: RingModeArg,
    pub(super) latency_sample: u32,
    pub(super) seconds: f64,
    pub(super) core: usize,
}

/// Operations per reading of the clock.
const BATCH: u64 = 1024;
/// Number of messages in flight where only the ring is timed.
const ON_THE_RING: usize = 256;

/// Runs one test and reports the result.
pub(super) fn run(spec: &OpSpec) -> Result<()> {
    die_with_parent()?;
    floor::pin(spec.core)?;
    let mut config = LinkConfig::new(spec.name.parse()?);
    config.ring_mode = mode(spec.mode);
    config.latency_sample = spec.latency_sample;
    let options = LinkOptions::new().dir(&spec.dir);
    let primary = options.create(&config)?;
    let secondary = options.attach(&spec.name, Side::Secondary)?;
    // The writer of a broadcast ring is on the primary side.
    let (sender, receiver) =
        if spec.mode == RingModeArg::Broadcast { (primary, secondary) } else { (secondary, primary) };
    let dist = time(spec, &sender, &receiver)?;
    drop((sender, receiver));
    say(&dist)
}

fn time(spec: &OpSpec, sender: &Link, receiver: &Link) -> Result<Dist> {
    let lost = "a message was lost";
    let cycle = |bytes: usize, word: u64| -> Result<()> {
        let mut loan = sender.loan()?;
        payload::fill(loan.resize_msg(bytes)?, word);
        loan.send().map_err(shmesh::Error::from)?;
        let message = receiver.receive()?.context(lost)?;
        anyhow::ensure!(payload::read(message.msg()) == Some(word), "a message was lost or damaged");
        Ok(())
    };
    match spec.op.as_str() {
        "cycle" => repeat(spec.seconds, BATCH, |word| cycle(64, word).map(|()| None)),
        "cycle-bare" => repeat(spec.seconds, BATCH, |word| cycle(8, word).map(|()| None)),
        "inline" => repeat(spec.seconds, BATCH, |word| {
            let mut bytes = [0; 48];
            payload::fill(&mut bytes, word);
            sender.send_inline(1, 0, &bytes)?;
            let message = receiver.receive()?.context(lost)?;
            anyhow::ensure!(payload::read(message.msg()) == Some(word), "a message was lost or damaged");
            Ok(None)
        }),
        "empty-receive" => repeat(spec.seconds, BATCH, |_| {
            anyhow::ensure!(black_box(receiver.receive()?).is_none(), "received a message that was not sent");
            Ok(None)
        }),
        "loan-drop" => repeat(spec.seconds, BATCH, |_| {
            drop(black_box(sender.loan()?));
            Ok(None)
        }),
        "ring" => {
            let (mut loans, mut messages) = (Vec::new(), Vec::with_capacity(ON_THE_RING));
            let dist = repeat(spec.seconds, 1, |_| {
                while loans.len() < ON_THE_RING {
                    loans.push(sender.loan()?);
                }
                let start = Instant::now();
                for loan in loans.drain(..) {
                    loan.send().map_err(shmesh::Error::from)?;
                }
                for _ in 0..ON_THE_RING {
                    messages.push(receiver.receive()?.context(lost)?);
                }
                let time = start.elapsed();
                messages.clear();
                Ok(Some(time))
            })?;
            let each = |ns: f64| ns / ON_THE_RING as f64;
            Ok(Dist {
                p50: each(dist.p50),
                p99: each(dist.p99),
                p999: each(dist.p999),
                mean: each(dist.mean),
                p50_timed: each(dist.p50_timed),
            })
        }
        other => anyhow::bail!("there is no operation {other}"),
    }
}
