//! The kinds of objects that the server keeps.

use serde_json::Value;

/// A kind of object: where it is served, and which of its fields a client may select by.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kind {
    pub(crate) group: &'static str,
    pub(crate) version: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) namespaced: bool,
    /// Whether there is a subresource `status`, which alone changes the field of that name.
    pub(crate) status: bool,
    /// Fields for field selectors, besides `metadata.name` and `metadata.namespace`.
    selectable: &'static [&'static str],
    /// Fields that an update may not change.
    pub(crate) immutable: &'static [&'static str],
}

const RESOURCE: &str = "resource.k8s.io";

static KINDS: &[Kind] = &[
    Kind { selectable: &["spec.nodeName", "status.phase"], ..core("pods", "Pod", true) },
    core("nodes", "Node", false),
    Kind { status: false, ..core("events", "Event", true) },
    Kind { group: "events.k8s.io", status: false, ..core("events", "Event", true) },
    Kind { group: RESOURCE, immutable: &["spec"], ..core("resourceclaims", "ResourceClaim", true) },
    Kind {
        group: RESOURCE,
        immutable: &["spec"],
        status: false,
        ..core("resourceclaimtemplates", "ResourceClaimTemplate", true)
    },
    Kind {
        group: RESOURCE,
        selectable: &["spec.nodeName", "spec.driver"],
        immutable: &["spec.driver", "spec.pool.name", "spec.nodeName"],
        status: false,
        ..core("resourceslices", "ResourceSlice", false)
    },
    Kind { group: RESOURCE, status: false, ..core("deviceclasses", "DeviceClass", false) },
];

const fn core(plural: &'static str, kind: &'static str, namespaced: bool) -> Kind {
    Kind { group: "", version: "v1", plural, kind, namespaced, status: true, selectable: &[], immutable: &[] }
}

impl Kind {
    pub(crate) fn find(group: &str, version: &str, plural: &str) -> Option<&'static Self> {
        KINDS.iter().find(|kind| (kind.group, kind.version, kind.plural) == (group, version, plural))
    }

    /// Returns `apiVersion` of the objects.
    pub(crate) fn api_version(&self) -> String {
        match self.group {
            "" => self.version.to_owned(),
            group => format!("{group}/{}", self.version),
        }
    }

    /// Returns the name of the resource as it is written in errors.
    pub(crate) fn qualified(&self) -> String {
        match self.group {
            "" => self.plural.to_owned(),
            group => format!("{}.{group}", self.plural),
        }
    }

    pub(crate) fn is_selectable(&self, field: &str) -> bool {
        ["metadata.name", "metadata.namespace"].contains(&field) || self.selectable.contains(&field)
    }
}

/// Returns the field at a path with dots, or null.
pub(crate) fn field<'a>(object: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(object, |value, key| value.get(key).unwrap_or(&Value::Null))
}
