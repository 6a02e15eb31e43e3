//! The files that a peer leaves behind, found by the name that we made it use.

use std::fs;
use std::path::Path;

/// The prefix of all names made here; the id of the process that owns the name follows it.
const PREFIX: &str = "comparison_";
/// Directories in which names can be: shared memory objects, then everything else.
const PLACES: [&str; 2] = ["/dev/shm", "/tmp"];

/// The names of one run, which belong to the process that forks the workers. Their files are removed when it is dropped.
pub(crate) struct Names(String);

impl Names {
    pub(crate) fn new() -> Self {
        sweep();
        Self(format!("{PREFIX}{}", std::process::id()))
    }

    /// The beginning of every name.
    pub(crate) fn prefix(&self) -> &str {
        &self.0
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        sweep();
    }
}

/// Removes the files of this process and of dead ones. The workers of this process have ended when this is called.
fn sweep() {
    for place in PLACES {
        for entry in fs::read_dir(place).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
            let pid: String = rest.chars().take_while(char::is_ascii_digit).collect();
            let Ok(pid) = pid.parse::<u32>() else { continue };
            if pid != std::process::id() && Path::new(&format!("/proc/{pid}")).exists() {
                continue;
            }
            let _ = fs::remove_file(entry.path()).or_else(|_| fs::remove_dir_all(entry.path()));
        }
    }
}
