//! Identifying a process by its pidfd, without mixing facts of two processes.
//!
//! A process id alone proves nothing, because it may belong to another process when it is used. But a living process
//! keeps its id. So identification starts from a pidfd, reads all facts, and then checks that the process is still
//! alive: if so, all facts are about it; otherwise they are discarded.

use std::io;

use shmesh_proto::identity::{PeerIdentity, Pod, Unknown};

use crate::pidfd::Pidfd;
use crate::procfs::{self, PidfdSays, Proc, ProcFile, start_time, status};

/// Returns the identity of a process, from `proc` and, by its cgroup, from `pod`.
///
/// # Errors
/// [`Unknown::Gone`]: it has ended, or belongs to another user than the connection whose process id was used to open
/// the pidfd; [`Unknown::OutOfSight`]: it is in a pid namespace that is not visible here; [`Unknown::Unavailable`]:
/// `/proc` hides it, or no descriptor is left.
pub fn identify(
    proc: &impl Proc,
    pidfd: &Pidfd,
    pod: impl FnOnce(&str) -> Option<Pod>,
) -> Result<PeerIdentity, Unknown> {
    let read = read(proc, pidfd, pod);
    // Last, whatever the result: facts about a process that has ended may belong to another one.
    if pidfd.has_ended().map_err(|_| Unknown::Unavailable)? {
        return Err(Unknown::Gone);
    }
    let peer = read?;
    if pidfd.must_be_user.is_some_and(|user| user != peer.uid) {
        return Err(Unknown::Gone);
    }
    Ok(peer)
}

fn read(
    proc: &impl Proc,
    pidfd: &Pidfd,
    pod: impl FnOnce(&str) -> Option<Pod>,
) -> Result<PeerIdentity, Unknown> {
    let tgid = match pidfd.says().map_err(|_| Unknown::Unavailable)? {
        PidfdSays::Pid(tgid) => tgid,
        PidfdSays::OutOfSight => return Err(Unknown::OutOfSight),
        PidfdSays::Gone => return Err(Unknown::Gone),
        PidfdSays::NoPidfd => return Err(Unknown::BadDescriptor),
    };
    // The process is alive, so `/proc` hides it (`hidepid`), or no descriptor is left.
    let file = |file| proc.read(tgid, file).map_err(|_| Unknown::Unavailable);
    let start_time = start_time(&file(ProcFile::Stat)?).ok_or(Unknown::Unavailable)?;
    let status = status(&file(ProcFile::Status)?).ok_or(Unknown::Unavailable)?;
    if status.tgid != tgid {
        // The id of a thread, which must never be taken for a process.
        return Err(Unknown::BadDescriptor);
    }
    let pod = pod(&file(ProcFile::Cgroup)?);
    let pidfd_inode = pidfd.inode();
    Ok(PeerIdentity { bare_tgid: tgid, start_time, pidfd_inode, uid: status.uid, gid: status.gid, pod })
}

/// The start time of this process. `None` if `/proc` belongs to another pid namespace.
///
/// # Errors
/// `/proc` is not mounted.
pub fn own_start_time() -> io::Result<Option<u64>> {
    let stat = procfs::own(ProcFile::Stat)?;
    Ok(if procfs::is_pid(&stat, std::process::id()) { start_time(&stat) } else { None })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::pidfd::PeerPidfd;
    use crate::procfs::Kernel;

    #[test]
    fn old_kernel_does_not_confuse_users() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut me = Pidfd::of_peer(socket.as_fd(), PeerPidfd::Old).unwrap();
        assert!(identify(&Kernel, &me, |_| None).is_ok());
        me.must_be_user = me.must_be_user.map(|user| user + 1);
        assert_eq!(identify(&Kernel, &me, |_| None), Err(Unknown::Gone));
    }

    #[test]
    fn number_identifies_a_living_process() {
        let me = Pidfd::of_number(std::process::id().cast_signed()).unwrap();
        assert_eq!(identify(&Kernel, &me, |_| None).unwrap().start_time, own_start_time().unwrap().unwrap());
        let thread = std::thread::spawn(|| {
            let tid = nix::unistd::gettid().as_raw();
            Pidfd::of_number(tid).map(drop)
        });
        assert_eq!(thread.join().unwrap(), Err(Unknown::Gone), "a thread is not a process");
        for pid in [0, -1, i32::MAX] {
            assert_eq!(Pidfd::of_number(pid).unwrap_err(), Unknown::Gone, "{pid}");
        }
    }
}
