//! Command-line flags and their environment variables.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Parser, Subcommand};
use shmesh_daemon::args::DaemonArgs;

const ABOUT: &str = "\
Keep the links of a pod: create their memory, serve it to the processes that may use it, recover processes that have died,
and broker keys of device memory.

Give at least one link: by --config, --annotation or --link. The sidecar runs as any user, without capabilities, in a pod or
on a workstation. On SIGTERM or SIGINT it shuts down; the links and their messages stay.";

const AFTER: &str = "\
Example, on a workstation:
  shmesh-sidecar --link fronthaul --admin 127.0.0.1:9900

Exit status:
  0   stopped by SIGTERM or SIGINT
  1   failed while starting or running; the last line on standard error has the reason
  2   invalid command line
  64  invalid configuration: a file, the annotation, links above SHMESH_BYTES, the log filter or the IPC directory";

/// Maximum and default of `--restore-seconds`.
const RESTORE_SECONDS: u64 = shmesh_proto::limits::RESTORE_MILLIS / 1000;

/// Flags of `shmesh-sidecar`, described by its `--help`.
#[derive(Clone, Debug, Parser)]
#[command(name = "shmesh-sidecar", version, args_conflicts_with_subcommands = true, about = "Keep the links of a pod", long_about = ABOUT, after_help = AFTER)]
pub struct Args {
    /// File with links, in the form of shmesh or of NVIPC
    #[arg(long, env = "SHMESH_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// File with the pod's annotation `shmesh.io/links`, written by the downward API
    #[arg(long, env = "SHMESH_ANNOTATION", value_name = "FILE")]
    pub annotation: Option<PathBuf>,

    /// Name of a link to keep with default sizes. May be repeated
    #[arg(long, value_name = "NAME", value_parser = link_name)]
    pub link: Vec<shmesh::config::LinkName>,

    /// IPC directory with the links; must be on a tmpfs
    #[arg(long, env = shmesh::DIR_VARIABLE, default_value = shmesh::DEFAULT_DIR, value_name = "DIR")]
    pub dir: PathBuf,

    /// Allow an IPC directory that is not on a tmpfs. The kernel may then write the memory of links to disk
    #[arg(long)]
    pub any_file_system: bool,

    /// Maximum bytes of all links together, such as 64Mi. In a pod with a ResourceClaim: its reserved bytes. No limit by default
    #[arg(long, env = "SHMESH_BYTES", value_name = "SIZE")]
    pub max_bytes: Option<shmesh::config::Bytes>,

    /// Socket of the node's identity service. Without it, only processes in this pid namespace can be identified
    #[arg(long, env = "SHMESH_IDENTITY", value_name = "SOCKET")]
    pub identity: Option<PathBuf>,

    /// Identify processes as on Linux before 6.5, for tests
    #[arg(long, hide = true)]
    pub old_kernel: bool,

    /// Accept memfds as descriptors of device memory, for tests without a device
    #[arg(long, hide = true)]
    pub memfds_for_devices: bool,

    /// Permit keys that every process may import (flag 0x1 of an export)
    #[arg(long)]
    pub allow_open_keys: bool,

    /// Permit exports by legacy CUDA IPC handles, which cannot be revoked: a process that has seen one can use it for ever
    #[arg(long)]
    pub allow_cuda_legacy: bool,

    /// Seconds after the start in which processes may register keys of a previous sidecar again. Keys that are not
    /// registered by then are lost for their importers
    #[arg(long, env = "SHMESH_RESTORE_SECONDS", default_value_t = RESTORE_SECONDS, value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(0..=RESTORE_SECONDS))]
    pub restore_seconds: u64,

    /// File for the audit log, one JSON object per line, or `-` for standard output
    #[arg(long, env = "SHMESH_AUDIT", value_name = "FILE")]
    pub audit: Option<PathBuf>,

    /// Flags for logs and probes.
    #[command(flatten)]
    pub daemon: DaemonArgs,

    /// A task in place of keeping links.
    #[command(subcommand)]
    pub task: Option<Task>,
}

/// A task of the image's program that ends by itself.
#[derive(Clone, Debug, Subcommand)]
pub enum Task {
    /// Copy the preload library of this image into a directory, in place of keeping links
    ///
    /// The init container of a pod with the annotation `shmesh.io/as` does this. A library that is there is replaced: at each
    /// moment there is a whole one.
    InstallLibrary {
        /// Directory to copy it into
        dir: PathBuf,

        /// File with the library
        #[arg(long, default_value = crate::library::PATH, value_name = "FILE")]
        from: PathBuf,
    },

    /// Wait until the sidecar in this container has started, in place of keeping links
    ///
    /// The hook `postStart` of an injected sidecar does this: the kubelet starts the pod's other containers after it. It ends when
    /// each link was kept once, or has failed for ten seconds.
    AwaitStart {
        /// Address of the sidecar's probes
        #[arg(long, env = "SHMESH_ADMIN", value_name = "IP:PORT")]
        admin: SocketAddr,

        /// Maximum wait; the exit status is then 1
        #[arg(long, default_value_t = 60, value_name = "SECONDS")]
        seconds: u64,
    },
}

fn link_name(text: &str) -> Result<shmesh::config::LinkName, String> {
    text.parse().map_err(|error: shmesh::config::NameError| error.to_string())
}
