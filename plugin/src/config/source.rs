//! Merges the configuration file and `--set` into one document.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;

use serde_json::{Map, Value};
use shmesh::config::show_yaml_error;

use super::Problem;

/// Maximum size of a configuration file.
const MAX_BYTES: u64 = 1 << 20;

/// An override such as `--set shm.unit=128Mi`: a path in the document and a YAML value.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Override {
    path: Vec<String>,
    value: Value,
}

impl FromStr for Override {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, value) = text.split_once('=').ok_or("must be KEY=VALUE, as in shm.unit=128Mi")?;
        let path: Vec<_> = path.split('.').map(str::to_owned).collect();
        if path.iter().any(String::is_empty) {
            return Err("the key has an empty part; write it as in shm.unit or pools.0.name".into());
        }
        let value = if value.is_empty() { Value::String(String::new()) } else { yaml("--set", value)? };
        Ok(Self { path, value })
    }
}

fn yaml(name: &str, text: &str) -> Result<Value, String> {
    serde_saphyr::from_str_with_options(text, serde_saphyr::options! { strict_booleans: true })
        .map_err(|error| show_yaml_error(name, text, &error))
}

/// Merges the file and then the overrides. Parts that cannot be parsed are left out.
pub(super) fn document(file: Option<&Path>, settings: &[Override]) -> (Value, Vec<Problem>) {
    let mut problems = Vec::new();
    let mut document = Value::Object(Map::new());
    if let Some(file) = file {
        match read(file) {
            // An empty file means all defaults.
            Ok(Value::Null) => {}
            Ok(read @ Value::Object(_)) => document = read,
            Ok(_) => problems.push(Problem {
                path: file.display().to_string(),
                what: "must be a mapping of keys to values".into(),
            }),
            Err(what) => problems.push(Problem { path: file.display().to_string(), what }),
        }
    }
    for (at, setting) in settings.iter().enumerate() {
        let named = setting.path.join(".");
        let contradicts = settings[..at].iter().any(|other| {
            let common = other.path.len().min(setting.path.len());
            other.path[..common] == setting.path[..common] && other != setting
        });
        if contradicts {
            let what = "set twice to different values; remove one of them".into();
            problems.push(Problem { path: named, what });
        } else if let Err(what) = place(&mut document, &setting.path, setting.value.clone()) {
            problems.push(Problem { path: named, what });
        }
    }
    (document, problems)
}

fn read(file: &Path) -> Result<Value, String> {
    let size = fs::metadata(file).map_err(|error| format!("cannot be read: {error}"))?.len();
    if size > MAX_BYTES {
        return Err(format!("has {size} bytes, more than the maximum of {MAX_BYTES}"));
    }
    let text = fs::read_to_string(file).map_err(|error| format!("cannot be read: {error}"))?;
    parsed(&file.display().to_string(), &text)
}

/// Parses the text of a configuration file; an empty one is `null`.
pub(super) fn parsed(name: &str, text: &str) -> Result<Value, String> {
    if text.trim().is_empty() { Ok(Value::Null) } else { yaml(name, text) }
}

fn place(at: &mut Value, path: &[String], value: Value) -> Result<(), String> {
    let Some((first, rest)) = path.split_first() else {
        *at = value;
        return Ok(());
    };
    if at.is_null() {
        *at =
            if first.parse::<usize>().is_ok() { Value::Array(Vec::new()) } else { Value::Object(Map::new()) };
    }
    match at {
        Value::Object(map) => place(map.entry(first.clone()).or_insert(Value::Null), rest, value),
        Value::Array(list) => {
            let at: usize = first.parse().map_err(|_| format!("{first:?} is not a list index"))?;
            if at > list.len() {
                return Err(format!("the list has {} entries; the next index is {0}", list.len()));
            }
            if at == list.len() {
                list.push(Value::Null);
            }
            place(&mut list[at], rest, value)
        }
        _ => Err(format!("the parent of {first:?} is neither a list nor a mapping")),
    }
}

/// Identifies the version of a file, including one replaced through a symlink as in a ConfigMap.
pub(crate) fn stamp(file: &Path) -> Option<(u64, u64, i64, i64, u64)> {
    let found = fs::metadata(file).ok()?;
    Some((found.dev(), found.ino(), found.mtime(), found.mtime_nsec(), found.size()))
}
