//! A patch that only adds: what is there stays as it is.

use serde::Serialize;
use serde_json::{Map, Value};

/// One operation of a JSON patch (RFC 6902).
///
/// ```
/// # let pod = serde_json::json!({
/// #     "metadata": {"annotations": {"shmesh.io/links": "- name: a\n"}},
/// #     "spec": {"securityContext": {"runAsUser": 1}, "containers": [{"name": "a"}]},
/// # });
/// let injected = shmesh_injector::inject(&pod, "radio", &Default::default())?;
/// assert_eq!((injected.operations[0].op, injected.operations[0].path.as_str()), ("add", "/spec/volumes"));
/// # Ok::<(), shmesh_injector::Refusal>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Operation {
    /// Always `add`.
    pub op: &'static str,
    /// A JSON pointer.
    pub path: String,
    /// What is added.
    pub value: Value,
}

/// A pod that is being changed, and what was done.
#[derive(Debug)]
pub(crate) struct Edit {
    pub(crate) pod: Value,
    pub(crate) operations: Vec<Operation>,
}

/// A place in the pod that has another type than Kubernetes says.
#[derive(Debug, thiserror::Error)]
#[error("{0} is not what Kubernetes has there")]
pub(crate) struct ShapeError(pub(crate) String);

impl Edit {
    pub(crate) fn new(pod: Value) -> Self {
        Self { pod, operations: Vec::new() }
    }

    /// Adds a member, unless there is one.
    pub(crate) fn ensure(&mut self, parent: &str, key: &str, value: Value) -> Result<(), ShapeError> {
        self.object(parent)?;
        let path = format!("{parent}/{}", escaped(key));
        if self.pod.pointer(&path).is_none_or(Value::is_null) {
            self.add(&path, value)?;
        }
        Ok(())
    }

    /// Adds an object where there is none, and those around it.
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

    /// Adds to the end of a list, which is made where there is none.
    pub(crate) fn push(&mut self, list: &str, value: Value) -> Result<(), ShapeError> {
        self.enlist(list, "-", value)
    }

    /// Adds as the first of a list.
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

/// A key as JSON pointers have it.
pub(crate) fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_there_stays() {
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
    fn what_has_another_shape_is_no_reason_to_panic() {
        let mut edit = Edit::new(json!({"t": "text", "l": []}));
        assert_eq!(
            edit.ensure("/t", "x", json!(1)).unwrap_err().to_string(),
            "/t is not what Kubernetes has there"
        );
        edit.push("/t", json!(1)).unwrap_err();
        edit.ensure("/l", "x", json!(1)).unwrap_err();
        Edit::new(json!(3)).ensure("/a", "b", json!(1)).unwrap_err();
        Edit::new(json!(3)).push("/a/b", json!(1)).unwrap_err();
    }
}
