//! Pages of `docs/reference`, which are generated from the code.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Compares a page of `docs/reference` with what the code gives. With `SHMESH_BLESS=1`, writes it.
#[track_caller]
pub fn assert_reference(page: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference").join(page);
    if std::env::var_os("SHMESH_BLESS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    let differs = committed.lines().zip(text.lines()).find(|(before, now)| before != now);
    assert!(
        committed == text,
        "docs/reference/{page} differs from the code: run this test with SHMESH_BLESS=1; the first difference: {differs:?}"
    );
}

/// A page with the help of a program and of all its subcommands.
pub fn help_page(program: &str, about: &str) -> String {
    let name = Path::new(program).file_name().unwrap().to_str().unwrap();
    let mut page = format!("# `{name}`\n\n{about}\n\nThis page is generated from `--help`.\n");
    add_help(program, name, &mut Vec::new(), &mut page);
    page
}

fn add_help(program: &str, name: &str, subcommand: &mut Vec<String>, page: &mut String) {
    // The help shows values of variables, and is as wide as COLUMNS says.
    let output = Command::new(program).args(&*subcommand).arg("--help").env_clear().output().unwrap();
    assert!(output.status.success(), "{subcommand:?}: {output:?}");
    let help = String::from_utf8(output.stdout).unwrap();
    if !subcommand.is_empty() {
        write!(page, "\n## `{name} {}`\n", subcommand.join(" ")).unwrap();
    }
    let lines: Vec<_> = help.lines().map(str::trim_end).collect();
    write!(page, "\n```text\n{}\n```\n", lines.join("\n").trim_end()).unwrap();
    let listed =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    for line in listed {
        // A description that continues on the next line is indented further.
        let Some(entry) = line.strip_prefix("  ").filter(|entry| !entry.starts_with(' ')) else { continue };
        let word = entry.split_whitespace().next().unwrap();
        if word != "help" {
            subcommand.push(word.to_owned());
            add_help(program, name, subcommand, page);
            subcommand.pop();
        }
    }
}
