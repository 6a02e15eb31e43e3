//! Two processes that load the driver, and this one, which passes descriptors between them.

use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use shmesh_sys::poll::{self, Watch};
use shmesh_sys::socket;

use super::wire::{Order, OrderResult, Transfer, receive, send};

/// Time limit for one order. After that, a device that does not answer is reported.
const LIMIT: Duration = Duration::from_secs(120);

/// A child process that loads the driver.
#[derive(Debug)]
pub(super) struct DriverProcess {
    child: Child,
    socket: OwnedFd,
}

impl DriverProcess {
    /// Starts a process, by `unshare` with these flags if there are any.
    pub(super) fn start(namespaces: &[&str]) -> Result<Self> {
        Self::start_behind(namespaces, &[], &[])
    }

    /// Starts a process that changes to this user, which requires root.
    pub(super) fn start_as(user: u32) -> Result<Self> {
        Self::start_behind(&[], &[], &["--user", &user.to_string()])
    }

    /// As [`start`](Self::start), behind a shell, so that the process is not process 1 of a pid namespace.
    pub(super) fn start_second(namespaces: &[&str]) -> Result<Self> {
        Self::start_behind(namespaces, &["sh", "-c", "\"$0\" \"$@\"; exit $?"], &[])
    }

    fn start_behind(namespaces: &[&str], shell: &[&str], args: &[&str]) -> Result<Self> {
        let (ours, theirs) = socket::pair().context("cannot make a socket")?;
        let program = std::env::current_exe().context("cannot determine the path of this program")?;
        let mut command = if namespaces.is_empty() {
            Command::new(program)
        } else {
            let mut unshare = Command::new("unshare");
            unshare.args(namespaces).arg("--").args(shell).arg(program);
            unshare
        };
        let child =
            command.arg("device-side").args(args).stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn();
        Ok(Self { child: child.context("cannot start a process")?, socket: ours })
    }

    /// Sends an order, without waiting for the answer.
    pub(super) fn order(&self, order: &Order, fd: Option<&OwnedFd>) -> Result<()> {
        send(&self.socket, order, fd).context("a process of this check has ended")
    }

    /// The answer to the last order.
    pub(super) fn answer(&self) -> Result<(OrderResult, Option<OwnedFd>)> {
        let deadline = Instant::now() + LIMIT;
        let ready = poll::wait(&mut [Watch::readable(&self.socket)], Some(deadline));
        if ready.context("cannot wait for a process")? == 0 {
            bail!("the driver did not answer within {} s", LIMIT.as_secs());
        }
        match receive(&self.socket).context("a process of this check has ended")? {
            Some((OrderResult::Refused(text), _)) => bail!(text),
            Some(answer) => Ok(answer),
            None => bail!("a process of this check has ended"),
        }
    }

    pub(super) fn ask(&self, order: &Order) -> Result<OrderResult> {
        self.order(order, None)?;
        Ok(self.answer()?.0)
    }

    pub(super) fn number(&self, order: &Order) -> Result<u64> {
        match self.ask(order)? {
            OrderResult::Number(number) => Ok(number),
            other => bail!("the test process sent an unexpected reply: {other:?}"),
        }
    }

    /// Kills the process, as in a crash.
    pub(super) fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // `unshare --kill-child` kills its children with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for DriverProcess {
    fn drop(&mut self) {
        self.end();
    }
}

/// Exported memory that is being passed to the importer.
#[derive(Debug)]
pub(super) struct ExportedMemory {
    pub(super) how: Transfer,
    pub(super) size: u64,
    pub(super) handle: Vec<u8>,
    pub(super) fd: Option<OwnedFd>,
    pub(super) make_nanos: u64,
}

/// An exporter and an importer.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) exporter: DriverProcess,
    pub(super) importer: DriverProcess,
}

impl Pair {
    pub(super) fn start(namespaces: &[&str]) -> Result<Self> {
        Ok(Self { exporter: DriverProcess::start(namespaces)?, importer: DriverProcess::start(namespaces)? })
    }

    /// Makes the exporter allocate and export memory.
    pub(super) fn make(&self, how: Transfer, size: u64) -> Result<ExportedMemory> {
        self.exporter.order(&Order::Make { how, size }, None)?;
        match self.exporter.answer()? {
            (OrderResult::Made { size, handle, nanos }, fd) => {
                Ok(ExportedMemory { how, size, handle, fd, make_nanos: nanos })
            }
            (other, _) => bail!("the test process sent an unexpected reply: {other:?}"),
        }
    }

    /// Makes the importer import it. Returns the duration in the driver, and in total.
    pub(super) fn import(&self, exported: &ExportedMemory) -> Result<(u64, u64)> {
        let since = Instant::now();
        let order = Order::Import { how: exported.how, size: exported.size, handle: exported.handle.clone() };
        self.importer.order(&order, exported.fd.as_ref())?;
        match self.importer.answer()?.0 {
            OrderResult::Imported { nanos } => {
                Ok((nanos, u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)))
            }
            other => bail!("the test process sent an unexpected reply: {other:?}"),
        }
    }

    /// Releases the memory in both processes, in the importer first.
    pub(super) fn let_go(&self) -> Result<()> {
        self.importer.ask(&Order::Drop)?;
        self.exporter.ask(&Order::Drop)?;
        Ok(())
    }
}

/// Number of words that differ from the pattern.
pub(super) fn wrong_words(side: &DriverProcess, seed: u32) -> Result<u64> {
    match side.ask(&Order::Verify { seed })? {
        OrderResult::Verified { wrong } => Ok(wrong),
        other => bail!("the test process sent an unexpected reply: {other:?}"),
    }
}
