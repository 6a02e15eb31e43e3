//! Cores, quota, kernel and hypervisor, which decide whether spinning is useful.

use std::collections::BTreeSet;

use serde_json::json;

use super::source::{Source, UnknownFact};
use super::{Finding, FindingStatus, cgroup};
use shmesh_sys::procfs::field;

/// Maximum number of CPUs in a list, more than any kernel supports: bounds the memory for an unexpected list.
const MOST_CPUS: u32 = 1 << 16;

/// The cores that this process may use.
#[derive(Clone, Debug)]
pub(super) struct Cores {
    /// Cores that are online.
    online: Result<BTreeSet<u32>, UnknownFact>,
    /// Online cores that this process may run on, as `sched_getaffinity` reports.
    allowed: Result<BTreeSet<u32>, UnknownFact>,
    /// The cgroup's quota in thousandths of a core; `None` without one.
    quota: Option<u64>,
}

impl Cores {
    /// Reads the available cores.
    pub(super) fn gather(source: &Source, status: &Result<String, UnknownFact>) -> Self {
        let online = source.text("/sys/devices/system/cpu/online").and_then(|text| list(&text));
        let affinity = status.as_ref().map_err(UnknownFact::clone).and_then(|text| {
            let text = field(text, "Cpus_allowed_list");
            list(text.ok_or_else(|| UnknownFact("/proc/self/status has no Cpus_allowed_list".into()))?)
        });
        let allowed = affinity.map(|affinity| match &online {
            Ok(online) => affinity.intersection(online).copied().collect(),
            Err(_) => affinity,
        });
        Self { online, allowed, quota: quota(source) }
    }

    /// The number of cores that can be used at once, in thousandths.
    fn usable(&self) -> Option<u64> {
        let cores = self.allowed.as_ref().or(self.online.as_ref()).ok()?;
        let cores = u64::try_from(cores.len()).unwrap_or(u64::MAX).saturating_mul(1000);
        Some(self.quota.map_or(cores, |quota| quota.min(cores)))
    }
}

/// A kernel CPU list: `0-3,8,10-11`.
fn list(text: &str) -> Result<BTreeSet<u32>, UnknownFact> {
    let invalid = || UnknownFact(format!("{:?} is not a list of CPUs", text.trim()));
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = first
            .parse()
            .ok()
            .zip(last.parse().ok())
            .filter(|(_, last)| *last < MOST_CPUS)
            .ok_or_else(invalid)?;
        cpus.extend(first..=last);
    }
    if cpus.is_empty() { Err(invalid()) } else { Ok(cpus) }
}

/// The quota in thousandths of a core, from quota and period in microseconds; `None` for `max` and `-1`.
fn millicores(quota: &str, period: &str) -> Option<u64> {
    let (quota, period): (u64, u64) = (quota.trim().parse().ok()?, period.trim().parse().ok()?);
    quota.checked_mul(1000)?.checked_div(period)
}

/// The smallest quota among the visible levels of the cpu cgroup.
fn quota(source: &Source) -> Option<u64> {
    let place = cgroup::locate(source, "cpu").ok()?;
    let level = |dir: &std::path::PathBuf| match place.version {
        1 => {
            let read = |file: &str| source.text(dir.join(file)).ok();
            millicores(&read("cpu.cfs_quota_us")?, &read("cpu.cfs_period_us")?)
        }
        _ => {
            let text = source.text(dir.join("cpu.max")).ok()?;
            let (quota, period) = text.trim().split_once(' ')?;
            millicores(quota, period)
        }
    };
    place.dirs.iter().filter_map(level).min()
}

/// All findings about the processor.
pub(super) fn findings(source: &Source, cores: &Cores) -> Vec<Finding> {
    vec![core_finding(cores), kernel(source), machine(source, cores)]
}

/// A count in thousandths, formatted as `1.5`.
fn decimal(milli: u64) -> String {
    match milli % 1000 {
        0 => (milli / 1000).to_string(),
        rest => format!("{}.{rest:03}", milli / 1000).trim_end_matches('0').to_owned(),
    }
}

/// The finding about the number of cores.
fn core_finding(cores: &Cores) -> Finding {
    const ID: &str = "cpu.cores";
    let count = |set: &Result<BTreeSet<u32>, UnknownFact>| set.as_ref().ok().map(BTreeSet::len);
    let (online, allowed) = (count(&cores.online), count(&cores.allowed));
    let Some(usable) = cores.usable() else {
        let why =
            cores.online.as_ref().err().cloned().unwrap_or_else(|| UnknownFact("no list of CPUs".into()));
        return Finding::unknown(ID, &why, "Set spin_us to 0 if fewer than two cores are there.");
    };
    let value = json!({
        "online": online, "allowed": allowed, "quota_millicores": cores.quota, "usable_millicores": usable,
    });
    let word = |number: Option<usize>| number.map_or("?".to_owned(), |number| number.to_string());
    let limit = cores.quota.map_or("no quota".to_owned(), |quota| format!("quota {}", decimal(quota)));
    let shown = format!("{} online, {} allowed, {limit}", word(online), word(allowed));
    let (status, means) = if usable < 2000 {
        let means = format!(
            "Only {} core(s) can be used at once: a peer that spins wastes the slice of the one it waits \
             for, so set spin_us: 0 (sleep at once) or allow two cores.",
            decimal(usable)
        );
        (FindingStatus::Warn, means)
    } else if cores.quota.is_some_and(|quota| quota <= usable) {
        let means = "Two peers can spin, but spinning spends the quota and a throttled peer stalls for tens \
                     of milliseconds: keep spin_us small, or give whole cores (Guaranteed pod, static CPU \
                     manager)."
            .to_owned();
        (FindingStatus::Note, means)
    } else {
        (
            FindingStatus::Ok,
            "Two peers can each spin on a core of their own: a message then takes well under a microsecond."
                .to_owned(),
        )
    };
    Finding::new(ID, status, value, shown, means)
}

/// Major and minor number of a kernel release.
pub(super) fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.trim().split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The finding about the kernel's version.
fn kernel(source: &Source) -> Finding {
    const ID: &str = "kernel.release";
    let facts = source.text("/proc/sys/kernel/osrelease").and_then(|text| {
        let release = text.trim().to_owned();
        version(&release)
            .map(|version| (release.clone(), version))
            .ok_or_else(|| UnknownFact(format!("{release:?} is not a kernel release")))
    });
    let (release, version) = match facts {
        Ok(facts) => facts,
        Err(why) => {
            return Finding::unknown(ID, &why, "The system calls tried above tell what the kernel can do.");
        }
    };
    let missing: Vec<_> = [
        ((5, 1), "sealing against future writers (5.1)"),
        ((5, 3), "pidfd_open (5.3)"),
        ((5, 14), "MADV_POPULATE_WRITE (5.14)"),
        ((5, 16), "futex_waitv (5.16)"),
        ((6, 5), "SO_PEERPIDFD (6.5)"),
    ]
    .into_iter()
    .filter_map(|(since, what)| (version < since).then_some(what))
    .collect();
    let value = json!({ "release": release, "major": version.0, "minor": version.1, "missing": missing });
    let (status, means) = match missing.as_slice() {
        [] => (FindingStatus::Ok, "The kernel has everything links use.".to_owned()),
        some => {
            let status = if version < (5, 3) { FindingStatus::Warn } else { FindingStatus::Note };
            (
                status,
                format!(
                    "Too old for {}: links work by older means, slower or with weaker checks.",
                    some.join(", ")
                ),
            )
        }
    };
    Finding::new(ID, status, value, release, means)
}

/// Whether this is a virtual machine; `None` if it cannot be determined.
fn virtual_machine(cpuinfo: &str, vendor: Option<&str>) -> Option<bool> {
    const VENDORS: [&str; 8] =
        ["QEMU", "KVM", "Amazon EC2", "Google", "Microsoft Corporation", "VMware", "Xen", "innotek"];
    if let Some(flags) = cpuinfo.lines().find(|line| line.starts_with("flags")) {
        return Some(flags.split_whitespace().any(|flag| flag == "hypervisor"));
    }
    vendor.map(|vendor| VENDORS.iter().any(|one| vendor.contains(one)))
}

/// The cost of sleeping and waking.
fn machine(source: &Source, cores: &Cores) -> Finding {
    const ID: &str = "machine.virtual";
    let vendor = source.text("/sys/class/dmi/id/sys_vendor").ok();
    let facts = source.text("/proc/cpuinfo").and_then(|text| {
        virtual_machine(&text, vendor.as_deref())
            .ok_or_else(|| UnknownFact("neither /proc/cpuinfo nor the firmware tells".into()))
    });
    match facts {
        Err(why) => {
            Finding::unknown(ID, &why, "In a virtual machine sleeping is expensive: then raise spin_us.")
        }
        Ok(false) => Finding::new(
            ID,
            FindingStatus::Ok,
            json!(false),
            "no",
            "Waking a sleeping peer costs a few microseconds.",
        ),
        Ok(true) => {
            let spin = match cores.usable() {
                Some(usable) if usable < 2000 => {
                    "with fewer than two cores there is no remedy but more cores"
                }
                _ => "raise spin_us where latency matters and cores are free",
            };
            let means = format!(
                "Waking a sleeping peer costs 40-70 µs in a virtual machine (a spinning one 0.3 µs): {spin}."
            );
            Finding::new(ID, FindingStatus::Note, json!(true), "yes", means)
        }
    }
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
