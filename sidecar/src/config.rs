//! The links to keep, from a file, the pod's annotation and flags.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail};
use shmesh::config::{LinkConfig, from_annotation, from_file};
use shmesh_sys::mount::{FsKind, file_system};

use crate::args::Args;

/// Reads all configured links.
///
/// # Errors
/// A file that cannot be read or is invalid (with path, line and column), a link configured twice, no link at all, or an IPC
/// directory that is missing or not on a tmpfs.
///
/// ```
/// use clap::Parser;
/// # let dir = tempfile::tempdir()?;
/// # let dir = dir.path().to_str().unwrap_or_default();
/// let args = ["shmesh-sidecar", "--link", "a", "--link", "b", "--any-file-system", "--dir", dir];
/// let links = shmesh_sidecar::config::links(&shmesh_sidecar::args::Args::parse_from(args))?;
/// assert_eq!(links.len(), 2);
/// # Ok::<(), anyhow::Error>(())
/// ```
pub fn links(args: &Args) -> Result<Vec<LinkConfig>> {
    let mut links = Vec::new();
    if let Some(path) = &args.config {
        let loaded = from_file(path)?;
        for key in &loaded.ignored {
            eprintln!(
                "shmesh-sidecar: {}:{}: {} is ignored: shmesh has no such setting",
                path.display(),
                key.line,
                key.path
            );
        }
        links.extend(loaded.links);
    }
    if let Some(path) = &args.annotation {
        links.extend(annotated(path)?);
    }
    links.extend(args.link.iter().cloned().map(LinkConfig::new));
    if links.is_empty() {
        bail!("no links: give --config FILE, --annotation FILE or --link NAME");
    }
    let mut names = BTreeSet::new();
    for link in &links {
        link.validate()?;
        if !names.insert(&link.name) {
            bail!("link {} is configured twice; remove one of them", link.name);
        }
    }
    if !args.any_file_system {
        check_file_system(&args.dir)?;
    }
    Ok(links)
}

fn annotated(path: &Path) -> Result<Vec<LinkConfig>> {
    let named = || format!("annotation shmesh.io/links in {}", path.display());
    let text = std::fs::read_to_string(path).with_context(named)?;
    match from_annotation(&text) {
        Ok(loaded) => Ok(loaded.links),
        Err(error) => {
            let shown = error.shown_in(&path.display().to_string(), &text);
            bail!("annotation shmesh.io/links: {shown}")
        }
    }
}

fn check_file_system(dir: &Path) -> Result<()> {
    let named = dir.display();
    let found = file_system(dir).with_context(|| format!("the IPC directory {named}"))?;
    if matches!(found.kind, FsKind::Other(_)) {
        bail!(
            "the IPC directory {named} is not on a tmpfs: mount one there (in a pod: an emptyDir with medium Memory), or \
             give --any-file-system"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn refused(flags: &[&str]) -> String {
        let args = Args::parse_from([&["shmesh-sidecar"], flags].concat());
        format!("{:#}", links(&args).unwrap_err())
    }

    #[test]
    fn what_is_wrong_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        assert!(refused(&["--any-file-system"]).contains("--link NAME"));
        assert!(
            refused(&["--link", "a", "--link", "a", "--any-file-system"])
                .contains("link a is configured twice")
        );
        let bad = file("links", "- name: a\n  ring: { length: 4 }\n");
        let said = refused(&["--annotation", &bad, "--any-file-system"]);
        for part in ["shmesh.io/links", &format!("{bad}:2:11"), "length"] {
            assert!(said.contains(part), "{said:?} names {part:?}");
        }
        let bad = file("config", "links:\n  - name: a/b\n");
        let said = refused(&["--config", &bad, "--any-file-system"]);
        assert!(said.contains(&format!("{bad}:2")), "{said}");
        assert!(refused(&["--config", "/nonexistent", "--any-file-system"]).contains("/nonexistent"));
        assert!(refused(&["--link", "a", "--dir", "/proc"]).contains("/proc is not on a tmpfs"));
        assert!(
            refused(&["--link", "a", "--dir", "/nonexistent"]).contains("the IPC directory /nonexistent")
        );
    }

    #[test]
    fn all_sources_together() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("links");
        std::fs::write(&path, "- name: b\n  ring: { len: 64 }\n").unwrap();
        let path = path.display().to_string();
        let args = Args::parse_from(["x", "--link", "a", "--annotation", &path, "--any-file-system"]);
        let links = links(&args).unwrap();
        assert_eq!(
            links.iter().map(|link| (link.name.as_str(), link.ring_len)).collect::<Vec<_>>()[0],
            ("b", 64)
        );
        assert_eq!(links.len(), 2);
    }
}
