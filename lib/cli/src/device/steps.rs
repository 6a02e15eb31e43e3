//! The steps, P1 to P9.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Value, json};

use super::CheckArgs;
use super::finding::{self, CheckResult, CheckStatus};
use super::pair::{DriverProcess, Pair, wrong_words};
use super::wire::{Order, OrderResult, Transfer};
use crate::human;

pub(super) const MIB: u64 = 1 << 20;

/// The result of one step: status, description and numbers.
pub(super) type StepResult = Result<(CheckStatus, String, Value)>;

pub(super) struct CheckPlan<'a> {
    pub(super) args: &'a CheckArgs,
    /// Maximum bytes of memory to allocate at once.
    pub(super) most: u64,
    /// Granularity of the device's memory in bytes.
    pub(super) piece: u64,
    pub(super) findings: Vec<CheckResult>,
    /// Where results are written for people, as soon as they are known.
    pub(super) text: Option<&'a mut dyn Write>,
}

/// Released memory must be free within this time; otherwise it leaks.
const FREE_WITHIN: Duration = Duration::from_secs(30);
/// A user id that owns nothing.
const NOBODY: u32 = 65_534;
/// Number of copies per measurement.
const COPIES: u32 = 10;
/// Minimum bandwidth of shared memory, as a fraction of the bandwidth of a process's own memory.
const BANDWIDTH_MIN: f64 = 0.98;

pub(super) fn name(how: Transfer) -> &'static str {
    match how {
        Transfer::Vmm => "cuda-vmm",
        Transfer::Legacy => "cuda-legacy",
    }
}

/// Median and 99th percentile, in nanoseconds.
fn percentiles(mut nanos: Vec<u64>) -> (u64, u64) {
    nanos.sort_unstable();
    let at = |part: usize| nanos.get((nanos.len() * part / 100).min(nanos.len().saturating_sub(1))).copied();
    (at(50).unwrap_or_default(), at(99).unwrap_or_default())
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn shown(nanos: u64) -> String {
    human::nanos(nanos as f64)
}

/// Whether mapped files of a process belong to a driver, or to its double. Only file names count, because directories
/// may have any name.
fn is_of_a_driver(maps: &str) -> bool {
    let files = maps.lines().filter_map(|line| line.rsplit_once('/')).map(|(_, file)| file);
    files.into_iter().any(|file| {
        ["libcuda.", "libnvidia-", "libshmesh_fake_cuda"].iter().any(|name| file.starts_with(name))
    })
}

/// Checks that the process between the two passes on descriptors without loading the driver.
pub(super) fn without_the_driver() -> StepResult {
    let loaded = is_of_a_driver(&std::fs::read_to_string("/proc/self/maps")?);
    let status = if loaded { CheckStatus::Fail } else { CheckStatus::Ok };
    let word = if loaded { "has" } else { "has not" };
    Ok((
        status,
        format!("the process that passes on descriptors, as the sidecar does, {word} loaded the driver"),
        json!({ "loaded": loaded }),
    ))
}

impl CheckPlan<'_> {
    pub(super) fn step(&mut self, id: &str, act: impl FnOnce(&mut Self) -> StepResult) -> Result<()> {
        let (status, shown, value) = act(self).unwrap_or_else(|error| {
            let text = format!("{error:#}");
            (CheckStatus::Fail, text.clone(), json!({ "error": text }))
        });
        self.add(id, status, shown, value)
    }

    pub(super) fn add(&mut self, id: &str, status: CheckStatus, shown: String, value: Value) -> Result<()> {
        let result = CheckResult { id: id.to_owned(), status, shown, value };
        if let Some(out) = &mut self.text {
            finding::line(&result, out)?;
        }
        self.findings.push(result);
        Ok(())
    }

    pub(super) fn exact(&self, size: u64) -> StepResult {
        let pair = Pair::start(&[])?;
        let offer = pair.make(Transfer::Vmm, size)?;
        pair.exporter.ask(&Order::Fill { seed: 1 })?;
        pair.import(&offer)?;
        let there = wrong_words(&pair.importer, 1)?;
        pair.importer.ask(&Order::Fill { seed: 2 })?;
        let back = wrong_words(&pair.exporter, 2)?;
        pair.let_go()?;
        let status = if there + back == 0 { CheckStatus::Ok } else { CheckStatus::Fail };
        let shown = format!(
            "of {} words, {there} were wrong in the importer and {back} in the exporter after a change",
            offer.size / 4
        );
        Ok((status, shown, json!({ "size_bytes": offer.size, "wrong_there": there, "wrong_back": back })))
    }

    pub(super) fn latency(&self, how: Transfer) -> StepResult {
        let pair = Pair::start(&[])?;
        let (mut make, mut import, mut all) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.args.rounds {
            let offer = pair.make(how, self.piece)?;
            let (driver, whole) = pair.import(&offer)?;
            make.push(offer.make_nanos);
            import.push(driver);
            all.push(whole);
            pair.let_go()?;
        }
        let (make, import, all) = (percentiles(make), percentiles(import), percentiles(all));
        let text = format!(
            "export {} (p99 {}), import {} (p99 {}), including the transfer of the descriptor {}",
            shown(make.0),
            shown(make.1),
            shown(import.0),
            shown(import.1),
            shown(all.0)
        );
        let value = json!({
            "rounds": self.args.rounds, "size_bytes": self.piece,
            "export_p50_ns": make.0, "export_p99_ns": make.1,
            "import_p50_ns": import.0, "import_p99_ns": import.1,
            "passed_p50_ns": all.0, "passed_p99_ns": all.1,
        });
        Ok((CheckStatus::Ok, text, value))
    }

    pub(super) fn bandwidth(&mut self) -> StepResult {
        let pair = Pair::start(&[])?;
        let size = (self.most / 4 / self.piece * self.piece).max(self.piece);
        let offer = pair.make(Transfer::Vmm, size)?;
        pair.import(&offer)?;
        let OrderResult::Bandwidth { rates, size } =
            pair.importer.ask(&Order::Bandwidth { rounds: COPIES })?
        else {
            bail!("the test process sent an unexpected reply")
        };
        pair.let_go()?;
        let [own, from, to] = rates;
        let worst = from.min(to) / own;
        let status = if worst >= BANDWIDTH_MIN { CheckStatus::Ok } else { CheckStatus::Note };
        let rate = human::bytes_per_second;
        let text = format!(
            "copy in own memory {}, from imported {}, to imported {}: at least {worst:.3} of the former",
            rate(own),
            rate(from),
            rate(to)
        );
        let value = json!({
            "size_bytes": size, "own_bytes_per_second": own, "from_imported_bytes_per_second": from,
            "to_imported_bytes_per_second": to, "ratio_min": worst,
        });
        Ok((status, text, value))
    }

    /// Checks both mechanisms in each kind of namespace, and in all at once. Both processes are process 1 in pid
    /// namespaces of their own, in which legacy handles cannot work and must be refused.
    pub(super) fn namespaces(&mut self) -> Result<()> {
        let pid: &[&str] = &["--pid", "--fork", "--kill-child", "--mount-proc"];
        let all = [pid, &["--mount", "--ipc", "--net", "--uts", "--cgroup"]].concat();
        // Root is not sufficient: in most containers root lacks the capability.
        let tried = std::process::Command::new("unshare").args(&all).arg("true").output();
        if !tried.is_ok_and(|tried| tried.status.success()) {
            let shown =
                "cannot create namespaces here: this requires CAP_SYS_ADMIN and unshare of util-linux"
                    .to_owned();
            return self.add("P4 namespaces", CheckStatus::Skip, shown, Value::Null);
        }
        let kinds: [(&str, &[&str]); 8] = [
            ("none", &[]),
            ("pid", pid),
            ("ipc", &["--ipc"]),
            ("mount", &["--mount"]),
            ("net", &["--net"]),
            ("uts", &["--uts"]),
            ("cgroup", &["--cgroup"]),
            ("all", &all),
        ];
        for (kind, flags) in kinds {
            for how in [Transfer::Vmm, Transfer::Legacy] {
                let equal_numbers = how == Transfer::Legacy && flags.contains(&"--pid");
                self.step(&format!("P4 {kind}, {}", name(how)), |plan| {
                    plan.namespace(how, Pair::start(flags)?, equal_numbers)
                })?;
            }
        }
        self.step("P4 pid, numbers differ, cuda-legacy", |plan| {
            let pair =
                Pair { exporter: DriverProcess::start(pid)?, importer: DriverProcess::start_second(pid)? };
            plan.namespace(Transfer::Legacy, pair, false)
        })
    }

    /// Checks an importer with another user id. The vendor does not document whether legacy handles work then.
    pub(super) fn users(&mut self) -> Result<()> {
        for how in [Transfer::Vmm, Transfer::Legacy] {
            self.step(&format!("P4 another user, {}", name(how)), |plan| {
                let pair =
                    Pair { exporter: DriverProcess::start(&[])?, importer: DriverProcess::start_as(NOBODY)? };
                if pair.importer.ask(&Order::Drop).is_err() {
                    let shown =
                        "cannot change the user of a process here: this requires CAP_SETUID".to_owned();
                    return Ok((CheckStatus::Skip, shown, Value::Null));
                }
                match plan.namespace(how, pair, false) {
                    Err(error) if how == Transfer::Legacy => {
                        Ok((CheckStatus::Note, format!("refused: {error:#}"), json!({ "works": false })))
                    }
                    seen => seen,
                }
            })?;
        }
        Ok(())
    }

    fn namespace(&self, how: Transfer, pair: Pair, equal_numbers: bool) -> StepResult {
        let offer = pair.make(how, self.piece)?;
        pair.exporter.ask(&Order::Fill { seed: 3 })?;
        match pair.import(&offer) {
            Err(error) if equal_numbers => {
                pair.let_go()?;
                Ok((CheckStatus::Note, format!("refused, as expected: {error}"), json!({ "works": false })))
            }
            Err(error) => {
                pair.let_go()?;
                Err(error)
            }
            Ok(_) if equal_numbers => {
                bail!("legacy handles were accepted although both processes have the same process id")
            }
            Ok(_) => {
                let wrong = wrong_words(&pair.importer, 3)?;
                pair.let_go()?;
                let status = if wrong == 0 { CheckStatus::Ok } else { CheckStatus::Fail };
                Ok((status, format!("{wrong} words wrong"), json!({ "works": wrong == 0 })))
            }
        }
    }

    /// Kills the exporter while the importer has the memory mapped; then the importer releases it, and the memory must
    /// become free.
    pub(super) fn death(&self, keep_descriptor: bool) -> StepResult {
        let watcher = DriverProcess::start(&[])?;
        // A driver keeps some of the memory that it allocates at its first use.
        watcher.number(&Order::FreeMemory)?;
        let before = watcher.number(&Order::FreeMemory)?;
        let Pair { exporter, importer } = Pair::start(&[])?;
        let pair = Pair { exporter, importer };
        let mut offer = pair.make(Transfer::Vmm, self.piece * 4)?;
        pair.exporter.ask(&Order::Fill { seed: 4 })?;
        pair.import(&offer)?;
        let Pair { exporter, importer } = pair;
        exporter.kill();
        let wrong = wrong_words(&importer, 4)?;
        let kept = if keep_descriptor { offer.fd.take() } else { None };
        drop(offer);
        importer.kill();
        let pinned = if keep_descriptor {
            // Contexts end with their processes; memory that is still in use then is kept by the descriptor.
            let held = before.saturating_sub(watcher.number(&Order::FreeMemory)?);
            drop(kept);
            Some(held >= self.piece * 4)
        } else {
            None
        };
        let since = Instant::now();
        let mut after = watcher.number(&Order::FreeMemory)?;
        while after < before && since.elapsed() < FREE_WITHIN {
            std::thread::sleep(Duration::from_millis(10));
            after = watcher.number(&Order::FreeMemory)?;
        }
        let freed = after >= before;
        let works = freed && wrong == 0 && pinned != Some(false);
        let kept = match pinned {
            Some(true) => ", and an open descriptor kept the memory until it was closed",
            Some(false) => ", but an open descriptor did not keep the memory",
            None => "",
        };
        let back = if freed {
            "all memory is free again"
        } else {
            "memory is still in use: check whether another process uses the device"
        };
        let status = if works {
            CheckStatus::Ok
        } else if wrong == 0 {
            CheckStatus::Note
        } else {
            CheckStatus::Fail
        };
        let text = format!("{wrong} words wrong after the exporter's death{kept}; {back}");
        let value = json!({ "wrong": wrong, "free_before_bytes": before, "free_after_bytes": after, "pinned": pinned });
        Ok((status, text, value))
    }

    pub(super) fn revocation(&mut self) -> StepResult {
        let pair = Pair::start(&[])?;
        let offer = pair.make(Transfer::Vmm, self.piece)?;
        pair.exporter.ask(&Order::Fill { seed: 5 })?;
        pair.import(&offer)?;
        drop(offer);
        pair.exporter.ask(&Order::Drop)?;
        let wrong = wrong_words(&pair.importer, 5)?;
        pair.importer.ask(&Order::Fill { seed: 6 })?;
        let wrong = wrong + wrong_words(&pair.importer, 6)?;
        pair.importer.ask(&Order::Drop)?;
        let status = if wrong == 0 { CheckStatus::Note } else { CheckStatus::Fail };
        let text = "an importer keeps its mapping after the exporter and all others have released the memory"
            .to_owned();
        Ok((status, text, json!({ "wrong": wrong })))
    }

    pub(super) fn descriptors(&mut self) -> StepResult {
        let pair = Pair::start(&[])?;
        let offer = pair.make(Transfer::Vmm, self.piece)?;
        pair.exporter.ask(&Order::Fill { seed: 7 })?;
        // The driver opens some descriptors at its first use, and keeps them.
        pair.import(&offer)?;
        pair.importer.ask(&Order::Drop)?;
        let before = pair.importer.number(&Order::Descriptors)?;
        for _ in 0..2 {
            pair.import(&offer)?;
            if wrong_words(&pair.importer, 7)? != 0 {
                bail!("importing the same descriptor again gave other memory");
            }
            pair.importer.ask(&Order::Drop)?;
        }
        let after = pair.importer.number(&Order::Descriptors)?;
        let order = || Order::Import { how: Transfer::Vmm, size: offer.size, handle: offer.handle.clone() };
        let mut refusals = Vec::new();
        let (pipe, _other) = std::io::pipe()?;
        for wrong in [std::fs::File::open("/dev/null")?.into(), std::os::fd::OwnedFd::from(pipe)] {
            pair.importer.order(&order(), Some(&wrong))?;
            match pair.importer.answer() {
                Ok(_) => bail!("a descriptor that is not device memory was imported"),
                Err(error) => refusals.push(error.to_string()),
            }
        }
        pair.importer.order(&order(), None)?;
        if pair.importer.answer().is_ok() {
            bail!("memory was imported without a descriptor");
        }
        let status = if after <= before { CheckStatus::Ok } else { CheckStatus::Fail };
        let text = format!(
            "imported twice from one descriptor; {before} descriptors open before and {after} after; other descriptors are refused"
        );
        Ok((status, text, json!({ "before": before, "after": after, "refusals": refusals })))
    }

    pub(super) fn timeline(&mut self) -> StepResult {
        let pair = Pair::start(&[])?;
        let rounds = self.args.rounds.min(500);
        let offer = pair.make(Transfer::Vmm, self.piece)?;
        // All words are 0 at the start.
        pair.import(&offer)?;
        pair.exporter.ask(&Order::Zero)?;
        pair.importer.order(&Order::Pong { rounds }, None)?;
        let OrderResult::Pinged { nanos } = pair.exporter.ask(&Order::Ping { rounds })? else {
            bail!("the test process sent an unexpected reply")
        };
        pair.importer.answer()?;
        pair.let_go()?;
        let (p50, p99) = percentiles(nanos);
        let text = format!("round trip {} (p99 {}), including the wait of the CPU", shown(p50), shown(p99));
        Ok((
            CheckStatus::Ok,
            text,
            json!({ "rounds": rounds, "round_trip_p50_ns": p50, "round_trip_p99_ns": p99 }),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_is_recognised_by_its_files() {
        let line = |path: &str| format!("7f00-7f01 r-xp 00000000 08:01 42   {path}\n");
        let other =
            line("/home/nvidia/libcuda/shmesh") + &line("/usr/lib/libc.so.6") + "7f02-7f03 rw-p 0 00:00 0\n";
        assert!(!is_of_a_driver(&other));
        for library in ["libcuda.so.580.159", "libnvidia-ptxjitcompiler.so.1", "libshmesh_fake_cuda.so"] {
            assert!(is_of_a_driver(&(other.clone() + &line(&format!("/usr/lib/{library}")))), "{library}");
        }
    }

    #[test]
    fn percentiles_of_few_and_many() {
        assert_eq!(percentiles(vec![]), (0, 0));
        assert_eq!(percentiles(vec![7]), (7, 7));
        assert_eq!(percentiles((0..1000).rev().collect()), (500, 990));
    }
}
