//! Devices that are equal although they are written differently: the API server writes quantities in its own
//! form, and adds the time at which a taint was added.

use k8s_openapi::api::resource::v1::{CapacityRequestPolicy, Device};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The device in a form that is the same for all devices that mean the same.
pub(super) fn canonical(device: &Device) -> Device {
    let mut device = device.clone();
    for capacity in device.capacity.iter_mut().flat_map(|capacity| capacity.values_mut()) {
        canonical_quantity(&mut capacity.value);
        let Some(CapacityRequestPolicy { default, valid_range, valid_values }) = &mut capacity.request_policy
        else {
            continue;
        };
        let range = valid_range.iter_mut().flat_map(|range| {
            [Some(&mut range.min), range.max.as_mut(), range.step.as_mut()].into_iter().flatten()
        });
        range.chain(default).chain(valid_values.iter_mut().flatten()).for_each(canonical_quantity);
        omit_empty(valid_values);
    }
    for consumption in device.consumes_counters.iter_mut().flatten() {
        consumption.counters.values_mut().for_each(|counter| canonical_quantity(&mut counter.value));
    }
    for taint in device.taints.iter_mut().flatten() {
        taint.time_added = None;
        if taint.value.as_deref() == Some("") {
            taint.value = None;
        }
    }
    omit_empty(&mut device.taints);
    omit_empty(&mut device.consumes_counters);
    omit_empty(&mut device.binding_conditions);
    omit_empty(&mut device.binding_failure_conditions);
    device.capacity = device.capacity.filter(|entries| !entries.is_empty());
    device.attributes = device.attributes.filter(|entries| !entries.is_empty());
    device
}

fn omit_empty<T>(list: &mut Option<Vec<T>>) {
    if list.as_ref().is_some_and(Vec::is_empty) {
        *list = None;
    }
}

/// Leaves a quantity that cannot be read as it is.
fn canonical_quantity(quantity: &mut Quantity) {
    if let Some(nanos) = nanos_of(&quantity.0) {
        quantity.0 = format!("{nanos}n");
    }
}

/// Units of quantities: their texts, and the factor as a base and its power.
const UNITS: [(&str, i128, i32); 16] = [
    ("Ki", 1024, 1),
    ("Mi", 1024, 2),
    ("Gi", 1024, 3),
    ("Ti", 1024, 4),
    ("Pi", 1024, 5),
    ("Ei", 1024, 6),
    ("n", 10, -9),
    ("u", 10, -6),
    ("m", 10, -3),
    ("k", 10, 3),
    ("M", 10, 6),
    ("G", 10, 9),
    ("T", 10, 12),
    ("P", 10, 15),
    ("E", 10, 18),
    ("", 10, 0),
];

/// The value of a quantity in units of 1e-9, if it is one and can be written so exactly.
///
/// The parser of the other crates, `shmesh_sys::quantity`, is for positive whole bytes and accepts a subset. Here every value must be read
/// exactly as the API server reads it, also negative and fractional ones, which counters and capacities of any vendor may have.
fn nanos_of(text: &str) -> Option<i128> {
    let is_number = |sign: char| sign.is_ascii_digit() || ".+-".contains(sign);
    let end = text.find(|sign| !is_number(sign)).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (base, power) = match UNITS.iter().find(|(name, ..)| *name == unit) {
        Some((_, base, power)) => (*base, *power),
        None => (10, unit.strip_prefix(['e', 'E'])?.parse::<i8>().ok()?.into()),
    };
    let (sign, digits) = match number.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, number.strip_prefix('+').unwrap_or(number)),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let decimal = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.len() + fraction.len() == 0 || !decimal(whole) || !decimal(fraction) {
        return None;
    }
    let mantissa: i128 = format!("{whole}{fraction}").parse().ok()?;
    let mut value = sign * mantissa;
    if base == 1024 {
        value = value.checked_mul(1024_i128.checked_pow(power.try_into().ok()?)?)?;
    }
    let tens = if base == 1024 { 9 } else { power + 9 } - i32::try_from(fraction.len()).ok()?;
    let factor = 10_i128.checked_pow(tens.unsigned_abs())?;
    if tens >= 0 { value.checked_mul(factor) } else { (value % factor == 0).then_some(value / factor) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use k8s_openapi::api::resource::v1::{DeviceCapacity, DeviceTaint};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    #[test]
    fn quantities_have_values() {
        for same in [
            &["1Gi", "1024Mi", "1073741824", "1.0Gi", "+1Gi", "1073741824e0"][..],
            &["2k", "2000", "2e3", "2E3", "2000000m", "0.002M"],
            &["1E", "1000P", "1e18"],
            &["0.5", "500m", ".5", "5e-1"],
            &["-1", "-1000m"],
            &["0", "0Ki", "-0"],
        ] {
            let values: Vec<_> = same.iter().map(|text| nanos_of(text)).collect();
            assert!(
                values[0].is_some() && values.iter().all(|value| *value == values[0]),
                "{same:?} {values:?}"
            );
        }
        assert_eq!(nanos_of("3Ki"), Some(3072 * 1_000_000_000));
        for none in
            ["", ".", "x", "1 Ki", "1Kii", "--1", "1-1", "1.2.3", "1e", "1e999", "0.1n", "999999999999Ei"]
        {
            assert_eq!(nanos_of(none), None, "{none}");
        }
    }

    #[test]
    fn equal_devices_are_written_differently() {
        let device = |bytes: &str, time: Option<Time>| Device {
            name: "a".into(),
            capacity: Some(BTreeMap::from([(
                "bytes".into(),
                DeviceCapacity { value: Quantity(bytes.into()), request_policy: None },
            )])),
            taints: Some(vec![DeviceTaint {
                effect: "NoSchedule".into(),
                key: "k".into(),
                time_added: time,
                value: None,
            }]),
            ..Device::default()
        };
        let now = Some(Time(Timestamp::now()));
        assert_eq!(canonical(&device("1024Ki", None)), canonical(&device("1Mi", now)));
        assert_ne!(canonical(&device("1023Ki", None)), canonical(&device("1Mi", None)));
        let empty = Device { taints: Some(vec![]), attributes: Some(BTreeMap::new()), ..Device::default() };
        assert_eq!(canonical(&empty), Device::default());
    }
}
