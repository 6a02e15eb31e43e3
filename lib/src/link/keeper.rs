//! Keeping a link without being on it: what a sidecar does.
//!
//! A keeper has the segments and the duty, and no seat. Of a link whose memory has no names, newcomers get the descriptors
//! from it. When it ends, one of the participants takes its place; when it comes back, it takes the duty over again, with the
//! descriptors that they have. So such a link lives as long as its keeper or one of its participants does. A link whose memory
//! has names stays without it, and nobody takes its place.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use shmesh_proto::broker::PoolMemory;
use shmesh_sys::socket;

use super::holder;
use super::open::{Entered, LinkOptions};
use super::{Recovered, Shared};
use crate::config::LinkConfig;
use crate::error::Result;
use crate::inspect::View;
use crate::participant::{Participant, SeatIndex, SeatWord};
use crate::segment::lock::{Host, Lock};

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
/// let keeper = options.keep(&LinkConfig::new("fronthaul".parse()?))?;
/// assert!(dir.path().join("fronthaul_shm").exists());
/// assert_eq!(keeper.participants().count(), 0, "it is not on the link itself");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Keeper {
    shared: Arc<Shared>,
    listening: holder::Listening,
}

/// What a newcomer gets from a [`Keeper`]: descriptors, in this order.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// let keeper = options.keep(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// let offer = keeper.offer();
/// assert_eq!((offer.segments, offer.fds.len()), (0, 0), "segments have names here");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct KeeperOffer<'a> {
    /// Version of the layout in shared memory.
    pub layout: u16,
    /// How many segments there are: none when they have names.
    pub segments: u32,
    /// The segments.
    pub fds: Vec<BorrowedFd<'a>>,
}

impl LinkOptions {
    /// Creates a link to keep it, or adopts one: from its files, or from the participant that serves it if its memory has no
    /// names. Then it, and everything that waits in it, is as it was.
    ///
    /// # Errors
    /// As [`create`](Self::create); [`Holder`](crate::ErrorKind::Holder) when another keeper has it.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh::config::LinkConfig;
    /// let config = LinkConfig::new("fronthaul".parse()?);
    /// let phy = options.create(&config)?;
    /// phy.send_inline(7, 0, b"waits")?;
    /// let keeper = options.keep(&config)?; // adopts the link of `phy`, which goes on
    /// assert_eq!(keeper.participants().count(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn keep(&self, config: &LinkConfig) -> Result<Keeper> {
        config.validate()?;
        let store = self.store(config);
        self.settle(&store, || {
            self.try_enter(&store, Some(config), true)?.and_then(|Entered { shared, connection }| {
                let listening = holder::listen(&shared, Host::Sidecar, socket::listen_for_senders)
                    .map_err(|error| holder::Holder::deaf(&store, error))?;
                // Now: who followed the old holder finds us, and whoever watches the lock file sees that there is something new.
                drop(connection);
                drop(Lock::open(&holder::lock_path(&store)));
                Ok(Keeper { shared, listening })
            })
        })
    }
}

impl Keeper {
    /// The name of the link.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// let keeper = options.keep(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// assert_eq!(keeper.name(), "fronthaul");
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
    /// let keeper = options.keep(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// // Who comes before anybody has looked at the listener is known, too.
    /// let client = socket::connect_to(&keeper.path())?;
    /// socket::send(&client, b"hello", &[])?;
    /// let packet = socket::receive_from(&socket::accept(&keeper.listener())?)?;
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
    /// let keeper = options.keep(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// assert!(keeper.path().starts_with(dir.path()) && keeper.path().exists());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.listening.path
    }

    /// What a newcomer gets.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// config.backing = shmesh::config::Backing::Memfd;
    /// let keeper = options.keep(&config)?;
    /// assert!(keeper.offer().segments > 0, "segments without names travel, too");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn offer(&self) -> KeeperOffer<'_> {
        let (attached, fds) = holder::offer(&self.shared);
        KeeperOffer { layout: crate::segment::header::LAYOUT_VERSION, segments: attached.segments, fds }
    }

    /// Answers a participant that asks for the device memory of a pool, or offers some with its descriptor: the first offer
    /// stays, for as long as the keeper or a participant lives. What the link has then, and the descriptor that goes with it;
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
    /// let keeper = options.keep(&config)?;
    /// let question = PoolMemory { pool: PoolId::GpuData as u32, ..PoolMemory::default() };
    /// let (answer, fd, is_news) = keeper.pool_memory(&question, Vec::new())?;
    /// assert!(answer.id == 0 && fd.is_none() && !is_news, "nobody has offered any");
    /// assert!(keeper.pool_memory(&PoolMemory { pool: 1, ..question }, Vec::new()).is_err(), "cpu_data is here");
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

    /// For looking at the link: what waits, who holds which buffer.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// let phy = options.create(&config)?;
    /// let keeper = options.keep(&config)?;
    /// phy.send_inline(7, 0, b"waits")?;
    /// assert_eq!(keeper.view().snapshot().rings[0].sent, 1);
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
    /// let keeper = options.keep(&config)?;
    /// assert_eq!(keeper.participants().next().map(|phy| phy.word.pid()), Some(std::process::id()));
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
    /// let keeper = options.keep(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// assert_eq!(keeper.recover().participants, 0, "nobody has died");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn recover(&self) -> Recovered {
        let dead: Vec<_> = self.shared.dead().collect();
        holder::take_back(&self.shared, &dead)
    }

    /// Takes back what the participant in `seat` held, on the caller's word that its process has ended. `word` is what
    /// [`participants`](Self::participants) said of it: if somebody else sits there by now, nothing happens.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// let phy = options.create(&config)?;
    /// let keeper = options.keep(&config)?;
    /// let seen = keeper.participants().next().expect("it is attached");
    /// drop(phy);
    /// let done = keeper.recover_participant(seen.seat, seen.word);
    /// assert_eq!(done.participants, 0, "it has left by itself");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn recover_participant(&self, seat: SeatIndex, word: SeatWord) -> Recovered {
        match self.shared.core.seats.at(seat) {
            Some(dead) if dead.word.is_same(word) => holder::take_back(&self.shared, &[dead]),
            _ => Recovered::default(),
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // The link stays: for its participants, and for the next keeper. A forked child has no say in it.
        if self.shared.me.is_me() {
            self.listening.end(&self.shared.lock);
        }
    }
}
