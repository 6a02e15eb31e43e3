//! Access to `/proc` and `/sys` below a root that tests can change, and parsers that several probes use.

use std::fmt;
use std::path::{Path, PathBuf};

/// The reason why a fact could not be determined. The finding reports it; the command does not fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unknown(pub(super) String);

impl fmt::Display for Unknown {
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
    pub(super) fn text(&self, path: impl AsRef<Path>) -> Result<String, Unknown> {
        let path = path.as_ref();
        match std::fs::read(self.place(path)) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(why) => Err(Unknown(format!("cannot read {}: {why}", path.display()))),
        }
    }

    /// The number in a file.
    pub(super) fn number(&self, path: impl AsRef<Path>) -> Result<u64, Unknown> {
        let path = path.as_ref();
        let text = self.text(path)?;
        let text = text.trim();
        text.parse().map_err(|_| Unknown(format!("{} holds {text:?}, not a number", path.display())))
    }

    /// The target of a symbolic link.
    pub(super) fn link(&self, path: &str) -> Result<String, Unknown> {
        match std::fs::read_link(self.place(Path::new(path))) {
            Ok(target) => Ok(target.to_string_lossy().into_owned()),
            Err(why) => Err(Unknown(format!("cannot read the link {path}: {why}"))),
        }
    }

    /// The sorted names in a directory.
    pub(super) fn names(&self, path: &str) -> Result<Vec<String>, Unknown> {
        let entries = std::fs::read_dir(self.place(Path::new(path)))
            .map_err(|why| Unknown(format!("cannot list {path}: {why}")))?;
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

/// The value of `name` in lines of the form `name: value`, as in `/proc/self/status` and `/proc/meminfo`.
pub(super) fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
}

/// Formats bytes for people: the largest binary unit with a whole part, one decimal, rounded down.
pub(super) fn human(bytes: u64) -> String {
    const UNITS: [(u64, &str); 5] =
        [(1 << 50, "PiB"), (1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let Some((unit, name)) = UNITS.into_iter().find(|(unit, _)| bytes >= *unit) else {
        return format!("{bytes} B");
    };
    let (whole, tenth) = (bytes / unit, bytes % unit * 10 / unit);
    if tenth == 0 { format!("{whole} {name}") } else { format!("{whole}.{tenth} {name}") }
}

/// Parses a number of bytes: a quantity of Kubernetes, or `64 MiB`.
pub(super) fn parse_bytes(text: &str) -> Result<u64, String> {
    let compact: String = text.split_whitespace().collect();
    let quantity = compact.strip_suffix("iB").map_or(compact.clone(), |number| format!("{number}i"));
    shmesh::config::parse_bytes(&quantity).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_formatted_with_units() {
        assert_eq!(human(0), "0 B");
        assert_eq!(human(1023), "1023 B");
        assert_eq!(human(64 << 20), "64 MiB");
        assert_eq!(human((1 << 30) + (1 << 29)), "1.5 GiB");
        assert_eq!(human(u64::MAX), "16383.9 PiB");
    }

    #[test]
    fn quantities() {
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_bytes("64Mi"), Ok(64 << 20));
        assert_eq!(parse_bytes("64 MiB"), Ok(64 << 20));
        assert_eq!(parse_bytes("1G"), Ok(1_000_000_000));
        assert_eq!(parse_bytes("1.5Gi"), Ok(3 << 29));
        assert_eq!(parse_bytes("1e9"), Ok(1_000_000_000));
        for bad in ["", "Mi", "-1", "12 parsecs", "99999999999999999999", "18446744073709551615Ki"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn fields_match_whole_names() {
        let text = "Seccomp:\t2\nSeccomp_filters:\t1\n";
        assert_eq!(field(text, "Seccomp"), Some("2"));
        assert_eq!(field(text, "Seccomp_filters"), Some("1"));
        assert_eq!(field(text, "NoNewPrivs"), None);
    }

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
