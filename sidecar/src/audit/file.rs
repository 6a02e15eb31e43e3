//! A log file of bounded size: when it is full it is renamed to `<file>.1`, replacing the previous one.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Maximum size of a file in bytes before it is renamed.
const BYTES_MAX: u64 = 64 << 20;

#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    /// Size in bytes; `None` if it is not a regular file, such as a pipe.
    bytes: Option<u64>,
    bytes_max: u64,
}

impl LogFile {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = append_to(path)?;
        let metadata = file.metadata()?;
        let bytes = metadata.is_file().then_some(metadata.len());
        Ok(Self { path: path.to_owned(), file, bytes, bytes_max: BYTES_MAX })
    }

    fn turn(&mut self) -> io::Result<()> {
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        if let Err(error) = std::fs::rename(&self.path, old) {
            // A mount point, or a directory without write permission: limiting the disk usage is more important than
            // old records.
            tracing::error!(%error, path = %self.path.display(), "the audit log is full and cannot be renamed; its old records are deleted to limit its size");
            return self.file.set_len(0);
        }
        self.file = append_to(&self.path)?;
        Ok(())
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

impl Write for LogFile {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.bytes.is_some_and(|bytes| bytes >= self.bytes_max) {
            self.turn()?;
            self.bytes = Some(0);
        }
        let written = self.file.write(line)?;
        self.bytes = self.bytes.map(|bytes| bytes + written as u64);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_does_not_fill() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        std::fs::write(&path, "old\n").unwrap();
        let mut log = LogFile { bytes_max: 100, ..LogFile::open(&path).unwrap() };
        for n in 0..1000 {
            log.write_all(format!("line {n}\n").as_bytes()).unwrap();
        }
        let text = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        let (now, before) = (text("audit.jsonl"), text("audit.jsonl.1"));
        assert!(now.len() < 120 && before.len() < 120, "{} {}", now.len(), before.len());
        assert!(format!("{before}{now}").ends_with("line 997\nline 998\nline 999\n"), "what is new is there");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn log_that_cannot_be_renamed_is_truncated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        std::fs::create_dir_all(dir.path().join("audit.jsonl.1/in the way")).unwrap();
        let mut log = LogFile { bytes_max: 10, ..LogFile::open(&path).unwrap() };
        for n in 0..5 {
            log.write_all(format!("a long line {n}\n").as_bytes()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a long line 4\n");
    }
}
