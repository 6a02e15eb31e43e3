//! Quantities, and how much of a device's capacity a request consumes.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{CapacityRequestPolicy, CapacityRequestPolicyRange, DeviceCapacity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

type Requests = BTreeMap<String, Quantity>;

/// Returns a quantity in thousandths; `None` if the text is not a quantity.
pub(super) fn thousandths(quantity: &Quantity) -> Option<i128> {
    let text = quantity.0.as_str();
    let end = text.find(|c: char| !(c.is_ascii_digit() || "+-.".contains(c))).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let factor: i128 = match suffix {
        "m" => 1,
        "" => 1000,
        "k" => 1_000_000,
        "M" => 1_000_000_000,
        "G" => 1_000_000_000_000,
        "T" => 1_000_000_000_000_000,
        "P" => 1_000_000_000_000_000_000,
        "Ki" => 1000 << 10,
        "Mi" => 1000 << 20,
        "Gi" => 1000 << 30,
        "Ti" => 1000 << 40,
        "Pi" => 1000 << 50,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let whole: i128 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let digits = u32::try_from(fraction.len()).ok()?;
    let scale = 10_i128.checked_pow(digits)?;
    let fraction: i128 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    whole.checked_mul(factor)?.checked_add(fraction.checked_mul(factor)? / scale)
}

/// Returns a number with the largest binary suffix that divides it.
pub(super) fn binary(value: i128) -> Quantity {
    let suffixes = [("Pi", 50), ("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];
    let suffix = suffixes.iter().find(|(_, shift)| value != 0 && value % (1 << shift) == 0);
    Quantity(match suffix {
        Some((suffix, shift)) => format!("{}{suffix}", value >> shift),
        None => value.to_string(),
    })
}

fn value(quantity: &Quantity) -> Result<i128, String> {
    let thousandths = thousandths(quantity).ok_or_else(|| format!("{:?} is not a quantity", quantity.0))?;
    Ok((thousandths + 999).div_euclid(1000))
}

/// Returns what a request consumes of each capacity of a device, or `None` if it violates the policy of one. Fails if the device has
/// no such capacity.
pub(super) fn consumed(
    requests: &Requests,
    capacity: &BTreeMap<String, DeviceCapacity>,
) -> Result<Option<Requests>, String> {
    if requests.keys().any(|name| !capacity.contains_key(name)) {
        return Err("some requested capacity has not been defined".to_owned());
    }
    let mut consumed = Requests::new();
    for (name, capacity) in capacity {
        let amount = amount(requests.get(name), capacity)?;
        let policy = capacity.request_policy.as_ref();
        if policy.map_or(Ok(false), |policy| violates(&amount, policy))? {
            return Ok(None);
        }
        consumed.insert(name.clone(), amount);
    }
    Ok(Some(consumed))
}

fn amount(requested: Option<&Quantity>, capacity: &DeviceCapacity) -> Result<Quantity, String> {
    let policy = capacity.request_policy.as_ref();
    let Some(requested) = requested else {
        let default = policy.and_then(|policy| policy.default.clone());
        return Ok(default.unwrap_or_else(|| capacity.value.clone()));
    };
    match policy {
        Some(CapacityRequestPolicy { valid_range: Some(range), .. }) => round_up(requested, range),
        Some(CapacityRequestPolicy { valid_values: Some(values), .. }) => {
            for valid in values {
                if value(requested)? <= value(valid)? {
                    return Ok(valid.clone());
                }
            }
            Ok(requested.clone())
        }
        _ => Ok(requested.clone()),
    }
}

fn round_up(requested: &Quantity, range: &CapacityRequestPolicyRange) -> Result<Quantity, String> {
    let (requested_value, min) = (value(requested)?, value(&range.min)?);
    if requested_value < min {
        return Ok(range.min.clone());
    }
    let Some(step) = &range.step else { return Ok(requested.clone()) };
    let step = value(step)?.max(1);
    let steps = (requested_value - min + step - 1) / step;
    Ok(binary(min + step * steps))
}

fn violates(amount: &Quantity, policy: &CapacityRequestPolicy) -> Result<bool, String> {
    if policy.default.as_ref() == Some(amount) {
        return Ok(false);
    }
    let amount = value(amount)?;
    if let Some(range) = &policy.valid_range {
        let over = range.max.as_ref().map(value).transpose()?.is_some_and(|max| amount > max);
        let step = range.step.as_ref().map(value).transpose()?.unwrap_or(1).max(1);
        return Ok(over || (amount - value(&range.min)?) % step != 0);
    }
    let Some(values) = policy.valid_values.as_ref().filter(|values| !values.is_empty()) else {
        return Ok(false);
    };
    let values: Vec<i128> = values.iter().map(value).collect::<Result<_, _>>()?;
    Ok(!values.contains(&amount))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantity(text: &str) -> Quantity {
        Quantity(text.to_owned())
    }

    #[test]
    fn quantities_are_read_and_written() {
        for (text, expected) in
            [("1", 1000), ("500m", 500), ("1.5", 1500), ("2Ki", 2_048_000), ("0", 0), (".5k", 500_000)]
        {
            assert_eq!(thousandths(&quantity(text)), Some(expected), "{text}");
        }
        assert_eq!(thousandths(&quantity("1x")), None);
        assert_eq!(binary(64 << 20).0, "64Mi");
        assert_eq!(binary((2 << 20) + 1).0, "2097153");
        assert_eq!(binary(0).0, "0");
    }

    #[test]
    fn requests_are_rounded_by_the_policy() {
        let policy = CapacityRequestPolicy {
            default: Some(quantity("64Mi")),
            valid_range: Some(CapacityRequestPolicyRange {
                min: quantity("2Mi"),
                step: Some(quantity("2Mi")),
                max: Some(quantity("512Mi")),
            }),
            valid_values: None,
        };
        let capacity = DeviceCapacity { value: quantity("1Gi"), request_policy: Some(policy) };
        let capacity = BTreeMap::from([("bytes".to_owned(), capacity)]);
        let bytes = |text: &str| {
            let requests =
                if text.is_empty() { Requests::new() } else { [("bytes".to_owned(), quantity(text))].into() };
            consumed(&requests, &capacity).map(|found| found.map(|found| found["bytes"].0.clone()))
        };
        let is = |text: &str| Ok(Some(text.to_owned()));
        assert_eq!(bytes(""), is("64Mi"));
        assert_eq!(bytes("1"), is("2Mi"));
        assert_eq!(bytes("3Mi"), is("4Mi"));
        assert_eq!(bytes("100M"), is("96Mi"));
        assert_eq!(bytes("513Mi"), Ok(None), "above the maximum");
        let unknown = consumed(&[("x".to_owned(), quantity("1"))].into(), &capacity);
        assert_eq!(unknown.unwrap_err(), "some requested capacity has not been defined");
    }
}
