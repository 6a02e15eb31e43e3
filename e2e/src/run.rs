//! The sequence of a run: cluster, chart, scenarios, and a cleanup after any outcome.

use std::cell::Cell;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::{Args, Output};
use crate::cluster::Cluster;
use crate::diagnostics;
use crate::provider::ClusterProvider;
use crate::release::Release;
use crate::scenarios::{Scenario, Setup};
use crate::wait::Pace;

/// Exit status if a scenario or the installation failed.
const FAILED: u8 = 1;
/// Exit status if there is no cluster to test on.
const NO_CLUSTER: u8 = 3;

/// How a scenario ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Passed,
    Failed,
    NotRun,
}

#[derive(Debug, Serialize)]
struct Line {
    name: String,
    outcome: Outcome,
    seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Progress of the run, also used for cleanup after an interrupt.
#[derive(Default)]
struct Progress {
    lines: Vec<Line>,
    cluster: Option<Cluster>,
    /// Namespaces created by this run; no others are deleted.
    namespaces: Vec<String>,
    is_testing: bool,
}

/// Waits for SIGINT and SIGTERM.
struct SignalWatcher(Signal, Signal);

impl SignalWatcher {
    fn new() -> Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self(listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?))
    }

    async fn wait(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

fn say(text: &str) {
    eprintln!("{text}");
}

/// Runs everything and returns the exit status.
pub(crate) async fn run(args: &Args) -> ExitCode {
    let found = SignalWatcher::new().and_then(|told| Ok((told, ClusterProvider::find(args)?)));
    let (mut told, mut place) = match found {
        Ok(found) => found,
        Err(error) => return no_cluster(&error),
    };
    let mut progress = Progress::default();
    let done = tokio::select! {
        done = test(args, &mut place, &mut progress) => done,
        () = told.wait() => Err(anyhow::anyhow!("interrupted")),
    };
    if let Err(error) = &done {
        say(&format!("error: {error:#}"));
    }
    let has_failed = done.is_err() || progress.lines.iter().any(|line| line.outcome != Outcome::Passed);
    let cleaned = if args.keep && has_failed && progress.is_testing {
        say(&place.leave(args));
        Ok(())
    } else {
        tokio::select! {
            cleaned = clean(args, &mut place, &progress) => cleaned,
            () = told.wait() => Err(anyhow::anyhow!("interrupted while cleaning up")),
        }
    };
    if let Err(error) = &cleaned {
        say(&format!("error: cleanup failed: {error:#}"));
    }
    let is_passed = !has_failed && cleaned.is_ok();
    report(args, &progress.lines, is_passed);
    match is_passed {
        true => ExitCode::SUCCESS,
        false if done.is_err() && !progress.is_testing => ExitCode::from(NO_CLUSTER),
        false => ExitCode::from(FAILED),
    }
}

fn no_cluster(error: &anyhow::Error) -> ExitCode {
    say(&format!("error: no cluster to test on: {error:#}"));
    ExitCode::from(NO_CLUSTER)
}

/// Runs all scenarios. Returns an error only for failures before them.
async fn test(args: &Args, place: &mut ClusterProvider, progress: &mut Progress) -> Result<()> {
    place.open(args, say).await.context("no cluster to test on")?;
    let kubeconfig = place.kubeconfig();
    let pace = Pace { limit: args.limit(), poll: std::time::Duration::from_millis(args.poll_ms) };
    let cluster = Cluster::connect(&kubeconfig, pace).await.context("no cluster to test on")?;
    let others = cluster.plugins().await?;
    if !others.is_empty() {
        bail!(
            "no cluster to test on: shmesh is already installed ({}), and a node can have only one plugin; uninstall that release first",
            others.join(", ")
        );
    }
    let setup = Setup { args, release: Release::new(args, kubeconfig)?, cluster, tools: Cell::new(0) };
    progress.cluster = Some(setup.cluster.clone());
    make(progress, &setup.cluster, &args.namespace, "privileged").await.context("no cluster to test on")?;
    progress.is_testing = true;
    say("chart: installing");
    if let Err(error) = setup.release.install().await {
        say(&diagnostics::gather(&setup.cluster, &[&args.namespace]).await);
        return Err(error.context("the chart cannot be installed"));
    }
    for scenario in args.scenarios() {
        let is_over = args.keep && progress.lines.iter().any(|line| line.outcome == Outcome::Failed);
        let line = if is_over {
            Line { name: scenario.name(), outcome: Outcome::NotRun, seconds: 0.0, error: None }
        } else {
            one(scenario, &setup, progress).await
        };
        progress.lines.push(line);
    }
    Ok(())
}

/// Runs a scenario in a namespace of its own.
async fn one(scenario: Scenario, setup: &Setup<'_>, progress: &mut Progress) -> Line {
    let (name, began) = (scenario.name(), Instant::now());
    say(&format!("{name}: {}", scenario.shows()));
    let namespace = scenario.namespace(setup.args);
    let mut done = match make(progress, &setup.cluster, &namespace, "restricted").await {
        Ok(()) => scenario.run(setup).await,
        Err(error) => Err(error),
    };
    if let Err(error) = &done {
        say(&format!("{name}: failed: {error:#}"));
        say(&diagnostics::gather(&setup.cluster, &[&namespace, &setup.release.namespace]).await);
    }
    if progress.namespaces.contains(&namespace) && !(setup.args.keep && done.is_err()) {
        let deleted = setup.cluster.delete_namespace(&namespace).await;
        if deleted.is_ok() {
            progress.namespaces.retain(|one| *one != namespace);
        }
        let restored = if deleted.is_ok() { scenario.after(setup).await } else { Ok(()) };
        done = done.and(deleted).and(restored);
    }
    let outcome = if done.is_ok() { Outcome::Passed } else { Outcome::Failed };
    let seconds = (began.elapsed().as_secs_f64() * 10.0).round() / 10.0;
    Line { name, outcome, seconds, error: done.err().map(|error| format!("{error:#}")) }
}

async fn make(progress: &mut Progress, cluster: &Cluster, name: &str, pod_security: &str) -> Result<()> {
    cluster.make_namespace(name, pod_security).await?;
    progress.namespaces.push(name.to_owned());
    Ok(())
}

/// Deletes everything that was created, in reverse order. Deleting a kind cluster suffices.
async fn clean(args: &Args, place: &mut ClusterProvider, progress: &Progress) -> Result<()> {
    if let (ClusterProvider::Existing(kubeconfig), Some(cluster)) = (&*place, &progress.cluster) {
        for namespace in progress.namespaces.iter().rev() {
            if *namespace == args.namespace {
                Release::new(args, kubeconfig.clone())?.uninstall().await?;
            }
            cluster.delete_namespace(namespace).await?;
        }
    }
    place.close().await
}

fn report(args: &Args, lines: &[Line], is_passed: bool) {
    match args.output {
        Output::Json => println!("{}", serde_json::json!({"passed": is_passed, "scenarios": lines})),
        Output::Text => {
            for line in lines {
                let word = match line.outcome {
                    Outcome::Passed => "passed",
                    Outcome::Failed => "failed",
                    Outcome::NotRun => "not run",
                };
                let why = line.error.as_ref().map(|error| format!("  {error}")).unwrap_or_default();
                println!("{word:<9}{:<16}{:>6.1} s{why}", line.name, line.seconds);
            }
        }
    }
}
