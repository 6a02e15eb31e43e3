//! JSON patches that only add. The one value that changes is a text that is appended to.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::pod::{self, Container};

/// One operation of a JSON patch (RFC 6902).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Operation {
    /// `add`, or `replace` for a text that gets longer.
    pub op: &'static str,
    /// JSON pointer to the new value.
    pub path: String,
    /// The value to add.
    pub value: Value,
}

/// A pod under construction, and the patch so far.
#[derive(Debug)]
pub(crate) struct Edit {
    pub(crate) pod: Value,
    pub(crate) operations: Vec<Operation>,
}

/// A value of the pod has a different type than Kubernetes specifies.
#[derive(Debug, thiserror::Error)]
#[error("{0} has an unexpected type")]
pub(crate) struct ShapeError(pub(crate) String);

impl Edit {
    pub(crate) fn new(pod: Value) -> Self {
        Self { pod, operations: Vec::new() }
    }

    /// Adds a member unless it exists.
    pub(crate) fn ensure(&mut self, parent: &str, key: &str, value: Value) -> Result<(), ShapeError> {
        self.object(parent)?;
        let path = format!("{parent}/{}", escaped(key));
        if self.pod.pointer(&path).is_none_or(Value::is_null) {
            self.add(&path, value)?;
        }
        Ok(())
    }

    /// Requests a pool for a container, which mounts it there.
    pub(crate) fn pool_resource(
        &mut self,
        container: &Container<'_>,
        resource: &str,
    ) -> Result<(), ShapeError> {
        let asked = container.resource(resource).unwrap_or(1).to_string();
        // Extended resources require equal limits and requests.
        for kind in ["limits", "requests"] {
            self.ensure(&format!("{}/resources/{kind}", container.path()), resource, json!(asked))?;
        }
        Ok(())
    }

    /// Tells a container the IPC directory by its environment.
    pub(crate) fn directory_variable(
        &mut self,
        container: &Container<'_>,
        directory: &str,
    ) -> Result<(), ShapeError> {
        if pod::named(container.value, "/env", shmesh::DIR_VARIABLE).is_some() {
            return Ok(());
        }
        let variable = json!({ "name": shmesh::DIR_VARIABLE, "value": directory });
        self.push(&format!("{}/env", container.path()), variable)
    }

    /// Appends text to an environment variable, after a separator if it has a value.
    pub(crate) fn append_variable(
        &mut self,
        container: &Container<'_>,
        name: &str,
        separator: char,
        text: &str,
    ) -> Result<(), ShapeError> {
        let env = format!("{}/env", container.path());
        // The last one counts, if there are several.
        let position = pod::list(container.value, "/env")
            .enumerate()
            .filter(|(_, it)| pod::text(it, "/name") == Some(name));
        let Some((at, variable)) = position.last() else {
            return self.push(&env, json!({ "name": name, "value": text }));
        };
        match variable.get("value") {
            None | Some(Value::Null) => self.ensure(&format!("{env}/{at}"), "value", json!(text)),
            Some(Value::String(old)) if old.is_empty() => {
                self.replace(&format!("{env}/{at}/value"), json!(text))
            }
            Some(Value::String(old)) if old.split([separator, ' ']).any(|part| part == text) => Ok(()),
            Some(Value::String(old)) => {
                self.replace(&format!("{env}/{at}/value"), json!(format!("{old}{separator}{text}")))
            }
            Some(_) => Err(ShapeError(format!("{env}/{at}/value"))),
        }
    }

    fn replace(&mut self, path: &str, value: Value) -> Result<(), ShapeError> {
        let there = self.pod.pointer_mut(path).ok_or_else(|| ShapeError(path.to_owned()))?;
        *there = value.clone();
        self.operations.push(Operation { op: "replace", path: path.to_owned(), value });
        Ok(())
    }

    /// Adds an object and its parents unless they exist.
    fn object(&mut self, path: &str) -> Result<(), ShapeError> {
        match self.pod.pointer(path) {
            Some(Value::Object(_)) => return Ok(()),
            None | Some(Value::Null) => {}
            Some(_) => return Err(ShapeError(path.to_owned())),
        }
        let Some((parent, _)) = path.rsplit_once('/') else { return Err(ShapeError(path.to_owned())) };
        self.object(parent)?;
        self.add(path, Value::Object(Map::new()))
    }

    /// Appends to a list, which is created if missing.
    pub(crate) fn push(&mut self, list: &str, value: Value) -> Result<(), ShapeError> {
        self.enlist(list, "-", value)
    }

    /// Inserts at the start of a list, which is created if missing.
    pub(crate) fn first(&mut self, list: &str, value: Value) -> Result<(), ShapeError> {
        self.enlist(list, "0", value)
    }

    fn enlist(&mut self, list: &str, at: &str, value: Value) -> Result<(), ShapeError> {
        match self.pod.pointer(list) {
            Some(Value::Array(_)) => self.add(&format!("{list}/{at}"), value),
            None | Some(Value::Null) => {
                if let Some((parent, _)) = list.rsplit_once('/') {
                    self.object(parent)?;
                }
                self.add(list, Value::Array(vec![value]))
            }
            Some(_) => Err(ShapeError(list.to_owned())),
        }
    }

    fn add(&mut self, path: &str, value: Value) -> Result<(), ShapeError> {
        let shape_error = || ShapeError(path.to_owned());
        let (parent, key) = path.rsplit_once('/').ok_or_else(shape_error)?;
        match self.pod.pointer_mut(parent) {
            Some(Value::Object(members)) => {
                members.insert(key.replace("~1", "/").replace("~0", "~"), value.clone());
            }
            Some(Value::Array(list)) => match key {
                "-" => list.push(value.clone()),
                _ => list.insert(0, value.clone()),
            },
            _ => return Err(shape_error()),
        }
        self.operations.push(Operation { op: "add", path: path.to_owned(), value });
        Ok(())
    }
}

/// Escapes a key for a JSON pointer.
pub(crate) fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn existing_values_are_kept() {
        let mut edit = Edit::new(json!({"a": {"b": 1, "n": null}, "l": [1], "t": "text"}));
        edit.ensure("/a", "b", json!(2)).unwrap();
        assert_eq!(edit.operations, []);
        edit.ensure("/a", "n", json!(2)).unwrap();
        edit.ensure("/x/y", "z/~", json!(3)).unwrap();
        edit.push("/l", json!(2)).unwrap();
        edit.first("/l", json!(0)).unwrap();
        edit.push("/m", json!(9)).unwrap();
        let expected =
            json!({"a": {"b": 1, "n": 2}, "l": [0, 1, 2], "m": [9], "t": "text", "x": {"y": {"z/~": 3}}});
        assert_eq!(edit.pod, expected);
        let paths: Vec<_> = edit.operations.iter().map(|operation| operation.path.as_str()).collect();
        assert_eq!(paths, ["/a/n", "/x", "/x/y", "/x/y/z~1~0", "/l/-", "/l/0", "/m"]);
    }

    #[test]
    fn variables_are_appended_to() {
        let appended = |env: Value| {
            let pod = json!({"spec": {"containers": [{"name": "a", "env": env}]}});
            let mut edit = Edit::new(pod.clone());
            let container = pod::containers(&pod).next().unwrap();
            edit.append_variable(&container, "P", ':', "/x")
                .map(|()| edit.pod["spec"]["containers"][0]["env"].take())
        };
        let value = |value: Value| json!([{"name": "P", "value": value}]);
        assert_eq!(appended(json!(null)).unwrap(), value("/x".into()));
        assert_eq!(appended(value("".into())).unwrap(), value("/x".into()));
        assert_eq!(appended(value("/a /b".into())).unwrap(), value("/a /b:/x".into()));
        assert_eq!(appended(value("/xy".into())).unwrap(), value("/xy:/x".into()), "another path");
        for there in ["/x", "/a:/x", "/x:/a", "/a /x"] {
            assert_eq!(appended(value(there.into())).unwrap(), value(there.into()), "is there");
        }
        let two = json!([{"name": "P", "value": "/x"}, {"name": "P"}]);
        assert_eq!(appended(two).unwrap()[1]["value"], "/x", "the last one counts");
        assert_eq!(appended(value(json!(3))).unwrap_err().0, "/spec/containers/0/env/0/value");
    }

    #[test]
    fn unexpected_types_are_errors() {
        let mut edit = Edit::new(json!({"t": "text", "l": []}));
        assert_eq!(edit.ensure("/t", "x", json!(1)).unwrap_err().to_string(), "/t has an unexpected type");
        edit.push("/t", json!(1)).unwrap_err();
        edit.ensure("/l", "x", json!(1)).unwrap_err();
        Edit::new(json!(3)).ensure("/a", "b", json!(1)).unwrap_err();
        Edit::new(json!(3)).push("/a/b", json!(1)).unwrap_err();
    }
}
