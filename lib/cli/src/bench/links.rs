//! `shmesh bench links`: the cost of a link, and how it grows with the number of links.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use shmesh::config::{LinkConfig, PoolConfig, PoolId};
use shmesh::{LinkOptions, Side};
use shmesh_sys::{procfs, rlimit};

use super::report::{Row, single};
use crate::child::{ProcessGroup, die_with_parent, say};

/// The task of one process: one creates the links, the other attaches to them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct LinksSpec {
    pub(super) dir: PathBuf,
    pub(super) count: usize,
    pub(super) primary: bool,
}

/// The measurements of one side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct LinkCosts {
    /// Microseconds to create or attach each link.
    open_us: Vec<f64>,
    segment_bytes: u64,
    threads: u64,
    fds: u64,
    /// Private memory, without the segments, which both sides share.
    private_bytes: u64,
    /// Nanoseconds to poll one link for a message.
    poll_ns: f64,
}

/// A small link: 64 slots, 64 buffers of 256 bytes.
fn config(i: usize) -> Result<LinkConfig> {
    let mut config = LinkConfig::new(format!("link-{i}").parse()?);
    config.ring_len = 64;
    config.pools = [PoolConfig::DISABLED; PoolId::COUNT];
    config.pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 256, pool_len: 64 };
    Ok(config)
}

/// Runs one side: opens all links, reports the measurements, and closes the links at the end of its input.
pub(super) fn run(spec: &LinksSpec) -> Result<()> {
    die_with_parent()?;
    let hard = rlimit::open_files().context("cannot read the limit of open files")?.hard;
    rlimit::set_open_files(hard).context("cannot raise the limit of open files")?;
    let before = ProcessUsage::now()?;
    let options = LinkOptions::new().dir(&spec.dir).timeout(Duration::from_secs(10));
    let (mut links, mut open_us) = (Vec::new(), Vec::new());
    for i in 0..spec.count {
        let config = config(i)?;
        let start = Instant::now();
        let link = if spec.primary {
            options.create(&config)
        } else {
            options.attach(config.name.as_str(), Side::Secondary)
        };
        links.push(link.with_context(|| {
            format!("link {i} of {}: with a limit of {hard} open files, about 10 for each", spec.count)
        })?);
        open_us.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let after = ProcessUsage::now()?;
    let mut rounds = Vec::new();
    let end = Instant::now() + Duration::from_millis(100);
    while Instant::now() < end || rounds.len() < 16 {
        let start = Instant::now();
        for link in &links {
            anyhow::ensure!(link.receive()?.is_none(), "received a message that was not sent");
        }
        rounds.push(start.elapsed().as_nanos() as f64 / spec.count as f64);
    }
    rounds.sort_by(f64::total_cmp);
    let each = |after: u64, before: u64| after.saturating_sub(before);
    say(&LinkCosts {
        open_us,
        segment_bytes: segment_bytes(spec)?,
        threads: each(after.threads, before.threads),
        fds: each(after.fds, before.fds),
        private_bytes: each(after.private_bytes, before.private_bytes),
        poll_ns: rounds[rounds.len() / 2],
    })?;
    // The other side may still measure.
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(())
}

fn segment_bytes(spec: &LinksSpec) -> Result<u64> {
    let first = config(0)?.name;
    let view = shmesh::inspect::View::open(&spec.dir, &first)?;
    Ok(view.bytes() * spec.count as u64)
}

struct ProcessUsage {
    threads: u64,
    fds: u64,
    private_bytes: u64,
}

impl ProcessUsage {
    fn now() -> Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
        let fds = procfs::open_descriptors().context("cannot read /proc/self/fd")? as u64;
        let threads = procfs::field(&status, "Threads").and_then(|value| value.parse().ok()).unwrap_or(0);
        Ok(Self { threads, fds, private_bytes: procfs::field_bytes(&status, "RssAnon").unwrap_or(0) })
    }
}

/// Measures each number of links.
pub(super) fn measure(session: &ProcessGroup, dir: &std::path::Path, counts: &[usize]) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &count in counts {
        let dir = dir.join(format!("shmesh-bench-{}-{count}", std::process::id()));
        session.make_dir(&dir)?;
        let limit = Instant::now() + Duration::from_secs(120);
        let spec = |primary| super::BenchTask::Links(LinksSpec { dir: dir.clone(), count, primary });
        let (read, write) = std::io::pipe().context("cannot make a pipe")?;
        let primary = session.spawn("bench-side", &spec(true), read.try_clone()?.into())?;
        let created: LinkCosts = primary.says(limit, || ())?;
        let secondary = session.spawn("bench-side", &spec(false), read.into())?;
        let attached: LinkCosts = secondary.says(limit, || ())?;
        // Both read the end of their input, and close their links.
        drop(write);
        secondary.join(limit)?;
        primary.join(limit)?;
        rows.extend(found(count, &created, &attached));
        std::fs::remove_dir(&dir).with_context(|| format!("links were left behind in {}", dir.display()))?;
    }
    Ok(rows)
}

fn found(count: usize, created: &LinkCosts, attached: &LinkCosts) -> Vec<Row> {
    let name = format!("links-{count}");
    let median = |times: &[f64]| {
        let mut times = times.to_vec();
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
    };
    let each = |total: u64| total as f64 / count as f64;
    vec![
        single(&name, "create_us", median(&created.open_us), "median, pages included"),
        single(&name, "attach_us", median(&attached.open_us), "median"),
        single(
            &name,
            "segment_bytes",
            each(created.segment_bytes),
            "per link: 64 slots, 64 buffers of 256 B",
        ),
        single(
            &name,
            "private_bytes",
            each(created.private_bytes),
            "per link, of the process that created them",
        ),
        single(&name, "threads", each(created.threads), "per link, of the same"),
        single(&name, "fds", each(created.fds), "per link, of the same"),
        single(&name, "poll_ns", created.poll_ns, "one look at one empty link, all in turn"),
    ]
}
