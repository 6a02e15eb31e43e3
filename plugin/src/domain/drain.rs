//! Draining: while a file is in the directory of the checkpoint, the devices of the node have a taint, and no new claim is
//! allocated to them. It outlives restarts of the plugin and of the node.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

fn mark(state_directory: &Path) -> PathBuf {
    state_directory.join("draining")
}

/// Whether the node is being drained.
pub(crate) fn is_draining(state_directory: &Path) -> bool {
    mark(state_directory).exists()
}

/// Begins draining, or ends it. The running driver notices the file.
pub(crate) fn set_draining(state_directory: &Path, is_draining: bool) -> Result<()> {
    let path = mark(state_directory);
    let outcome = if is_draining {
        fs::create_dir_all(state_directory).and_then(|()| File::create(&path)).map(drop)
    } else {
        fs::remove_file(&path)
    };
    match outcome {
        Err(error) if is_draining || error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot change {}", path.display()))
        }
        _ => Ok(()),
    }
}
