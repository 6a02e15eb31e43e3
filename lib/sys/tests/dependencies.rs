//! Only this crate talks to the kernel and the C library: no other product crate depends on `libc` or `nix`, except the crate that
//! takes the place of the C library in programs, `lib/posix`.

use std::fs;
use std::path::Path;

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

#[test]
fn only_this_crate_depends_on_libc_and_nix() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
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
