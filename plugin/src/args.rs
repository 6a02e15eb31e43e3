//! The command line. Every option has an environment variable, which is how a chart sets it.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Parser, Subcommand};
use shmesh_daemon::args::LogFormat;

use crate::config::Override;

const EXIT_CODES: &str = "\
Exit status: 0 it was told to end and did so in order, 1 it failed, 2 the command line is wrong, 64 the configuration is
wrong, 69 this place does not let it work (pid namespace, /proc, descriptors).";

const IDENTITY: &str = "\
A sidecar without hostPID sees its clients as process 0. It sends a question with one descriptor: the pidfd of its client
(SO_PEERPIDFD, Linux 6.5), or the accepted socket itself. The answer is the kernel's word: process id in this service's pid
namespace, start time, pidfd inode, uid, gid, and the pod from the cgroup path. NoPods is asked for a pid of their own.

Run it with hostPID and the host's cgroup namespace if you can; it needs no capability and any uid that may write the
socket's directory. Mount the directory, not the socket, into pods: a restart makes a new socket.

Examples:
  shmesh-plugin identity
  shmesh-plugin identity --socket /tmp/agent.sock --socket-mode 0600 --pods pods.yaml --log-format text
  shmesh-plugin identity --check                       # whether one answers; for a probe

Signals: SIGTERM and SIGINT drain and end, SIGHUP reads the pods again.

";

const RUN: &str = "\
Advertises shared memory (<domain>/shm), pools (<domain>/<pool>) and IPC slots of GPUs and NPUs to the kubelet, and is the
node's identity service, in one process. A configuration is a YAML file, --set, or both; without any, defaults hold. Its
schema, the chart's too, is what `shmesh-plugin schema` prints.

Run it as uid 0 without capabilities, with the node's directories mounted below hostRoot, and with the groups of all pools
as supplementalGroups.

Examples:
  shmesh-plugin run --config /etc/shmesh/plugin.yaml --admin 0.0.0.0:9901
  shmesh-plugin run --set shm.budget=8Gi --set 'pools=[{name: fronthaul, gid: 60001}]' --check

Signals: SIGTERM and SIGINT end in order, SIGHUP reads the configuration again; a file that changes is read again by itself.

";

const INJECT: &str = "\
Pods and pod templates with the annotation shmesh.io/links get the sidecar, /dev/shm, resources and environment; all other
documents pass as they are. ResourceKind cannot be honoured is refused, with the annotation's line and the remedy, and nothing is
written.

Examples:
  shmesh-plugin inject -f pod.yaml | kubectl apply -f -
  kustomize build . | shmesh-plugin inject -f - --config injector.yaml -o json

";

const WEBHOOK: &str = "\
Answers the API server's AdmissionReviews at /inject. Replicas make their certificate themselves, keep it in a Secret, replace
it in time and keep the caBundle of the MutatingWebhookConfiguration current; or they read it from files.

Examples:
  shmesh-plugin webhook --config /etc/shmesh/injector.yaml --admin 0.0.0.0:9903
  shmesh-plugin webhook --tls-cert /tls/tls.crt --tls-key /tls/tls.key

Signals: SIGTERM and SIGINT drain and end.

";

/// What runs once per node.
#[derive(Parser, Debug)]
#[command(name = "shmesh-plugin", version, after_help = EXIT_CODES, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) log: Log,
}

/// What it is to do.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// The device plugin and the identity service
    #[command(after_long_help = format!("{RUN}{EXIT_CODES}"))]
    Run(Run),
    /// Prints the schema of the configuration
    Schema,
    /// Tells sidecars who is at the other end of a socket
    #[command(after_long_help = format!("{IDENTITY}{EXIT_CODES}"))]
    Identity(Identity),
    /// Adds to pods in YAML or JSON what their annotations ask for
    #[command(after_long_help = format!("{INJECT}{EXIT_CODES}"))]
    Inject(shmesh_injector::command::Inject),
    /// Adds to new pods of the cluster what their annotations ask for
    #[command(after_long_help = format!("{WEBHOOK}{EXIT_CODES}"))]
    Webhook(shmesh_injector::command::Webhook),
    /// Makes the directory of the identity service's socket, for a service that runs as another user
    Prepare(Prepare),
}

/// The log.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Log {
    /// How lines of the log look
    #[arg(long, global = true, value_name = "FORM", env = "SHMESH_LOG_FORMAT", default_value = "json")]
    pub(crate) log_format: LogFormat,
    /// What is logged: a level, or levels by module as in `info,shmesh_plugin=debug`
    #[arg(long, global = true, value_name = "FILTER", env = "SHMESH_LOG", default_value = "info")]
    pub(crate) log: String,
}

/// The device plugin.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Run {
    /// The configuration, in YAML; read again when it changes
    #[arg(long, value_name = "FILE", env = "SHMESH_PLUGIN_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// One key of the configuration, over the file: shm.unit=128Mi, pools.0.name=a; several, separated by `;`
    #[arg(long, value_name = "KEY=VALUE", env = "SHMESH_PLUGIN_SET", value_delimiter = ';')]
    pub(crate) set: Vec<Override>,
    /// Only say whether the configuration is right
    #[arg(long)]
    pub(crate) check: bool,
    /// Where /livez, /readyz, /metrics and /log-level are served; without it they are not
    #[arg(long, env = "SHMESH_ADMIN", value_name = "IP:PORT")]
    pub(crate) admin: Option<SocketAddr>,
    /// The node's name in the cluster: Events are written about it; without it there are none
    #[arg(long, env = "SHMESH_NODE", value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) node: Option<String>,
}

/// The identity service.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Identity {
    /// The socket to listen on; one that nobody listens on any more is replaced
    #[arg(
        long,
        value_name = "PATH",
        env = "SHMESH_IDENTITY_SOCKET",
        default_value = "/run/shmesh/agent/agent.sock"
    )]
    pub(crate) socket: PathBuf,
    /// The socket's mode: sidecars run as any uid, and whoever reaches it may ask
    #[arg(long, value_name = "OCTAL", env = "SHMESH_IDENTITY_SOCKET_MODE", default_value = "0666")]
    pub(crate) socket_mode: Mode,
    /// A file of pods (YAML or JSON) that confirms uids and gives names; without it pods are not confirmed
    #[arg(long, value_name = "FILE", env = "SHMESH_IDENTITY_PODS")]
    pub(crate) pods: Option<PathBuf>,
    /// Refuse to start in a nested pid namespace; not in kind, where the node itself is nested
    #[arg(long, env = "SHMESH_IDENTITY_REQUIRE_INITIAL_PID_NAMESPACE")]
    pub(crate) require_initial_pid_namespace: bool,
    /// Seconds that a connection may stay without a question
    #[arg(long = "idle-seconds", value_name = "N", env = "SHMESH_IDENTITY_IDLE_SECONDS", default_value = DEFAULT_IDLE)]
    pub(crate) idle: Seconds,
    /// Only say whether a service answers on the socket
    #[arg(long)]
    pub(crate) check: bool,
}

/// What the identity service needs before it starts.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Prepare {
    /// The directory; its parent must be there
    #[arg(long, value_name = "DIR", default_value = "/run/shmesh/agent")]
    pub(crate) directory: PathBuf,
    /// The group that may make sockets in it; without capabilities, one that this process is in
    #[arg(long, value_name = "GID", default_value_t = 65_532)]
    pub(crate) gid: u32,
}

/// Long enough for a sidecar whose clients seldom change.
const DEFAULT_IDLE: &str = "600";

/// Permission bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Mode(pub(crate) u32);

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match u32::from_str_radix(text, 8) {
            Ok(mode) if mode <= 0o777 => Ok(Self(mode)),
            _ => Err("must be octal and at most 0777".into()),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl Identity {
    /// What the device plugin runs beside itself.
    pub(crate) fn beside(
        socket: PathBuf,
        pods: Option<PathBuf>,
        require_initial_pid_namespace: bool,
    ) -> Self {
        let idle = DEFAULT_IDLE.parse().unwrap_or(Seconds(600));
        Self { socket, socket_mode: Mode(0o666), pods, require_initial_pid_namespace, idle, check: false }
    }
}

/// A time that is neither nothing nor for ever.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Seconds(u32);

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(seconds @ 1..=86_400) => Ok(Self(seconds)),
            _ => Err("must lie between 1 and 86400".into()),
        }
    }
}

impl From<Seconds> for Duration {
    fn from(Seconds(seconds): Seconds) -> Self {
        Self::from_secs(seconds.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn modes_are_octal() {
        assert_eq!("0660".parse(), Ok(Mode(0o660)));
        assert_eq!(Mode(0o60).to_string(), "0060");
        for wrong in ["", "rw", "0888", "1777", "-1"] {
            assert!(wrong.parse::<Mode>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_have_bounds() {
        assert_eq!("60".parse(), Ok(Seconds(60)));
        for wrong in ["0", "86401", "-1", "soon"] {
            assert!(wrong.parse::<Seconds>().is_err(), "{wrong}");
        }
    }
}
