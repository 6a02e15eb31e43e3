//! `shmesh-e2e`: tests on a cluster; its test suite covers everything that takes more than one program.
//!
//! | module | contents |
//! |---|---|
//! | `args` | command line |
//! | `provider` | the cluster: an existing one, or a kind cluster that is created and deleted |
//! | `tools` | external commands with a timeout, and a directory for their files |
//! | `release` | the chart, installed with `helm` |
//! | `cluster`, `wait` | requests to the API server, and polling |
//! | `pods`, `traffic`, `node` | pods and their status; message counts; inspecting a node and killing processes |
//! | `scenarios` | the scenarios |
//! | `diagnostics` | diagnostics after a failure |
//! | `run` | the sequence of a run |
//! | `pods/*.yaml`, `pods/*.sh` | pods of scenarios, and scripts for the tool pod |
//!
//! The test suite needs no cluster:
//!
//! | file | what it tests |
//! |---|---|
//! | `tests/suite/cluster` | this program against a fake API server, with fake `helm`, `kind` and `docker` |
//! | `tests/suite/scripts.rs` | the scripts for the tool pod |
//! | `tests/suite/node.rs` | a simulated node: fake kubelet, real plugin, containers made with `unshare` from the allocations, sidecar and applications; kills each of them |
//! | `tests/suite/identity.rs` | the sidecar with the identity service, in pid namespaces as in pods |
//! | `tests/suite/command.rs` | the command `shmesh` with a running sidecar |
//! | `tests/suite/samples.rs` | commands and links of the samples, as processes |
//! | `kubelet/` | a crate of its own: a fake kubelet for tests of any device plugin |
//!
//! Tests that create namespaces need root and are skipped with a message otherwise. This crate is not a default member of the workspace.

mod args;
mod cluster;
mod diagnostics;
mod node;
mod pods;
mod provider;
mod release;
mod run;
mod scenarios;
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
