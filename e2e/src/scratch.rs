//! A private directory for a kubeconfig, values and images.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

/// A private directory, removed on drop.
#[derive(Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Creates the directory. Fails if the path exists, because another user may have created it.
    pub(crate) fn new() -> Result<Self> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let path = std::env::temp_dir().join(format!("shmesh-e2e-{}-{since}", std::process::id()));
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.with_context(|| format!("cannot make the directory {}", path.display()))?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Keeps the directory and returns its path.
    pub(crate) fn keep(mut self) -> PathBuf {
        std::mem::take(&mut self.0)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.0.as_os_str().is_empty() {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn scratch_directory_is_private_and_removed() {
        let (one, kept) = (Scratch::new().unwrap(), Scratch::new().unwrap());
        let path = one.path().to_owned();
        assert_ne!(path, kept.path());
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        std::fs::write(path.join("file"), "").unwrap();
        drop(one);
        assert!(!path.exists());
        let kept = kept.keep();
        assert!(kept.is_dir());
        std::fs::remove_dir(kept).unwrap();
    }
}
