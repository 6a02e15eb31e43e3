//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::scenarios::Scenario;

const HELP: &str = "\
Installs the chart on a cluster, runs pods, kills what there is to kill, and looks whether what is promised is so.

  cargo run -p shmesh-e2e                                    a kind cluster, made and removed; images built here
  cargo run -p shmesh-e2e -- --kubeconfig FILE               a cluster whose nodes have shmesh-plugin and shmesh-sidecar
  cargo run -p shmesh-e2e -- --kubeconfig FILE --registry registry.example.com/shmesh --tag 0.1.0
  cargo run -p shmesh-e2e -- --only two-pods --keep          one scenario; what failed stays as it is
  cargo run -p shmesh-e2e -- --list                          the scenarios, and what each shows

KUBECONFIG is not looked at: nothing is installed on a cluster that was not named for it. The kubeconfig's current context
is used, and its user must be an administrator: the kills are done by a privileged pod with hostPID. Commands: helm, and for
kind also kind and docker or podman. Nodes must be able to pull --tool-image (a shell, find and dd) or have it.

Results go to standard output, progress and what a person would look at after a failure to standard error.

Exit status: 0 all passed, 1 a scenario or the installation failed, or it was interrupted, 2 the command line is wrong,
3 there is no cluster to test on, or a command is missing.";

/// What is asked.
#[derive(Parser, Clone, Debug)]
#[command(name = "shmesh-e2e", version, about = "Tests shmesh on a cluster", after_long_help = HELP)]
pub(crate) struct Args {
    /// The cluster to test on; without it a kind cluster is made and removed
    #[arg(long, value_name = "FILE", env = "SHMESH_E2E_KUBECONFIG")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Before the names of both images; without it they are built for kind, and elsewhere must be on the nodes
    #[arg(long, value_name = "NAME", env = "SHMESH_E2E_REGISTRY")]
    pub(crate) registry: Option<String>,
    /// Of both images
    #[arg(long, value_name = "TAG", env = "SHMESH_E2E_TAG", default_value = env!("CARGO_PKG_VERSION"))]
    pub(crate) tag: String,
    /// The plugin's and injector's image, without registry and tag
    #[arg(long, value_name = "NAME", env = "SHMESH_E2E_PLUGIN_IMAGE", default_value = "shmesh-plugin")]
    pub(crate) plugin_image: String,
    /// The sidecar's image, without registry and tag
    #[arg(long, value_name = "NAME", env = "SHMESH_E2E_SIDECAR_IMAGE", default_value = "shmesh-sidecar")]
    pub(crate) sidecar_image: String,
    /// A whole image name: of the pods that look at a node, kill there, and fill /dev/shm
    #[arg(long, value_name = "IMAGE", env = "SHMESH_E2E_TOOL_IMAGE", default_value = "busybox:1.37")]
    pub(crate) tool_image: String,
    /// Of all images
    #[arg(long, value_name = "POLICY", env = "SHMESH_E2E_PULL_POLICY", default_value = "IfNotPresent")]
    pub(crate) pull_policy: PullPolicy,
    /// The release's namespace, and how those of the scenarios begin; also the name of the kind cluster
    #[arg(long, value_name = "NAME", env = "SHMESH_E2E_NAMESPACE", default_value = "shmesh-e2e", value_parser = namespace)]
    pub(crate) namespace: String,
    /// Run only this one; may be given several times
    #[arg(long, value_name = "SCENARIO")]
    pub(crate) only: Vec<Scenario>,
    /// Stop at the first failure, and leave everything as it is
    #[arg(long, env = "SHMESH_E2E_KEEP")]
    pub(crate) keep: bool,
    /// Say which scenarios there are, and end
    #[arg(long)]
    pub(crate) list: bool,
    /// How to print results
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub(crate) output: Output,
    /// How long anything on the cluster may take: a pod's start, a restart, helm
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) timeout_seconds: u64,
    /// Milliseconds between two looks
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..=10_000))]
    pub(crate) poll_ms: u64,
    /// The repository, for the chart and the images' Dockerfile
    #[arg(long, value_name = "DIR", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/.."), hide_default_value = true)]
    pub(crate) repository: PathBuf,
}

/// When nodes pull images.
#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
#[value(rename_all = "PascalCase")]
pub(crate) enum PullPolicy {
    /// For each container
    Always,
    /// Where the node has it not
    IfNotPresent,
    /// Nodes must have them
    Never,
}

/// How to print results.
#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Output {
    /// For people
    Text,
    /// For programs
    Json,
}

/// An image of ours.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Image {
    Plugin,
    Sidecar,
}

impl Args {
    /// An image's whole name.
    pub(crate) fn image(&self, image: Image) -> String {
        let name = match image {
            Image::Plugin => &self.plugin_image,
            Image::Sidecar => &self.sidecar_image,
        };
        let before = self.registry.as_ref().map(|registry| format!("{}/", registry.trim_end_matches('/')));
        format!("{}{name}:{}", before.unwrap_or_default(), self.tag)
    }

    /// The most that anything on the cluster may take.
    pub(crate) fn limit(&self) -> Duration {
        Duration::from_secs(self.timeout_seconds)
    }

    /// What is run, in the order of the table.
    pub(crate) fn scenarios(&self) -> Vec<Scenario> {
        let is_asked = |one: &Scenario| self.only.is_empty() || self.only.contains(one);
        Scenario::value_variants().iter().copied().filter(is_asked).collect()
    }
}

impl PullPolicy {
    /// As Kubernetes has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::IfNotPresent => "IfNotPresent",
            Self::Never => "Never",
        }
    }
}

/// The names of the scenarios' namespaces must fit behind it.
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
    fn the_command_line_is_well_formed() {
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
    fn scenarios_run_in_the_order_of_the_table() {
        let args = parse(&["--only", "uninstall", "--only", "allocate"]);
        assert_eq!(args.scenarios(), [Scenario::Allocate, Scenario::Uninstall]);
        assert_eq!(parse(&[]).scenarios().len(), Scenario::value_variants().len());
    }
}
