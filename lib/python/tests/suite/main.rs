//! Runs the tests of the Python package: pytest with the module that Cargo has just built. As a long test, all of them with the
//! wheel, also those that are marked `long`, and the check of the stubs against the module.
//!
//! Uses virtual environments below `target/`, which it creates and fills from PyPI. If that is not possible, it prints what
//! it skipped; with `SHMESH_REQUIRE_PYTHON=1` that is a failure. `SHMESH_PYTHON` selects another interpreter.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The packages of the environment. A change creates a new environment.
const PACKAGES: [&str; 4] = ["ml_dtypes>=0.3", "numpy>=1.23", "pytest>=8", "pytest-xdist>=3.2"];
/// The packages for the long test.
const PACKAGES_OF_THE_WHEEL: [&str; 6] =
    ["maturin>=1.9.4,<2", "ml_dtypes>=0.3", "mypy>=1.18", "numpy>=1.23", "pytest>=8", "pytest-xdist>=3.2"];

enum Failure {
    /// The machine lacks something that the tests need.
    Skipped(String),
    /// The tests ran and failed.
    Wrong(String),
}

use Failure::{Skipped, Wrong};

#[test]
fn pytest() {
    or_skipped(test_module());
}

#[test]
#[ignore = "long: builds the wheel, installs it, and checks the types"]
fn wheel_and_its_stubs() {
    or_skipped(test_wheel());
}

fn or_skipped(result: Result<(), Failure>) {
    match result {
        Ok(()) => {}
        Err(Skipped(why)) => {
            shmesh_testing::skip("PYTHON", &format!("the tests of the Python package: {why}"));
        }
        Err(Wrong(why)) => panic!("{why}"),
    }
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn target() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap_or(here())
}

/// Tests the package in the sources, with the module that Cargo has built for this test.
fn test_module() -> Result<(), Failure> {
    let python = environment(&target().join("python/module"), &PACKAGES)?;
    let package = target().join("python/package");
    let _ = std::fs::remove_dir_all(&package);
    let io = |error: std::io::Error| Wrong(error.to_string());
    copy(&here().join("python/shmesh"), &package.join("shmesh")).map_err(io)?;
    let test = std::env::current_exe().map_err(io)?;
    let module = test.with_file_name("lib_shmesh.so");
    std::fs::copy(&module, package.join("shmesh/_shmesh.abi3.so"))
        .map_err(|error| Wrong(format!("{}: {error}", module.display())))?;
    pytest_with(&python, Some(&package), &["-m", "not long"])
}

/// Copies a folder of the package, without what Python has compiled.
fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let (source, name) = (entry.path(), entry.file_name());
        if source.is_file() {
            std::fs::copy(&source, to.join(name))?;
        } else if name != "__pycache__" {
            copy(&source, &to.join(name))?;
        }
    }
    Ok(())
}

/// Tests the installed package.
fn test_wheel() -> Result<(), Failure> {
    let (here, target) = (here(), target());
    let python = environment(&target.join("python/wheel"), &PACKAGES_OF_THE_WHEEL)?;
    let programs = python.parent().unwrap_or(here);

    let wheels = target.join("python/wheels");
    let _ = std::fs::remove_dir_all(&wheels);
    // In the same folder and profile as this test, so that most is compiled already. It may have to download crates of
    // other platforms, for what is in the lock file.
    let mut maturin = Command::new(programs.join("maturin"));
    maturin.args(["build", "--quiet", "--locked", "--profile", "dev", "--interpreter"]).arg(&python);
    maturin.arg("--out").arg(&wheels).arg("--target-dir").arg(target).current_dir(here);
    succeed(&mut maturin, Wrong)?;
    let wheel = std::fs::read_dir(&wheels).into_iter().flatten().flatten().map(|entry| entry.path()).next();
    let wheel = wheel.ok_or_else(|| Wrong("maturin made no wheel".into()))?;
    let name = wheel.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if !name.contains("-cp310-abi3-") {
        return Err(Wrong(format!("{name} is not a wheel for the stable ABI of CPython 3.10")));
    }
    let install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall"];
    succeed(Command::new(&python).args(install).arg(&wheel), Wrong)?;
    pytest_with(&python, None, &[])?;

    let mut stubs = Command::new(&python);
    stubs.args(["-m", "mypy.stubtest", "shmesh._shmesh"]).current_dir(target);
    succeed(stubs.env("MYPYPATH", ""), Wrong)?;
    let mut types = Command::new(&python);
    types.args(["-m", "mypy", "--strict", "--package", "shmesh", "--cache-dir"]);
    succeed(types.arg(target.join("python/mypy")).current_dir(target), Wrong)?;
    Ok(())
}

/// Runs the tests, with the package in a folder, or with the installed one.
fn pytest_with(python: &Path, package: Option<&Path>, selection: &[&str]) -> Result<(), Failure> {
    // Device keys are brokered by the sidecar, which `cargo test --workspace` has built.
    let sidecar = target().join("debug/shmesh-sidecar");
    if !sidecar.exists() && shmesh_testing::is_required("PYTHON") {
        return Err(Skipped("device keys take a sidecar: cargo build -p shmesh-sidecar".into()));
    }
    // Half of the time, a test waits for other processes.
    let workers = 2 * std::thread::available_parallelism().map_or(1, usize::from);
    let mut pytest = Command::new(python);
    pytest
        .args(["-m", "pytest", "--dist", "worksteal", "-n", &workers.to_string()])
        .args(selection)
        .current_dir(here())
        // Two hundred processes import the same modules, and each would compile them.
        .env_remove("PYTHONDONTWRITEBYTECODE")
        // Each of many processes would start threads for algebra that none does.
        .env("OPENBLAS_NUM_THREADS", "1");
    pytest.env("SHMESH_SIDECAR", sidecar).env("SHMESH_CUDA_LIBRARY", shmesh_fake_cuda::named_or_fake());
    if let Some(package) = package {
        pytest.env("PYTHONPATH", package);
    }
    let tested = succeed(&mut pytest, Wrong)?;
    // The skipped tests, and the number of passed ones.
    let text = String::from_utf8_lossy(&tested.stdout).into_owned();
    let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
    Ok(())
}

/// The interpreter of a virtual environment with the packages for the tests.
fn environment(place: &Path, packages: &[&str]) -> Result<PathBuf, Failure> {
    let chosen = std::env::var("SHMESH_PYTHON").unwrap_or_else(|_| "python3".into());
    let version = "import sys; sys.exit(sys.version_info < (3, 10))";
    let found = Command::new(&chosen).args(["-c", version]).output();
    match found {
        Err(error) => {
            return Err(Skipped(format!(
                "{chosen} cannot be started ({error}); install Python 3.10 or later"
            )));
        }
        Ok(output) if !output.status.success() => {
            return Err(Skipped(format!(
                "{chosen} is older than Python 3.10, or broken; name another by SHMESH_PYTHON"
            )));
        }
        Ok(_) => {}
    }
    let (venv, stamp) = (place.join("venv"), place.join("packages"));
    let python = venv.join("bin/python");
    let wanted = format!("{chosen}\n{}\n", packages.join("\n"));
    if std::fs::read_to_string(&stamp).is_ok_and(|made| made == wanted) && python.exists() {
        return Ok(python);
    }
    let _ = std::fs::remove_file(&stamp);
    let _ = std::fs::remove_dir_all(&venv);
    std::fs::create_dir_all(place).map_err(|error| Wrong(error.to_string()))?;
    let without_venv =
        |why| Skipped(format!("no virtual environment (on Debian: apt-get install python3-venv): {why}"));
    succeed(Command::new(&chosen).args(["-m", "venv"]).arg(&venv), without_venv)?;
    let without_index = |why| Skipped(format!("PyPI does not give what they need: {why}"));
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--prefer-binary"];
    succeed(Command::new(&python).args(install).args(packages), without_index)?;
    std::fs::write(&stamp, wanted).map_err(|error| Wrong(error.to_string()))?;
    Ok(python)
}

/// Runs a command to its end. If it fails, its output is the reason.
fn succeed(command: &mut Command, failure: impl FnOnce(String) -> Failure) -> Result<Output, Failure> {
    // The linker is cargo's, and so are the variables that it sets for tests: another cargo would take them for its own.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR" || name == "LD_LIBRARY_PATH" {
            command.env_remove(&*name);
        }
    }
    let shown = format!("{command:?}");
    match command.output() {
        Ok(output) if output.status.success() => Ok(output),
        Ok(output) => {
            let (out, err) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            Err(failure(format!("{shown}: {}\n{out}{err}", output.status)))
        }
        Err(error) => Err(failure(format!("{shown}: {error}"))),
    }
}
