//! The plan: which steps are run, and in which order.

use std::io::Write;

use anyhow::{Result, bail};
use serde_json::{Value, json};

use super::CheckArgs;
use super::finding::{CheckReport, CheckResult, CheckStatus, Verdict};
use super::pair::DriverProcess;
use super::steps::{CheckPlan, MIB, name, without_the_driver};
use super::wire::{Order, OrderResult, Transfer};
use crate::human;

/// Runs all steps of the plan, and writes the result of each for people where they want it.
pub(super) fn run<'a>(args: &'a CheckArgs, text: Option<&'a mut dyn Write>) -> Result<CheckReport> {
    let mut plan = CheckPlan { args, most: 0, piece: 2 * MIB, findings: Vec::new(), text };
    let device = match plan.probe()? {
        Ok(device) => device,
        Err(absent) => {
            let value = json!({ "error": absent });
            plan.add("P0 probe", CheckStatus::Skip, absent, value)?;
            return Ok(CheckReport {
                verdict: Verdict::NoDevice,
                device: String::new(),
                findings: plan.findings,
            });
        }
    };
    for size in plan.sizes() {
        plan.step(&format!("P1 exact, {}", human::bytes(size)), |plan| plan.exact(size))?;
    }
    plan.step("P1 sidecar's part", |_| without_the_driver())?;
    for how in [Transfer::Vmm, Transfer::Legacy] {
        plan.step(&format!("P2 latency, {}", name(how)), |plan| plan.latency(how))?;
    }
    plan.step("P3 bandwidth", CheckPlan::bandwidth)?;
    plan.namespaces()?;
    plan.users()?;
    plan.step("P5 exporter killed", |plan| plan.death(false))?;
    plan.step("P5 descriptor kept", |plan| plan.death(true))?;
    plan.step("P6 no revocation", CheckPlan::revocation)?;
    let shown = "read-only access cannot be enforced: importers choose their own access, so admit trusted processes only";
    plan.add("P7 read-only", CheckStatus::Note, shown.to_owned(), Value::Null)?;
    plan.step("P8 descriptors", CheckPlan::descriptors)?;
    plan.step("P9 timeline", CheckPlan::timeline)?;
    Ok(CheckReport::of(device, plan.findings))
}

impl CheckPlan<'_> {
    /// The name of the device, or the reason why there is none.
    fn probe(&mut self) -> Result<std::result::Result<String, String>> {
        let (device, uuid, driver, granularity, free, all, missing, attributes, ascend) =
            match DriverProcess::start(&[])?.ask(&Order::Probe)? {
                OrderResult::Probed {
                    device,
                    uuid,
                    driver,
                    granularity,
                    free,
                    all,
                    missing,
                    attributes,
                    ascend,
                } => (device, uuid, driver, granularity, free, all, missing, attributes, ascend),
                OrderResult::Absent(why) => return Ok(Err(why)),
                other => bail!("the test process sent an unexpected reply: {other:?}"),
            };
        self.piece = granularity;
        self.most = self.args.max_bytes.0.min(free / 4);
        let version = format!("CUDA {}.{}", driver / 1000, driver % 1000 / 10);
        let status = if missing.is_empty() { CheckStatus::Ok } else { CheckStatus::Note };
        let lacks =
            if missing.is_empty() { String::new() } else { format!(", without {}", missing.join(", ")) };
        let shown = format!(
            "{device} {uuid}, {version}{lacks}, {} of {} free, pieces of {}",
            human::bytes(free),
            human::bytes(all),
            human::bytes(granularity)
        );
        let attributes: Value = attributes
            .iter()
            .map(|(number, value)| (number.to_string(), json!(value)))
            .collect::<serde_json::Map<_, _>>()
            .into();
        let value = json!({
            "device": device, "uuid": uuid, "driver_version": driver, "granularity_bytes": granularity,
            "free_bytes": free, "all_bytes": all, "missing": missing, "attributes": attributes, "ascend": ascend,
        });
        self.add("P0 probe", status, shown, value)?;
        let shares = value_of(&self.findings, "103");
        if shares == Some(0) {
            let shown = "this device cannot share memory by file descriptors (attribute 103)".to_owned();
            self.add("P0 shares", CheckStatus::Fail, shown, Value::Null)?;
        }
        Ok(Ok(device))
    }

    /// A small and a medium size, and the maximum.
    fn sizes(&self) -> Vec<u64> {
        let mut sizes = vec![self.piece, 64 * MIB, self.most / self.piece * self.piece];
        sizes.retain(|size| *size >= self.piece && *size <= self.most);
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

/// The value of an attribute that the probe has reported.
fn value_of(findings: &[CheckResult], attribute: &str) -> Option<i64> {
    findings.first()?.value.get("attributes")?.get(attribute)?.as_i64()
}
