//! From a pidfd to an identity.
//!
//! A number of a process means nothing by itself: it may be another's by the time it is used. But while a process lives, its
//! number is its own. So everything is read first, and then the pidfd is asked whether the process lives still: if it does,
//! all that was read was read of it; if not, nothing of it is given out.

use std::io;

use shmesh_proto::identity::{PeerIdentity, Pod, Unknown};
use tracing::{debug, warn};

use super::cgroup::Roots;
use super::descriptor::Pidfd;
use super::pods::Pods;
use super::procfs::{Facts, PidfdSays, Proc, start_time, status};

/// Tells who processes are.
#[derive(Debug)]
pub(crate) struct Resolver<P> {
    /// Where facts come from.
    pub(crate) proc: P,
    /// What comes before this cluster's pods.
    pub(crate) roots: Roots,
}

impl<P: Proc> Resolver<P> {
    /// Who it is. A process that started after `latest_start` (if that is not 0) is not the one that is meant.
    pub(crate) fn identify(
        &self,
        pidfd: &Pidfd,
        latest_start: u64,
        pods: &dyn Pods,
    ) -> Result<PeerIdentity, Unknown> {
        let read = self.read(pidfd, pods);
        // Last of all, and whatever came out of it: facts of one that has ended may be facts of another.
        if pidfd.has_ended().map_err(|_| Unknown::Unavailable)? {
            return Err(Unknown::Gone);
        }
        let peer = read?;
        if latest_start != 0 && peer.start_time > latest_start {
            debug!(tgid = peer.bare_tgid, "started after the connection was made: not who connected");
            return Err(Unknown::Gone);
        }
        if pidfd.must_be_user.is_some_and(|user| user != peer.uid) {
            debug!(tgid = peer.bare_tgid, "another user than who connected");
            return Err(Unknown::Gone);
        }
        Ok(peer)
    }

    fn read(&self, pidfd: &Pidfd, pods: &dyn Pods) -> Result<PeerIdentity, Unknown> {
        let tgid = match pidfd.says().map_err(|_| Unknown::Unavailable)? {
            PidfdSays::Pid(tgid) => tgid,
            PidfdSays::OutOfSight => return Err(Unknown::OutOfSight),
            PidfdSays::Gone => return Err(Unknown::Gone),
            PidfdSays::NoPidfd => return Err(Unknown::BadDescriptor),
        };
        let facts = |facts| {
            self.proc.read(tgid, facts).map_err(|error| {
                // Of a living process: /proc hides it (`hidepid`), or there are no descriptors left.
                debug!(tgid, ?facts, %error, "not readable");
                Unknown::Unavailable
            })
        };
        let start_time = start_time(&facts(Facts::Stat)?).ok_or(Unknown::Unavailable)?;
        let status = status(&facts(Facts::Status)?).ok_or(Unknown::Unavailable)?;
        if status.tgid != tgid {
            // The number of a thread, which must never pass for a process's.
            return Err(Unknown::BadDescriptor);
        }
        let pod = self.pod(&facts(Facts::Cgroup)?, pods);
        let pidfd_inode = pidfd.inode();
        Ok(PeerIdentity { bare_tgid: tgid, start_time, pidfd_inode, uid: status.uid, gid: status.gid, pod })
    }

    fn pod(&self, cgroup: &str, pods: &dyn Pods) -> Option<Pod> {
        let place = self.roots.place(cgroup).inspect_err(|why| debug!(?why, "no pod")).ok()?;
        let known = pods.find(place.pod_uid.as_deref(), &place.container_id);
        match (known, place.pod_uid) {
            (Some(known), Some(uid)) if known.uid != uid => {
                warn!(uid, known.uid, "the source of pods has this container in another pod: not believed");
                Some(Pod { uid, container_id: place.container_id, ..Pod::default() })
            }
            (Some(known), _) => Some(Pod { container_id: place.container_id, ..known }),
            (None, Some(uid)) => Some(Pod { uid, container_id: place.container_id, ..Pod::default() }),
            // Only a container is known, and nobody knows whose it is.
            (None, None) => None,
        }
    }
}

/// The start time of this very process, and whether `/proc` numbers processes as we do.
pub(super) fn own_start_time() -> io::Result<Option<u64>> {
    let stat = super::procfs::beginning("/proc/self/stat", super::limits::MAX_PROC_BYTES)?;
    let is_ours = stat.split(' ').next() == Some(std::process::id().to_string().as_str());
    Ok(if is_ours { start_time(&stat) } else { None })
}
