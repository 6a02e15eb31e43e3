//! Descriptors that clients send: whether they are memory, and how many each client may have.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use shmesh_proto::broker::Mechanism;
use shmesh_sys::file::{self, DescriptorKind};

use crate::broker::{Account, FdToken, ProcessId, Reason};
use crate::shares::Shares;

/// Major number of the character devices of NVIDIA GPUs.
const NVIDIA_MAJOR: u64 = 195;

/// Divisor of the free descriptors for a process: it may have half of them.
const PART_OF_PROCESS: usize = 2;
/// Divisor of the free descriptors for an account: it may have as many as are free.
const PART_OF_ACCOUNT: usize = 1;

/// Limits of descriptors and of unread bytes, shared by all clients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptors {
    /// Maximum number of descriptors of keys.
    pub(crate) keys: usize,
    /// Maximum number of attached processes, each of which needs a pidfd. Keys cannot take these descriptors.
    pub(crate) attached: usize,
    /// Maximum number of bytes that wait for clients to read them.
    pub(crate) outgoing: usize,
    /// Whether memfds count as device memory, for tests with a fake device.
    pub(crate) memfds_for_devices: bool,
}

/// The process and account that a descriptor is charged to.
type DescriptorOwner = (ProcessId, Account);

/// The descriptors of keys, and of attached processes.
#[derive(Debug)]
pub(super) struct FdTable {
    fds: HashMap<FdToken, (Arc<OwnedFd>, Option<DescriptorOwner>)>,
    fds_ever: u64,
    by_process: Shares<ProcessId>,
    by_account: Shares<Account>,
    attached: Shares<Account>,
}

impl FdTable {
    pub(super) fn new(limits: Descriptors) -> Self {
        Self {
            fds: HashMap::new(),
            fds_ever: 0,
            by_process: Shares::new(limits.keys),
            by_account: Shares::new(limits.keys),
            attached: Shares::new(limits.attached),
        }
    }

    /// Checks whether a process may export one more descriptor. The error has the reason and the text for the client.
    pub(super) fn may_export(&self, process: &ProcessId, account: &Account) -> Result<(), (Reason, String)> {
        let free = self.by_account.free();
        let remedy = "close some, or raise the sidecar's limit of open files";
        if free == 0 {
            let all = self.by_account.max();
            return Err((
                Reason::Descriptors,
                format!("the sidecar has {all} keys with descriptors, its limit: {remedy}"),
            ));
        }
        if !self.by_account.may_take(account, 1, PART_OF_ACCOUNT) {
            let text = format!(
                "this pod or user has its share of the keys with descriptors, as many as are free, and {free} are free: {remedy}"
            );
            return Err((Reason::DescriptorsOfAccount, text));
        }
        if !self.by_process.may_take(process, 1, PART_OF_PROCESS) {
            let text = format!(
                "this process has its share of the keys with descriptors, half as many as are free, and {free} are free: {remedy}"
            );
            return Err((Reason::DescriptorsOfProcess, text));
        }
        Ok(())
    }

    pub(super) fn hold(&mut self, fd: OwnedFd, owner: Option<DescriptorOwner>) -> FdToken {
        self.fds_ever += 1;
        let token = FdToken(self.fds_ever);
        if let Some((process, account)) = &owner {
            self.by_process.take(process, 1);
            self.by_account.take(account, 1);
        }
        self.fds.insert(token, (Arc::new(fd), owner));
        token
    }

    pub(super) fn get(&self, token: FdToken) -> Option<Arc<OwnedFd>> {
        self.fds.get(&token).map(|(fd, _)| Arc::clone(fd))
    }

    pub(super) fn release(&mut self, token: FdToken) {
        if let Some((_, Some((process, account)))) = self.fds.remove(&token) {
            self.by_process.give_back(&process, 1);
            self.by_account.give_back(&account, 1);
        }
    }

    /// Counts one more attached process, within the limits.
    pub(super) fn attach(&mut self, account: &Account) -> Result<(), (Reason, String)> {
        let free = self.attached.free();
        let remedy = "end some, or raise the sidecar's limit of open files";
        if free == 0 {
            let text =
                format!("the sidecar has {} attached processes, its limit: {remedy}", self.attached.max());
            return Err((Reason::Descriptors, text));
        }
        if !self.attached.may_take(account, 1, PART_OF_ACCOUNT) {
            let text = format!(
                "this pod or user has its share of the attached processes, as many as places are free, and {free} are free: {remedy}"
            );
            return Err((Reason::DescriptorsOfAccount, text));
        }
        self.attached.take(account, 1);
        Ok(())
    }

    pub(super) fn detach(&mut self, account: &Account) {
        self.attached.give_back(account, 1);
    }
}

impl Descriptors {
    /// Whether a descriptor is memory of the kind that the mechanism needs. A file that can be truncated would cause
    /// SIGBUS in the importer.
    pub(super) fn is_memory_of(self, fd: &OwnedFd, mechanism: Mechanism, size: u64) -> bool {
        if mechanism != Mechanism::Host {
            // A character device, if the mechanism uses a descriptor.
            return match file::kind(fd) {
                Ok(DescriptorKind::CharDevice { major }) => major == NVIDIA_MAJOR,
                Ok(DescriptorKind::Regular { .. }) => self.memfds_for_devices,
                _ => false,
            };
        }
        let is_large = matches!(file::kind(fd), Ok(DescriptorKind::Regular { size: found }) if found >= size);
        file::is_size_sealed(fd) && is_large
    }
}
