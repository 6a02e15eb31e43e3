//! Which descriptors are memory.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use shmesh_proto::broker::Mechanism;
use shmesh_sys::file::{self, Kind};

use crate::broker::{Account, FdToken, ProcessId, Reason};
use crate::shares::Shares;

/// Of the character devices whose descriptors are memory of a GPU.
const NVIDIA_MAJOR: u64 = 195;

/// A process may have one for each so many that are free.
const PART_OF_PROCESS: usize = 2;
/// An account may have as many as are free.
const PART_OF_ACCOUNT: usize = 1;

/// Which descriptors keys and pools may have, and how much there is of what participants share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptors {
    /// How many keys may have, all together.
    pub(crate) keys: usize,
    /// How many processes may have attached: each is watched by one. Keys cannot take these.
    pub(crate) attached: usize,
    /// Bytes that may wait to be read by participants.
    pub(crate) outgoing: usize,
    /// Whether a memfd passes for a device's, as that of a double is one.
    pub(crate) memfds_for_devices: bool,
}

/// Whose a descriptor is.
type Owner = (ProcessId, Account);

/// The descriptors of keys, and of attached processes.
#[derive(Debug)]
pub(super) struct Held {
    fds: HashMap<FdToken, (Arc<OwnedFd>, Option<Owner>)>,
    fds_ever: u64,
    by_process: Shares<ProcessId>,
    by_account: Shares<Account>,
    attached: Shares<Account>,
}

impl Held {
    pub(super) fn new(limits: Descriptors) -> Self {
        Self {
            fds: HashMap::new(),
            fds_ever: 0,
            by_process: Shares::new(limits.keys),
            by_account: Shares::new(limits.keys),
            attached: Shares::new(limits.attached),
        }
    }

    /// Whether a process may export one more descriptor; what to say if not.
    pub(super) fn may_export(&self, process: &ProcessId, account: &Account) -> Result<(), (Reason, String)> {
        let free = self.by_account.free();
        let remedy = "close some, or raise the sidecar's limit of open files";
        if free == 0 {
            let all = self.by_account.max();
            return Err((
                Reason::Descriptors,
                format!("at most {all} keys with descriptors in all: {remedy}"),
            ));
        }
        if !self.by_account.may_take(account, 1, PART_OF_ACCOUNT) {
            let text = format!(
                "at most as many keys with descriptors for one pod or user as are free, and {free} are free: {remedy}"
            );
            return Err((Reason::DescriptorsOfAccount, text));
        }
        if !self.by_process.may_take(process, 1, PART_OF_PROCESS) {
            let text = format!(
                "at most half as many keys with descriptors for one process as are free, and {free} are free: {remedy}"
            );
            return Err((Reason::DescriptorsOfProcess, text));
        }
        Ok(())
    }

    pub(super) fn hold(&mut self, fd: OwnedFd, owner: Option<Owner>) -> FdToken {
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

    /// One more process has attached, if it may.
    pub(super) fn attach(&mut self, account: &Account) -> Result<(), (Reason, String)> {
        let free = self.attached.free();
        let remedy = "end some, or raise the sidecar's limit of open files";
        if free == 0 {
            let text = format!("at most {} attached processes in all: {remedy}", self.attached.max());
            return Err((Reason::Descriptors, text));
        }
        if !self.attached.may_take(account, 1, PART_OF_ACCOUNT) {
            let text = format!(
                "at most as many attached processes of one pod or user as places are free, and {free} are free: {remedy}"
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
    /// Whether a descriptor is what the mechanism needs. Memory that can be truncated would be a bus error in the importer.
    pub(super) fn is_memory_of(self, fd: &OwnedFd, mechanism: Mechanism, size: u64) -> bool {
        if mechanism != Mechanism::Host {
            // A device's, where the mechanism has one at all.
            return match file::kind(fd) {
                Ok(Kind::CharDevice { major }) => major == NVIDIA_MAJOR,
                Ok(Kind::Regular { .. }) => self.memfds_for_devices,
                _ => false,
            };
        }
        let is_large = matches!(file::kind(fd), Ok(Kind::Regular { size: found }) if found >= size);
        file::is_size_sealed(fd) && is_large
    }
}
