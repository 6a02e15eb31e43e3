//! `docs/reference/errors.md`: every error, with its message and what it is in C and Python.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

#[test]
fn reference_page_has_every_error() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| fs::read_to_string(here.join(path)).unwrap();
    let in_c = arms(&read("src/error.rs"), "match kind {");
    let in_python = arms(&read("../python/src/error.rs"), "match failed.kind() {");
    let mut page = String::from(
        "# Errors\n\nEach error names the link, the limit that was reached, and the remedy. \
        In Rust it is a kind of `shmesh::Error`, in C a number with a text (`shmesh_last_error`), in\nPython an exception of the module \
        `shmesh` ([python.md](../python.md)). Exit codes of the programs are at the end of their `--help`: [shmesh](shmesh.md), \
        [sidecar](shmesh-sidecar.md), [plugin](shmesh-plugin.md).\n\nThis page is generated from the code.\n\n## Kinds\n\n\
        | `ErrorKind` | meaning | message | C | Python |\n|---|---|---|---|---|\n",
    );
    let kinds = kinds(&read("../src/error.rs"));
    assert!(kinds.len() > 40, "{kinds:?}");
    for (name, meaning, message) in &kinds {
        let c = in_c.get(name).map_or("SHMESH_ERROR_SYSTEM", String::as_str).trim_start_matches("SHMESH_");
        let python = in_python.get(name).map_or("Error", String::as_str);
        writeln!(page, "| `{name}` | {meaning} | {message} | `{c}` | `{python}` |").unwrap();
    }
    page.push_str("\n## Numbers in C\n\n| number | name | meaning |\n|---|---|---|\n");
    for (number, name, meaning) in numbers(&read("include/shmesh.h")) {
        writeln!(page, "| {number} | `{name}` | {meaning} |").unwrap();
    }
    shmesh_testing::assert_reference("errors.md", &page);
}

/// Name, documentation and message of each variant of `ErrorKind`.
fn kinds(source: &str) -> Vec<(String, String, String)> {
    let (_, body) = source.split_once("pub enum ErrorKind {").unwrap();
    let (body, _) = body.split_once("\n}").unwrap();
    let (mut found, mut meaning, mut attribute) = (Vec::new(), Vec::new(), String::new());
    for line in body.lines() {
        if let Some(text) = line.strip_prefix("    /// ") {
            meaning.push(text.replace(['[', ']'], ""));
        } else if line.starts_with("    #[error(") || (!attribute.is_empty() && line.starts_with("     ")) {
            attribute.push_str(line.trim().trim_end_matches('\\'));
        } else if line.starts_with("    ") && line.trim_start().starts_with(char::is_uppercase) {
            let name = word(line.trim_start()).to_owned();
            // The message is the first literal.
            let message = attribute
                .split('"')
                .nth(1)
                .map_or("the cause's".to_owned(), |text| format!("`{}`", text.replace('`', "'")));
            found.push((
                name,
                meaning.join(" "),
                message.replace("{{", "{").replace("}}", "}").replace('|', "\\|"),
            ));
            meaning.clear();
            attribute.clear();
        }
    }
    found
}

/// The result of each arm of a `match`, by the kinds that the arm names.
fn arms(source: &str, start: &str) -> BTreeMap<String, String> {
    let (_, body) = source.split_once(start).unwrap();
    let (body, _) = body.split_once("_ =>").unwrap();
    let parts: Vec<_> = body.split("=>").collect();
    let mut found = BTreeMap::new();
    for pair in parts.windows(2) {
        let value = word(pair[1].trim_start_matches([' ', '\n', '{', '"']));
        for kind in pair[0].split("ErrorKind::").skip(1) {
            found.insert(word(kind).to_owned(), value.to_owned());
        }
    }
    assert!(found.len() > 20, "{found:?}");
    found
}

/// Number, name and documentation of each code in the header.
fn numbers(header: &str) -> Vec<(u32, String, String)> {
    let (body, _) = header.split_once("} shmesh_error_t;").unwrap();
    let (mut found, mut meaning) = (Vec::new(), Vec::new());
    for line in body.lines().map(str::trim) {
        if line == "/**" {
            meaning.clear();
        } else if let Some(text) = line.strip_prefix("* ") {
            meaning.push(text);
        } else if let Some((name, number)) = line.trim_end_matches(',').split_once(" = ") {
            found.push((number.parse().unwrap(), name.to_owned(), meaning.join(" ")));
        }
    }
    found
}

fn word(text: &str) -> &str {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap()
}
