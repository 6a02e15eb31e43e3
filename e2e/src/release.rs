//! Installs the chart with the `helm` command.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::args::Args;
use crate::tools::{self, Tool};

const NAME: &str = "shmesh";

/// A Helm release of the chart.
#[derive(Debug)]
pub(crate) struct Release {
    kubeconfig: PathBuf,
    pub(crate) namespace: String,
    repository: PathBuf,
    limit: Duration,
    values: Value,
    /// Directory of the values file.
    dir: TempDir,
}

impl Release {
    pub(crate) fn new(args: &Args, kubeconfig: PathBuf) -> Result<Self> {
        let values = json!({
            "image": {
                "registry": args.registry.as_deref().unwrap_or_default(),
                "tag": args.tag,
                "pullPolicy": args.pull_policy.name(),
            },
            "plugin": {"image": args.plugin_image},
            "sidecar": {"image": args.sidecar_image},
        });
        Ok(Self {
            kubeconfig,
            namespace: args.namespace.clone(),
            repository: args.repository.clone(),
            limit: args.limit(),
            values,
            dir: tools::private_dir()?,
        })
    }

    async fn helm(&self, words: &[&str]) -> Result<String> {
        let kubeconfig = self.kubeconfig.to_string_lossy();
        // Helm's own timeout expires first and gives a better message.
        let tool = Tool::new("helm", self.limit + Duration::from_secs(60));
        tool.args(words).args(["--namespace", &self.namespace, "--kubeconfig", &kubeconfig]).run().await
    }

    async fn put(&self, verb: &str, values: &Value) -> Result<()> {
        let own = self.dir.path().join("values.json");
        std::fs::write(&own, values.to_string()).context("cannot write the chart's values")?;
        let chart = self.repository.join("helm");
        let shared = self.repository.join("e2e/values.yaml");
        let (chart, shared, own) = (chart.to_string_lossy(), shared.to_string_lossy(), own.to_string_lossy());
        let timeout = format!("{}s", self.limit.as_secs());
        self.helm(&[
            verb,
            NAME,
            &chart,
            "--values",
            &shared,
            "--values",
            &own,
            "--wait",
            "--timeout",
            &timeout,
        ])
        .await?;
        Ok(())
    }

    pub(crate) async fn install(&self) -> Result<()> {
        self.put("install", &self.values).await
    }

    /// Upgrades to another revision, which replaces the plugin pods.
    pub(crate) async fn upgrade(&self) -> Result<()> {
        self.upgrade_to("upgraded", &json!(0)).await
    }

    /// Upgrades to a revision with this annotation, and starts that many new plugins beside old ones.
    pub(crate) async fn upgrade_to(&self, annotation: &str, max_surge: &Value) -> Result<()> {
        let mut values = self.values.clone();
        values["plugin"]["podAnnotations"] = json!({"shmesh.io/e2e": annotation});
        values["plugin"]["maxSurge"] = max_surge.clone();
        self.put("upgrade", &values).await
    }

    /// Replaces the device plugin by the DRA driver on all nodes.
    pub(crate) async fn switch_to_dra(&self) -> Result<()> {
        let mut values = self.values.clone();
        values["config"] = json!({"mode": "dra"});
        self.put("upgrade", &values).await
    }

    /// Rolls back to the first revision.
    pub(crate) async fn roll_back(&self) -> Result<()> {
        let timeout = format!("{}s", self.limit.as_secs());
        self.helm(&["rollback", NAME, "1", "--wait", "--timeout", &timeout]).await?;
        Ok(())
    }

    /// Runs the tests of the chart.
    pub(crate) async fn test(&self) -> Result<()> {
        let timeout = format!("{}s", self.limit.as_secs());
        self.helm(&["test", NAME, "--logs", "--timeout", &timeout]).await?;
        Ok(())
    }

    pub(crate) async fn uninstall(&self) -> Result<()> {
        let timeout = format!("{}s", self.limit.as_secs());
        self.helm(&["uninstall", NAME, "--ignore-not-found", "--wait", "--timeout", &timeout]).await?;
        Ok(())
    }
}
