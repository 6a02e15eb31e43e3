//! The checks of the server that a driver or a test is likely to meet.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::Value;

use super::capacity::{binary, thousandths};
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
            request_policy(&capacity["value"], &capacity["requestPolicy"])
                .map_err(|what| format!("spec.devices[{index}].capacity[{key}].requestPolicy{what}"))?;
        }
    }
    Ok(())
}

/// Checks the values of a policy against each other and against the capacity. A text begins with the path in the policy.
fn request_policy(value: &Value, policy: &Value) -> Result<(), String> {
    let text = |quantity: &Value| quantity.as_str().map_or_else(|| quantity.to_string(), str::to_owned);
    let number = |quantity: &Value| thousandths(&Quantity(text(quantity))).unwrap_or_default();
    let (default, range) = (&policy["default"], &policy["validRange"]);
    let values = policy["validValues"].as_array().map(Vec::as_slice).unwrap_or_default();
    let key = match (range.is_null(), values.is_empty()) {
        (true, true) => return Ok(()),
        (false, false) => {
            return Err(": Forbidden: exactly one policy can be specified, cannot specify \"validValues\" and \"validRange\" at the same time".to_owned());
        }
        (false, true) => "validRange",
        (true, false) => "validValues",
    };
    if default.is_null() {
        return Err(format!(".default: Required value: required when {key} is defined"));
    }
    let check = |holds: bool, path: &str, given: &Value, what: &str| match holds {
        true => Ok(()),
        false => Err(format!(".{key}{path}: Invalid value: {:?}: {what}", text(given))),
    };
    let is_within = |least: &Value, most: &Value| number(least) <= number(most);
    let capacity = format!("larger than capacity value: {}", text(value));
    if !values.is_empty() {
        for (at, one) in values.iter().enumerate() {
            let path = format!("[{at}]");
            let is_sorted = at == 0 || is_within(&values[at - 1], one);
            check(is_sorted, &path, one, "values must be sorted in ascending order")?;
            check(is_within(one, value), &path, one, &format!("option is {capacity}"))?;
        }
        let is_valid = values.iter().any(|one| number(one) == number(default));
        return check(is_valid, "", default, "default value is not valid according to the requestPolicy");
    }
    let (min, max, step) = (&range["min"], &range["max"], &range["step"]);
    if min.is_null() {
        return Err(".validRange.min: Required value: required when validRange is defined".to_owned());
    }
    check(is_within(min, value), ".min", min, &format!("min is {capacity}"))?;
    check(is_within(min, default), ".min", default, &format!("default is less than min: {}", text(min)))?;
    if !max.is_null() {
        check(is_within(min, max), ".max", min, &format!("min is larger than max: {}", text(max)))?;
        check(is_within(max, value), ".max", max, &format!("max is {capacity}"))?;
        check(is_within(default, max), ".max", default, &format!("default is more than max: {}", text(max)))?;
    }
    if !step.is_null() {
        let added = number(min) + number(step);
        let what = format!("one step {} is {capacity}", binary(added / 1000).0);
        check(added <= number(value), ".step", step, &what)?;
        for one in [default, max].into_iter().filter(|one| !one.is_null()) {
            let is_multiple = (number(one) - number(min)) % number(step).max(1) == 0;
            let what =
                format!("value is not a multiple of a given step ({}) from ({})", text(step), text(min));
            check(is_multiple, ".step", one, &what)?;
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
