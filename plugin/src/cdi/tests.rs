use std::fs;

use serde_json::{Value, json};

use super::*;
use crate::config::Config;
use crate::resource::{NodeResources, plan};

fn files() -> (tempfile::TempDir, SpecFiles) {
    let dir = tempfile::tempdir().unwrap();
    let files = SpecFiles { directory: dir.path().join("run/cdi"), domain: "shmesh.io".into() };
    (dir, files)
}

fn wanted(settings: &[&str]) -> CdiDevices {
    let mut config = Config::default();
    for setting in settings {
        let (key, value) = setting.split_once('=').unwrap();
        match key {
            "unit" => config.shm.unit = value.parse().unwrap(),
            _ => config.pools = serde_saphyr::from_str(value).unwrap(),
        }
    }
    let resources = plan(&config, &NodeResources { memory: 1 << 30, ..NodeResources::default() });
    CdiDevices::for_resources(&resources, &config.identity.directory)
}

fn read(files: &SpecFiles, class: &str) -> Value {
    serde_json::from_slice(&fs::read(files.directory.join(format!("shmesh.io-{class}.json"))).unwrap())
        .unwrap()
}

fn names(spec: &Value) -> Vec<&str> {
    spec["devices"].as_array().unwrap().iter().map(|device| device["name"].as_str().unwrap()).collect()
}

#[test]
fn memory_is_a_sized_tmpfs() {
    let (_dir, files) = files();
    files.write(&wanted(&[])).unwrap();
    let spec = read(&files, "shm");
    assert_eq!((&spec["cdiVersion"], &spec["kind"]), (&json!("0.6.0"), &json!("shmesh.io/shm")));
    assert_eq!(names(&spec), ["64Mi", "128Mi", "192Mi", "256Mi", "320Mi", "384Mi", "448Mi", "512Mi"]);
    let mount = json!({
        "hostPath": "tmpfs", "containerPath": "/dev/shm", "type": "tmpfs",
        "options": ["nosuid", "nodev", "noexec", "mode=1777", "size=134217728"],
    });
    assert_eq!(spec["devices"][1], json!({ "name": "128Mi", "containerEdits": { "mounts": [mount] } }));
    let left: Vec<_> =
        fs::read_dir(&files.directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "no file is left beside: {left:?}");
}

#[test]
fn pool_is_a_bind_mount_with_a_group() {
    let (_dir, files) = files();
    files.write(&wanted(&["pools=[{name: a, gid: 60001}, {name: b, userNamespaces: always}, {name: c, userNamespaces: mixed}]"])).unwrap();
    let spec = read(&files, "pool");
    assert_eq!(spec["cdiVersion"], "0.7.0");
    let edits = |at: usize| &spec["devices"][at]["containerEdits"];
    assert_eq!(edits(0)["additionalGids"], json!([60001]));
    assert_eq!(edits(0)["mounts"][0]["hostPath"], "/dev/shm/shmesh/a");
    let options = json!(["rbind", "rw", "nosuid", "nodev", "noexec", "rprivate"]);
    assert_eq!(edits(0)["mounts"][0]["options"], options);
    assert!(edits(1)["mounts"][0]["options"].as_array().unwrap().contains(&json!("idmap")));
    assert_eq!(edits(2).get("mounts"), None, "the mount is in the Allocate answer");
    let agent = read(&files, "agent");
    let options = json!(["rbind", "ro", "nosuid", "nodev", "noexec", "rprivate"]);
    assert_eq!(agent["devices"][0]["containerEdits"]["mounts"][0]["options"], options);
}

#[test]
fn allocated_devices_stay_in_the_specification() {
    let (_dir, files) = files();
    files.write(&wanted(&["pools=[{name: a, gid: 60001}]"])).unwrap();
    files.write(&wanted(&["unit=512Mi", "pools=[{name: b, gid: 60002}, {name: a, gid: 60003}]"])).unwrap();
    assert_eq!(names(&read(&files, "shm")).len(), 8);
    let pools = read(&files, "pool");
    assert_eq!(names(&pools), ["a", "b"]);
    assert_eq!(pools["devices"][0]["containerEdits"]["additionalGids"], json!([60003]), "as it is now");
    // Nothing left of either: the files stay.
    let mut nothing = wanted(&[]);
    nothing.shm = None;
    files.write(&nothing).unwrap();
    assert_eq!((names(&read(&files, "shm")).len(), names(&read(&files, "pool")).len()), (8, 2));
}

#[test]
fn missing_or_damaged_file_is_rewritten() {
    let (_dir, files) = files();
    let wanted = wanted(&["pools=[{name: a}]"]);
    assert!(files.is_any_missing(&wanted));
    files.write(&wanted).unwrap();
    assert!(!files.is_any_missing(&wanted));
    for class in ["shm", "pool", "agent"] {
        let path = files.directory.join(format!("shmesh.io-{class}.json"));
        let good = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(files.is_any_missing(&wanted));
        fs::write(&path, "{\"devices\": [{\"na").unwrap();
        files.write(&wanted).unwrap();
        assert_eq!(fs::read(&path).unwrap(), good);
    }
}

#[test]
fn unwritable_cdi_directory_is_reported() {
    let (dir, files) = files();
    fs::write(dir.path().join("run"), "").unwrap();
    let error = format!("{:#}", files.write(&wanted(&[])).unwrap_err());
    assert!(error.contains("run/cdi"), "{error}");
}

#[test]
fn unchanged_files_are_not_rewritten() {
    use std::os::unix::fs::MetadataExt;
    let (_dir, files) = files();
    let wanted = wanted(&["pools=[{name: a, gid: 60001}]"]);
    files.write(&wanted).unwrap();
    let inodes = || ["shm", "pool", "agent"].map(|class| fs::metadata(files.path(class)).unwrap().ino());
    let before = inodes();
    // A directory at the temporary path makes every write fail, even for root.
    for class in ["shm", "pool", "agent"] {
        fs::create_dir(files.path(class).with_extension("new")).unwrap();
    }
    files.write(&wanted).unwrap();
    assert_eq!(inodes(), before);
    // Longer than it should be, shorter, and another.
    for spoil in [
        |text: &str| format!("{text} "),
        |text: &str| text[..text.len() - 1].to_owned(),
        |text: &str| text.replacen("60001", "60009", 1),
    ] {
        let path = files.path("pool");
        let good = fs::read_to_string(&path).unwrap();
        fs::write(&path, spoil(&good)).unwrap();
        assert!(files.write(&wanted).is_err(), "it is to be written, and cannot be");
        fs::write(&path, good).unwrap();
    }
}

#[test]
fn failed_write_keeps_the_existing_file() {
    let (_dir, files) = files();
    let before = wanted(&["pools=[{name: a, gid: 60001}]"]);
    files.write(&before).unwrap();
    let blocked = files.path("pool").with_extension("new");
    fs::create_dir(&blocked).unwrap();
    let pools = serde_saphyr::from_str("[{name: a, gid: 60001}, {name: b, gid: 60002}]").unwrap();
    let config = Config { pools, ..Config::default() };
    let resources = plan(&config, &NodeResources { memory: 1 << 30, ..NodeResources::default() });
    let after = CdiDevices::for_resources(&resources, &config.identity.directory);
    assert!(files.write(&after).is_err());
    let described: Vec<_> = resources.iter().map(|one| (one.short_name(), files.describes(one))).collect();
    assert_eq!(described, [("shm", true), ("a", true), ("b", false), ("agent", true)]);
    fs::remove_dir(&blocked).unwrap();
    files.write(&after).unwrap();
    assert!(resources.iter().all(|one| files.describes(one)));
    // And nothing half done is left beside.
    fs::remove_file(files.path("pool")).unwrap();
    fs::create_dir(files.path("pool")).unwrap();
    fs::write(files.path("pool").join("x"), "").unwrap();
    assert!(files.write(&after).is_err());
    assert!(!files.path("pool").with_extension("new").exists());
}
