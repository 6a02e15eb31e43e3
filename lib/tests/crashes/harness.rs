//! Runs the cases of this binary, each in a process of its own, because they fork and so must have one thread.
//!
//! It understands as much of libtest's command line as `cargo test` and nextest use: `--list`, `--exact`, `--skip`,
//! `--ignored`, `--include-ignored`, `--test-threads` and filters.

use std::collections::VecDeque;
use std::panic::catch_unwind;
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::time::Instant;

/// One test of the harness.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    name: &'static str,
    body: fn(),
    is_long: bool,
}

/// A case that always runs.
pub(crate) const fn quick(name: &'static str, body: fn()) -> Case {
    Case { name, body, is_long: false }
}

/// A case that runs with `--include-ignored` only, as `#[ignore = "long"]` makes a test do.
pub(crate) const fn long(name: &'static str, body: fn()) -> Case {
    Case { name, body, is_long: true }
}

#[derive(Default)]
struct Arguments {
    filters: Vec<String>,
    skipped: Vec<String>,
    list: bool,
    exact: bool,
    only_long: bool,
    with_long: bool,
    threads: Option<usize>,
}

impl Arguments {
    fn parse(mut from: impl Iterator<Item = String>) -> Self {
        let mut arguments = Self::default();
        while let Some(argument) = from.next() {
            let (option, value) = match argument.split_once('=') {
                Some((option, value)) if option.starts_with('-') => {
                    (option.to_owned(), Some(value.to_owned()))
                }
                _ => (argument, None),
            };
            match option.as_str() {
                "--list" => arguments.list = true,
                "--exact" => arguments.exact = true,
                "--ignored" => arguments.only_long = true,
                "--include-ignored" => arguments.with_long = true,
                "--skip" => arguments.skipped.extend(value.or_else(|| from.next())),
                "--test-threads" => {
                    arguments.threads = value.or_else(|| from.next()).and_then(|n| n.parse().ok());
                }
                "--format" | "--color" | "-Z" | "--logfile" => drop(value.or_else(|| from.next())),
                option if option.starts_with('-') => {}
                _ => arguments.filters.push(option),
            }
        }
        arguments
    }

    fn fit(&self, name: &str, pattern: &str) -> bool {
        if self.exact { name == pattern } else { name.contains(pattern) }
    }

    fn choose(&self, case: &Case) -> bool {
        let fits = |patterns: &[String]| patterns.iter().any(|pattern| self.fit(case.name, pattern));
        let long_enough = if self.only_long { case.is_long } else { self.with_long || !case.is_long };
        long_enough && (self.filters.is_empty() || fits(&self.filters)) && !fits(&self.skipped)
    }
}

/// Runs what the command line asks for.
pub(crate) fn main(cases: &[&[Case]]) -> ExitCode {
    let arguments = Arguments::parse(std::env::args().skip(1));
    let all = cases.iter().copied().flatten();
    let chosen: Vec<&Case> = all.clone().filter(|case| arguments.choose(case)).collect();
    if arguments.list {
        chosen.iter().for_each(|case| println!("{}: test", case.name));
        return ExitCode::SUCCESS;
    }
    let failed = match chosen[..] {
        [case] if arguments.exact => {
            let passed = catch_unwind(case.body).is_ok();
            println!("test {} ... {}", case.name, if passed { "ok" } else { "FAILED" });
            usize::from(!passed)
        }
        _ => {
            println!("\nrunning {} tests", chosen.len());
            let failed = run_all(&chosen, arguments.threads);
            let ignored =
                all.filter(|case| case.is_long).count() - chosen.iter().filter(|c| c.is_long).count();
            let result = if failed == 0 { "ok" } else { "FAILED" };
            let passed = chosen.len() - failed;
            println!("\ntest result: {result}. {passed} passed; {failed} failed; {ignored} ignored\n");
            failed
        }
    };
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(101) }
}

/// Starts this program again for each case, twice as many at a time as there are processors, because some wait. Returns how many failed.
fn run_all(chosen: &[&Case], threads: Option<usize>) -> usize {
    let threads = threads.unwrap_or_else(|| 2 * std::thread::available_parallelism().map_or(1, usize::from));
    let program = std::env::current_exe().expect("the path of this program");
    let waiting = Mutex::new(chosen.iter().collect::<VecDeque<_>>());
    let failed = Mutex::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                while let Some(case) = { waiting.lock().expect("a queue").pop_front() } {
                    let started = Instant::now();
                    let output = Command::new(&program)
                        .args([case.name, "--exact", "--include-ignored"])
                        .output()
                        .expect("start this program again");
                    let passed = output.status.success();
                    let mut failed = failed.lock().expect("a count");
                    *failed += usize::from(!passed);
                    let result = if passed { "ok" } else { "FAILED" };
                    println!("test {} ... {result} ({:.1} s)", case.name, started.elapsed().as_secs_f64());
                    if !passed {
                        print!("{}", String::from_utf8_lossy(&output.stdout));
                        eprintln!("{}{}", String::from_utf8_lossy(&output.stderr), output.status);
                    }
                }
            });
        }
    });
    failed.into_inner().expect("a count")
}
