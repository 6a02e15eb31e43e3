//! Only this crate talks to the kernel and the C library: no other product crate depends on `libc` or `nix`, except the crate that
//! takes the place of the C library in programs, `lib/posix`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Crates that no product contains: doubles of kubelet and drivers, and the shared test code.
const FAKES: [&str; 4] = ["e2e/devices/ascend", "e2e/devices/cuda", "e2e/kubelet", "lib/testing"];
/// Dependencies that only this crate may have.
const KERNEL: [&str; 3] = ["libc", "nix", "rustix"];

/// The members of the workspace, from the text between `members = [` and `]`.
fn members(manifest: &str) -> Vec<String> {
    let list = manifest.split_once("\nmembers = [").expect("a list of members").1;
    let list = list.split_once(']').expect("its end").0;
    list.split(',')
        .map(|name| name.trim().trim_matches('"').to_owned())
        .filter(|name| !name.is_empty())
        .collect()
}

/// The names in all tables of dependencies that end up in a product: also those of a target, and of build scripts.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut is_table = false;
    let mut names = Vec::new();
    for line in manifest.lines().map(str::trim) {
        if let Some(table) = line.strip_prefix('[') {
            let table = table.trim_end_matches(']');
            let (_, name) = table.split_once("dependencies.").unwrap_or_default();
            is_table = table.ends_with("dependencies") && !table.ends_with("dev-dependencies");
            if !name.is_empty() && !table.contains("dev-dependencies") {
                names.push(name.to_owned());
            }
        } else if is_table && !line.starts_with('#') {
            let name = line.split(['.', '=', ' ']).next().unwrap_or_default();
            // Under another name it is the same crate.
            let package = line.split_once("package = \"").and_then(|(_, rest)| rest.split('"').next());
            names.extend(
                [package.unwrap_or(name)].into_iter().filter(|name| !name.is_empty()).map(str::to_owned),
            );
        }
    }
    names
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The Rust files below the directories `src` of the members but the fakes, each by its path from the root, with its text.
fn sources() -> Vec<(String, String)> {
    fn collect(root: &Path, directory: &str, found: &mut Vec<(String, String)>) {
        for entry in fs::read_dir(root.join(directory)).into_iter().flatten().map(Result::unwrap) {
            let path = format!("{directory}/{}", entry.file_name().to_string_lossy());
            if entry.file_type().expect("its type").is_dir() {
                collect(root, &path, found);
            } else if path.ends_with(".rs") {
                found.push((path.clone(), fs::read_to_string(root.join(&path)).expect("a source")));
            }
        }
    }
    let (root, mut found) = (root(), Vec::new());
    for member in members(&fs::read_to_string(root.join("Cargo.toml")).expect("a manifest")) {
        if !member.starts_with("e2e") && member != "lib/comparison" {
            collect(&root, &format!("{member}/src"), &mut found);
        }
    }
    assert!(found.len() > 300, "{}", found.len());
    found
}

#[test]
fn only_this_crate_declares_c_functions_and_contains_assembly() {
    let allowed = ["lib/sys/", "lib/posix/", "lib/src/device/", "lib/src/segment/lines.rs", "lib/testing/"];
    let is_foreign = |line: &str| {
        let block = line.split_once("extern \"").is_some_and(|(_, rest)| rest.contains("\" {"));
        !line.trim_start().starts_with("//") && (block || line.contains("asm!("))
    };
    let found: Vec<_> = sources().into_iter().filter(|(_, text)| text.lines().any(is_foreign)).collect();
    let is_allowed = |path: &str| allowed.iter().any(|allowed| path.starts_with(allowed));
    let (allowed, others): (Vec<_>, Vec<_>) =
        found.iter().map(|(path, _)| path.as_str()).partition(|path| is_allowed(path));
    assert!(
        ["lib/sys/src/cancel.rs", "lib/posix/src/sys.rs"].iter().all(|path| allowed.contains(path)),
        "found by this test: {allowed:?}"
    );
    assert!(others.is_empty(), "{others:?}: use shmesh-sys, or add what it lacks");
}

#[test]
fn documentation_lists_each_file_with_unsafe_code() {
    let text = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let section = text.split_once("### Who may contain unsafe code").expect("a section").1;
    let section = section.split_once("\n#").expect("its end").0;
    let mut listed = BTreeSet::new();
    for row in section.lines().filter(|line| line.starts_with("| `")) {
        let mut directory = "";
        for word in row.split(" | ").next().unwrap().split('`').skip(1).step_by(2) {
            let is_directory = !word.ends_with(".rs");
            match word {
                _ if is_directory => directory = word,
                _ if directory == "device/cuda/" || directory == "device/ascend/" => {
                    listed.insert(format!("lib/src/{directory}{word}"));
                }
                _ if !directory.is_empty() => {
                    listed.insert(format!("{directory}/src/{word}"));
                }
                _ if word.contains("/src/") => {
                    listed.insert(word.to_owned());
                }
                _ => {
                    listed.insert(format!("lib/src/{word}"));
                }
            }
        }
    }
    // The edge to C, as the section says below its tables.
    listed.extend(["lib/capi/src/lib.rs", "lib/capi/nvipc/src/lib.rs"].map(str::to_owned));
    let found: BTreeSet<_> = sources()
        .into_iter()
        .filter(|(path, text)| !path.contains("/tests") && text.contains("unsafe_code"))
        .map(|(path, _)| path)
        .collect();
    assert_eq!(listed, found, "the tables in docs/architecture.md, and the files");
}

#[test]
fn only_this_crate_depends_on_libc_and_nix() {
    let root = root();
    let read =
        |path: &str| fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let members = members(&read("Cargo.toml"));
    assert!(
        members.len() > 10 && FAKES.iter().all(|fake| members.iter().any(|member| member == fake)),
        "{members:?}"
    );
    for member in members.iter().filter(|member| !FAKES.contains(&member.as_str())) {
        let found = dependencies(&read(&format!("{member}/Cargo.toml")));
        let kernel: Vec<_> = found.iter().filter(|name| KERNEL.contains(&name.as_str())).collect();
        match member.as_str() {
            "lib/sys" => assert_eq!(kernel, ["libc", "nix"], "found by this test"),
            // It defines functions of the C library, with the C library's types.
            "lib/posix" => assert_eq!(kernel, ["libc"], "found by this test"),
            _ => assert!(
                kernel.is_empty(),
                "{member} depends on {kernel:?}: use shmesh-sys, or add what it lacks"
            ),
        }
    }
}

#[test]
fn dependencies_are_found_however_they_are_written() {
    let manifest = "[package]\nname = \"x\"\n[dependencies]\nlibc.workspace = true\n# nix\na = { package = \"nix\" }\n\
                    [target.'cfg(x)'.dependencies]\nb = \"1\"\n[build-dependencies.c]\n[dev-dependencies]\nd = \"1\"\n\
                    [dev-dependencies.e]\n[lints]\nworkspace = true\n";
    assert_eq!(dependencies(manifest), ["libc", "nix", "b", "c"]);
}
