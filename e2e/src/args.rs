//! Command line of `shmesh-e2e`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::scenarios::Scenario;

const HELP: &str = "\
Installs the chart on a cluster, runs sample pods, kills components, and checks the documented guarantees.

  cargo run -p shmesh-e2e                                    create a kind cluster, build the images, delete the cluster
  cargo run -p shmesh-e2e -- --kubeconfig FILE               a cluster whose nodes have shmesh-plugin and shmesh-sidecar
  cargo run -p shmesh-e2e -- --kubeconfig FILE --registry registry.example.com/shmesh --tag 0.1.0
  cargo run -p shmesh-e2e -- --only two-pods --keep          run one scenario; keep everything if it fails
  cargo run -p shmesh-e2e -- --list                          list the scenarios

KUBECONFIG is ignored, so that a test never runs on a cluster by accident. The current context of the kubeconfig is used. Its
user must be an administrator, because a privileged pod with hostPID kills processes. Required commands: helm, and for kind
also kind and docker or podman. Nodes must have or be able to pull --tool-image (a shell, find and dd).

Results go to standard output, progress and diagnostics of failures to standard error.

Exit status: 0 all passed, 1 a scenario or the installation failed or the run was interrupted, 2 invalid command line,
3 no cluster to test on, or a required command is missing.";

/// The options of `shmesh-e2e`.
#[derive(Parser, Clone, Debug)]
#[command(name = "shmesh-e2e", version, about = "Tests shmesh on a cluster", after_long_help = HELP)]
pub(crate) struct Args {
    /// Kubeconfig of the cluster to test on; without it a kind cluster is created and deleted
    #[arg(long, value_name = "FILE", env = "SHMESH_E2E_KUBECONFIG")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Registry of both images; without it they are built for kind, and must be present on the nodes of other
    /// clusters
    #[arg(long, value_name = "NAME", env = "SHMESH_E2E_REGISTRY")]
    pub(crate) registry: Option<String>,
    /// Tag of both images
    #[arg(long, value_name = "TAG", env = "SHMESH_E2E_TAG", default_value = env!("CARGO_PKG_VERSION"))]
    pub(crate) tag: String,
    /// Image of the plugin and the injector, without registry and tag
    #[arg(long, value_name = "NAME", env = "SHMESH_E2E_PLUGIN_IMAGE", default_value = "shmesh-plugin")]
    pub(crate) plugin_image: String,
    /// Image of the sidecar, without registry and tag
    #[arg(long, value_name = "NAME", env = "SHMESH_E2E_SIDECAR_IMAGE", default_value = "shmesh-sidecar")]
    pub(crate) sidecar_image: String,
    /// Full image name for pods that inspect a node, kill processes and fill /dev/shm
    #[arg(long, value_name = "IMAGE", env = "SHMESH_E2E_TOOL_IMAGE", default_value = "busybox:1.37")]
    pub(crate) tool_image: String,
    /// Pull policy of all images
    #[arg(long, value_name = "POLICY", env = "SHMESH_E2E_PULL_POLICY", default_value = "IfNotPresent")]
    pub(crate) pull_policy: PullPolicy,
    /// Namespace of the release, prefix of the scenarios' namespaces, and name of the kind cluster
    #[arg(long, value_name = "NAME", env = "SHMESH_E2E_NAMESPACE", default_value = "shmesh-e2e", value_parser = namespace)]
    pub(crate) namespace: String,
    /// Run only this scenario; can be repeated. Without it all run but claim, which needs Kubernetes 1.36
    #[arg(long, value_name = "SCENARIO")]
    pub(crate) only: Vec<Scenario>,
    /// Stop at the first failure and keep everything for inspection
    #[arg(long, env = "SHMESH_E2E_KEEP")]
    pub(crate) keep: bool,
    /// How often scenario kills kills all processes of pods together
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(..=10_000))]
    pub(crate) kill_rounds: u32,
    /// List the scenarios and exit
    #[arg(long)]
    pub(crate) list: bool,
    /// Output format of the results
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub(crate) output: Output,
    /// Timeout for each operation on the cluster: starting a pod, a restart, helm
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) timeout_seconds: u64,
    /// Milliseconds between two polls
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..=10_000))]
    pub(crate) poll_ms: u64,
    /// Repository with the chart and the Dockerfile
    #[arg(long, value_name = "DIR", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/.."), hide_default_value = true)]
    pub(crate) repository: PathBuf,
}

/// When nodes pull images.
#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
#[value(rename_all = "PascalCase")]
pub(crate) enum PullPolicy {
    /// Pull for each container
    Always,
    /// Pull if the node lacks the image
    IfNotPresent,
    /// Never pull; nodes must have the image
    Never,
}

/// Output format of the results.
#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Output {
    /// A table for people
    Text,
    /// One JSON object for programs
    Json,
}

/// The images of shmesh.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Image {
    Plugin,
    Sidecar,
}

impl Args {
    /// Returns the full name of an image.
    pub(crate) fn image(&self, image: Image) -> String {
        let name = match image {
            Image::Plugin => &self.plugin_image,
            Image::Sidecar => &self.sidecar_image,
        };
        let before = self.registry.as_ref().map(|registry| format!("{}/", registry.trim_end_matches('/')));
        format!("{}{name}:{}", before.unwrap_or_default(), self.tag)
    }

    /// Returns the timeout of operations on the cluster.
    pub(crate) fn limit(&self) -> Duration {
        Duration::from_secs(self.timeout_seconds)
    }

    /// Returns the selected scenarios in table order.
    pub(crate) fn scenarios(&self) -> Vec<Scenario> {
        let is_asked = |one: &Scenario| {
            if self.only.is_empty() { one.is_default() } else { self.only.contains(one) }
        };
        Scenario::value_variants().iter().copied().filter(is_asked).collect()
    }
}

impl PullPolicy {
    /// Returns the name that Kubernetes uses.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::IfNotPresent => "IfNotPresent",
            Self::Never => "Never",
        }
    }
}

/// Parses a namespace and checks that the scenarios' suffixes fit.
fn namespace(text: &str) -> Result<String, String> {
    let is_inside = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let is_edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    if text.len() > 40
        || !text.chars().all(is_inside)
        || !is_edge(text.chars().next())
        || !is_edge(text.chars().last())
    {
        return Err("a namespace has small letters, digits and '-' between them; at most 40 here".to_owned());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(flags: &[&str]) -> Args {
        Args::try_parse_from([&["shmesh-e2e"], flags].concat()).unwrap()
    }

    #[test]
    fn command_line_definition_is_valid() {
        Args::command().debug_assert();
    }

    #[test]
    fn images_are_named_as_the_chart_names_them() {
        let args = parse(&["--tag", "1.0"]);
        assert_eq!(args.image(Image::Plugin), "shmesh-plugin:1.0");
        let args = parse(&["--registry", "r.example:5000/x/", "--sidecar-image", "side", "--tag", "t"]);
        assert_eq!(args.image(Image::Sidecar), "r.example:5000/x/side:t");
    }

    #[test]
    fn scenarios_run_in_table_order() {
        let args = parse(&["--only", "uninstall", "--only", "allocate"]);
        assert_eq!(args.scenarios(), [Scenario::Allocate, Scenario::Uninstall]);
        let default = parse(&[]).scenarios();
        let only_if_asked_for = [(Scenario::Claim, "claim"), (Scenario::Rollout, "rollout")];
        assert_eq!(default.len(), Scenario::value_variants().len() - only_if_asked_for.len());
        for (scenario, name) in only_if_asked_for {
            assert!(!default.contains(&scenario), "{name}");
            assert_eq!(parse(&["--only", name]).scenarios(), [scenario]);
        }
    }
}
