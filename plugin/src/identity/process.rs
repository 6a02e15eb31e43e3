//! Maps a pidfd to an identity with its pod.

use shmesh_proto::identity::{PeerIdentity, Pod, Unknown};
use shmesh_sys::identify;
use shmesh_sys::pidfd::Pidfd;
use shmesh_sys::procfs::Proc;
use tracing::{debug, warn};

use super::cgroup::CgroupRoots;
use super::pods::Pods;

/// Identifies processes and their pods.
#[derive(Debug)]
pub(crate) struct ProcessResolver<P> {
    /// Source of `/proc` files.
    pub(crate) proc: P,
    /// Cgroup prefix of this cluster's pods.
    pub(crate) roots: CgroupRoots,
}

impl<P: Proc> ProcessResolver<P> {
    /// Identifies the process of a pidfd. Fails if it started after `latest_start` (unless 0), because then
    /// the pid was reused.
    pub(crate) fn identify(
        &self,
        pidfd: &Pidfd,
        latest_start: u64,
        pods: &dyn Pods,
    ) -> Result<PeerIdentity, Unknown> {
        let peer = identify::identify(&self.proc, pidfd, |cgroup| self.pod(cgroup, pods))?;
        if latest_start != 0 && peer.start_time > latest_start {
            debug!(tgid = peer.bare_tgid, "process started after the connection: the pid was reused");
            return Err(Unknown::Gone);
        }
        Ok(peer)
    }

    fn pod(&self, cgroup: &str, pods: &dyn Pods) -> Option<Pod> {
        let container = self.roots.container(cgroup).inspect_err(|why| debug!(?why, "not in a pod")).ok()?;
        let known = pods.find(container.pod_uid.as_deref(), &container.container_id);
        match (known, container.pod_uid) {
            (Some(known), Some(uid)) if known.uid != uid => {
                warn!(uid, known.uid, "the file of pods has this container in another pod; ignoring it");
                Some(Pod { uid, container_id: container.container_id, ..Pod::default() })
            }
            (Some(known), _) => Some(Pod { container_id: container.container_id, ..known }),
            (None, Some(uid)) => Some(Pod { uid, container_id: container.container_id, ..Pod::default() }),
            // Without a pod uid and a source, the pod is unknown.
            (None, None) => None,
        }
    }
}
