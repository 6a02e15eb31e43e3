//! Provides the cluster to test on: an existing one, or a kind cluster that is created and deleted.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use tempfile::TempDir;

use crate::args::{Args, Image};
use crate::tools::{self, Tool, find};

/// The first build compiles all dependencies.
const BUILD: Duration = Duration::from_secs(3600);
const CREATE: Duration = Duration::from_secs(900);

/// The cluster on which the tests run.
#[derive(Debug)]
pub(crate) enum ClusterProvider {
    Existing(PathBuf),
    Kind(KindCluster),
}

/// A kind cluster for one run.
#[derive(Debug)]
pub(crate) struct KindCluster {
    name: String,
    /// Either `docker` or `podman`.
    engine: &'static str,
    /// Directory with the kubeconfig and the images.
    dir: TempDir,
    is_made: bool,
}

impl ClusterProvider {
    /// Selects the cluster by the flags and checks that all required commands exist.
    pub(crate) fn find(args: &Args) -> Result<Self> {
        let mut missing = Vec::new();
        if find("helm").is_none() {
            missing.push("helm (https://helm.sh/docs/intro/install)");
        }
        let chart = args.repository.join("helm/Chart.yaml");
        if !chart.is_file() {
            bail!("{} does not exist: name the repository's directory with --repository", chart.display());
        }
        if let Some(kubeconfig) = &args.kubeconfig {
            no_more(&missing)?;
            if !kubeconfig.is_file() {
                bail!(
                    "the kubeconfig {} does not exist: give its path with --kubeconfig",
                    kubeconfig.display()
                );
            }
            return Ok(Self::Existing(kubeconfig.clone()));
        }
        let engine = ["docker", "podman"].into_iter().find(|engine| find(engine).is_some());
        if find("kind").is_none() {
            missing.push("kind (https://kind.sigs.k8s.io), or --kubeconfig of a cluster");
        }
        if engine.is_none() {
            missing.push("docker or podman, for kind and for building images");
        }
        no_more(&missing)?;
        let dir = tools::private_dir()?;
        let engine = engine.unwrap_or("docker");
        Ok(Self::Kind(KindCluster { name: args.namespace.clone(), engine, dir, is_made: false }))
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        match self {
            Self::Existing(file) => file.clone(),
            Self::Kind(kind) => kind.dir.path().join("kubeconfig"),
        }
    }

    /// Builds the images and creates the cluster if needed.
    pub(crate) async fn open(&mut self, args: &Args, say: impl Fn(&str)) -> Result<()> {
        match self {
            Self::Existing(_) => Ok(()),
            Self::Kind(kind) => kind.open(args, say).await,
        }
    }

    /// Deletes the cluster if it was created.
    pub(crate) async fn close(&mut self) -> Result<()> {
        match self {
            Self::Kind(kind) if kind.is_made => {
                kind.tool(CREATE).args(["delete", "cluster", "--name", &kind.name]).run().await.map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Keeps the cluster and returns instructions to inspect and delete it.
    pub(crate) fn leave(self, args: &Args) -> String {
        let namespace = &args.namespace;
        match self {
            Self::Existing(file) => format!(
                "kept: the release shmesh in namespace {namespace}, and namespaces {namespace}-*\n\
                 remove them: helm uninstall shmesh --namespace {namespace} --kubeconfig {}; then kubectl delete namespace",
                file.display()
            ),
            Self::Kind(kind) => {
                let dir = kind.dir.keep();
                let file = dir.join("kubeconfig");
                format!(
                    "kept: export KUBECONFIG={}\nremove it: kind delete cluster --name {}",
                    file.display(),
                    kind.name
                )
            }
        }
    }
}

fn no_more(missing: &[&str]) -> Result<()> {
    if !missing.is_empty() {
        bail!("commands are missing: install {}", missing.join("; "));
    }
    Ok(())
}

impl KindCluster {
    fn tool(&self, limit: Duration) -> Tool {
        let tool = Tool::new("kind", limit);
        if self.engine == "podman" { tool.env("KIND_EXPERIMENTAL_PROVIDER", "podman") } else { tool }
    }

    async fn open(&mut self, args: &Args, say: impl Fn(&str)) -> Result<()> {
        let there = self.tool(CREATE).args(["get", "clusters"]).run().await?;
        if there.lines().any(|name| name == self.name) {
            bail!(
                "there is a kind cluster {0} already: kind delete cluster --name {0}, or choose another --namespace",
                self.name
            );
        }
        let archive = self.dir.path().join("images.tar");
        if args.registry.is_none() {
            say("images: building");
            self.build(args, &archive).await?;
        }
        say("kind: creating a cluster");
        self.is_made = true;
        let config = args.repository.join("e2e/kind.yaml");
        let kubeconfig = self.dir.path().join("kubeconfig");
        let create =
            self.tool(CREATE).args(["create", "cluster", "--name", &self.name, "--wait", "300s", "--config"]);
        create.args([config.as_path()]).args(["--kubeconfig"]).args([kubeconfig]).run().await?;
        if args.registry.is_none() {
            say("kind: loading images");
            self.tool(CREATE)
                .args(["load", "image-archive", "--name", &self.name])
                .args([archive])
                .run()
                .await?;
        }
        Ok(())
    }

    /// Builds both images into one archive.
    async fn build(&self, args: &Args, archive: &Path) -> Result<()> {
        let engine = || Tool::new(self.engine, BUILD);
        let file = args.repository.join("helm/images/Dockerfile");
        let mut names = Vec::new();
        for (target, image) in [("plugin", Image::Plugin), ("sidecar", Image::Sidecar)] {
            // The full name, because podman would prepend localhost/.
            let name = format!("docker.io/library/{}", args.image(image));
            let build = engine()
                .env("DOCKER_BUILDKIT", "1")
                .args(["build", "--target", target, "--tag", &name, "--file"]);
            build.args([file.as_path(), args.repository.as_path()]).run().await?;
            names.push(name);
        }
        engine().args(["save", "--output"]).args([archive]).args(names).run().await?;
        Ok(())
    }
}
