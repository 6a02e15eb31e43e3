//! System calls that links use, each of which is tried: this shows what a seccomp profile refuses.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use serde_json::json;
use shmesh_sys::errno::{self, Errno};
use shmesh_sys::eventfd::Doorbell;
use shmesh_sys::file::{self, ByteLock, Seals};
use shmesh_sys::socket;

use super::dir::Scratch;
use super::source::{Source, UnknownFact};
use super::{Finding, FindingStatus, PidfdOpen, cpu};
use shmesh_sys::procfs::field;

/// A system call, and the consequences if it works or fails.
struct Call {
    /// The name of the finding.
    id: &'static str,
    /// The status if it fails.
    refused: FindingStatus,
    /// The consequence if it works.
    works: &'static str,
    /// The consequence if it fails, with the remedy.
    fails: &'static str,
}

impl Call {
    /// The finding for the result of a trial.
    fn judge(&self, outcome: Result<(), Errno>) -> Finding {
        match outcome {
            Ok(()) => Finding::new(self.id, FindingStatus::Ok, json!({ "works": true }), "works", self.works),
            Err(why) => {
                let value = json!({ "works": false, "errno": format!("{why:?}") });
                Finding::new(
                    self.id,
                    self.refused,
                    value,
                    format!("refused: {why:?}, {}", why.desc()),
                    self.fails,
                )
            }
        }
    }
}

const MEMFD: Call = Call {
    id: "syscall.memfd_create",
    refused: FindingStatus::Fail,
    works: "Segments without a name can be made (`backing: memfd`).",
    fails: "Segments without a name cannot be made: allow memfd_create in the seccomp profile \
            (RuntimeDefault does), and see vm.memfd_noexec if this is EACCES.",
};
const SEALS: Call = Call {
    id: "syscall.memfd_seals",
    refused: FindingStatus::Warn,
    works: "No peer can shrink a segment under you, and readers can be kept read-only.",
    fails: "A hostile peer could shrink a segment and kill its readers by SIGBUS: Linux 5.1 or later has all \
            seals.",
};
const FALLOCATE: Call = Call {
    id: "syscall.fallocate",
    refused: FindingStatus::Warn,
    works: "Named segments are reserved when they are made, so a full directory is an error at start.",
    fails: "Named segments cannot be reserved here, a full directory would be a SIGBUS later: use a tmpfs \
            with free space, or `backing: memfd`.",
};
const EVENTFD: Call = Call {
    id: "syscall.eventfd2",
    refused: FindingStatus::Fail,
    works: "The thread that watches this process's links can be woken.",
    fails: "Links cannot attach, because the thread that watches them cannot start: allow eventfd2 in the \
            seccomp profile (RuntimeDefault does).",
};
const SCM_RIGHTS: Call = Call {
    id: "syscall.scm_rights",
    refused: FindingStatus::Fail,
    works: "A broker can hand over segments without a name, and device memory.",
    fails: "Links with `backing: memfd` or pools in device memory cannot attach, and there are no device keys: \
            allow sendmsg and recvmsg of SCM_RIGHTS, and raise RLIMIT_NOFILE if it is used up.",
};
const PEER_PIDFD: Call = Call {
    id: "syscall.so_peerpidfd",
    refused: FindingStatus::Note,
    works: "A broker knows each peer by the kernel's word and sees its death at once.",
    fails: "Before Linux 6.5 a broker knows peers by their connected socket and start time, and sees deaths \
            as hang-ups; a newer kernel pins them.",
};
const PIDFD_OPEN: Call = Call {
    id: "syscall.pidfd_open",
    refused: FindingStatus::Note,
    works: "Processes can be pinned by number where numbers can be judged (see ns.pid).",
    fails: "Processes cannot be pinned by number; death is seen through SO_PEERPIDFD or hang-up instead.",
};
const LOCK: Call = Call {
    id: "syscall.ofd_lock",
    refused: FindingStatus::Warn,
    works: "Only one of two starting at once makes a link; the lock dies with its holder.",
    fails: "Two participants that start at once may both try to make a link: start one first, or use a \
            tmpfs.",
};
const TMPFILE: Call = Call {
    id: "syscall.o_tmpfile",
    refused: FindingStatus::Note,
    works: "A segment gets its name only when it is complete.",
    fails: "Segments are visible while they are being made; a maker killed in between leaves one for `shmesh \
            rm`.",
};

/// Tries all system calls that links use.
pub(super) fn findings(
    source: &Source,
    status: &Result<String, UnknownFact>,
    scratch: &Scratch,
    pidfd_open: Option<PidfdOpen>,
) -> Vec<Finding> {
    let memfd = memfd();
    let mut findings = vec![MEMFD.judge(memfd.as_ref().map(drop).map_err(errno::of))];
    if let Ok(memfd) = &memfd {
        findings.push(SEALS.judge(seals(memfd)));
    }
    if let Ok(file) = &scratch.file {
        findings.push(FALLOCATE.judge(said(reserve(file))));
        findings.push(LOCK.judge(said(ofd_lock(file))));
        findings.push(TMPFILE.judge(scratch.anonymous));
    }
    findings.push(EVENTFD.judge(said(eventfd())));
    findings.push(SCM_RIGHTS.judge(said(scm_rights())));
    findings.push(PEER_PIDFD.judge(said(peer_pidfd())));
    findings.push(match pidfd_open {
        Some(open) => PIDFD_OPEN.judge(open(std::process::id()).map(drop).map_err(|why| errno::of(&why))),
        None => inferred(source, status),
    });
    findings
}

/// The error number of a failed trial.
fn said(outcome: io::Result<()>) -> Result<(), Errno> {
    outcome.map_err(|why| errno::of(&why))
}

/// Reserves a page of a file.
fn reserve(file: &OwnedFd) -> io::Result<()> {
    file::reserve(&File::from(file.try_clone()?), 4096)
}

/// A small memfd that may be sealed.
fn memfd() -> io::Result<File> {
    let file = file::memfd("shmesh-doctor", false)?;
    file.set_len(4096)?;
    Ok(file)
}

/// Seals a memfd and checks that the seal holds.
fn seals(memfd: &File) -> Result<(), Errno> {
    Seals::FUTURE_WRITE.add_to(memfd)?;
    Seals::SIZE.and(Seals::FINAL).add_to(memfd)?;
    match memfd.set_len(0).map_err(|why| errno::of(&why)) {
        Err(Errno::EPERM) => Ok(()),
        Err(other) => Err(other),
        Ok(()) => Err(Errno::ENOTSUP),
    }
}

/// Takes a lock, as the creator of a link does.
fn ofd_lock(file: &impl AsFd) -> io::Result<()> {
    file::try_lock_byte(file, 0, ByteLock::Exclusive)?;
    Ok(())
}

/// Signals an eventfd and takes the signal.
fn eventfd() -> io::Result<()> {
    let bell = Doorbell::new()?;
    bell.signal()?;
    if bell.take()? { Ok(()) } else { Err(Errno::EAGAIN.into()) }
}

/// Passes a descriptor through a socket, as between a broker and a participant.
fn scm_rights() -> io::Result<()> {
    let (near, far) = socket::pair()?;
    socket::send_now(&near, b"x", &[near.as_fd()])?;
    match socket::receive_now(&far)?.fds.len() {
        1 => Ok(()),
        _ => Err(Errno::EMFILE.into()),
    }
}

/// Requests the pidfd of the peer of a socket.
fn peer_pidfd() -> io::Result<()> {
    let (near, _far) = socket::pair()?;
    socket::peer_pidfd(&near).map(drop)
}

/// The finding about `pidfd_open` without trying it.
fn inferred(source: &Source, status: &Result<String, UnknownFact>) -> Finding {
    let release = source.text("/proc/sys/kernel/osrelease").ok();
    let version = release.as_deref().and_then(cpu::version);
    let filtered = status.as_ref().ok().and_then(|status| field(status, "Seccomp")) != Some("0");
    match version {
        Some(version) if version < (5, 3) => PIDFD_OPEN.judge(Err(Errno::ENOSYS)),
        Some(_) if !filtered => Finding::new(
            PIDFD_OPEN.id,
            FindingStatus::Ok,
            json!({ "works": true, "inferred": true }),
            "works (the kernel has it and nothing filters)",
            PIDFD_OPEN.works,
        ),
        _ => Finding::unknown(
            PIDFD_OPEN.id,
            &UnknownFact("not tried; a seccomp filter or an unknown kernel decides".into()),
            "RuntimeDefault allows it; where it is refused, death is seen through SO_PEERPIDFD or hang-up.",
        ),
    }
}

#[cfg(test)]
#[path = "syscalls_tests.rs"]
mod tests;
