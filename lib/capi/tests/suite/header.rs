//! Checks that the header is what cbindgen generates from the sources. If not, it is updated, and the test fails once.

use std::path::Path;

#[test]
fn header_is_up_to_date() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(here.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    // By file: the crate itself is named like its dependency, which has nothing for C.
    for source in ["error", "config", "link", "events", "message", "request"] {
        builder = builder.with_src(here.join(format!("src/{source}.rs")));
    }
    let mut generated = Vec::new();
    builder.generate().unwrap().write(&mut generated);
    // The safety sections are for Rust.
    let text = String::from_utf8(generated).unwrap();
    let mut lines = Vec::new();
    let mut skipping = false;
    for line in text.lines() {
        match line.trim() {
            " * # Safety" | "* # Safety" => skipping = true,
            "*/" => {
                if skipping {
                    while lines.last().is_some_and(|line: &&str| line.trim() == "*") {
                        lines.pop();
                    }
                }
                skipping = false;
            }
            _ => {}
        }
        if !skipping {
            lines.push(line);
        }
    }
    let wanted = lines.join("\n") + "\n";
    let path = here.join("include/shmesh.h");
    if std::fs::read_to_string(&path).unwrap_or_default() != wanted {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, wanted).unwrap();
        panic!("include/shmesh.h was out of date and has been updated: review and commit it");
    }
}
