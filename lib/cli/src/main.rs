//! The `shmesh` command-line program.

mod args;
mod bench;
mod bridge;
mod capture;
mod child;
mod demo;
mod device;
mod doctor;
mod dump;
mod generate;
mod keys;
mod ls;
mod nvipc;
mod open_files;
mod people;
mod rm;
mod talk;
mod top;
mod who;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use shmesh::ErrorKind;
use shmesh::config::{ConfigError, NameError};
use shmesh_sys::terminal::is_closed_pipe;
use shmesh_sys::{human, table};

use crate::args::LinkArgs;

/// Exit status after a failure, or if a check found a problem.
const FAILED: u8 = 1;
/// Exit status for an invalid command line, as in clap.
const BAD_REQUEST: u8 = 2;
/// Exit status for an invalid configuration (`EX_USAGE` of sysexits, as in the daemons).
const BAD_CONFIG: u8 = 64;

/// A request that is refused before anything is changed.
#[derive(Debug)]
enum Refusal {
    /// The command line is invalid in a way that clap cannot detect.
    Request(String),
    /// The configuration lacks an item that the command line names.
    Config(String),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::Request(what) | Self::Config(what)) = self;
        f.write_str(what)
    }
}

impl std::error::Error for Refusal {}

const EXAMPLES: &str = "\
Examples:
  shmesh demo                      exchange messages, kill a process, recover; ten seconds
  shmesh device check              check whether the GPU can share memory, and how fast
  shmesh doctor                    check whether links work on this machine or in this container
  shmesh ls                        list links and participants, and memory of other programs
  shmesh top                       watch rates, queues and pools of all links
  shmesh dump fronthaul            show queued messages and the owners of buffers
  shmesh capture fronthaul -o a.pcapng    record messages for Wireshark
  shmesh who fronthaul             list the processes known to its sidecar
  shmesh keys fronthaul            list device keys and their importers
  shmesh rm --stale                remove links left behind by crashes
  shmesh talk fronthaul --side primary    send numbered messages to the other side
  shmesh bench --ring spsc         measure the speed, relative to the hardware
  shmesh bridge --link fronthaul --listen tcp/0.0.0.0:7447    carry messages to other machines

Links are in the IPC directory: /dev/shm, SHMESH_DIR, or --dir.

Exit status: 0 success, 1 failure or unhealthy, 2 invalid command line, 64 invalid configuration.";

/// Shared-memory links between the processes of one machine.
#[derive(Parser, Debug)]
#[command(name = "shmesh", version, after_help = EXAMPLES, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Exchange messages between two processes, kill one, and verify that nothing is lost
    Demo(demo::Args),
    /// Measure round trips, streams, single operations, and many links
    Bench(bench::Args),
    /// List links with their participants and queued messages, and shared memory of other programs
    Ls(ls::Args),
    /// Watch the rates, queues, pools and participants of links
    Top(top::Args),
    /// Show queued messages of a link and the owners of its buffers
    Dump(dump::Args),
    /// Record the messages of a link for Wireshark
    Capture(capture::Args),
    /// List the processes on a link, as known to its sidecar
    #[command(after_long_help = who::EXAMPLES)]
    Who(LinkArgs),
    /// List the device keys of a link's sidecar and their importers
    #[command(after_long_help = keys::EXAMPLES)]
    Keys(LinkArgs),
    /// Remove links, and shared memory of other programs, that no process uses
    Rm(rm::Args),
    /// Send numbered messages over an existing link, and count the messages received
    Talk(talk::Args),
    /// Carry the messages of links to another machine and back, with the program `shmesh-bridge`
    Bridge(bridge::Args),
    /// Check whether links work on this machine or in this container
    Doctor(doctor::Args),
    /// Check whether device memory can be shared between processes
    Device(device::Args),
    /// Print completions for a shell
    Completions(generate::CompletionsArgs),
    /// Write man pages of all commands to a directory
    Man(generate::ManArgs),
}

/// The command line of processes that a subcommand starts. Separate from [`Cli`], because clap suggests hidden subcommands too.
#[derive(Parser, Debug)]
#[command(name = "shmesh", disable_help_subcommand = true)]
struct SideCli {
    #[command(subcommand)]
    side: SideCommand,
}

#[derive(Subcommand, Debug)]
enum SideCommand {
    /// One side of the demo, in a process of its own
    #[command(name = "demo-side")]
    Demo(demo::SideArgs),
    /// One side of a benchmark, in a process of its own
    #[command(name = "bench-side")]
    Bench(bench::SideArgs),
    /// One side of a check of a device, in a process of its own
    #[command(name = "device-side")]
    Device(device::SideArgs),
}

fn main() -> ExitCode {
    let is_side = |first: std::ffi::OsString| first.to_str().is_some_and(SideCommand::has_subcommand);
    if std::env::args_os().nth(1).is_some_and(is_side) {
        let done = match SideCli::parse().side {
            SideCommand::Demo(args) => demo::side(&args),
            SideCommand::Bench(args) => bench::side(&args),
            SideCommand::Device(args) => device::side(&args),
        };
        return done.map_or_else(|error| complain(&error), |()| ExitCode::SUCCESS);
    }
    let cli = Cli::parse();
    // Buffered: a slow reader, such as a pager, must not disturb a measurement.
    let mut out = io::BufWriter::new(io::stdout());
    let done = dispatch(&cli.command, &mut out).and_then(|code| Ok(out.flush().map(|()| code)?));
    done.unwrap_or_else(|error| complain(&error))
}

fn dispatch(command: &Command, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    match command {
        Command::Demo(args) => demo::run(args, out),
        Command::Bench(args) => bench::run(args, out),
        Command::Ls(args) => ls::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Top(args) => top::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Dump(args) => dump::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Capture(args) => capture::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Who(args) => who::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Keys(args) => keys::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Rm(args) => rm::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Talk(args) => talk::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Bridge(args) => bridge::run(args).map(|never| match never {}),
        Command::Doctor(args) => doctor::run(args, out).map(ExitCode::from),
        Command::Device(args) => device::run(args, out),
        Command::Completions(args) => generate::completions(args, out).map(|()| ExitCode::SUCCESS),
        Command::Man(args) => generate::man(args).map(|()| ExitCode::SUCCESS),
    }
}

/// Prints the error and its causes once, and returns the exit status.
fn complain(error: &anyhow::Error) -> ExitCode {
    let causes = || error.chain();
    if is_closed_pipe(error.as_ref()) {
        return ExitCode::SUCCESS;
    }
    eprintln!("error: {error}");
    for cause in causes().skip(1) {
        eprintln!("caused by: {cause}");
    }
    let is_request =
        |cause: &(dyn std::error::Error + 'static)| matches!(cause.downcast_ref(), Some(Refusal::Request(_)));
    ExitCode::from(match () {
        () if causes().any(is_configuration) => BAD_CONFIG,
        () if causes().any(is_request) => BAD_REQUEST,
        () => FAILED,
    })
}

fn is_configuration(error: &(dyn std::error::Error + 'static)) -> bool {
    let kind = error.downcast_ref().map(shmesh::Error::kind);
    matches!(kind, Some(ErrorKind::Config(_) | ErrorKind::Name(_)))
        || error.is::<ConfigError>()
        || error.is::<NameError>()
        || matches!(error.downcast_ref(), Some(Refusal::Config(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_any_kubernetes_quantity() {
        for (text, bytes) in shmesh_testing::LEGAL_QUANTITIES {
            let cli = Cli::try_parse_from(["shmesh", "doctor", "--need-bytes", text]).unwrap();
            let Command::Doctor(args) = cli.command else { panic!("{text}") };
            assert_eq!(args.need_bytes.map(|bytes| bytes.0), Some(bytes), "{text}");
            assert!(
                Cli::try_parse_from(["shmesh", "capture", "x", "-o", "-", "--limit-bytes", text]).is_ok(),
                "{text}"
            );
            let shows = Cli::try_parse_from(["shmesh", "dump", "x", "--payload", text]);
            assert_eq!(shows.is_ok(), bytes <= 65_536, "{text}");
            let measures = Cli::try_parse_from(["shmesh", "bench", "--sizes", text]);
            assert_eq!(
                measures.is_ok(),
                (8..=64 << 20).contains(&bytes) && bytes.is_multiple_of(8),
                "{text}"
            );
        }
    }

    #[test]
    fn command_line_is_well_formed() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
        SideCli::command().debug_assert();
    }
}
