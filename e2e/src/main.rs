//! `shmesh-e2e`: tests on a cluster, and the crate whose tests take more than one program.
//!
//! | place | what it is |
//! |---|---|
//! | `args` | the command line |
//! | `place` | the cluster: one that is given, or a kind cluster that is made and removed |
//! | `tools`, `scratch` | commands of others, with a limit and their words; a directory for what they read |
//! | `release` | the chart on the cluster, by `helm` |
//! | `cluster`, `wait` | the API server, and waiting for what it says |
//! | `pods`, `traffic`, `node` | pods and their status; messages that flow; what is on a node, and what is killed there |
//! | `scenarios` | what is shown |
//! | `diagnostics` | what a person would look at after a failure |
//! | `run` | the order of it all, and its end |
//! | `pods/*.yaml`, `pods/*.sh` | pods that are no samples; what the tool's pod runs |
//!
//! Below the cluster, on this machine:
//!
//! | place | what it tests |
//! |---|---|
//! | `tests/suite/cluster` | this program against an API server's double, with `helm`, `kind` and `docker` that only say that they were called |
//! | `tests/suite/scripts.rs` | what the tool's pod runs |
//! | `tests/suite/node.rs` | a node below the cluster: kubelet double, real plugin, containers made by `unshare` of what was allocated, sidecar and applications in them; kills of each |
//! | `tests/suite/identity.rs` | the sidecar and the node's identity service, in pid namespaces as in pods |
//! | `tests/suite/command.rs` | the command line tool with a running sidecar |
//! | `tests/suite/samples.rs` | the samples' own commands and links, as processes |
//! | `kubelet/` | a crate of its own: the kubelet double, for tests of any device plugin |
//!
//! They need root where they make namespaces, and say so where they skip. This crate is not a default member of the workspace.

mod args;
mod cluster;
mod diagnostics;
mod node;
mod pods;
mod provider;
mod release;
mod run;
mod scenarios;
mod scratch;
mod tools;
mod traffic;
mod wait;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};

use args::{Args, Output};
use scenarios::Scenario;

fn main() -> ExitCode {
    let args = Args::parse();
    if args.list {
        list(args.output);
        return ExitCode::SUCCESS;
    }
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(run::run(&args)),
        Err(error) => {
            eprintln!("error: cannot start: {error}");
            ExitCode::FAILURE
        }
    }
}

fn list(output: Output) {
    let all = Scenario::value_variants();
    match output {
        Output::Text => all.iter().for_each(|one| println!("{:<16}{}", one.name(), one.shows())),
        Output::Json => {
            let all: Vec<_> =
                all.iter().map(|one| serde_json::json!({"name": one.name(), "shows": one.shows()})).collect();
            println!("{}", serde_json::json!(all));
        }
    }
}
