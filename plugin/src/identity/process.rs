//! From a pidfd to an identity with its pod.

use shmesh_proto::identity::{PeerIdentity, Pod, Unknown};
use shmesh_sys::identify;
use shmesh_sys::pidfd::Pidfd;
use shmesh_sys::procfs::Proc;
use tracing::{debug, warn};

use super::cgroup::Roots;
use super::pods::Pods;

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
        let peer = identify::identify(&self.proc, pidfd, |cgroup| self.pod(cgroup, pods))?;
        if latest_start != 0 && peer.start_time > latest_start {
            debug!(tgid = peer.bare_tgid, "started after the connection was made: not who connected");
            return Err(Unknown::Gone);
        }
        Ok(peer)
    }

    fn pod(&self, cgroup: &str, pods: &dyn Pods) -> Option<Pod> {
        let container = self.roots.container(cgroup).inspect_err(|why| debug!(?why, "no pod")).ok()?;
        let known = pods.find(container.pod_uid.as_deref(), &container.container_id);
        match (known, container.pod_uid) {
            (Some(known), Some(uid)) if known.uid != uid => {
                warn!(uid, known.uid, "the source of pods has this container in another pod: not believed");
                Some(Pod { uid, container_id: container.container_id, ..Pod::default() })
            }
            (Some(known), _) => Some(Pod { container_id: container.container_id, ..known }),
            (None, Some(uid)) => Some(Pod { uid, container_id: container.container_id, ..Pod::default() }),
            // Only a container is known, and nobody knows whose it is.
            (None, None) => None,
        }
    }
}
