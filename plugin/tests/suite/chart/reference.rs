//! `docs/reference/values.md`: every value of the chart, from the schema and `values.yaml`.

use std::fmt::Write as _;

use serde_json::Value;

/// Renders the page. Defaults are those of `values`, and for the device plugin's configuration those of the schema.
pub(crate) fn page(schema: &Value, values: &Value) -> String {
    let mut page = String::from(
        "# Values of the chart, configuration of the device plugin\n\n\
        `config` has the keys of the device plugin's configuration file ([daemons.md](../daemons.md#shmesh-plugin-run)). \
        [installing.md](../installing.md#values) explains the\nmost important values; `values.schema.json` of the chart rejects all others.\n\n\
        This page is generated from `shmesh-plugin schema` and the chart.\n\n\
        | value | type | default | meaning |\n|---|---|---|---|\n",
    );
    add_rows(&mut page, "", schema, schema, Some(values));
    page
}

/// The definition that a schema refers to, or the schema itself.
fn resolved<'a>(whole: &'a Value, given: &'a Value) -> &'a Value {
    given["$ref"].as_str().map_or(given, |name| &whole["$defs"][name.trim_start_matches("#/$defs/")])
}

fn add_rows(page: &mut String, path: &str, whole: &Value, given: &Value, default: Option<&Value>) {
    let schema = resolved(whole, given);
    let default = default.or_else(|| given.get("default")).filter(|default| !default.is_null());
    if let Some(properties) = schema["properties"].as_object() {
        for (key, property) in properties {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            add_rows(page, &path, whole, property, default.and_then(|default| default.get(key)));
        }
        return;
    }
    let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
    let kind = match &schema["enum"] {
        Value::Array(names) => names.iter().map(|name| format!("`{}`", name.as_str().unwrap())).collect(),
        _ => match &schema["type"] {
            Value::Array(kinds) => kinds
                .iter()
                .filter_map(Value::as_str)
                .filter(|kind| *kind != "null")
                .map(str::to_owned)
                .collect(),
            kind => vec![kind.as_str().unwrap_or("any").to_owned()],
        },
    };
    let meaning = given["description"].as_str().or(schema["description"].as_str()).unwrap_or_default();
    assert!(!meaning.is_empty(), "{path} has no description");
    let default = default.map(|default| format!("`{default}`")).unwrap_or_default();
    writeln!(page, "| `{path}` | {} | {} | {} |", kind.join(", "), cell(&default), cell(meaning)).unwrap();
    if schema["items"].is_object() {
        let item = resolved(whole, &schema["items"]);
        if item["properties"].is_object() {
            add_rows(page, &format!("{path}[]"), whole, item, None);
        }
    }
}
