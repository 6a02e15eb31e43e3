//! `shmesh bench`: measures the speed of links on this machine.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | the list of tests, and running them |
//! | `side.rs` | one side of a test, in a process of its own |
//! | `ops.rs`, `links.rs` | single operations on one core; many links |
//! | `measure.rs`, `payload.rs` | timing and payload, by the method of `lib/comparison` |
//! | `floor.rs` | the reference: the round trip of a bare cache line |
//! | `report.rs` | rows, as a table or as JSON |

mod floor;
mod links;
mod measure;
mod ops;
mod payload;
mod report;
mod side;

use std::io::Write;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use shmesh_sys::quantity::{Bytes, QuantityError};

use crate::Refusal;
use crate::args::{self, Dir, Output};
use crate::child::ProcessGroup;
use measure::Dist;
use report::{Row, RowKind};
use side::{Metric, PayloadForm, RingModeArg, WaitMode};

const EXAMPLES: &str = "\
How to read a row:
  rtt_ns      one round trip; p50 is over batches of 32, so that reading the clock does not distort it; p99 and p99.9
              are of singly timed trips
  oneway_ns   one message of a stream, counted at the receiver; percentiles are over batches of 1024
  With --ring broadcast and several readers, rtt_ns ends with the answer of the last reader, and the streams' figures are those of
  the slowest reader: with `slow: wait`, which is measured, each reader gets every message.
  us_per_msg  the same from 16 KiB on, filled by the sender and summed by the receiver, batches of 16; gib_s its rate
  op_ns       a step on one core
  floor       the round trip of one cache line between the two cores, measured before and after the test; ratio is p50 divided by
              it. A hypervisor may move virtual cores, which changes the floor up to fourfold: compare only rows with the same
              floor, or require one with --floor

Each test runs two processes or, with broadcast, the writer and its readers, each pinned to a core; readers beyond the last core
share them. lib/comparison measures other transports by the same method and with the same JSON. Leave the machine idle during
a run.

Examples:
  shmesh bench                                         everything; about two minutes
  shmesh bench --metric rtt --sizes 48,64 --wait poll  round trips of small messages
  shmesh bench --sizes 65536 --form data --ring spsc
  shmesh bench --ring broadcast --readers 1,2,4 --wait poll  one writer, and more and more readers
  shmesh bench --apart --sizes 48,65536 --wait poll    the same with each side in its own namespaces
  shmesh bench ops                                     cost of each operation on one core
  shmesh bench links --counts 1,100,1000               memory, threads, files and time per link
  shmesh bench --output json > shmesh.json             progress goes to standard error

Exit status: 0 success, 1 a test failed, 2 invalid command line.";

/// The options of `shmesh bench`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES, disable_help_subcommand = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// The metrics to measure
    #[arg(long, value_enum, value_name = "METRIC,...", value_delimiter = ',', default_values = ["rtt", "oneway"])]
    metric: Vec<Metric>,
    /// Payload sizes in bytes, such as 64 or 64Ki; multiples of 8
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["48", "64", "65536"], value_parser = size)]
    sizes: Vec<usize>,
    /// How messages travel; default: in the ring up to 112 bytes, above 48 also in a MSG buffer, from 4096 also as DATA
    #[arg(long, value_enum, value_name = "FORM,...", value_delimiter = ',')]
    form: Vec<PayloadForm>,
    /// How receivers wait; default: round trips in all ways, streams by polling
    #[arg(long, value_enum, value_name = "WAIT,...", value_delimiter = ',')]
    wait: Vec<WaitMode>,
    /// Numbers of readers, for broadcast rings
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["1", "2", "4"],
          value_parser = clap::value_parser!(u16).range(1..=shmesh::config::MAX_READERS as i64))]
    readers: Vec<u16>,
    /// Messages sent and received at once, for streams
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["1", "16"],
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    batch: Vec<u16>,
    /// Repeat each test with each side in namespaces of its own, as containers are (pid, mount, ipc, net, uts, cgroup);
    /// needs root and `unshare`
    #[arg(long)]
    apart: bool,
    /// List the tests and exit
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    common: Common,
}

/// The options of all benchmarks.
#[derive(clap::Args, Clone, Debug)]
struct Common {
    /// Ring modes to measure
    #[arg(long, value_enum, value_name = "MODE,...", value_delimiter = ',', default_values = ["spsc", "mpmc"], global = true)]
    ring: Vec<RingModeArg>,
    /// Seconds per repetition of a test; the first tenth is discarded
    #[arg(long, value_name = "S", default_value_t = 0.5, value_parser = args::seconds, global = true)]
    seconds: f64,
    /// Number of repetitions; each figure is the median
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..), global = true)]
    repeat: u32,
    /// Cores of the two sides, the sender first, and of further readers; default: the available cores in their order
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', num_args = 1, global = true)]
    cores: Vec<usize>,
    /// Use only tests during which the round trip of one cache line is within this range in ns; wait for it if needed
    #[arg(long, value_name = "MIN,MAX", value_delimiter = ',', num_args = 1, global = true)]
    floor: Vec<f64>,
    #[command(flatten)]
    dir: Dir,
    /// Output format: a table, or a JSON list of rows
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Output::Text, global = true)]
    output: Output,
}

#[derive(clap::Subcommand, Clone, Debug)]
enum Command {
    /// Measure the cost of each operation on one core, in ns
    Ops {
        /// Time one message of N, as latency.sample of a link does
        #[arg(long, value_name = "N", default_value_t = 0)]
        latency_sample: u32,
    },
    /// Measure the cost of links: memory, threads, files, time to create, attach and poll
    Links {
        /// Numbers of links to measure
        #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["1", "100", "1000"],
              value_parser = clap::value_parser!(u32).range(1..=10_000))]
        counts: Vec<u32>,
    },
}

/// One side of a benchmark.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct SideArgs {
    spec: String,
}

/// The task of a process that the benchmark starts.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum BenchTask {
    Side(side::SideSpec),
    Op(ops::OpSpec),
    Links(links::LinksSpec),
}

/// Runs one side of a benchmark.
pub(crate) fn side(args: &SideArgs) -> Result<()> {
    match serde_json::from_str(&args.spec)? {
        BenchTask::Side(spec) => side::run(&spec),
        BenchTask::Op(spec) => ops::run(&spec),
        BenchTask::Links(spec) => links::run(&spec),
    }
}

fn size(text: &str) -> Result<usize, String> {
    let Bytes(size) = text.parse().map_err(|error: QuantityError| error.to_string())?;
    match usize::try_from(size) {
        Ok(size @ 8..=0x400_0000) if size.is_multiple_of(8) => Ok(size),
        _ => Err("must be a multiple of 8 between 8 and 64Mi".to_owned()),
    }
}

/// One test: its row in the report, and the tasks of its processes.
struct Case {
    name: String,
    kind: RowKind,
    bytes: usize,
    note: String,
    tasks: Vec<BenchTask>,
    /// Whether each process runs in namespaces of its own.
    apart: bool,
}

/// How long a test may take beyond its measuring time.
const GRACE: Duration = Duration::from_secs(15);

/// Runs the selected benchmarks.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let common = &args.common;
    let all_cores = cores(common)?;
    let cores = (all_cores[0], all_cores[1]);
    let wanted = &common.floor;
    let range = wanted.is_empty() || matches!(wanted[..], [min, max] if min < max);
    request(range, || "--floor needs two numbers, the lower first, as in 90,130".to_owned())?;
    if let Some(Command::Links { counts }) = &args.command {
        let session = ProcessGroup::begin()?;
        let counts: Vec<usize> = counts.iter().map(|&count| count as usize).collect();
        let rows = links::measure(&session, &common.dir.dir, &counts)?;
        report::print(&rows, common.output, out)?;
        return Ok(ExitCode::SUCCESS);
    }
    let cases = match args.command {
        Some(Command::Ops { latency_sample }) => ops_cases(common, cores.0, latency_sample),
        _ => grid(args, &all_cores),
    };
    request(!cases.is_empty(), || "nothing to measure: inline messages have at most 112 bytes".to_owned())?;
    if args.apart && !args.list {
        let runs =
            std::process::Command::new("unshare").args(["--pid", "--fork", "--mount-proc", "true"]).output();
        let can = runs.is_ok_and(|ran| ran.status.success());
        request(can, || {
            "--apart needs root (CAP_SYS_ADMIN) and unshare of util-linux; leave it out".to_owned()
        })?;
    }
    if args.list {
        for case in &cases {
            writeln!(out, "{}", case.name)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    remarks(cores);
    let session = ProcessGroup::begin()?;
    let mut runs = vec![Vec::new(); cases.len()];
    let mut failed = false;
    // Repetitions outside, tests inside: a host that slows down for a while disturbs one repetition of all tests, not all
    // repetitions of one.
    for round in 1..=common.repeat {
        for (case, runs) in cases.iter().zip(&mut runs) {
            eprintln!("{round}/{}  {}", common.repeat, case.name);
            match floor::around(cores, wanted, || once(&session, common, case)) {
                Ok(run) => runs.push(run),
                Err(error) => {
                    eprintln!("failed   {}: {error:#}", case.name);
                    failed = true;
                }
            }
        }
    }
    let done = cases.iter().zip(&runs).filter(|(_, runs)| !runs.is_empty());
    let rows: Vec<Row> = done
        .flat_map(|(case, runs)| {
            report::rows(&case.name, case.kind, case.bytes, &case.note, case.tasks.len(), runs)
        })
        .collect();
    report::print(&rows, common.output, out)?;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// One repetition of one test.
fn once(session: &ProcessGroup, common: &Common, case: &Case) -> Result<Dist> {
    let name = link_name().parse()?;
    session.owns_link(&common.dir.dir, &name);
    let deadline = Instant::now() + Duration::from_secs_f64(common.seconds) + GRACE;
    let spawn = |task| match case.apart {
        false => session.spawn("bench-side", task, Stdio::null()),
        true => session.spawn_apart("bench-side", task, Stdio::null()),
    };
    let children = case.tasks.iter().map(spawn).collect::<Result<Vec<_>>>()?;
    let mut found: Option<Dist> = None;
    for child in &children {
        let said: Option<Dist> = child.says(deadline, || ())?;
        // The result of several readers is the slowest one's.
        found = found.into_iter().chain(said).max_by(|a, b| a.mean.total_cmp(&b.mean));
    }
    for child in children {
        child.join(deadline)?;
    }
    found.context("the benchmark returned no measurement")
}

/// The name of the link. All tests share it, because one runs at a time.
fn link_name() -> String {
    format!("bench-{}", std::process::id())
}

/// The cores of the sender, the receiver and further readers: at least two, all different.
fn cores(common: &Common) -> Result<Vec<usize>> {
    let usable = floor::cores()?;
    if common.cores.is_empty() {
        anyhow::ensure!(usable.len() > 1, "two cores are needed, but this process may use only one");
        return Ok(usable);
    }
    let cores = common.cores.clone();
    request(cores.len() > 1, || "--cores needs at least two cores, as in 0,1".to_owned())?;
    for (i, core) in cores.iter().enumerate() {
        request(!cores[..i].contains(core), || {
            "--cores needs different cores: two processes that poll on one measure the scheduler".to_owned()
        })?;
        let missing = || format!("core {core} does not exist, or this process may not run there");
        request(usable.contains(core), missing)?;
    }
    Ok(cores)
}

/// Refuses an invalid command line.
fn request(holds: bool, why: impl Fn() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Refusal::Request(why()).into()) }
}

/// All requested tests, in the order of the table.
fn grid(args: &Args, cores: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for &metric in &args.metric {
        let (waits, batches) = match metric {
            Metric::Rtt => (vec![WaitMode::Poll, WaitMode::Spin, WaitMode::Futex, WaitMode::Fd], vec![1]),
            Metric::Oneway => (vec![WaitMode::Poll], args.batch.clone()),
        };
        let waits = if args.wait.is_empty() { waits } else { args.wait.clone() };
        for &bytes in &args.sizes {
            for form in forms(args, bytes) {
                for &mode in &args.common.ring {
                    let readers = if mode == RingModeArg::Broadcast { args.readers.clone() } else { vec![1] };
                    for &readers in &readers {
                        for &wait in &waits {
                            for &batch in &batches {
                                let spec = side::SideSpec {
                                    dir: args.common.dir.dir.clone(),
                                    name: link_name(),
                                    metric,
                                    form,
                                    bytes,
                                    mode,
                                    wait,
                                    batch: batch.into(),
                                    readers: readers.into(),
                                    shares_core: usize::from(readers) >= cores.len(),
                                    seconds: args.common.seconds,
                                    core: cores[0],
                                    primary: true,
                                };
                                cases.push(case(&spec, cores, false));
                                if args.apart {
                                    cases.push(case(&spec, cores, true));
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    cases
}

fn forms(args: &Args, bytes: usize) -> Vec<PayloadForm> {
    let fits = |form: &PayloadForm| *form != PayloadForm::Inline || bytes <= shmesh::INLINE_MAX_BYTES;
    if !args.form.is_empty() {
        return args.form.iter().copied().filter(fits).collect();
    }
    match bytes {
        // Up to 48 bytes take one line of the ring, more take two.
        8..=48 => vec![PayloadForm::Inline],
        49..=shmesh::INLINE_MAX_BYTES => vec![PayloadForm::Inline, PayloadForm::Pooled],
        4096.. => vec![PayloadForm::Pooled, PayloadForm::Data],
        _ => vec![PayloadForm::Pooled],
    }
}

/// The test whose primary side is `one`.
fn case(one: &side::SideSpec, cores: &[usize], apart: bool) -> Case {
    let lower = |what: &dyn std::fmt::Debug| format!("{what:?}").to_lowercase();
    let mut name = format!("{}-{}-{}-{}", lower(&one.form), lower(&one.metric), one.bytes, lower(&one.mode));
    let mut note = String::new();
    if one.mode == RingModeArg::Broadcast {
        name.push_str(&one.readers.to_string());
        let others = cores.len() - 1;
        if one.shares_core {
            note = format!("{} readers on {others} core{}", one.readers, if others == 1 { "" } else { "s" });
        }
    }
    name.push_str(&format!("-{}", lower(&one.wait)));
    if one.batch > 1 {
        name.push_str(&format!("-batch{}", one.batch));
    }
    if apart {
        name.push_str("-apart");
    }
    let kind = match one.metric {
        Metric::Rtt => RowKind::RoundTrip,
        Metric::Oneway if one.is_bulk() => RowKind::Bulk,
        Metric::Oneway => RowKind::OneWay,
    };
    let reader =
        |core: &usize| BenchTask::Side(side::SideSpec { core: *core, primary: false, ..one.clone() });
    let readers = cores[1..].iter().cycle().take(one.readers).map(reader);
    let tasks = std::iter::once(BenchTask::Side(one.clone())).chain(readers).collect();
    Case { name, kind, bytes: one.bytes, note, tasks, apart }
}

fn ops_cases(common: &Common, core: usize, latency_sample: u32) -> Vec<Case> {
    let case = |mode: RingModeArg, (op, bytes, note): (&str, usize, &str)| {
        let spec = ops::OpSpec {
            dir: common.dir.dir.clone(),
            name: link_name(),
            op: op.to_owned(),
            mode,
            latency_sample,
            seconds: common.seconds,
            core,
        };
        let name = format!("op-{op}-{}", format!("{mode:?}").to_lowercase());
        Case {
            name,
            kind: RowKind::Op,
            bytes,
            note: note.to_owned(),
            tasks: vec![BenchTask::Op(spec)],
            apart: false,
        }
    };
    common.ring.iter().flat_map(|&mode| ops::OPS.map(|op| case(mode, op))).collect()
}

/// Prints facts about the machine that affect the numbers.
fn remarks((a, b): (usize, usize)) {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let model = model.trim_start_matches(['\t', ' ', ':']);
    eprintln!("machine  {model}, kernel {}, cores {a} and {b}", read("/proc/sys/kernel/osrelease").trim());
    let load = read("/proc/loadavg");
    if load.split(' ').next().and_then(|load| load.parse().ok()).is_some_and(|load: f64| load > 0.3) {
        eprintln!("warning  the machine is not idle (load {}): ratios may hold, tails will not", load.trim());
    }
}
