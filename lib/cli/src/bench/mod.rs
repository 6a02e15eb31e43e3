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

use crate::Refusal;
use crate::args::{self, Dir, Output};
use crate::child::ProcessGroup;
use measure::Dist;
use report::{Row, RowKind};
use side::{Metric, PayloadForm, RingModeArg, Wait};

const EXAMPLES: &str = "\
How to read a row:
  rtt_ns      one round trip; p50 is over batches of 32, free of the timer; p99 and p99.9 are of singly timed trips
  oneway_ns   one message of a stream, counted at the receiver; percentiles are over batches of 1024
  us_per_msg  the same from 16 KiB on, filled by the sender and summed by the receiver, batches of 16; gib_s its rate
  op_ns       a step on one core
  floor is a bare cache line's round trip around the test, ratio is p50 over it. Virtual cores move on their host, by a
  factor of four on some: compare rows of the same floor, or ask for one with --floor.

Each test runs two processes, each pinned to a core. lib/comparison measures other transports by the same method and with the same
JSON. Leave the machine idle during a run.

Examples:
  shmesh bench                                         everything; about two minutes
  shmesh bench --metric rtt --sizes 48,64 --wait poll  round trips of small messages
  shmesh bench --sizes 65536 --form data --ring spsc
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
    /// Payload sizes in bytes, multiples of 8
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["48", "64", "65536"], value_parser = size)]
    sizes: Vec<usize>,
    /// How messages travel; default: in the ring up to 112 bytes, above 48 also in a MSG buffer, from 4096 also as DATA
    #[arg(long, value_enum, value_name = "FORM,...", value_delimiter = ',')]
    form: Vec<PayloadForm>,
    /// How receivers wait; default: round trips in all ways, streams by polling
    #[arg(long, value_enum, value_name = "WAIT,...", value_delimiter = ',')]
    wait: Vec<Wait>,
    /// Messages sent and received at once, for streams
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["1", "16"],
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    batch: Vec<u16>,
    /// Each test once more with each side in namespaces of its own, as containers are (pid, mount, ipc, net, uts, cgroup);
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
    /// Cores of the two sides, the sender first; default: the first two available cores
    #[arg(long, value_name = "A,B", value_delimiter = ',', num_args = 1, global = true)]
    cores: Vec<usize>,
    /// Use only tests during which the round trip of a bare cache line is within this range in ns; wait for it if needed
    #[arg(long, value_name = "MIN,MAX", value_delimiter = ',', num_args = 1, global = true)]
    floor: Vec<f64>,
    #[command(flatten)]
    dir: Dir,
    /// Output format: a table, or a JSON list of rows
    #[arg(long, value_enum, value_name = "FORM", default_value_t = Output::Text, global = true)]
    output: Output,
}

#[derive(clap::Subcommand, Clone, Debug)]
enum Command {
    /// Measure the cost of each operation on one core, in ns
    Ops,
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
enum Task {
    Side(side::SideSpec),
    Op(ops::OpSpec),
    Links(links::LinksSpec),
}

/// Runs one side of a benchmark.
pub(crate) fn side(args: &SideArgs) -> Result<()> {
    match serde_json::from_str(&args.spec)? {
        Task::Side(spec) => side::run(&spec),
        Task::Op(spec) => ops::run(&spec),
        Task::Links(spec) => links::run(&spec),
    }
}

fn size(text: &str) -> Result<usize, String> {
    let size: usize = text.parse().map_err(|_| "not a number of bytes".to_owned())?;
    let fits = (8..=64 << 20).contains(&size) && size.is_multiple_of(8);
    if fits { Ok(size) } else { Err("must be a multiple of 8 between 8 and 64 MiB".to_owned()) }
}

/// One test: its row in the report, and the tasks of its processes.
struct Case {
    name: String,
    kind: RowKind,
    bytes: usize,
    note: String,
    tasks: Vec<Task>,
    /// Whether each process runs in namespaces of its own.
    apart: bool,
}

/// How long a test may take beyond its measuring time.
const GRACE: Duration = Duration::from_secs(15);

/// Runs the selected benchmarks.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let common = &args.common;
    let cores = cores(common)?;
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
        None => grid(args, cores),
        _ => ops_cases(common, cores.0),
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
        .flat_map(|(case, runs)| report::rows(&case.name, case.kind, case.bytes, &case.note, runs))
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
    let mut found = None;
    for child in &children {
        let said: Option<Dist> = child.says(deadline, || ())?;
        found = found.or(said);
    }
    for child in children {
        child.join(deadline)?;
    }
    found.context("the benchmark returned no measurement")
}

/// All tests share a name: one runs at a time.
fn link_name() -> String {
    format!("bench-{}", std::process::id())
}

fn cores(common: &Common) -> Result<(usize, usize)> {
    let usable = floor::cores()?;
    let (a, b) = match (common.cores[..].as_ref(), &usable[..]) {
        (&[a, b], _) => (a, b),
        ([], &[a, b, ..]) => (a, b),
        ([], _) => anyhow::bail!("two cores are needed, one is usable"),
        _ => return Err(Refusal::Request("--cores needs two cores, as in 0,1".to_owned()).into()),
    };
    request(a != b, || {
        "--cores needs two different cores: two that poll on one measure the scheduler".to_owned()
    })?;
    for core in [a, b] {
        let missing = || format!("core {core} does not exist or this process may not run there");
        request(usable.contains(&core), missing)?;
    }
    Ok((a, b))
}

/// Refuses what cannot be.
fn request(holds: bool, why: impl Fn() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Refusal::Request(why()).into()) }
}

/// Everything that is asked for, in the order of the table.
fn grid(args: &Args, (a, b): (usize, usize)) -> Vec<Case> {
    let mut cases = Vec::new();
    for &metric in &args.metric {
        let (waits, batches) = match metric {
            Metric::Rtt => (vec![Wait::Poll, Wait::Spin, Wait::Futex, Wait::Fd], vec![1]),
            Metric::Oneway => (vec![Wait::Poll], args.batch.clone()),
        };
        let waits = if args.wait.is_empty() { waits } else { args.wait.clone() };
        for &bytes in &args.sizes {
            for form in forms(args, bytes) {
                for &mode in &args.common.ring {
                    for &wait in &waits {
                        for &batch in &batches {
                            let spec = |primary| side::SideSpec {
                                dir: args.common.dir.dir.clone(),
                                name: link_name(),
                                metric,
                                form,
                                bytes,
                                mode,
                                wait,
                                batch: batch.into(),
                                seconds: args.common.seconds,
                                core: if primary { a } else { b },
                                primary,
                            };
                            cases.push(case(&spec, false));
                            if args.apart {
                                cases.push(case(&spec, true));
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
        // In one line of the ring; in two.
        8..=48 => vec![PayloadForm::Inline],
        49..=shmesh::INLINE_MAX_BYTES => vec![PayloadForm::Inline, PayloadForm::Pooled],
        4096.. => vec![PayloadForm::Pooled, PayloadForm::Data],
        _ => vec![PayloadForm::Pooled],
    }
}

fn case(spec: &impl Fn(bool) -> side::SideSpec, apart: bool) -> Case {
    let one = spec(true);
    let lower = |what: &dyn std::fmt::Debug| format!("{what:?}").to_lowercase();
    let mut name = format!(
        "{}-{}-{}-{}-{}",
        lower(&one.form),
        lower(&one.metric),
        one.bytes,
        lower(&one.mode),
        lower(&one.wait)
    );
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
    let bytes = one.bytes;
    let tasks = vec![Task::Side(one), Task::Side(spec(false))];
    Case { name, kind, bytes, note: String::new(), tasks, apart }
}

fn ops_cases(common: &Common, core: usize) -> Vec<Case> {
    let case = |mode: RingModeArg, (op, bytes, note): (&str, usize, &str)| {
        let spec = ops::OpSpec {
            dir: common.dir.dir.clone(),
            name: link_name(),
            op: op.to_owned(),
            mode,
            seconds: common.seconds,
            core,
        };
        let name = format!("op-{op}-{}", format!("{mode:?}").to_lowercase());
        Case {
            name,
            kind: RowKind::Op,
            bytes,
            note: note.to_owned(),
            tasks: vec![Task::Op(spec)],
            apart: false,
        }
    };
    common.ring.iter().flat_map(|&mode| ops::OPS.map(|op| case(mode, op))).collect()
}

/// What a reader must know to judge the numbers.
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
