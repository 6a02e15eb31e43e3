//! Checks a document against the schema. serde stops at the first mismatch; this reports all of them.
//!
//! It supports the part of JSON Schema that schemars generates for our types, which a test verifies.

use serde_json::Value;

use super::Problem;

/// Returns every mismatch, and removes nonconforming values from the document.
pub(crate) fn conform(document: &mut Value, schema: &Value) -> Vec<Problem> {
    let mut shape = ShapeCheck { root: schema, problems: Vec::new() };
    if !shape.check(document, schema, "") {
        *document = Value::Object(serde_json::Map::new());
    }
    shape.problems
}

struct ShapeCheck<'a> {
    root: &'a Value,
    problems: Vec<Problem>,
}

impl<'a> ShapeCheck<'a> {
    fn say(&mut self, path: &str, what: String) -> bool {
        let path = if path.is_empty() { "(document)" } else { path };
        self.problems.push(Problem { path: path.to_owned(), what });
        false
    }

    fn resolve(&self, schema: &'a Value) -> &'a Value {
        match schema.get("$ref").and_then(Value::as_str) {
            Some(reference) => {
                self.root.pointer(reference.trim_start_matches('#')).unwrap_or(&Value::Bool(true))
            }
            None => schema,
        }
    }

    /// Whether the value conforms and can stay.
    fn check(&mut self, value: &mut Value, schema: &'a Value, path: &str) -> bool {
        let schema = self.resolve(schema);
        if let Some(any) = schema.get("anyOf").and_then(Value::as_array) {
            // An `Option`: null or the inner type.
            let some = any.iter().find(|one| one.get("type").and_then(Value::as_str) != Some("null"));
            return value.is_null() || some.is_none_or(|some| self.check(value, some, path));
        }
        let words = words(schema);
        if !words.is_empty() {
            let fits = value.as_str().is_some_and(|value| words.contains(&value));
            return fits || self.say(path, format!("{} is not one of: {}", short(value), words.join(", ")));
        }
        let types = types(schema);
        if !types.is_empty() && !types.iter().any(|name| is(value, name)) {
            return self.say(path, format!("{} is not a valid {}", short(value), types.join(" or ")));
        }
        self.range(value, schema, path)
            && self.quantity(value, schema, path)
            && self.inside(value, schema, path)
    }

    fn range(&mut self, value: &Value, schema: &Value, path: &str) -> bool {
        let bound = |name| schema.get(name).and_then(Value::as_f64);
        let Some(number) = value.as_f64() else { return true };
        if bound("minimum").is_some_and(|least| number < least) {
            return self.say(path, format!("{value} is less than {}", schema["minimum"]));
        }
        // schemars expresses the range of `u32` only through `format`.
        let most = bound("maximum").or_else(|| {
            (schema.get("format").and_then(Value::as_str) == Some("uint32")).then_some(f64::from(u32::MAX))
        });
        match most {
            Some(most) if number > most => self.say(path, format!("{value} is more than {most}")),
            _ => true,
        }
    }

    fn quantity(&mut self, value: &Value, schema: &Value, path: &str) -> bool {
        // The parsers of these two types give better messages than the pattern. Names are checked in
        // `rules.rs`.
        let Some(pattern) = schema.get("pattern").and_then(Value::as_str) else { return true };
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let wrong = if pattern.contains('%') {
            text.parse::<super::Budget>().err()
        } else if pattern.contains(shmesh_sys::quantity::PATTERN) {
            text.parse::<super::Bytes>().err().map(|error| error.to_string())
        } else {
            None
        };
        wrong.is_none_or(|error| self.say(path, format!("{text:?} is {error}")))
    }

    fn inside(&mut self, value: &mut Value, schema: &'a Value, path: &str) -> bool {
        if let (Value::Array(list), Some(items)) = (&mut *value, schema.get("items")) {
            let mut at = 0;
            list.retain_mut(|one| {
                at += 1;
                self.check(one, items, &format!("{path}[{}]", at - 1))
            });
        }
        let (Value::Object(map), Some(Value::Object(properties))) = (value, schema.get("properties")) else {
            return true;
        };
        map.retain(|key, one| {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            match properties.get(key) {
                Some(schema) => self.check(one, schema, &path),
                None => {
                    let known: Vec<_> = properties.keys().map(String::as_str).collect();
                    self.say(&path, format!("is not a known key; known keys: {}", known.join(", ")))
                }
            }
        });
        let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
        for key in required.filter_map(Value::as_str) {
            if !map.contains_key(key) {
                return self.say(path, format!("the key {key} is missing"));
            }
        }
        true
    }
}

/// Returns the values of an enumeration.
fn words(schema: &Value) -> Vec<&str> {
    let listed = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
    let described = schema.get("oneOf").and_then(Value::as_array).into_iter().flatten();
    listed.chain(described.filter_map(|one| one.get("const"))).filter_map(Value::as_str).collect()
}

fn types(schema: &Value) -> Vec<&str> {
    match schema.get("type") {
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

fn is(value: &Value, name: &str) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    }
}

/// Shortens a value to fit on a line.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(40) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
