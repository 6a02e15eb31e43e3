//! The links of this sidecar, kept from start to end.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use shmesh::config::LinkConfig;
use shmesh::inspect::View;
use shmesh::{Keeper, LinkOptions};
use shmesh_proto::broker::Attached;
use shmesh_sys::file::set_nonblocking;
use shmesh_sys::socket;

/// A link, by its place among those of this sidecar.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) struct LinkIndex(pub(crate) usize);

/// One link that is kept.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) keeper: Keeper,
    /// For who asks for the metrics.
    pub(crate) view: View,
    /// What a newcomer is told, and the descriptors beside it.
    pub(crate) attached: Attached,
    pub(crate) fds: Vec<Arc<OwnedFd>>,
}

/// Creates or adopts all links, in their order.
pub(crate) fn keep_all(dir: &Path, links: &[LinkConfig]) -> Result<Vec<Kept>> {
    let options = LinkOptions::new().dir(dir);
    links.iter().map(|link| keep(&options, link)).collect()
}

fn keep(options: &LinkOptions, link: &LinkConfig) -> Result<Kept> {
    let keeper = options.keep(link)?;
    let participants = keeper.participants().count();
    // Those that died while nobody kept the link.
    let recovered = keeper.recover();
    tracing::info!(
        link = %link.name,
        bytes = keeper.segment_bytes(),
        backing = ?link.backing,
        participants,
        reaped = recovered.participants,
        "link kept"
    );
    let offer = keeper.offer();
    let attached = Attached { layout: offer.layout.into(), segments: offer.segments };
    let fds = offer.fds.iter().map(|fd| fd.try_clone_to_owned().map(Arc::new)).collect::<io::Result<_>>();
    let fds = fds.with_context(|| format!("link {}: cannot copy its descriptors", link.name))?;
    Ok(Kept { view: keeper.view(), keeper, attached, fds })
}

/// Where participants connect, for the event loop.
pub(crate) fn listener(kept: &Kept, by_pidfd: bool) -> io::Result<OwnedFd> {
    let listener = kept.keeper.listener().try_clone_to_owned()?;
    if !by_pidfd {
        // As on a kernel that cannot.
        socket::ask_for_senders(&listener, false)?;
    }
    set_nonblocking(&listener)?;
    Ok(listener)
}
