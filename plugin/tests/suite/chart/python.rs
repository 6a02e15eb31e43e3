//! A Python environment below `target`, with what `helm/tests/requirements.txt` names and no more.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The environment's Python; none, with a word why, where there is no Python or no package index. In CI that is a failure.
pub(crate) fn environment(root: &Path) -> Option<PathBuf> {
    match made(root) {
        Ok(python) => Some(python),
        Err(why) => {
            shmesh_testing::skip("HELM", &format!("the chart was not checked with Helm: {why}"));
            None
        }
    }
}

fn made(root: &Path) -> Result<PathBuf, String> {
    let requirements = root.join("helm/tests/requirements.txt");
    let wanted = fs::read(&requirements).map_err(|error| format!("{}: {error}", requirements.display()))?;
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("helm");
    fs::create_dir_all(&dir).map_err(|error| error.to_string())?;
    // Two runs at once make one environment.
    let lock = File::create(dir.join("lock")).map_err(|error| error.to_string())?;
    lock.lock().map_err(|error| error.to_string())?;
    let (python, stamp) = (dir.join("venv/bin/python"), dir.join("venv/made-from"));
    if fs::read(&stamp).is_ok_and(|made_from| made_from == wanted) {
        return Ok(python);
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(dir.join("venv")))?;
    run(Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"])
        .args(["--retries", "1", "--timeout", "30", "--require-hashes", "--no-deps", "-r"])
        .arg(&requirements))?;
    fs::write(&stamp, &wanted).map_err(|error| error.to_string())?;
    Ok(python)
}

fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().display().to_string();
    let out = command.output().map_err(|error| format!("{name}: {error}"))?;
    if out.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&out.stderr);
    Err(format!("{name}: {}", said.lines().last().unwrap_or("it failed")))
}
