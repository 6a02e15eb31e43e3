//! Command line of `shmesh-plugin`. Every option has an environment variable, which the chart sets.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, Subcommand};
use shmesh_daemon::args::LogFormat;

use crate::config::Override;

const EXIT_CODES: &str = "\
Exit status: 0 shut down by a signal, 1 an operation failed, 2 invalid command line, 64 invalid configuration, 69 unsuitable
environment (pid namespace, /proc, limit of open files).";

const IDENTITY: &str = "\
A sidecar without hostPID sees all its clients as process 0. It sends the service the pidfd of a client (SO_PEERPIDFD,
Linux 6.5) or the accepted socket. The service answers with what the kernel reports: process id in the service's pid
namespace, start time, pidfd inode, uid, gid, and the pod from the cgroup path. Clients are never asked for their own pid.

Run it with hostPID and, if possible, the host's cgroup namespace. It needs no capabilities, and any uid that can write to
the directory of the socket. Mount the directory, not the socket, into pods: a restart creates a new socket.

Examples:
  shmesh-plugin identity
  shmesh-plugin identity --socket /tmp/agent.sock --socket-mode 0600 --pods pods.yaml --log-format text
  shmesh-plugin identity --node worker-1                # names of pods from the API server
  shmesh-plugin identity --check                       # for a probe: does the service answer?

Signals: SIGTERM and SIGINT drain and exit, SIGHUP reloads the file of pods.

";

const RUN: &str = "\
Advertises shared memory (<domain>/shm), pools (<domain>/<pool>) and IPC slots of GPUs and NPUs to the kubelet, and runs the
identity service of the node in the same process. With `mode: dra` in the configuration it is a DRA driver instead: it publishes
ResourceSlices, and gives each ResourceClaim a directory and a group of its own. The configuration comes from a YAML file, --set, or both; all keys have
defaults. `shmesh-plugin schema` prints its schema, which the chart uses too.

Run it as uid 0 without capabilities, with the directories of the node mounted below hostRoot and the groups of all pools in
supplementalGroups.

Examples:
  shmesh-plugin run --config /etc/shmesh/plugin.yaml --admin 0.0.0.0:9901
  shmesh-plugin run --set shm.budget=8Gi --set 'pools=[{name: fronthaul, gid: 60001}]' --check

Signals: SIGTERM and SIGINT shut down, SIGHUP reloads the configuration. A changed file is also reloaded without a signal.

";

const INJECT: &str = "\
Adds the sidecar, /dev/shm, resources and environment to pods and pod templates with the annotation shmesh.io/links; all other
documents pass unchanged. If a pod cannot be injected, the error names the line of the annotation and the remedy, and nothing
is written.

Examples:
  shmesh-plugin inject -f pod.yaml | kubectl apply -f -
  kustomize build . | shmesh-plugin inject -f - --config injector.yaml -o json

";

const CLAIM: &str = "\
Prints a ResourceClaim (resource.k8s.io/v1, of the DeviceClass shmesh-domain) for the links that pods and pod templates have in
the annotation shmesh.io/links: with the bytes that the links need, and the links as parameters of the driver. Links of scope
claim/<name> go to the claim of that name, all others to that of --name. A pod with shmesh.io/share: claim/<name> and no links
gets a claim of the default size.

Examples:
  shmesh-plugin claim -f pods.yaml | kubectl apply -f -
  shmesh-plugin claim -f deployment.yaml -n du --template

";

const WEBHOOK: &str = "\
Answers AdmissionReviews of the API server at /inject. The replicas issue and renew their certificate, share it in a Secret and
update the caBundle of the MutatingWebhookConfiguration; or they read a certificate from files.

Examples:
  shmesh-plugin webhook --config /etc/shmesh/injector.yaml --admin 0.0.0.0:9903
  shmesh-plugin webhook --tls-cert /tls/tls.crt --tls-key /tls/tls.key

Signals: SIGTERM and SIGINT drain and exit.

";

/// The per-node daemon of shmesh: device plugin, identity service, injector
#[derive(Parser, Debug)]
#[command(name = "shmesh-plugin", version, after_help = EXIT_CODES, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) log: Log,
}

/// The subcommands of `shmesh-plugin`.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run the device plugin and the identity service
    #[command(after_long_help = format!("{RUN}{EXIT_CODES}"))]
    Run(RunArgs),
    /// Print the JSON schema of the configuration
    Schema,
    /// Run the identity service, which identifies the processes behind sockets for sidecars
    #[command(after_long_help = format!("{IDENTITY}{EXIT_CODES}"))]
    Identity(IdentityArgs),
    /// Inject sidecars into pods and pod templates in YAML or JSON
    #[command(after_long_help = format!("{INJECT}{EXIT_CODES}"))]
    Inject(shmesh_injector::command::Inject),
    /// Print ResourceClaims for the links of pods and pod templates in YAML or JSON
    #[command(after_long_help = format!("{CLAIM}{EXIT_CODES}"))]
    Claim(shmesh_injector::command::ClaimArgs),
    /// Serve the admission webhook that injects sidecars into new pods
    #[command(after_long_help = format!("{WEBHOOK}{EXIT_CODES}"))]
    Webhook(shmesh_injector::command::Webhook),
    /// Let no new claim be allocated to this node: its devices get the taint `<domain>/draining`
    ///
    /// For the DRA driver, in the container of the plugin. Claims that the node has stay. It lasts until `--undo`, also when
    /// the node restarts.
    Drain(DrainArgs),
    /// Create the directory of the identity service's socket for a service that does not run as root
    Prepare(Prepare),
}

/// Logging options of all subcommands.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Log {
    /// Format of log lines
    #[arg(long, global = true, value_name = "FORMAT", env = "SHMESH_LOG_FORMAT", default_value = "json")]
    pub(crate) log_format: LogFormat,
    /// Log level, or filter such as `info,shmesh_plugin=debug`
    #[arg(long, global = true, value_name = "FILTER", env = "SHMESH_LOG", default_value = "info")]
    pub(crate) log: String,
}

/// Options of `shmesh-plugin run`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct RunArgs {
    /// Configuration file in YAML; reloaded when it changes
    #[arg(long, value_name = "FILE", env = "SHMESH_PLUGIN_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Override a key of the configuration file, e.g. shm.unit=128Mi or pools.0.name=a; separate several with
    /// `;`
    #[arg(long, value_name = "KEY=VALUE", env = "SHMESH_PLUGIN_SET", value_delimiter = ';')]
    pub(crate) set: Vec<Override>,
    /// Validate the configuration and exit
    #[arg(long)]
    pub(crate) check: bool,
    /// Address for /livez, /readyz, /metrics and /log-level; not served by default
    #[arg(long, env = "SHMESH_ADMIN", value_name = "IP:PORT")]
    pub(crate) admin: Option<SocketAddr>,
    /// Name of this node, about which Kubernetes Events are written; without it none are written. Required for mode: dra
    #[arg(long, env = "SHMESH_NODE", value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) node: Option<String>,
    /// Uid of this pod, which distinguishes instances of the DRA driver on a node; the process id by default
    #[arg(long, env = "POD_UID", value_name = "UID", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) pod_uid: Option<String>,
    /// Milliseconds in which the kubelet notices the end of an instance that has handed over; shorter in tests only
    #[arg(long, hide = true, value_name = "MILLISECONDS")]
    pub(crate) settle: Option<u64>,
}

/// Options of `shmesh-plugin drain`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct DrainArgs {
    /// Configuration file of the plugin in YAML
    #[arg(long, value_name = "FILE", env = "SHMESH_PLUGIN_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Override a key of the configuration file, as for the plugin
    #[arg(long, value_name = "KEY=VALUE", env = "SHMESH_PLUGIN_SET", value_delimiter = ';')]
    pub(crate) set: Vec<Override>,
    /// Allow new claims again
    #[arg(long)]
    pub(crate) undo: bool,
}

/// Options of `shmesh-plugin identity`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct IdentityArgs {
    /// Socket to listen on; a stale socket is replaced
    #[arg(
        long,
        value_name = "PATH",
        env = "SHMESH_IDENTITY_SOCKET",
        default_value = "/run/shmesh/agent/agent.sock"
    )]
    pub(crate) socket: PathBuf,
    /// Mode of the socket; every process that can connect may ask, and sidecars run as any uid
    #[arg(long, value_name = "OCTAL", env = "SHMESH_IDENTITY_SOCKET_MODE", default_value = "0666")]
    pub(crate) socket_mode: FileMode,
    /// File with the pods of this node (YAML or JSON), which confirms uids and adds names
    #[arg(long, value_name = "FILE", env = "SHMESH_IDENTITY_PODS")]
    pub(crate) pods: Option<PathBuf>,
    /// Name of this node: its pods are read from the API server, which confirms uids and adds names. Needs the rights to list and
    /// watch pods
    #[arg(long, value_name = "NAME", env = "SHMESH_NODE", conflicts_with = "pods", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) node: Option<String>,
    /// Fail in a nested pid namespace; do not use in kind, where the node itself is nested
    #[arg(long, env = "SHMESH_IDENTITY_REQUIRE_INITIAL_PID_NAMESPACE")]
    pub(crate) require_initial_pid_namespace: bool,
    /// Seconds after which an idle connection is closed
    #[arg(long, value_name = "N", env = "SHMESH_IDENTITY_IDLE_SECONDS", default_value_t = DEFAULT_IDLE_SECONDS, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub(crate) idle_seconds: u32,
    /// Test whether a service answers on the socket, and exit
    #[arg(long)]
    pub(crate) check: bool,
}

/// Options of `shmesh-plugin prepare`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Prepare {
    /// Directory to create; its parent must exist
    #[arg(long, value_name = "DIR", default_value = "/run/shmesh/agent")]
    pub(crate) directory: PathBuf,
    /// Group that may create sockets in it; without capabilities, a group of this process
    #[arg(long, value_name = "GID", default_value_t = 65_532)]
    pub(crate) gid: u32,
}

/// Idle limit in seconds: long enough for a sidecar whose clients rarely change.
const DEFAULT_IDLE_SECONDS: u32 = 600;

/// Permission bits in octal, up to 0777.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct FileMode(pub(crate) u32);

impl FromStr for FileMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match u32::from_str_radix(text, 8) {
            Ok(mode) if mode <= 0o777 => Ok(Self(mode)),
            _ => Err("must be octal and at most 0777".into()),
        }
    }
}

impl fmt::Display for FileMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl IdentityArgs {
    /// Options of the identity service inside `shmesh-plugin run`.
    pub(crate) fn for_plugin(
        socket: PathBuf,
        pods: Option<PathBuf>,
        require_initial_pid_namespace: bool,
    ) -> Self {
        Self {
            socket,
            socket_mode: FileMode(0o666),
            pods,
            node: None,
            require_initial_pid_namespace,
            idle_seconds: DEFAULT_IDLE_SECONDS,
            check: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_definition_is_valid() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn modes_are_octal() {
        assert_eq!("0660".parse(), Ok(FileMode(0o660)));
        assert_eq!(FileMode(0o60).to_string(), "0060");
        for wrong in ["", "rw", "0888", "1777", "-1"] {
            assert!(wrong.parse::<FileMode>().is_err(), "{wrong}");
        }
    }
}
