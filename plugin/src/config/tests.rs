use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::*;

/// A node that has everything.
fn node() -> (tempfile::TempDir, ConfigLimits) {
    let dir = tempfile::tempdir().unwrap();
    for path in ["var/lib/kubelet/device-plugins", "var/lib/kubelet/plugins_registry", "dev/shm", "run"] {
        fs::create_dir_all(dir.path().join(path)).unwrap();
    }
    (dir, ConfigLimits { page: 4096, memory: 16 << 30, numa: Vec::new(), has_paths: true })
}

fn load(text: &str, settings: &[&str]) -> Result<Config, Problems> {
    let (dir, limits) = node();
    let file = dir.path().join("config.yaml");
    fs::write(&file, text).unwrap();
    let mut settings: Vec<Override> = settings.iter().map(|text| text.parse().unwrap()).collect();
    settings.push(format!("hostRoot={}", dir.path().display()).parse().unwrap());
    Config::load(Some(&file), &settings, &limits)
}

fn problems(text: &str, settings: &[&str]) -> Vec<String> {
    load(text, settings).unwrap_err().0.iter().map(Problem::to_string).collect()
}

/// There is exactly one problem, at this path, and it says so.
fn refused(text: &str, path: &str, said: &str) {
    let problems = load(text, &[]).unwrap_err().0;
    assert_eq!(problems.len(), 1, "{text:?}: {problems:?}");
    assert_eq!(problems[0].path, path, "{text:?}: {problems:?}");
    assert!(problems[0].what.contains(said), "{text:?}: {problems:?}");
}

#[test]
fn empty_configuration_is_valid() {
    let config = load("", &[]).unwrap();
    assert_eq!(Config { host_root: PathBuf::from("/"), ..config }, Config::default());
}

#[test]
fn overrides_take_precedence_over_the_file() {
    let file = "shm: {unit: 128Mi, budget: 2Gi}\npools:\n- {name: a, gid: 60001}\n";
    let config = load(
        file,
        &["shm.budget=4Gi", "pools.0.attachments=7", "pools.1={name: b}", "identity.enabled=false"],
    )
    .unwrap();
    assert_eq!((config.shm.unit, config.shm.budget), (Bytes(128 << 20), Budget::Bytes(Bytes(4 << 30))));
    assert_eq!((config.pools[0].attachments, config.pools[1].name.as_str()), (7, "b"));
    assert!(!config.identity.enabled);
    assert_eq!(config.pools[0].directory(&config), PathBuf::from("/dev/shm/shmesh/a"));
}

#[test]
fn each_invalid_value_is_reported() {
    refused("domain: kubernetes.io", "domain", "reserved by Kubernetes");
    refused("pools: [{name: a/b}]", "pools[a/b].name", "not a valid resource name");
    refused("pools: [{name: shm}]", "pools[shm].name", "reserved for shmesh.io/shm");
    refused("pools: [{name: a}, {name: a}]", "pools[a]", "duplicate pool name");
    refused("shm: {unit: 0}", "shm.unit", "page size");
    refused("shm: {unit: 4097}", "shm.unit", "page size, 4096");
    refused("shm: {budget: 17Gi}", "shm.budget", "more than the node's memory");
    refused("shm: {budget: 1Mi}", "shm.budget", "less than one unit");
    refused("shm: {unit: 4Ki}", "shm.unit", "raise it to");
    refused(
        "pools: [{name: a, attachments: 4000000}]",
        "pools[a].attachments",
        "the kubelet accepts 4194304",
    );
    refused("identity: {attachments: 4000000}", "identity.attachments", "the kubelet accepts 4194304");
    refused("cdi: {enabled: false}", "shm.budget", "enable_cdi = true");
    refused(
        "shm: {budget: 0}\ncdi: {enabled: false}\npools: [{name: a, gid: 60001}]",
        "pools[a].gid",
        "remove one of the two",
    );
    refused("pools: [{name: a, gid: 60001}, {name: b, gid: 60001}]", "pools[b].gid", "group of pool a");
    refused("pools: [{name: a, gid: 70001, userNamespaces: mixed}]", "pools[a].gid", "65535");
    refused("pools: [{name: a, gid: 0}]", "pools[a].gid", "reserved");
    refused("pools: [{name: a, directory: /run/x}]", "pools[a].directory", "breaks the node");
    refused("pools: [{name: a}, {name: b, directory: /dev/shm/shmesh/a/b}]", "pools[b].directory", "pool a");
    refused("pools: [{name: a, mountPath: /proc/x}]", "pools[a].mountPath", "container runtime");
    refused("pools: [{name: a, healthCommand: [true.sh]}]", "pools[a].healthCommand", "absolute");
    refused("gpuIpc: {slotsPerDevice: 2000}", "gpuIpc.slotsPerDevice", "1024");
    refused("sweep: {intervalSeconds: 0}", "sweep.intervalSeconds", "between 1 and");
    refused("fakeInventory: /nowhere", "fakeInventory", "cannot be read");
    refused(
        "kubelet: {devicePluginsDir: /var/lib/other}",
        "kubelet.devicePluginsDir",
        "mount the kubelet's directory",
    );
    refused("kubelet: {devicePluginsDir: var/lib}", "kubelet.devicePluginsDir", "absolute");
    let long = format!("pools: [{{name: {0}}}]\ndomain: {1}.io", "a".repeat(60), "b".repeat(40));
    refused(&long, "kubelet.devicePluginsDir", "shorten");
}

#[test]
fn slots_beyond_the_message_limit_are_rejected() {
    let (dir, limits) = node();
    let gpus: Vec<_> = (0..100).map(|at| format!("{{uuid: GPU-{at:036}}}")).collect();
    fs::write(dir.path().join("fake.yaml"), format!("gpus: [{}]\n", gpus.join(", "))).unwrap();
    let root = format!("hostRoot={}", dir.path().display());
    let load = |slots: &str| {
        let settings = [root.as_str(), "fakeInventory=/fake.yaml", slots].map(|text| text.parse().unwrap());
        Config::load(None, &settings, &limits)
    };
    load("gpuIpc.slotsPerDevice=500").unwrap();
    let problems = load("gpuIpc.slotsPerDevice=1000").unwrap_err().0;
    assert_eq!((problems.len(), problems[0].path.as_str()), (1, "gpuIpc.slotsPerDevice"));
    assert!(problems[0].what.contains("the kubelet accepts 4194304; write "), "{}", problems[0]);
    let (_, most) = problems[0].what.rsplit_once("write ").unwrap();
    let most: u32 = most.split(' ').next().unwrap().parse().unwrap();
    load(&format!("gpuIpc.slotsPerDevice={most}")).unwrap();
    assert!(load(&format!("gpuIpc.slotsPerDevice={}", most + 1)).is_err());
}

#[test]
fn unwritable_directory_is_reported() {
    let (dir, limits) = node();
    fs::write(dir.path().join("file"), "").unwrap();
    let settings = [
        "cdi.directory=/file/cdi",
        "poolsDirectory=/file",
        "pools=[{name: a}]",
        "identity.directory=/file/x",
    ];
    let mut settings: Vec<Override> = settings.iter().map(|text| text.parse().unwrap()).collect();
    settings.push(format!("hostRoot={}", dir.path().display()).parse().unwrap());
    let problems = Config::load(None, &settings, &limits).unwrap_err().0;
    let paths: Vec<_> = problems.iter().map(|problem| problem.path.as_str()).collect();
    assert_eq!(paths, ["cdi.directory", "identity.directory", "pools[a].directory"]);
}

#[test]
fn all_problems_are_reported_together() {
    let text = "shm: {unit: 64MB, budget: 99999Gi}\npools:\n- {name: a, giid: 5, attachments: -1}\n- {attachments: 3}\n\
                - {name: c, gid: 0}\nregistration: legacy\nhealth: 5\nkubelet: {registration: both}\n";
    let found = problems(text, &["shm.numa=1", "shm.numa=2"]);
    for part in [
        "shm.unit: \"64MB\" is not a number of bytes",
        "shm.budget: 99999Gi is more than",
        "shm.numa: set twice",
        "shm.numa: 1 is not a valid boolean",
        "pools[0].giid: is not a known key; known keys:",
        "pools[0].attachments: -1 is less than 0",
        "pools[1]: the key name is missing",
        "pools[c].gid: 0 is reserved",
        "registration: is not a known key",
        "health: 5 is not a valid object",
        "kubelet.registration: \"both\" is not one of: legacy, pluginsRegistry",
    ] {
        assert!(found.iter().any(|problem| problem.contains(part)), "{part} is in {found:#?}");
    }
    assert_eq!(found.len(), 11, "{found:#?}");
}

#[test]
fn invalid_file_is_reported_by_name() {
    for (text, part) in [("a: [", "config.yaml"), ("- a", "must be a mapping"), ("7", "must be a mapping")] {
        let found = problems(text, &[]);
        assert!(found.len() == 1 && found[0].contains(part), "{found:?}");
    }
    let limits = node().1;
    let missing = Config::load(Some(Path::new("/nowhere")), &[], &limits).unwrap_err();
    assert!(missing.0[0].to_string().starts_with("/nowhere: cannot be read"));
    for wrong in ["a", "=1", "a..b=1", "a={"] {
        assert!(wrong.parse::<Override>().is_err(), "{wrong}");
    }
}

#[test]
fn schema_matches_the_types() {
    let schema = schema();
    let schema = schema.as_value();
    // The keywords that `shape` supports; it would not check a new one.
    let known = [
        "$schema",
        "$defs",
        "$ref",
        "title",
        "description",
        "default",
        "type",
        "properties",
        "additionalProperties",
        "items",
        "required",
        "enum",
        "oneOf",
        "anyOf",
        "const",
        "minimum",
        "maximum",
        "pattern",
        "format",
    ];
    fn words<'a>(schema: &'a Value, found: &mut Vec<&'a str>) {
        match schema {
            Value::Object(map) => {
                for (key, value) in map {
                    found.push(key);
                    match key.as_str() {
                        "properties" | "$defs" => {
                            value.as_object().unwrap().values().for_each(|one| words(one, found))
                        }
                        "default" => {}
                        _ => words(value, found),
                    }
                }
            }
            Value::Array(list) => list.iter().for_each(|one| words(one, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    words(schema, &mut found);
    for word in found {
        assert!(known.contains(&word), "{word}");
    }
    // The defaults conform to it, and are the whole of it.
    let mut document = serde_json::to_value(Config::default()).unwrap();
    let before = document.clone();
    assert_eq!(conform(&mut document, schema), []);
    assert_eq!(document, before);
    assert_eq!(schema["additionalProperties"], json!(false));
    assert_eq!(schema["properties"].as_object().unwrap().len(), document.as_object().unwrap().len());
}

#[test]
fn default_gids_are_stable() {
    assert_eq!((default_gid("fronthaul"), default_gid("a")), (default_gid("fronthaul"), default_gid("a")));
    for name in ["fronthaul", "a", "b", ""] {
        assert!((60_000..65_000).contains(&default_gid(name)));
    }
}

/// The keys of a DRA driver whose sockets are in directories that exist.
const DRA: &str = "mode: dra\nkubelet: {pluginsRegistryDir: /tmp}\n";

#[test]
fn dra_driver_has_rules_of_its_own() {
    let valid = format!(
        "{DRA}dra: {{pluginsDir: /tmp, budget: 8Gi, attachments: 8, gids: {{first: 62000, count: 8}}}}\npools: [{{name: a-1, gid: 60001}}]"
    );
    let config = load(&valid, &[]).unwrap();
    assert_eq!((config.mode, config.dra.gids.range()), (FrontEnd::Dra, 62_000..62_008));
    assert_eq!(config.state_directory(), PathBuf::from("/tmp/shmesh.io"));
    let given = format!("{DRA}dra: {{pluginsDir: /tmp, stateDirectory: /tmp/state}}");
    assert_eq!(load(&given, &[]).unwrap().state_directory(), PathBuf::from("/tmp/state"));

    let with = |dra: &str, rest: &str| format!("{DRA}dra: {{pluginsDir: /tmp{dra}}}\n{rest}");
    for (dra, rest, path, said) in [
        (", budget: 1Mi", "", "dra.budget", "not between 64Mi and the node's memory"),
        (", budget: 17Gi", "", "dra.budget", "not between 64Mi and the node's memory"),
        (", attachments: 0", "", "dra.attachments", "0 is less than 1"),
        (
            ", attachments: 257",
            "",
            "dra.attachments",
            "dra.gids.count is 256; raise that, or write 256 or less",
        ),
        (", gids: {count: 63}", "", "dra.attachments", "write 63 or less"),
        (", gids: {count: 0}", "", "dra.gids.count", "0 is less than 1"),
        (", gids: {count: 1025}", "", "dra.gids.count", "1025 is more than 1024"),
        (", gids: {first: 65500}", "", "dra.gids.first", "65535"),
        (", attachments: 1, gids: {first: 0, count: 1}", "", "dra.gids.first", "not between 1"),
        (", directory: /dev/shm", "", "dra.directory", "three parts or more"),
        (", directory: dev/shm/x/y", "", "dra.directory", "absolute path"),
        (", directory: /run/shmesh/claims", "", "dra.directory", "outside /run"),
        (
            ", directory: /dev/shm/shmesh",
            "pools: [{name: a, gid: 60001}]",
            "pools[a].directory",
            "directory of claims",
        ),
        ("", "pools: [{name: a, gid: 61255}]", "pools[a].gid", "one of the groups of claims, 61000 to 61255"),
        (
            "",
            "pools: [{name: a, gid: 60001, userNamespaces: mixed}]",
            "pools[a].userNamespaces",
            "never or always",
        ),
        ("", "pools: [{name: A_1, gid: 60001}]", "pools[A_1].name", "lower-case letters"),
        (", stateDirectory: x", "", "dra.stateDirectory", "absolute path"),
        ("", "cdi: {enabled: false}\nshm: {budget: 0}", "mode", "needs a runtime with CDI"),
        (", extra: 1", "", "dra.extra", "known keys: attachments"),
    ] {
        let text = with(dra, rest);
        let problems = problems(&text, &[]);
        let found = problems.iter().any(|one| one.starts_with(&format!("{path}: ")) && one.contains(said));
        assert!(found, "{text:?}: {problems:?} has {path}: {said}");
    }
    // None of this concerns the device plugin.
    load("pools: [{name: A_1, gid: 61000, userNamespaces: mixed}]", &[]).unwrap();
    refused("mode: both", "mode", "one of: devicePlugin, dra");
}
