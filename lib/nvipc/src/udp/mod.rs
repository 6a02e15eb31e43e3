//! Messages as UDP datagrams, between nodes: `transport: udp`.
//!
//! | file | concept |
//! |---|---|
//! | `wire.rs` | the format of a datagram |
//! | `pool.rs` | buffers on the heap |
//! | `assemble.rs` | assembles parts to messages, counts losses |
//!
//! This is plain UDP: no retransmission, no flow control, no encryption, no authentication. Messages arrive whole and in
//! order or not at all, and losses are counted. The kernel drops datagrams whose source address is not the configured
//! peer's, but any host on the network path can forge that address. Use it on a trusted network only.

mod assemble;
mod pool;
mod wire;

use std::io::{self, IoSlice};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use shmesh::config::{PoolConfig, PoolId};
use shmesh_sys::poll::{self, Watch};
use shmesh_sys::{eventfd, file, udp as datagrams};

use crate::endpoint::{Buffers, Message};
use crate::memory::AtomicU32;
use crate::{Error, Result};
use assemble::Assembler;
use pool::Pool;
use wire::{DatagramHeader, HEADER_BYTES};

/// Largest payload of a datagram over IPv4.
const DATAGRAM_MAX: usize = 65_507;
/// Receive buffer to request from the kernel, which grants up to `net.core.rmem_max` and drops datagrams beyond.
const KEPT_BYTES: usize = 8 << 20;
/// Maximum number of datagrams that one call reads, so that a flood cannot keep it busy for ever.
const READ_MAX: usize = 4096;

/// Whether an error does not concern this call: a signal arrived, or an earlier datagram was refused by the peer's host.
fn is_unrelated(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionRefused)
}

/// The format of datagrams.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Form {
    /// shmesh's format: ids, lengths and pool are transmitted, and long messages are split.
    #[default]
    Shmesh,
    /// NVIPC's format: a whole MSG buffer and the DATA bytes in one datagram, and nothing else. Ids arrive as 0, and
    /// messages longer than a datagram are refused. Both sides need the same `buf_size` of `cpu_msg`.
    Nvipc,
}

/// Addresses, pools and datagram format of an endpoint.
///
/// ```
/// use shmesh_nvipc_wire::udp::{Config, Form};
/// let config = Config::new("127.0.0.1:38556".parse()?, "127.0.0.1:38555".parse()?);
/// assert_eq!((config.datagram_bytes, config.form), (1472, Form::Shmesh));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Config {
    /// The address to listen on. NVIPC's primary uses port 38556, its secondary 38555.
    pub local: SocketAddr,
    /// The address of the peer. The kernel drops datagrams from others.
    pub remote: SocketAddr,
    /// Sizes of the pools. Pools for DATA may be left out.
    pub pools: [PoolConfig; PoolId::COUNT],
    /// The format of datagrams.
    pub form: Form,
    /// Maximum size of a datagram in shmesh's format, with its header of 40 bytes. 1472 fits an Ethernet frame, which
    /// avoids IP fragmentation.
    pub datagram_bytes: usize,
}

impl Config {
    /// A configuration with NVIPC's buffer sizes and 256 buffers per pool.
    #[must_use]
    pub fn new(local: SocketAddr, remote: SocketAddr) -> Self {
        let mut pools = [PoolConfig::DISABLED; PoolId::COUNT];
        pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 8192, pool_len: 256 };
        pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: 153_600, pool_len: 256 };
        Self { local, remote, pools, form: Form::default(), datagram_bytes: 1472 }
    }
}

/// Counters of messages and datagrams that were lost, as the receiver sees it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LossStats {
    /// Messages that were skipped because a later one was delivered.
    pub messages: u64,
    /// Datagrams of messages that were dropped or delivered already.
    pub late: u64,
    /// Datagrams that no correct sender produces.
    pub damaged: u64,
    /// Datagrams of messages for which no buffer was free or long enough.
    pub no_buffer: u64,
}

/// The pools of one endpoint.
#[derive(Debug)]
struct Pools([Option<Pool>; PoolId::COUNT]);

impl Pools {
    fn get(&self, id: PoolId) -> Option<&Pool> {
        self.0[id.index()].as_ref()
    }

    fn msg(&self) -> Result<&Pool> {
        self.get(PoolId::CpuMsg).ok_or(Error::NoMsgPool)
    }

    fn data(&self, id: PoolId) -> Result<&Pool> {
        let no = |why| Error::NoPool { pool: id, why };
        if id == PoolId::CpuMsg {
            return Err(no("it holds MSG parts; use another pool for the DATA part"));
        }
        self.get(id).ok_or(no("it is not configured; set its buf_size and pool_len"))
    }
}

/// An endpoint that sends and receives datagrams. It has the same calls as [`Endpoint`](crate::Endpoint), for any thread.
///
/// ```
/// use shmesh_nvipc_wire::{Message, udp};
/// # let own = std::net::Ipv4Addr::from_bits(0x7f00_0000 | std::process::id());
/// # let (here, there) = ((own, 20_000).into(), (own, 20_001).into());
/// let phy = udp::Endpoint::open(udp::Config::new(here, there))?;
/// let mac = udp::Endpoint::open(udp::Config::new(there, here))?;
/// let buffers = mac.allocate(None)?;
/// mac.send(Message { msg_id: 0x80, cell_id: 3, msg_len: 100, data_len: 0, buffers })?;
/// assert!(phy.wait(None)?);
/// let message = phy.receive()?.expect("a message has come");
/// assert_eq!((message.msg_id, message.cell_id, message.msg_len), (0x80, 3, 100));
/// phy.release(message.buffers)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Endpoint {
    socket: UdpSocket,
    form: Form,
    datagram_bytes: usize,
    pools: Pools,
    session: u32,
    number: AtomicU32,
    arriving: Mutex<ReceiveState>,
    /// Readable when the endpoint is closed.
    over: std::os::fd::OwnedFd,
    closed: AtomicBool,
}

#[derive(Debug)]
struct ReceiveState {
    datagram: Box<[u8]>,
    assembler: Assembler,
}

impl Endpoint {
    /// Binds and connects the socket. The peer need not be running.
    ///
    /// # Errors
    /// [`System`](Error::System) (the port is taken), [`Udp`](Error::Udp), [`NoMsgPool`](Error::NoMsgPool).
    pub fn open(config: Config) -> Result<Self> {
        if !(HEADER_BYTES + 16..=DATAGRAM_MAX).contains(&config.datagram_bytes) {
            return Err(Error::Udp {
                why: "datagram_bytes must be 56 to 65507; 1472 fits an Ethernet frame",
            });
        }
        let shape = crate::layout::PoolShapes::checked(config.pools)?;
        let mut pools = [const { None }; PoolId::COUNT];
        for id in PoolId::ALL {
            let size = shape.pools[id.index()];
            if size.is_enabled() {
                if id.is_device() {
                    let why = "device pools are not available over UDP; use cpu_data or cpu_large";
                    return Err(Error::NoPool { pool: id, why });
                }
                pools[id.index()] = Some(Pool::new(id, size)?);
            }
        }
        let refused = |doing: &str, error| Error::system(format!("{doing} {} over udp", config.local), error);
        let socket = UdpSocket::bind(config.local).map_err(|error| refused("listen at", error))?;
        socket.connect(config.remote).map_err(|error| refused("reach the peer from", error))?;
        datagrams::set_receive_buffer(&socket, KEPT_BYTES);
        let over = eventfd::blocking().map_err(|error| Error::system("make an eventfd", error))?;
        Ok(Self {
            socket,
            form: config.form,
            datagram_bytes: config.datagram_bytes,
            pools: Pools(pools),
            session: file::random()
                .map(u32::from_ne_bytes)
                .map_err(|error| Error::system("read /dev/urandom", error))?,
            number: AtomicU32::new(0),
            arriving: Mutex::new(ReceiveState {
                datagram: vec![0; DATAGRAM_MAX].into(),
                assembler: Assembler::default(),
            }),
            over,
            closed: AtomicBool::new(false),
        })
    }

    fn living(&self) -> Result<()> {
        if self.closed.load(Acquire) { Err(Error::Closed) } else { Ok(()) }
    }

    /// Allocates a MSG buffer, and with `pool` a DATA buffer of that pool.
    ///
    /// # Errors
    /// [`Empty`](Error::Empty), [`NoPool`](Error::NoPool), [`Closed`](Error::Closed).
    pub fn allocate(&self, pool: Option<PoolId>) -> Result<Buffers> {
        self.living()?;
        let data_pool = pool.map(|id| self.pools.data(id)).transpose()?;
        let msg_pool = self.pools.msg()?;
        let msg = msg_pool.take()?;
        match data_pool.map(Pool::take).transpose() {
            Ok(data) => Ok(self.pools.buffers(msg, pool.zip(data))),
            Err(error) => {
                msg_pool.give(msg);
                Err(error)
            }
        }
    }

    /// Sends a message and releases its buffers, unless it fails.
    ///
    /// # Errors
    /// [`NotHeld`](Error::NotHeld), [`Length`](Error::Length), [`Udp`](Error::Udp) for a message that does not fit a
    /// datagram of NVIPC's format, [`System`](Error::System).
    ///
    /// ```
    /// # use shmesh_nvipc_wire::{Error, Message, udp};
    /// let link = udp::Endpoint::open(udp::Config::new("127.0.0.1:0".parse()?, "127.0.0.1:9".parse()?))?;
    /// let buffers = link.allocate(None)?;
    /// let message = Message { msg_id: 1, cell_id: 0, msg_len: 10, data_len: 0, buffers };
    /// link.send(message)?; // succeeds whether or not a peer is running
    /// assert!(matches!(link.send(message), Err(Error::NotHeld { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn send(&self, message: Message) -> Result<()> {
        self.living()?;
        let msg_pool = self.pools.msg()?;
        let Buffers { msg, data, data_pool } = message.buffers;
        let index = msg_pool.held_index(msg)?;
        let msg_len = msg_pool.checked_len("msg_len", message.msg_len)?;
        let data = match (data.is_null(), data_pool) {
            (true, _) => None,
            (false, None) => return Err(Error::NotHeld { address: data.addr(), pool: PoolId::CpuData }),
            (false, Some(id)) => {
                let pool = self.pools.data(id)?;
                Some((pool, pool.held_index(data)?, pool.checked_len("data_len", message.data_len)?))
            }
        };
        let header = DatagramHeader {
            session: self.session,
            number: 0,
            part: 0,
            parts: 1,
            msg_id: message.msg_id,
            cell_id: message.cell_id,
            msg_len,
            data_len: data.map_or(0, |(_, _, len)| len),
            data_pool: data.map(|(pool, _, _)| pool.id),
            offset: 0,
        };
        // The kernel copies datagrams in any case. This copy joins MSG and DATA.
        let copy = |offset: usize, to: &mut [u8]| {
            let split = (msg_len as usize).saturating_sub(offset).min(to.len());
            let (of_msg, of_data) = to.split_at_mut(split);
            msg_pool.read(index, offset, of_msg);
            if let Some((pool, data, _)) = data {
                pool.read(data, (offset + split).saturating_sub(msg_len as usize), of_data);
            }
        };
        match self.form {
            Form::Shmesh => self.send_parts(header, copy)?,
            Form::Nvipc => {
                let whole = DatagramHeader { msg_len: msg_pool.config.buf_size_bytes, ..header };
                self.send_whole(&whole, |to| {
                    let (of_msg, of_data) = to.split_at_mut(whole.msg_len as usize);
                    msg_pool.read(index, 0, of_msg);
                    if let Some((pool, data, _)) = data {
                        pool.read(data, 0, of_data);
                    }
                })?;
            }
        }
        self.pools.give(index, data.map(|(pool, index, _)| (pool.id, index)));
        Ok(())
    }

    fn send_parts(&self, header: DatagramHeader, copy: impl Fn(usize, &mut [u8])) -> Result<()> {
        let room = self.datagram_bytes - HEADER_BYTES;
        let total = usize::try_from(header.total()).unwrap_or(usize::MAX);
        let parts = u16::try_from(total.div_ceil(room).max(1))
            .map_err(|_| Error::Udp { why: "the message has more than 65535 parts; raise datagram_bytes" })?;
        let number = self.number.fetch_add(1, Relaxed);
        let mut payload = vec![0; room.min(total)];
        for part in 0..parts {
            let offset = usize::from(part) * room;
            let len = room.min(total - offset);
            copy(offset, &mut payload[..len]);
            let offset = u32::try_from(offset)
                .map_err(|_| Error::Udp { why: "the message is longer than 4 GiB; send less" })?;
            let head = DatagramHeader { number, part, parts, offset, ..header }.to_bytes();
            self.put(&[IoSlice::new(&head), IoSlice::new(&payload[..len])])?;
        }
        Ok(())
    }

    fn send_whole(&self, header: &DatagramHeader, fill: impl Fn(&mut [u8])) -> Result<()> {
        let total = usize::try_from(header.total()).unwrap_or(usize::MAX);
        if total > DATAGRAM_MAX {
            return Err(Error::Udp {
                why: "more than 65507 bytes do not fit one datagram of NVIPC's format; use shmesh's format on both sides",
            });
        }
        let mut datagram = vec![0; total];
        fill(&mut datagram);
        self.put(&[IoSlice::new(&datagram)])
    }

    fn put(&self, parts: &[IoSlice<'_>]) -> Result<()> {
        loop {
            match datagrams::send_parts(&self.socket, parts) {
                // ECONNREFUSED reports an earlier datagram, to a peer that was not running yet. Reporting clears it, and
                // this datagram is sent again.
                Err(error) if is_unrelated(&error) => {}
                Ok(()) => return Ok(()),
                Err(error) => return Err(Error::system("send a datagram", error)),
            }
        }
    }

    /// Receives the next complete message, if there is one. The caller holds its buffers until it releases or sends them.
    ///
    /// # Errors
    /// [`Closed`](Error::Closed), [`System`](Error::System).
    pub fn receive(&self) -> Result<Option<Message>> {
        self.living()?;
        let mut arriving = self.arriving();
        let ReceiveState { datagram, assembler } = &mut *arriving;
        for _ in 0..READ_MAX {
            let len = match datagrams::receive_now(&self.socket, datagram) {
                Ok(len) => len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if is_unrelated(&error) => continue,
                Err(error) => return Err(Error::system("receive a datagram", error)),
            };
            let message = match self.form {
                Form::Shmesh => match DatagramHeader::parse(&datagram[..len]) {
                    Some((header, payload)) => assembler.put(header, payload, &self.pools),
                    None => {
                        assembler.refuse();
                        None
                    }
                },
                Form::Nvipc => self.whole(&datagram[..len], assembler),
            };
            if message.is_some() {
                return Ok(message);
            }
        }
        Ok(None)
    }

    /// Receives a datagram of NVIPC's format: a whole MSG buffer, and DATA after it.
    fn whole(&self, datagram: &[u8], assembler: &mut Assembler) -> Option<Message> {
        let msg_size = self.pools.msg().ok()?.config.buf_size_bytes as usize;
        let (msg, data) = datagram.split_at(msg_size.min(datagram.len()));
        let header = DatagramHeader {
            session: 0,
            // The format has no numbers, so each datagram is the next message.
            number: self.number.fetch_add(1, Relaxed),
            part: 0,
            parts: 1,
            msg_id: 0,
            cell_id: 0,
            msg_len: u32::try_from(msg.len()).ok()?,
            data_len: u32::try_from(data.len()).ok()?,
            data_pool: (!data.is_empty()).then_some(PoolId::CpuData),
            offset: 0,
        };
        assembler.put(header, datagram, &self.pools)
    }

    fn arriving(&self) -> std::sync::MutexGuard<'_, ReceiveState> {
        self.arriving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns buffers to their pools: both, or one of them if the other is null.
    ///
    /// # Errors
    /// [`NotHeld`](Error::NotHeld).
    pub fn release(&self, buffers: Buffers) -> Result<()> {
        let give = |pool: Result<&Pool>, address: *mut u8| -> Result<()> {
            if address.is_null() {
                return Ok(());
            }
            let pool = pool?;
            let not_held = || Error::NotHeld { address: address.addr(), pool: pool.id };
            let index = pool.held_index(address)?;
            if pool.give(index) { Ok(()) } else { Err(not_held()) }
        };
        let pool =
            buffers.data_pool.ok_or(Error::NotHeld { address: buffers.data.addr(), pool: PoolId::CpuData });
        let data = give(pool.and_then(|id| self.pools.data(id)), buffers.data);
        give(self.pools.msg(), buffers.msg).and(data)
    }

    /// Does nothing, as each datagram wakes the peer. For symmetry with [`Endpoint`](crate::Endpoint).
    ///
    /// # Errors
    /// [`Closed`](Error::Closed).
    pub fn notify(&self) -> Result<()> {
        self.living()
    }

    /// Waits for a datagram. Returns `false` if `limit` expired. A message may need several, so receive until there is
    /// none.
    ///
    /// # Errors
    /// [`Closed`](Error::Closed), also if that happens during the wait.
    pub fn wait(&self, limit: Option<Duration>) -> Result<bool> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let [socket, over] = self.waits_on();
        let ready = poll::wait(&mut [Watch::readable(&socket), Watch::readable(&over)], deadline);
        self.living()?;
        Ok(ready.map_err(|error: io::Error| Error::system("wait for a datagram", error))? > 0)
    }

    /// The socket, which is readable when datagrams have arrived.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The two descriptors that [`wait`](Self::wait) polls: the socket, and one that is readable once this endpoint is
    /// closed.
    #[must_use]
    pub fn waits_on(&self) -> [BorrowedFd<'_>; 2] {
        [self.socket.as_fd(), self.over.as_fd()]
    }

    /// Whether an address lies in a buffer of this endpoint.
    #[must_use]
    pub fn is_inside(&self, address: *const u8) -> bool {
        self.pools.0.iter().flatten().any(|pool| pool.index(address).is_some())
    }

    /// The size of a pool, as configured.
    #[must_use]
    pub fn pool(&self, pool: PoolId) -> PoolConfig {
        self.pools.get(pool).map_or(PoolConfig::DISABLED, |pool| pool.config)
    }

    /// Counts of what was lost so far.
    #[must_use]
    pub fn lost(&self) -> LossStats {
        self.arriving().assembler.lost
    }

    /// Closes the endpoint: calls that wait return, later calls fail. Addresses stay valid until it is dropped.
    pub fn close(&self) {
        if !self.closed.swap(true, AcqRel) {
            let _ = eventfd::post(&self.over);
        }
    }
}
