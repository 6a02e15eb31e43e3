//! Selectors in CEL, as in device classes and requests.

use std::collections::HashMap;

use cel::{Context, Program, Value};
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceSelector};

/// An expression and what it is compiled to.
pub(super) type Expression<'a> = (&'a str, Program);

/// Compiles the expressions of selectors.
pub(super) fn compiled(selectors: Option<&[DeviceSelector]>) -> Result<Vec<Expression<'_>>, String> {
    let expressions = selectors.into_iter().flatten().filter_map(|selector| selector.cel.as_ref());
    let compile = |expression: &str| {
        Program::compile(expression).map_err(|error| format!("CEL {expression:?}: {error}"))
    };
    expressions.map(|cel| Ok((cel.expression.as_str(), compile(&cel.expression)?))).collect()
}

/// Whether all selectors match a device. Versions and quantities are text here, so functions of them are errors.
pub(super) fn matches(selectors: &[Expression<'_>], driver: &str, device: &Device) -> Result<bool, String> {
    for (expression, program) in selectors {
        let mut context = Context::default();
        context.add_variable_from_value("device", variable(driver, device));
        match program.execute(&context) {
            Ok(Value::Bool(true)) => {}
            Ok(Value::Bool(false)) => return Ok(false),
            Ok(other) => return Err(format!("CEL {expression:?}: must be a bool, is {other:?}")),
            Err(error) => return Err(format!("CEL {expression:?} for device {}: {error}", device.name)),
        }
    }
    Ok(true)
}

fn variable(driver: &str, device: &Device) -> Value {
    let attributes = device.attributes.iter().flatten().map(|(name, value)| (name, attribute(value)));
    let capacity =
        device.capacity.iter().flatten().map(|(name, capacity)| (name, capacity.value.0.clone().into()));
    let variable: HashMap<&str, Value> = HashMap::from([
        ("driver", driver.to_owned().into()),
        ("attributes", by_domain(driver, attributes)),
        ("capacity", by_domain(driver, capacity)),
        ("allowMultipleAllocations", Value::Bool(device.allow_multiple_allocations.unwrap_or(false))),
    ]);
    variable.into()
}

/// Groups values by the domain of their names, which is the driver if the name has none.
fn by_domain<'a>(driver: &str, values: impl Iterator<Item = (&'a String, Value)>) -> Value {
    let mut domains: HashMap<String, HashMap<String, Value>> =
        HashMap::from([(driver.to_owned(), HashMap::new())]);
    for (name, value) in values {
        let (domain, name) = name.split_once('/').unwrap_or((driver, name));
        domains.entry(domain.to_owned()).or_default().insert(name.to_owned(), value);
    }
    let domains = domains.into_iter().map(|(domain, values)| (domain, Value::from(values)));
    domains.collect::<HashMap<String, Value>>().into()
}

fn attribute(value: &DeviceAttribute) -> Value {
    match value {
        DeviceAttribute { bool: Some(value), .. } => (*value).into(),
        DeviceAttribute { int: Some(value), .. } => (*value).into(),
        DeviceAttribute { string: Some(text), .. } | DeviceAttribute { version: Some(text), .. } => {
            text.clone().into()
        }
        _ => Value::Null,
    }
}
