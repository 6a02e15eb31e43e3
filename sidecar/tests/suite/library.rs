//! `shmesh-sidecar install-library`, which the init container of pods with `shmesh.io/as` runs.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output};

use shmesh_testing::is_root;

const NAME: &str = "libshmesh_posix.so";

fn install(library: &Path, dir: &Path) -> Output {
    // The umask of a careful image.
    let script = "umask 077; exec \"$0\" install-library \"$1\" --from \"$2\"";
    let program = env!("CARGO_BIN_EXE_shmesh-sidecar");
    Command::new("sh").args(["-c", script, program]).arg(dir).arg(library).output().unwrap()
}

fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn copies_for_all_users_and_replaces_in_one_step() {
    let (image, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (library, target) = (image.path().join(NAME), dir.path().join(NAME));
    fs::write(&library, "one").unwrap();
    // What an installation that was killed has left.
    fs::write(dir.path().join(".libshmesh_posix.so.new"), "on").unwrap();
    assert!(install(&library, dir.path()).status.success());
    assert_eq!(files(dir.path()), ["lib", "lib64", NAME]);
    assert_eq!(fs::read_to_string(&target).unwrap(), "one");
    assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o7777, 0o755, "whatever the umask is");

    // A program that has loaded it keeps what it has.
    let mut loaded = fs::File::open(&target).unwrap();
    fs::write(&library, "another").unwrap();
    assert!(install(&library, dir.path()).status.success());
    assert_eq!(files(dir.path()), ["lib", "lib64", NAME]);
    assert_eq!(fs::read_to_string(&target).unwrap(), "another");
    assert_eq!(std::io::read_to_string(&mut loaded).unwrap(), "one");
    assert_ne!(loaded.metadata().unwrap().ino(), fs::metadata(&target).unwrap().ino());
}

/// `$LIB` of glibc on any distribution leads to the library.
#[test]
fn each_value_of_lib_has_a_link() {
    let (image, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let library = image.path().join(NAME);
    fs::write(&library, "one").unwrap();
    assert!(install(&library, dir.path()).status.success());
    let of_debian = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    for folder in ["lib", "lib64", &of_debian] {
        let folder = dir.path().join(folder);
        assert_eq!(
            fs::metadata(&folder).unwrap().permissions().mode() & 0o7777,
            0o755,
            "whatever the umask is"
        );
        assert_eq!(fs::read_to_string(folder.join(NAME)).unwrap(), "one");
        let link = fs::read_link(folder.join(NAME)).unwrap();
        assert!(link.is_relative(), "containers mount it elsewhere: {}", link.display());
    }
}

#[test]
fn errors_name_the_file() {
    let (image, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let library = image.path().join(NAME);
    let failed = |dir: &Path| {
        let output = install(&library, dir);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let said = failed(dir.path());
    assert!(said.starts_with("shmesh-sidecar: cannot read the preload library /"), "{said}");
    assert!(said.contains("use the image of the sidecar: No such file"), "{said}");
    fs::write(&library, "one").unwrap();
    let said = failed(&dir.path().join("missing"));
    assert!(
        said.contains("cannot copy /") && said.contains("missing/libshmesh_posix.so: No such file"),
        "{said}"
    );
}

#[test]
fn full_disk_leaves_the_old_library() {
    if !is_root() {
        return;
    }
    let (image, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let library = image.path().join(NAME);
    fs::write(&library, vec![1; 1 << 20]).unwrap();
    let script = "mount -t tmpfs -o size=64k tmpfs \"$1\" || exit 99; echo old >\"$1/libshmesh_posix.so\"
        \"$0\" install-library \"$1\" --from \"$2\"; echo $?; ls -A \"$1\"; cat \"$1/libshmesh_posix.so\"";
    let program = env!("CARGO_BIN_EXE_shmesh-sidecar");
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, program]).arg(dir.path()).arg(&library);
    let output = command.output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "1\nlibshmesh_posix.so\nold\n");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("cannot copy /") && said.contains("No space left on device"), "{said}");
}
