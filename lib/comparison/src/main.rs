//! The limits of this machine and the peers of shmesh, measured in one run by one method.

#[cfg(feature = "aeron")]
mod aeron;
#[cfg(feature = "boost")]
mod boost;
mod harness;
mod iceoryx;
mod inprocess;
mod ladder;
mod leftovers;
mod limits;
mod measure;
mod optional;
mod payload;
mod report;
mod rings;
mod sockets;
#[cfg(feature = "tachyon")]
mod tachyon;
#[cfg(feature = "zenoh")]
mod zenoh;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::{Parser, ValueEnum};

use crate::measure::{Clock, Ctx};
use crate::report::{Case, Group, Row, Run};

/// Measures what this machine allows and what the peers of shmesh reach, by one method, in one run.
///
/// Every test is two processes, forked before any library starts and pinned to a core each, unless its row says one.
/// Both sides write and read the whole payload, and check it. Ratios between rows of one run mean something; absolute
/// numbers, or rows of different runs, mean little on a shared machine.
#[derive(Parser, Debug)]
#[command(version, after_long_help = EXAMPLES)]
struct Args {
    /// Run only these tests: names, beginnings of names, or the groups `limit` and `peer`
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
    /// How long each repetition of each test measures; its first tenth is thrown away
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// How often everything is repeated; each figure is the median over the repetitions
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// The cores of the two sides: the pinging or producing one first
    #[arg(long, value_name = "A,B", value_delimiter = ',', num_args = 1, default_value = "0,1")]
    cores: Vec<usize>,
    /// Count only tests during which a bare cache line's round trip lies between these, in ns; wait for it if need be
    #[arg(long, value_name = "MIN,MAX", value_delimiter = ',', num_args = 1)]
    floor: Vec<f64>,
    /// A table for people, or a list of rows for scripts
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// Print the names of the tests, and on stderr how to get the peers that are not compiled in, and leave
    #[arg(long)]
    list: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Text,
    Json,
}

const EXAMPLES: &str = "\
How to read a row:
  rtt_ns      one round trip; p50 and mean are over batches of 32, so free of the timer; p99 and p99.9 are of
              singly timed trips, and `p50 timed` is the median of those
  oneway_ns   one message of a stream, counted at the consumer; percentiles are over batches of 1024
  us_per_msg  the same for 64 KiB, filled by the producer and summed by the consumer, batches of 16
  gib_s       the payload's rate; p99 is the rate that 99 % of the batches reach
  op_ns       push and pop, or their like, on one thread
  floor is a bare cache line's round trip around the test. Virtual cores move on their host, by a factor of four
  on some: compare rows of the same floor, divide by it, or ask for one with --floor. A test during which it jumped
  is tried again, four times at most.
  p50 min..max tells how much the repetitions differ: if it is wide, the machine was not idle.

Examples:
  comparison                                     everything, about three minutes; leave the machine alone meanwhile
  comparison --only limit                        the limits alone
  comparison --only cacheline,inline,iceoryx2-rtt --repeat 7
  comparison --floor 90,130                      only while the two cores are this near; cacheline-rtt tells what there is
  comparison --output json > comparison.json         progress and remarks go to stderr
  comparison --cores 2,3                         two cores that share no core but an L3, for comparable numbers

The exit status is 1 if a test failed (the others are reported all the same), and 2 for a bad request.";

/// All tests, in the order of the table.
fn cases() -> impl Iterator<Item = &'static Case> {
    let limits = limits::CASES.iter().chain(rings::CASES).chain(ladder::CASES);
    limits.chain(iceoryx::CASES).chain(inprocess::CASES).chain(sockets::CASES).chain(optional::cases())
}

fn chosen(only: &[String]) -> Result<Vec<&'static Case>> {
    let matches = |case: &Case, what: &str| match what {
        "limit" => case.group == Group::Limit,
        "peer" => case.group == Group::Peer,
        // A full name means that test alone, even where it begins another.
        _ if cases().any(|case| case.name == what) => case.name == what,
        _ => case.name.starts_with(what),
    };
    for what in only {
        if what.is_empty() || !cases().any(|case| matches(case, what)) {
            let remedy = optional::remedy_for(what).unwrap_or_else(|| "see --list".into());
            bail!("no test is called {what:?}; {remedy}");
        }
    }
    Ok(cases().filter(|case| only.is_empty() || only.iter().any(|what| matches(case, what))).collect())
}

fn check_cores(cores: &[usize]) -> Result<(usize, usize)> {
    let &[a, b] = cores else { bail!("--cores needs two cores, as in 0,1") };
    ensure!(a != b, "--cores needs two different cores: two sides that poll on one measure the scheduler");
    // SAFETY: an all-zero set is a valid, empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a valid place for the answer and its size is given.
    harness::checked(unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) })?;
    for core in [a, b] {
        // SAFETY: only reads the set, and the index is checked against its size.
        let allowed = core < libc::CPU_SETSIZE as usize && unsafe { libc::CPU_ISSET(core, &set) };
        ensure!(allowed, "core {core} does not exist or this process may not run there");
    }
    Ok((a, b))
}

/// Prints the machine's properties that a reader needs to judge the numbers.
fn remarks(ctx: &Ctx) {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let model = model.trim_start_matches(['\t', ' ', ':']);
    eprintln!(
        "machine  {model}, kernel {}, cores {} and {}",
        read("/proc/sys/kernel/osrelease").trim(),
        ctx.cores.0,
        ctx.cores.1
    );
    eprintln!("timer    {}", ctx.clock.describe());
    optional::missing().for_each(|line| eprintln!("missing  {line}"));
    let load = read("/proc/loadavg");
    let busy = load.split(' ').next().and_then(|load| load.parse().ok()).is_some_and(|load: f64| load > 0.3);
    if busy {
        eprintln!(
            "warning  the machine is not idle (load {}): ratios may still hold, tails will not",
            load.trim()
        );
    }
}

/// How much the yardstick may differ before and after a test, and how often a test is tried for that.
const STEADY: f64 = 1.25;
const TRIES: u32 = 5;
/// How often, a tenth of a second apart, the yardstick is looked at while it lies outside `--floor`.
const LOOKS: u32 = 300;

/// One repetition of `case`, between two looks at the yardstick. A host that moved a core meanwhile spoils it.
fn measure(case: &Case, ctx: &Ctx, floor: &[f64]) -> Result<Run> {
    let yardstick = || limits::cacheline(&Ctx { seconds: 0.03, ..*ctx }).map(|dist| dist.p50);
    let wanted = |ns: f64| floor.is_empty() || (floor[0]..=floor[1]).contains(&ns);
    for attempt in 1..=TRIES {
        let mut before = yardstick()?;
        let mut looks = 1;
        while !wanted(before) {
            ensure!(looks < LOOKS, "a bare cache line takes {before:.0} ns, and did not come into --floor");
            std::thread::sleep(Duration::from_millis(100));
            before = yardstick()?;
            looks += 1;
        }
        let dist = (case.run)(ctx)?;
        let after = yardstick()?;
        let steady = before.max(after) < before.min(after) * STEADY && wanted(after);
        // Without a wish, a restless machine is better shown than not measured.
        if steady || (floor.is_empty() && attempt == TRIES) {
            return Ok(Run { dist, floor_ns: (before + after) / 2.0 });
        }
        eprintln!("moved    a bare cache line took {before:.0} ns before and {after:.0} ns after");
    }
    bail!("the cores moved in each of {TRIES} tries")
}

fn main() -> ExitCode {
    run(&Args::parse()).unwrap_or_else(|error| {
        eprintln!("comparison: {error:#}");
        ExitCode::from(2)
    })
}

fn run(args: &Args) -> Result<ExitCode> {
    let chosen = chosen(&args.only)?;
    if args.list {
        for case in &chosen {
            println!("{}", case.name);
        }
        optional::missing().for_each(|line| eprintln!("missing  {line}"));
        return Ok(ExitCode::SUCCESS);
    }
    ensure!(args.seconds >= 0.1 && args.seconds <= 600.0, "--seconds must lie between 0.1 and 600");
    let range = args.floor.is_empty() || matches!(args.floor[..], [min, max] if min < max);
    ensure!(range, "--floor needs two numbers, the lower first, as in 90,130");
    let ctx = Ctx { clock: Clock::new(), seconds: args.seconds, cores: check_cores(&args.cores)? };
    remarks(&ctx);

    let mut runs = vec![Vec::new(); chosen.len()];
    let mut failed = false;
    // Repetitions outside, tests inside: a host that slows down for a while then disturbs one repetition of all tests,
    // not all repetitions of one.
    for round in 1..=args.repeat {
        for (case, runs) in chosen.iter().zip(&mut runs) {
            eprintln!("{round}/{}  {}", args.repeat, case.name);
            match measure(case, &ctx, &args.floor) {
                Ok(run) => runs.push(run),
                Err(error) => {
                    eprintln!("failed   {}: {error:#}", case.name);
                    failed = true;
                }
            }
        }
    }
    let done = chosen.iter().zip(&runs).filter(|(_, runs)| !runs.is_empty());
    let rows: Vec<Row> = done.flat_map(|(case, runs)| case.rows(runs)).collect();
    match args.output {
        Output::Text => print!("{}", report::table(&rows)),
        Output::Json => println!("{}", serde_json::to_string_pretty(&rows)?),
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
