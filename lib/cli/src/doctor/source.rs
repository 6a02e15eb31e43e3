//! Access to `/proc` and `/sys` below a root that tests can change, and parsers that several probes use.

use std::fmt;
use std::path::{Path, PathBuf};

/// The reason why a fact could not be determined. The finding reports it; the command does not fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnknownFact(pub(super) String);

impl fmt::Display for UnknownFact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The root of `proc`, `sys` and `run`: `/`, or a directory created by a test.
#[derive(Clone, Debug)]
pub(super) struct Source {
    root: PathBuf,
}

impl Source {
    /// Creates a source that reads below `root`.
    pub(super) fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The location of an absolute `path` below the root.
    pub(super) fn place(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The text of a file; bytes that are not UTF-8 are replaced.
    pub(super) fn text(&self, path: impl AsRef<Path>) -> Result<String, UnknownFact> {
        let path = path.as_ref();
        match std::fs::read(self.place(path)) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(why) => Err(UnknownFact(format!("cannot read {}: {why}", path.display()))),
        }
    }

    /// The number in a file.
    pub(super) fn number(&self, path: impl AsRef<Path>) -> Result<u64, UnknownFact> {
        let path = path.as_ref();
        let text = self.text(path)?;
        let text = text.trim();
        text.parse().map_err(|_| UnknownFact(format!("{} holds {text:?}, not a number", path.display())))
    }

    /// The target of a symbolic link.
    pub(super) fn link(&self, path: &str) -> Result<String, UnknownFact> {
        match std::fs::read_link(self.place(Path::new(path))) {
            Ok(target) => Ok(target.to_string_lossy().into_owned()),
            Err(why) => Err(UnknownFact(format!("cannot read the link {path}: {why}"))),
        }
    }

    /// The sorted names in a directory.
    pub(super) fn names(&self, path: &str) -> Result<Vec<String>, UnknownFact> {
        let entries = std::fs::read_dir(self.place(Path::new(path)))
            .map_err(|why| UnknownFact(format!("cannot list {path}: {why}")))?;
        let mut names: Vec<String> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        Ok(names)
    }

    /// Whether a path exists. A path that cannot be accessed counts as missing.
    pub(super) fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.place(path.as_ref()).exists()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_files_have_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let source = Source::new(dir.path());
        assert!(source.text("/proc/none").unwrap_err().0.starts_with("cannot read /proc/none: "));
        std::fs::write(dir.path().join("word"), "max\n").unwrap();
        assert!(source.number("/word").unwrap_err().0.contains("not a number"));
        assert!(!source.exists("/proc"));
    }
}
