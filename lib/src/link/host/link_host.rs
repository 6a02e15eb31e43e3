//! Hosting a link without being a participant, as a sidecar does.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shmesh_proto::broker::PoolMemory;

use super::{HostListener, OTHER_SIDECAR, lock_path, offer, refused};
use crate::config::{Backing, LinkConfig};
use crate::error::Result;
use crate::inspect::View;
use crate::link::open::{EnteredLink, LinkOptions};
use crate::link::reap::take_back;
use crate::link::{RecoveryStats, Shared};
use crate::participant::{Participant, SeatIndex, SeatWord};
use crate::segment::header::Header;
use crate::segment::lock::Host;

/// Keeps one link: its segments, and the socket at which participants ask for segments without names, and announce their
/// seats.
///
/// It does not answer requests itself: a sidecar listens on [`listener`](Self::listener), decides which processes may
/// attach, and gives them the [`offer`](Self::offer).
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// use shmesh::config::LinkConfig;
/// let host = options.keep(&LinkConfig::new("fronthaul".parse()?))?;
/// assert!(dir.path().join("fronthaul_shm").exists());
/// assert_eq!(host.participants().count(), 0, "the host is not a participant");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct LinkHost {
    shared: Arc<Shared>,
    listening: HostListener,
}

/// The descriptors that a newcomer gets from a [`LinkHost`], in this order.
#[derive(Clone, Debug)]
pub struct LinkHostOffer<'a> {
    /// Version of the layout in shared memory.
    pub layout: u16,
    /// Number of segments; 0 if they have names.
    pub segments: u32,
    /// Descriptors of the segments.
    pub fds: Vec<BorrowedFd<'a>>,
}

impl LinkOptions {
    /// Creates a link to host it, or adopts an existing one: from its files, or from any of its participants if its memory
    /// has no names. An adopted link and its queued messages are unchanged. A participant that was the host loses that
    /// role.
    ///
    /// # Errors
    /// As [`create`](Self::create); [`Host`](crate::ErrorKind::Host) if another sidecar hosts it, or no process on it
    /// offers its memory.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh::config::LinkConfig;
    /// let config = LinkConfig::new("fronthaul".parse()?);
    /// let phy = options.create(&config)?;
    /// phy.send_inline(7, 0, b"waits")?;
    /// let host = options.keep(&config)?; // adopts the link of `phy`, which goes on
    /// assert_eq!(host.participants().count(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn keep(&self, config: &LinkConfig) -> Result<LinkHost> {
        config.validate()?;
        let store = self.store(config);
        self.settle(&store, |limit| {
            self.try_enter(&store, Some(config), Some(Host::Sidecar), limit)?.and_then(|entered| {
                let EnteredLink { shared, listening, .. } = entered;
                // Without a listener it would not be a host.
                let listening = listening.ok_or_else(|| refused(&store, OTHER_SIDECAR))?;
                Ok(LinkHost { shared, listening })
            })
        })
    }
}

impl LinkHost {
    /// The name of the link.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.store.link
    }

    /// The socket on which participants connect: listening, `SOCK_SEQPACKET`, with the sender's credentials in each packet.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh_sys::socket;
    /// let host = options.keep(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// // A client that connects before the listener is polled is identified, too.
    /// let client = socket::connect_to(&host.path())?;
    /// socket::send(&client, b"hello", &[])?;
    /// let packet = socket::receive_from(&socket::accept(&host.listener())?)?;
    /// assert_eq!(packet.sender_pid, std::process::id());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listening.listener.as_fd()
    }

    /// The path of that socket: `<dir>/<link>.broker-` and a number that no other process has while this one lives.
    /// Participants find the number by a lock on `<link>.lock`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.listening.place.path
    }

    /// The descriptors for a newcomer.
    #[must_use]
    pub fn offer(&self) -> LinkHostOffer<'_> {
        let (attached, fds) = offer(&self.shared);
        LinkHostOffer { layout: crate::segment::header::LAYOUT_VERSION, segments: attached.segments, fds }
    }

    /// Answers a participant that asks for the device memory of a pool, or offers some with its descriptor. The first offer
    /// is kept, as long as this host or a participant lives. Returns what the link has then, the descriptor for the answer,
    /// and whether the memory is new, in which case all other participants should be notified.
    ///
    /// # Errors
    /// The rule that the request breaks: no such device pool, a wrong size, mechanism or descriptor.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh::config::{LinkConfig, PoolConfig, PoolId};
    /// use shmesh_proto::broker::PoolMemory;
    /// let mut config = LinkConfig::new("fronthaul".parse()?);
    /// config.pools[PoolId::GpuData.index()] = PoolConfig { buf_size_bytes: 4096, pool_len: 8 };
    /// let host = options.keep(&config)?;
    /// let question = PoolMemory { pool: PoolId::GpuData as u32, ..PoolMemory::default() };
    /// let (answer, fd, is_news) = host.pool_memory(&question, Vec::new())?;
    /// assert!(answer.id == 0 && fd.is_none() && !is_news, "none was offered");
    /// assert!(host.pool_memory(&PoolMemory { pool: 1, ..question }, Vec::new()).is_err(), "cpu_data is here");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pool_memory(
        &self,
        told: &PoolMemory,
        fds: Vec<OwnedFd>,
    ) -> std::result::Result<(PoolMemory, Option<Arc<OwnedFd>>, bool), String> {
        let answer = self.shared.lend(told, fds)?;
        Ok((answer.message(), answer.memory.as_ref().map(|memory| Arc::clone(&memory.fd)), answer.is_news))
    }

    /// Whether participants may still offer the device memory that the last host had. Until then, a participant that asks
    /// for missing memory should retry.
    #[must_use]
    pub fn is_gathering(&self) -> bool {
        self.shared.is_gathering()
    }

    /// Total size of all segments in bytes.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        self.shared.segments.iter().map(|segment| segment.header.bytes()).sum()
    }

    /// The files of a link whose segments have names, with the lock file last. Empty if they have no names.
    #[must_use]
    pub fn files(&self) -> Vec<PathBuf> {
        let store = &self.shared.store;
        if store.backing != Backing::Named {
            return Vec::new();
        }
        let file = |header: &Header| {
            let spare = header.pool.map(|pool| store.spare_path(pool, header.epoch));
            spare.filter(|spare| spare.exists()).unwrap_or_else(|| store.path(header.pool))
        };
        let segments = self.shared.segments.iter().map(|segment| file(&segment.header));
        segments.chain([lock_path(store)]).collect()
    }

    /// A view for inspecting the link: queued messages, holders of buffers.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// let phy = options.create(&config)?;
    /// let host = options.keep(&config)?;
    /// phy.send_inline(7, 0, b"waits")?;
    /// assert_eq!(host.view().snapshot().rings[0].sent, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn view(&self) -> View {
        View::of(&self.shared)
    }

    /// All attached participants, dead or alive.
    pub fn participants(&self) -> impl Iterator<Item = Participant> + '_ {
        self.shared.core.seats.all()
    }

    /// Recovers participants that have ended, as far as this process can see them.
    pub fn recover(&self) -> RecoveryStats {
        let dead: Vec<_> = self.shared.dead().collect();
        take_back(&self.shared, &dead)
    }

    /// Recovers the participant in `seat`. The caller must know that its process has ended. `word` is its value from
    /// [`participants`](Self::participants): if the seat has another participant by now, nothing happens.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// let phy = options.create(&config)?;
    /// let host = options.keep(&config)?;
    /// let seen = host.participants().next().expect("it is attached");
    /// drop(phy);
    /// let done = host.recover_participant(seen.seat, seen.word);
    /// assert_eq!(done.participants, 0, "it has detached");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn recover_participant(&self, seat: SeatIndex, word: SeatWord) -> RecoveryStats {
        match self.shared.core.seats.at(seat) {
            Some(dead) if dead.word.is_same(word) => take_back(&self.shared, &[dead]),
            _ => RecoveryStats::default(),
        }
    }
}

impl Drop for LinkHost {
    fn drop(&mut self) {
        // The link stays for its participants and the next host. A forked child must not end its parent's host role.
        if self.shared.me.is_me() {
            self.listening.place.end(&self.shared.lock);
        }
    }
}
