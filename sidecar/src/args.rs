//! Flags, and the environment variables that say the same.

use std::path::PathBuf;

use clap::Parser;
use shmesh_daemon::args::DaemonArgs;

const ABOUT: &str = "\
Keeps the links of a pod: creates their memory, hands it to the processes that may have it, and takes back what dead
processes held.

Links come from a file, from a pod's annotation, or by name; without any of them there is nothing to do. It runs as any
user, without capabilities, and on a workstation without Kubernetes as well.";

const AFTER: &str = "\
Example, on a workstation:
  shmesh-sidecar --link fronthaul --admin 127.0.0.1:9900

Exit status: 0 it was told to end, 1 something failed while it ran, 2 the command line is wrong, 64 the configuration (a
file, the annotation, the log filter, the IPC directory) is wrong.";

/// The longest that importers wait for a key.
const RESTORE_SECONDS: u64 = shmesh_proto::limits::RESTORE_MILLIS / 1000;

/// Flags of `shmesh-sidecar`; its `--help` has the words.
///
/// ```
/// use clap::Parser;
/// let args = shmesh_sidecar::args::Args::parse_from(["shmesh-sidecar", "--link", "fronthaul"]);
/// assert_eq!(args.link[0].as_str(), "fronthaul");
/// ```
#[derive(Clone, Debug, Parser)]
#[command(name = "shmesh-sidecar", version, about = "Keeps the links of a pod", long_about = ABOUT, after_help = AFTER)]
pub struct Args {
    /// A file of links, in our form or NVIPC's
    #[arg(long, env = "SHMESH_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// The pod's annotation `shmesh.io/links`, in a file that the downward API writes
    #[arg(long, env = "SHMESH_ANNOTATION", value_name = "FILE")]
    pub annotation: Option<PathBuf>,

    /// A link by its name, with default sizes; may be given several times
    #[arg(long, value_name = "NAME", value_parser = link_name)]
    pub link: Vec<shmesh::config::LinkName>,

    /// The IPC directory
    #[arg(long, env = shmesh::DIR_VARIABLE, default_value = shmesh::DEFAULT_DIR, value_name = "DIR")]
    pub dir: PathBuf,

    /// Keep links in a directory that is not on a tmpfs: their pages may be written to a disk
    #[arg(long)]
    pub any_file_system: bool,

    /// The node's identity service; without it, processes are known as far as this pid namespace shows them
    #[arg(long, env = "SHMESH_IDENTITY", value_name = "SOCKET")]
    pub identity: Option<PathBuf>,

    /// Know processes as on Linux before 6.5, for tests
    #[arg(long, hide = true)]
    pub old_kernel: bool,

    /// Take memfds for the descriptors of devices, for tests without one
    #[arg(long, hide = true)]
    pub memfds_for_devices: bool,

    /// Let keys be exported that need no admission (flag 0x1 of an export)
    #[arg(long)]
    pub allow_open_keys: bool,

    /// Let memory be exported by CUDA's old handles, which cannot be taken back from whoever has seen one
    #[arg(long)]
    pub allow_cuda_legacy: bool,

    /// How long after the start exporters and importers of a former sidecar may register their keys again; then keys that were
    /// not are lost for their importers
    #[arg(long, env = "SHMESH_RESTORE_SECONDS", default_value_t = RESTORE_SECONDS, value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(0..=RESTORE_SECONDS))]
    pub restore_seconds: u64,

    /// Where the audit log goes, one JSON object per line: a file, or `-` for standard output
    #[arg(long, env = "SHMESH_AUDIT", value_name = "FILE")]
    pub audit: Option<PathBuf>,

    /// Logs and probes.
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

fn link_name(text: &str) -> Result<shmesh::config::LinkName, String> {
    text.parse().map_err(|error: shmesh::config::NameError| error.to_string())
}
