//! The links to keep, from a file, the pod's annotation and flags.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail};
use shmesh::config::{Bytes, LinkConfig, from_annotation, from_file};
use shmesh_sys::mount::{FsKind, file_system};

use crate::args::Args;

/// Claims have multiples of this many bytes.
const CLAIM_STEP: u64 = 2 << 20;

/// Reads all configured links.
///
/// # Errors
/// A file that cannot be read or is invalid (with path, line and column), a link configured twice, no link at all, links that
/// need more than `--max-bytes`, or an IPC directory that is missing or not on a tmpfs.
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
    if let Some(Bytes(limit)) = args.max_bytes {
        check_bytes(&links, limit)?;
    }
    if !args.any_file_system {
        check_file_system(&args.dir)?;
    }
    Ok(links)
}

/// Refuses links that need more memory than the claim reserves.
fn check_bytes(links: &[LinkConfig], limit: u64) -> Result<()> {
    let sum = links.iter().fold(0, |sum: u64, link| sum.saturating_add(link.segment_bytes()));
    if sum > limit {
        let each: Vec<_> = links
            .iter()
            .map(|link| format!("{} {}", link.name.as_str(), Bytes(link.segment_bytes()).rounded()))
            .collect();
        bail!(
            "the links need {sum} bytes ({}), and the limit is {limit} bytes (SHMESH_BYTES, or --max-bytes): request at least \
             bytes: {} in the capacity of the ResourceClaim, or make pools and rings smaller",
            each.join(", "),
            Bytes(sum.checked_next_multiple_of(CLAIM_STEP).unwrap_or(sum))
        );
    }
    Ok(())
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
    fn invalid_configuration_is_named() {
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
    fn links_above_the_bytes_of_the_claim_are_refused() {
        let of = |limit: &str| {
            let flags = ["x", "--link", "a", "--link", "b", "--any-file-system", "--max-bytes", limit];
            links(&Args::parse_from(flags)).map_err(|error| format!("{error:#}"))
        };
        let needed: u64 = of("1Gi").unwrap().iter().map(LinkConfig::segment_bytes).sum();
        assert_eq!(of(&needed.to_string()).unwrap().len(), 2, "the limit itself is allowed");
        let said = of(&(needed - 1).to_string()).unwrap_err();
        let rounded = needed.next_multiple_of(2 << 20) >> 20;
        for part in [&needed.to_string(), &(needed - 1).to_string(), &format!("bytes: {rounded}Mi"), "a "] {
            assert!(said.contains(part), "{said:?} has {part:?}");
        }
        assert!(Args::try_parse_from(["x", "--link", "a", "--max-bytes", "much"]).is_err());
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
