//! Being the host of a link without being on it: what a sidecar does.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shmesh_proto::broker::PoolMemory;

use super::{Listening, OTHER_SIDECAR, lock_path, offer, refused};
use crate::config::{Backing, LinkConfig};
use crate::error::Result;
use crate::inspect::View;
use crate::link::open::{Entered, LinkOptions};
use crate::link::reap::take_back;
use crate::link::{Recovered, Shared};
use crate::participant::{Participant, SeatIndex, SeatWord};
use crate::segment::header::Header;
use crate::segment::lock::Host;

/// Keeps one link: its segments, and the socket at which participants ask for those that have no names, and say which seats
/// are theirs.
///
/// It does not answer there itself: a sidecar listens on [`listener`](Self::listener), decides who may attach, and gives
/// them the [`offer`](Self::offer).
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// use shmesh::config::LinkConfig;
/// let host = options.keep(&LinkConfig::new("fronthaul".parse()?))?;
/// assert!(dir.path().join("fronthaul_shm").exists());
/// assert_eq!(host.participants().count(), 0, "it is not on the link itself");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct LinkHost {
    shared: Arc<Shared>,
    listening: Listening,
}

/// What a newcomer gets from a [`LinkHost`]: descriptors, in this order.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// let host = options.keep(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// let offer = host.offer();
/// assert_eq!((offer.segments, offer.fds.len()), (0, 0), "segments have names here");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct LinkHostOffer<'a> {
    /// Version of the layout in shared memory.
    pub layout: u16,
    /// How many segments there are: none when they have names.
    pub segments: u32,
    /// The segments.
    pub fds: Vec<BorrowedFd<'a>>,
}

impl LinkOptions {
    /// Creates a link to be its host, or adopts one: from its files, or from any of its participants if its memory has no names.
    /// Then it, and everything that waits in it, is as it was. A participant that is the host is so no more.
    ///
    /// # Errors
    /// As [`create`](Self::create); [`Host`](crate::ErrorKind::Host) when another sidecar has it, or none of the processes that
    /// are on it offers its memory.
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
                let Entered { shared, listening, .. } = entered;
                // Without one it would not be done.
                let listening = listening.ok_or_else(|| refused(&store, OTHER_SIDECAR))?;
                Ok(LinkHost { shared, listening })
            })
        })
    }
}

impl LinkHost {
    /// The name of the link.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// let host = options.keep(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// assert_eq!(host.name(), "fronthaul");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.store.link
    }

    /// Where participants connect: a listening `SOCK_SEQPACKET` socket, whose packets say who sent them.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh_sys::socket;
    /// let host = options.keep(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// // Who comes before anybody has looked at the listener is known, too.
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

    /// The path of that socket: `<dir>/<link>.broker-` and a number that is no other process's while this one lives. A lock in
    /// `<link>.lock` tells it to participants.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// let host = options.keep(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// assert!(host.path().starts_with(dir.path()) && host.path().exists());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.listening.place.path
    }

    /// What a newcomer gets.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// config.backing = shmesh::config::Backing::Memfd;
    /// let host = options.keep(&config)?;
    /// assert!(host.offer().segments > 0, "segments without names travel, too");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn offer(&self) -> LinkHostOffer<'_> {
        let (attached, fds) = offer(&self.shared);
        LinkHostOffer { layout: crate::segment::header::LAYOUT_VERSION, segments: attached.segments, fds }
    }

    /// Answers a participant that asks for the device memory of a pool, or offers some with its descriptor: the first offer
    /// stays, for as long as this host or a participant lives. What the link has then, and the descriptor that goes with it;
    /// and whether that is news, of which everybody should hear.
    ///
    /// # Errors
    /// Which rule the request breaks: a pool that the link does not have in device memory, a size, a mechanism, a descriptor.
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
    /// assert!(answer.id == 0 && fd.is_none() && !is_news, "nobody has offered any");
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

    /// Whether participants may still offer the device memory that the last host had. Until then, who asks for some that is not
    /// here had better ask again.
    #[must_use]
    pub fn is_gathering(&self) -> bool {
        self.shared.is_gathering()
    }

    /// Bytes of all segments.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// let config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// assert!(options.keep(&config)?.segment_bytes() > config.payload_bytes());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        self.shared.segments.iter().map(|segment| segment.header.bytes()).sum()
    }

    /// The files of a link whose segments have names, the lock file last; none if they have no names.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// let host = options.keep(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// assert_eq!(host.files().first(), Some(&dir.path().join("fronthaul_shm")));
    /// assert_eq!(host.files().last(), Some(&dir.path().join("fronthaul.lock")));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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

    /// For looking at the link: what waits, who holds which buffer.
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

    /// Everybody who is attached, dead or alive.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// let phy = options.create(&config)?;
    /// let host = options.keep(&config)?;
    /// assert_eq!(host.participants().next().map(|phy| phy.word.pid()), Some(std::process::id()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn participants(&self) -> impl Iterator<Item = Participant> + '_ {
        self.shared.core.seats.all()
    }

    /// Takes back what participants held that have ended, as far as this process can see them.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// let host = options.keep(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// assert_eq!(host.recover().participants, 0, "nobody has died");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn recover(&self) -> Recovered {
        let dead: Vec<_> = self.shared.dead().collect();
        take_back(&self.shared, &dead)
    }

    /// Takes back what the participant in `seat` held, on the caller's word that its process has ended. `word` is what
    /// [`participants`](Self::participants) said of it: if somebody else sits there by now, nothing happens.
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
    /// assert_eq!(done.participants, 0, "it has left by itself");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn recover_participant(&self, seat: SeatIndex, word: SeatWord) -> Recovered {
        match self.shared.core.seats.at(seat) {
            Some(dead) if dead.word.is_same(word) => take_back(&self.shared, &[dead]),
            _ => Recovered::default(),
        }
    }
}

impl Drop for LinkHost {
    fn drop(&mut self) {
        // The link stays: for its participants, and for the next host. A forked child has no say in it.
        if self.shared.me.is_me() {
            self.listening.place.end(&self.shared.lock);
        }
    }
}
