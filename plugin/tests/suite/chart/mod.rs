//! The chart: its schema is that of the configuration, and Helm and Kubernetes take what it renders.
//!
//! | file | concept |
//! |---|---|
//! | `values.rs` | the form of the chart's values |
//! | `reference.rs` | the page of the reference with all values |
//! | `python.rs` | the environment with the Helm library and the schemas of Kubernetes |
//! | `mod.rs` | the tests; those with Helm are in `helm/tests/check.py` |
//!
//! `SHMESH_BLESS=1` writes what is made from something else: `helm/values.schema.json`, `manifests/install.yaml`,
//! `docs/reference`.

mod python;
mod reference;
mod values;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn is_blessing() -> bool {
    std::env::var_os("SHMESH_BLESS").is_some()
}

fn plugin_schema() -> Value {
    let out = Command::new(env!("CARGO_BIN_EXE_shmesh-plugin")).arg("schema").output().unwrap();
    assert!(out.status.success(), "{out:?}");
    serde_json::from_slice(&out.stdout).unwrap()
}

/// Returns the expected schema; when blessing, writes it before the chart is rendered.
fn wanted_schema() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        let text = serde_json::to_string_pretty(&values::schema(plugin_schema())).unwrap() + "\n";
        if is_blessing() {
            fs::write(root().join("helm/values.schema.json"), &text).unwrap();
        }
        text
    })
}

#[test]
fn values_schema_matches_the_configuration() {
    let file = root().join("helm/values.schema.json");
    let text = wanted_schema();
    let there = fs::read_to_string(&file).unwrap_or_default();
    assert!(
        there == text,
        "helm/values.schema.json is not that of the configuration: run with SHMESH_BLESS=1"
    );
}

#[test]
fn value_errors_do_not_mention_schema_alternatives() {
    let schema = values::schema(plugin_schema());
    let text = schema.to_string();
    assert!(!text.contains("anyOf") && !text.contains("oneOf"), "{text}");
    assert_eq!(schema["$defs"]["CountOrShare"]["type"], serde_json::json!(["integer", "string"]));
    assert_eq!(schema["$defs"]["Mode"]["type"], "string");
    assert!(schema["$defs"]["Pool"]["properties"]["name"]["pattern"].is_string());
}

/// Every key of `values.yaml` is known, and every key that is known is in `values.yaml`.
#[test]
fn values_file_and_schema_have_the_same_keys() {
    let text = fs::read_to_string(root().join("helm/values.yaml")).unwrap();
    let values: Value = serde_saphyr::from_str(&text).unwrap();
    let schema = values::schema(plugin_schema());
    fn compare(path: &str, values: &Value, schema: &Value, whole: &Value) {
        let schema = match schema["$ref"].as_str() {
            Some(name) => &whole["$defs"][name.trim_start_matches("#/$defs/")],
            None => schema,
        };
        let (Some(values), Some(known)) = (values.as_object(), schema["properties"].as_object()) else {
            return;
        };
        for key in values.keys() {
            assert!(known.contains_key(key), "{path}{key} is in values.yaml and not in the schema");
        }
        // The device plugin's defaults are its own; of the rest, all is shown.
        for key in known.keys().filter(|key| path != "config." && *key != "global") {
            let is_open = ["injector.limits.", "config."].iter().any(|open| path.starts_with(open));
            assert!(
                is_open || values.contains_key(key),
                "{path}{key} is in the schema and not in values.yaml"
            );
        }
        for (key, value) in values {
            compare(&format!("{path}{key}."), value, &known[key], whole);
        }
    }
    compare("", &values, &schema, &schema);
}

#[test]
fn reference_page_has_every_value() {
    let text = fs::read_to_string(root().join("helm/values.yaml")).unwrap();
    let page = reference::page(&values::schema(plugin_schema()), &serde_saphyr::from_str(&text).unwrap());
    shmesh_testing::assert_reference("values.md", &page);
}

#[test]
fn reference_page_has_the_help_of_every_subcommand() {
    let about = "The programs of the node: device plugin, DRA driver, identity service, injector. [daemons.md](../daemons.md) and [annotations.md](../annotations.md) explain them.";
    let page = shmesh_testing::help_page(env!("CARGO_BIN_EXE_shmesh-plugin"), about);
    shmesh_testing::assert_reference("shmesh-plugin.md", &page);
}

#[test]
#[ignore = "long: every value, rendered by the Helm library and checked by the schemas of Kubernetes"]
fn chart_passes_helm_and_kubernetes_validation() {
    let Some(python) = python::environment(&root()) else { return };
    wanted_schema();
    let mut check = Command::new(python);
    check.arg(root().join("helm/tests/check.py")).arg("--plugin").arg(env!("CARGO_BIN_EXE_shmesh-plugin"));
    if is_blessing() {
        check.arg("--bless");
    }
    let out = check.output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{said}\n{}", String::from_utf8_lossy(&out.stderr));
    println!("{said}");
}
