//! The checks of the server that a driver or a test is likely to meet.

use std::collections::BTreeSet;

use serde_json::Value;

use super::errors::ApiError;
use super::kinds::{Kind, field};

const DEVICES_MAX: usize = 128;
const DEVICES_WITH_TAINTS_MAX: usize = 64;
const ATTRIBUTES_MAX: usize = 32;
const CONSUMERS_MAX: usize = 256;
const OPAQUE_BYTES_MAX: usize = 10 * 1024;

pub(super) fn validate(
    kind: &'static Kind,
    name: &str,
    before: Option<&Value>,
    after: &Value,
) -> Result<(), ApiError> {
    let invalid = |what: String| Err(ApiError::invalid(kind, name, &what));
    if let Some(before) = before {
        for path in kind.immutable {
            if field(before, path) != field(after, path) {
                return invalid(format!("{path}: Invalid value: {}: field is immutable", field(after, path)));
            }
        }
    }
    let checked = match kind.plural {
        "resourceslices" => slice(&after["spec"]),
        "resourceclaims" => claim(after),
        _ => Ok(()),
    };
    checked.or_else(invalid)
}

fn slice(spec: &Value) -> Result<(), String> {
    for path in ["driver", "pool.name"] {
        if field(spec, path).as_str().unwrap_or_default().is_empty() {
            return Err(format!("spec.{path}: Required value"));
        }
    }
    if field(spec, "pool.resourceSliceCount").as_i64().unwrap_or_default() <= 0 {
        return Err("spec.pool.resourceSliceCount: Invalid value: must be greater than zero".to_owned());
    }
    let places = ["nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection"];
    let count = places.iter().filter(|place| !spec[**place].is_null() && spec[**place] != false).count();
    if count != 1 {
        let which =
            "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required";
        return Err(format!("spec: Invalid value: {which}"));
    }
    let devices = spec["devices"].as_array().map(Vec::as_slice).unwrap_or_default();
    let tainted =
        devices.iter().any(|device| !device["taints"].is_null() || !device["consumesCounters"].is_null());
    let limit = if tainted { DEVICES_WITH_TAINTS_MAX } else { DEVICES_MAX };
    if devices.len() > limit {
        return Err(format!("spec.devices: Too many: {}: must have at most {limit} items", devices.len()));
    }
    let mut names = BTreeSet::new();
    for (index, device) in devices.iter().enumerate() {
        let name = device["name"].as_str().unwrap_or_default();
        if !is_label(name) {
            return Err(format!(
                "spec.devices[{index}].name: Invalid value: {name:?}: a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-'"
            ));
        }
        if !names.insert(name) {
            return Err(format!("spec.devices[{index}].name: Duplicate value: {name:?}"));
        }
        let len = |key: &str| device[key].as_object().map_or(0, serde_json::Map::len);
        let sum = len("attributes") + len("capacity");
        if sum > ATTRIBUTES_MAX {
            return Err(format!(
                "spec.devices[{index}]: Invalid value: {sum}: the total number of attributes and capacities must not exceed {ATTRIBUTES_MAX}"
            ));
        }
        for (key, attribute) in device["attributes"].as_object().into_iter().flatten() {
            let values = ["bool", "int", "string", "version"];
            if values.iter().filter(|value| !attribute[**value].is_null()).count() != 1 {
                return Err(format!(
                    "spec.devices[{index}].attributes[{key}]: Invalid value: exactly one value must be specified"
                ));
            }
            if attribute["string"].as_str().is_some_and(|text| text.len() > 64) {
                return Err(format!(
                    "spec.devices[{index}].attributes[{key}].string: Too long: may not be more than 64 bytes"
                ));
            }
        }
        for (key, capacity) in device["capacity"].as_object().into_iter().flatten() {
            if !capacity["requestPolicy"].is_null() && device["allowMultipleAllocations"] != true {
                return Err(format!(
                    "spec.devices[{index}].capacity[{key}].requestPolicy: Forbidden: request policy must not be set when allowMultipleAllocations is false or unset"
                ));
            }
        }
    }
    Ok(())
}

fn claim(claim: &Value) -> Result<(), String> {
    let consumers = field(claim, "status.reservedFor").as_array().map_or(0, Vec::len);
    if consumers > CONSUMERS_MAX {
        return Err(format!(
            "status.reservedFor: Too many: {consumers}: must have at most {CONSUMERS_MAX} items"
        ));
    }
    let configs = field(claim, "spec.devices.config").as_array().map(Vec::as_slice).unwrap_or_default();
    for (index, config) in configs.iter().enumerate() {
        let parameters = field(config, "opaque.parameters");
        if parameters.to_string().len() > OPAQUE_BYTES_MAX {
            return Err(format!(
                "spec.devices.config[{index}].opaque.parameters: Too long: may not be more than {OPAQUE_BYTES_MAX} bytes"
            ));
        }
    }
    let allocated =
        field(claim, "status.allocation.devices.results").as_array().map(Vec::as_slice).unwrap_or_default();
    let key = |value: &Value| ["driver", "pool", "device", "shareID"].map(|key| value[key].clone());
    for (index, device) in field(claim, "status.devices").as_array().into_iter().flatten().enumerate() {
        if !allocated.iter().any(|result| key(result) == key(device)) {
            return Err(format!(
                "status.devices[{index}]: Invalid value: must be an allocated device in the claim"
            ));
        }
        if device["data"].to_string().len() > OPAQUE_BYTES_MAX {
            return Err(format!(
                "status.devices[{index}].data: Too long: may not be more than {OPAQUE_BYTES_MAX} bytes"
            ));
        }
        if device["conditions"].as_array().is_some_and(|list| list.len() > 8) {
            return Err(format!("status.devices[{index}].conditions: Too many: must have at most 8 items"));
        }
    }
    Ok(())
}

fn is_label(name: &str) -> bool {
    let edge = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let inner = |byte: u8| edge(Some(byte)) || byte == b'-';
    name.len() <= 63 && edge(name.bytes().next()) && edge(name.bytes().last()) && name.bytes().all(inner)
}
