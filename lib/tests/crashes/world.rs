//! A small link whose shared memory can be saved, restored and examined, for tests that stop a participant
//! anywhere.
//!
//! A [`Base`] is a link with a seat on each side that only serves to make handles. A test runs its operation on
//! one base, copies the bytes to a second one of the same shape, and [`verify`]s there: the examination does not
//! disturb the link.

#![allow(clippy::disallowed_types, reason = "a test looks at the words as the machine has them")]
// UNSAFETY: looks at, and copies, the memory of segments behind the library's back.
#![expect(unsafe_code, reason = "maps segments a second time, as bytes")]

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use shmesh::config::{BroadcastConfig, LinkConfig, PoolConfig, PoolId, RingMode, SlowReaders};
use shmesh::{Error, ErrorKind, Link, LinkOptions, Loan, Message, SeatIndex, Side};

use crate::layout::{self, Layout, Table};

pub(crate) const RING_LEN: u32 = 4;
pub(crate) const MSG_LEN: u32 = 6;
pub(crate) const DATA_LEN: u32 = 3;
/// Messages that a new reader of a broadcast ring gets of those before it.
pub(crate) const HISTORY: u32 = 1;
const BUF_BYTES: u32 = 64;
const NAME: &str = "world";
/// Nothing that the survivors do may take longer, all together.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const TO_PRIMARY: usize = 0;
pub(crate) const TO_SECONDARY: usize = 1;

/// A kind of failure after a crash.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Class {
    /// A survivor could not work.
    Wedged,
    /// A message that was sent did not arrive.
    Lost,
    /// A message arrived twice, or out of order.
    Doubled,
    /// A buffer, a slot or a seat did not come back.
    Leaked,
    /// A message arrived with other content.
    Damaged,
}

#[derive(Debug)]
pub(crate) struct Bad {
    pub(crate) class: Class,
    pub(crate) what: String,
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.class, self.what)
    }
}

pub(crate) fn bad<T>(class: Class, what: impl Into<String>) -> Result<T, Bad> {
    Err(Bad { class, what: what.into() })
}

pub(crate) fn wedged(doing: &str) -> impl FnOnce(Error) -> Bad + '_ {
    move |error| Bad { class: Class::Wedged, what: format!("{doing}: {error}") }
}

/// A message, by a number from which all of it follows.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct Tag(pub(crate) u64);

/// How a message travels.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    Inline,
    Msg,
    MsgData,
}

pub(crate) const fn inline(n: u64) -> Tag {
    Tag(3 * n)
}

pub(crate) const fn msg(n: u64) -> Tag {
    Tag(3 * n + 1)
}

pub(crate) const fn msg_data(n: u64) -> Tag {
    Tag(3 * n + 2)
}

impl Tag {
    pub(crate) fn kind(self) -> Kind {
        [Kind::Inline, Kind::Msg, Kind::MsgData][usize::try_from(self.0 % 3).unwrap_or(0)]
    }

    /// Each second inline message needs a second line.
    fn bytes(self) -> Vec<u8> {
        let len = if self.kind() == Kind::Inline && (self.0 / 3).is_multiple_of(2) { 100 } else { 16 };
        let mut bytes = vec![self.fill(); len];
        bytes[..8].copy_from_slice(&self.0.to_le_bytes());
        bytes[len - 8..].copy_from_slice(&(!self.0).to_le_bytes());
        bytes
    }

    #[expect(clippy::cast_possible_truncation, reason = "any 32 bits of it will do")]
    fn id(self) -> i32 {
        (self.0 as u32).cast_signed()
    }

    #[expect(clippy::cast_possible_truncation, reason = "any 8 bits of it will do")]
    fn fill(self) -> u8 {
        self.0.wrapping_mul(0x9e37_79b9) as u8
    }

    /// Loans a message and writes it.
    pub(crate) fn loan(self, link: &Link) -> shmesh::Result<Loan<'_>> {
        let loan = if self.kind() == Kind::MsgData { link.loan_with(PoolId::CpuData)? } else { link.loan()? };
        self.write(loan)
    }

    pub(crate) fn write(self, mut loan: Loan<'_>) -> shmesh::Result<Loan<'_>> {
        loan.resize_msg(16)?.copy_from_slice(&self.bytes());
        if self.kind() == Kind::MsgData {
            loan.resize_data(40)?.fill(self.fill());
        }
        Ok(loan.with_msg_id(self.id()).with_cell_id(!self.id()))
    }

    pub(crate) fn send(self, link: &Link) -> shmesh::Result<()> {
        match self.kind() {
            Kind::Inline => link.send_inline(self.id(), !self.id(), &self.bytes()),
            _ => Ok(self.loan(link)?.send()?),
        }
    }

    /// The tag of a message, if all of it is as it was written.
    pub(crate) fn read(message: &Message<'_>) -> Result<Self, Bad> {
        let Some(number) = message.msg().first_chunk::<8>() else {
            return bad(Class::Damaged, format!("{message:?} has {} bytes", message.msg().len()));
        };
        let tag = Self(u64::from_le_bytes(*number));
        let data_ok = match tag.kind() {
            Kind::MsgData => {
                message.data().len() == 40 && message.data().iter().all(|&byte| byte == tag.fill())
            }
            _ => message.data().is_empty() && message.data_pool().is_none(),
        };
        if message.msg() != tag.bytes()
            || message.msg_id() != tag.id()
            || message.cell_id() != !tag.id()
            || !data_ok
        {
            return bad(
                Class::Damaged,
                format!("{tag:?}: {message:?} {:02x?} {:02x?}", message.msg(), message.data()),
            );
        }
        Ok(tag)
    }
}

/// A segment, mapped a second time.
#[derive(Debug)]
pub(crate) struct Bytes(memmap2::MmapRaw);

impl Bytes {
    pub(crate) fn open(path: &std::path::Path) -> Self {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).expect("open a segment");
        Self(memmap2::MmapOptions::new().map_raw(&file).expect("map a segment"))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The bytes of the segments. They must not be written meanwhile: other participants are stopped or dead.
    pub(crate) fn get(&self) -> &[u8] {
        // SAFETY: mapped as long as `self`; not written while a test reads.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.0.len()) }
    }

    pub(crate) fn set(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len());
        // SAFETY: as long as the mapping, which no reference borrows now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.as_mut_ptr(), bytes.len()) }
    }

    pub(crate) fn word(&self, offset: usize) -> &std::sync::atomic::AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.len());
        // SAFETY: in the mapping and aligned, and atomic at the other end too.
        unsafe { std::sync::atomic::AtomicU64::from_ptr(self.0.as_mut_ptr().add(offset).cast()) }
    }
}

/// All bytes of a link: its own segment, `cpu_msg`, `cpu_data`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Snapshot([Vec<u8>; 3]);

/// A link with one seat on each side.
#[derive(Debug)]
pub(crate) struct Base {
    pub(crate) mode: RingMode,
    window: usize,
    pub(crate) segments: [Bytes; 3],
    pub(crate) primary: Link,
    pub(crate) secondary: Link,
    /// The treatment of slow readers of a broadcast ring.
    pub(crate) slow: SlowReaders,
    /// The link as it was made.
    pub(crate) empty: Snapshot,
    dir: tempfile::TempDir,
}

impl Base {
    pub(crate) fn new(mode: RingMode) -> Self {
        Self::with(mode, 0, BroadcastConfig::default())
    }

    /// With a broadcast ring. The root of the secondary side is no reader.
    pub(crate) fn broadcast(slow: SlowReaders) -> Self {
        let rules = BroadcastConfig { slow, history: HISTORY, evict_after_ms: 1 };
        Self::with(RingMode::Broadcast, 0, rules)
    }

    /// On a link where each client can have so many requests pending.
    pub(crate) fn with_requests(mode: RingMode, window: u32) -> Self {
        Self::with(mode, window, BroadcastConfig::default())
    }

    fn with(mode: RingMode, window: u32, rules: BroadcastConfig) -> Self {
        let dir =
            tempfile::Builder::new().prefix("shmesh-world-").tempdir_in("/dev/shm").expect("a directory");
        let mut config = LinkConfig::new(NAME.parse().expect("a name"));
        config.ring_len = RING_LEN;
        config.ring_mode = mode;
        config.request_window = window;
        config.broadcast = rules;
        config.latency_sample = layout::LATENCY_SAMPLE;
        config.notify = false;
        config.pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: BUF_BYTES, pool_len: MSG_LEN };
        config.pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: BUF_BYTES, pool_len: DATA_LEN };
        let options = LinkOptions::new().monitor(false).dir(dir.path());
        let primary = options.create(&config).expect("create");
        let secondary = options.attach(NAME, Side::Secondary).expect("attach");
        let segments = ["shm", "cpu_msg", "cpu_data"]
            .map(|pool| Bytes::open(&dir.path().join(format!("{NAME}_{pool}"))));
        let empty = Snapshot([const { Vec::new() }; 3]);
        let (window, slow) = (window as usize, rules.slow);
        let mut base = Self { mode, window, segments, primary, secondary, slow, empty, dir };
        IDENTITY.store(std::process::id(), std::sync::atomic::Ordering::Relaxed);
        let words: Vec<_> = (0..4096 / 8 * 2)
            .map(|i| base.segments[0].word(i * 8).load(std::sync::atomic::Ordering::Relaxed))
            .collect();
        base.layout().check(&words, 1);
        if mode != RingMode::Broadcast {
            let end = base.layout().times().end.next_multiple_of(4096);
            assert_eq!(base.segments[0].len(), end, "the layout has changed");
        } else {
            let subscribers = base.layout().control(0, layout::SLEEPERS) + layout::SUBSCRIBERS * layout::WORD;
            let old = base.segments[0].word(subscribers).swap(0, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(old, 1 << base.secondary.seat().value(), "the layout has changed");
        }
        base.empty = base.save();
        base
    }

    pub(crate) fn single(&self) -> bool {
        self.mode == RingMode::Spsc
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout { ring_len: RING_LEN as usize, single: self.single(), window: self.window }
    }

    pub(crate) fn options(&self) -> (LinkOptions, &'static str) {
        (LinkOptions::new().monitor(false).dir(self.path()), NAME)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().to_path_buf()
    }

    /// Another handle of this process.
    pub(crate) fn handle(&self, side: Side) -> Link {
        let root = if side == Side::Primary { &self.primary } else { &self.secondary };
        root.try_clone().expect("a free seat")
    }

    pub(crate) fn save(&self) -> Snapshot {
        Snapshot([0, 1, 2].map(|i| self.segments[i].get().to_vec()))
    }

    pub(crate) fn restore(&self, snapshot: &Snapshot) {
        for (segment, bytes) in self.segments.iter().zip(&snapshot.0) {
            segment.set(bytes);
        }
    }

    pub(crate) fn is(&self, snapshot: &Snapshot) -> bool {
        self.segments.iter().zip(&snapshot.0).all(|(segment, bytes)| segment.get() == bytes)
    }

    /// Tags in MSG buffers that participants other than the two roots have received.
    fn in_hands(&self) -> BTreeSet<Tag> {
        let table = Table::of_pool(MSG_LEN as usize);
        let segment = &self.segments[1];
        let word = |offset: usize| segment.word(offset).load(std::sync::atomic::Ordering::Relaxed);
        (0..MSG_LEN as usize)
            .filter(|&cell| layout::msg_owner(word(table.owner(cell))).0 == layout::BORROWED)
            .map(|cell| Tag(word(table.buffer(cell, BUF_BYTES as usize))))
            .collect()
    }
}

/// The state that a crash must leave.
#[derive(Clone, Debug, Default)]
pub(crate) struct Expect {
    /// The messages queued in each direction before the operation.
    pub(crate) waiting: [Vec<Tag>; 2],
    /// The messages that the operation sends to the primary.
    pub(crate) sends: Vec<Tag>,
    /// How many messages the operation takes of those to the secondary.
    pub(crate) takes: usize,
    /// MSG buffers that are held by others than the survivors, at most.
    pub(crate) held: u32,
}

/// How far the operation had come.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Progress {
    pub(crate) sent: usize,
    pub(crate) taken: usize,
}

/// In which order the survivors go about it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Order {
    /// Recovery, and then work.
    RecoverFirst,
    /// Work before the death is noticed, then recovery.
    WorkFirst,
}

pub(crate) const PROBE: u64 = 1_000_000;

pub(crate) fn drain(link: &Link, got: &mut Vec<Tag>) -> Result<(), Bad> {
    for _ in 0..10 * RING_LEN {
        match link.receive().map_err(wedged("receive"))? {
            Some(message) => got.push(Tag::read(&message)?),
            None => return Ok(()),
        }
    }
    bad(Class::Doubled, format!("messages without end: {got:?}"))
}

/// Loans until there is no more. Returns how many; all are dropped.
pub(crate) fn loanable(link: &Link, pool: Option<PoolId>) -> Result<u32, Bad> {
    let mut loans = Vec::new();
    for _ in 0..=MSG_LEN {
        let loan = match pool {
            None => link.loan(),
            Some(pool) => link.loan_with(pool),
        };
        match loan {
            Ok(loan) => loans.push(loan),
            Err(error) if matches!(error.kind(), ErrorKind::Exhausted { .. }) => break,
            Err(error) => return Err(wedged("loan")(error)),
        }
    }
    let distinct: BTreeSet<_> = loans.iter().map(Loan::index).collect();
    if distinct.len() != loans.len() {
        return bad(Class::Doubled, "one buffer was loaned twice");
    }
    Ok(u32::try_from(loans.len()).unwrap_or(u32::MAX))
}

/// Sends until the ring is full, and receives it all.
pub(crate) fn whole_ring(from: &Link, to: &Link, tags: impl Iterator<Item = Tag>) -> Result<(), Bad> {
    let mut sent = Vec::new();
    for tag in tags {
        match tag.send(from) {
            Ok(()) => sent.push(tag),
            Err(error) if matches!(error.kind(), ErrorKind::Full { .. }) => break,
            Err(error) => return Err(wedged("send into an empty ring")(error)),
        }
    }
    if sent.len() != RING_LEN as usize {
        return bad(Class::Leaked, format!("a ring of {RING_LEN} took {}", sent.len()));
    }
    let mut got = Vec::new();
    drain(to, &mut got)?;
    if got != sent {
        return bad(Class::Lost, format!("sent {sent:?}, received {got:?}"));
    }
    Ok(())
}

/// The work that survivors can do before the death is noticed.
fn work_before_recovery(base: &Base, expect: &Expect, got: &mut [Vec<Tag>; 2]) -> Result<(), Bad> {
    let p = base.handle(Side::Primary);
    drain(&p, &mut got[TO_PRIMARY])?;
    let room = loanable(&p, None)?;
    if room + expect.held < MSG_LEN - waiting_msgs(&expect.waiting[TO_SECONDARY]) {
        return bad(
            Class::Wedged,
            format!("only {room} buffers can be loaned while the dead one has at most {}", expect.held),
        );
    }
    let probe = inline(PROBE);
    match probe.send(&p) {
        Ok(()) => {}
        Err(error)
            if matches!(error.kind(), ErrorKind::Full { .. })
                && expect.waiting[TO_SECONDARY].len() == RING_LEN as usize => {}
        Err(error) => return Err(wedged("send to the dead one's side")(error)),
    }
    if base.single() {
        // The other half of each ring may belong to the dead participant until recovery.
        return Ok(());
    }
    let s = base.handle(Side::Secondary);
    drain(&s, &mut got[TO_SECONDARY])?;
    for _ in 0..2 {
        whole_ring(&p, &s, (0..=u64::from(RING_LEN)).map(|i| inline(PROBE + 10 + i)))?;
        for kind in [inline, msg] {
            kind(PROBE + 1).send(&s).map_err(wedged("send beside the dead one"))?;
            let mut answer = Vec::new();
            drain(&p, &mut answer)?;
            if answer != [kind(PROBE + 1)] {
                return bad(Class::Lost, format!("sent one probe, received {answer:?}"));
            }
        }
    }
    Ok(())
}

fn waiting_msgs(tags: &[Tag]) -> u32 {
    u32::try_from(tags.iter().filter(|tag| tag.kind() != Kind::Inline).count()).unwrap_or(u32::MAX)
}

/// Examines a link in which all participants but the two roots are dead, from fresh handles.
pub(crate) fn verify(base: &Base, expect: &Expect, order: Order) -> Result<Progress, Bad> {
    let started = Instant::now();
    let hands = base.in_hands();
    let mut got = [Vec::new(), Vec::new()];
    if order == Order::WorkFirst {
        work_before_recovery(base, expect, &mut got)?;
    }
    recover(base)?;
    // A restarted process often gets the very seat of the dead one.
    let s = base.handle(Side::Secondary);
    let p = base.handle(Side::Primary);
    drain(&p, &mut got[TO_PRIMARY])?;
    drain(&s, &mut got[TO_SECONDARY])?;
    got[TO_SECONDARY].retain(|&tag| tag != inline(PROBE));
    let progress = account(expect, &got, &hands)?;

    for (name, pool, len) in [("cpu_msg", None, MSG_LEN), ("cpu_data", Some(PoolId::CpuData), DATA_LEN)] {
        for link in [&p, &s] {
            let found = loanable(link, pool)?;
            if found != len {
                return bad(Class::Leaked, format!("{found} of {len} buffers of {name} can be loaned"));
            }
        }
    }
    for (from, to) in [(&p, &s), (&s, &p)] {
        whole_ring(from, to, (0..=u64::from(RING_LEN)).map(|i| msg(PROBE + 100 + i)))?;
        whole_ring(
            from,
            to,
            (0..=u64::from(RING_LEN)).map(|i| if i < 3 { msg_data(PROBE + i) } else { inline(PROBE + i) }),
        )?;
    }
    // All inline cells at once.
    for i in 0..u64::from(RING_LEN) {
        for link in [&p, &s] {
            inline(PROBE + 200 + i).send(link).map_err(wedged("fill both rings"))?;
        }
    }
    for link in [&p, &s] {
        let mut all = Vec::new();
        drain(link, &mut all)?;
        if all.len() != RING_LEN as usize {
            return bad(Class::Lost, format!("{} of {RING_LEN} inline messages arrived", all.len()));
        }
    }
    drop((p, s));
    let seats: Vec<_> = base.primary.participants().map(|other| other.seat).collect();
    if seats != [base.primary.seat(), base.secondary.seat()] {
        return bad(Class::Leaked, format!("seats {seats:?} are taken"));
    }
    if started.elapsed() > PATIENCE {
        return bad(Class::Wedged, format!("it took {:?}", started.elapsed()));
    }
    Ok(progress)
}

/// Recovers all participants but the two roots and the recovering one.
pub(crate) fn recover(base: &Base) -> Result<(), Bad> {
    recover_but(base, None)
}

/// As `recover`, of all but this one.
pub(crate) fn recover_but(base: &Base, spared: Option<SeatIndex>) -> Result<(), Bad> {
    let reaper = base.handle(Side::Primary);
    let living: [SeatIndex; 3] = [base.primary.seat(), base.secondary.seat(), reaper.seat()];
    let is_dead = |seat| !living.contains(&seat) && spared != Some(seat);
    let dead: Vec<_> = reaper.participants().filter(|other| is_dead(other.seat)).collect();
    for dead in dead {
        reaper.recover_participant(dead.seat, dead.word).map_err(wedged("recover"))?;
    }
    Ok(())
}

/// Compares what arrived with what had to.
fn account(expect: &Expect, got: &[Vec<Tag>; 2], hands: &BTreeSet<Tag>) -> Result<Progress, Bad> {
    for got in got {
        let distinct: BTreeSet<_> = got.iter().collect();
        if distinct.len() != got.len() {
            return bad(Class::Doubled, format!("received {got:?}"));
        }
    }
    // To the primary: all that waited, then some of what the operation sends.
    let waited = &expect.waiting[TO_PRIMARY];
    let sent = match got[TO_PRIMARY].strip_prefix(waited.as_slice()) {
        Some(rest) if expect.sends.starts_with(rest) => rest.len(),
        _ => {
            return bad(
                Class::Lost,
                format!("waited {waited:?}, then sent {:?}, received {:?}", expect.sends, got[TO_PRIMARY]),
            );
        }
    };
    // To the secondary: all that waited, but for the first few, if the operation has taken them.
    let waited = &expect.waiting[TO_SECONDARY];
    let taken = waited.len().saturating_sub(got[TO_SECONDARY].len());
    if taken > expect.takes || waited[taken..] != got[TO_SECONDARY] {
        return bad(
            Class::Lost,
            format!("waited {waited:?}, {} are taken, received {:?}", expect.takes, got[TO_SECONDARY]),
        );
    }
    if let Some(tag) = waited[..taken].iter().find(|tag| tag.kind() != Kind::Inline && !hands.contains(tag)) {
        return bad(Class::Lost, format!("{tag:?} is neither in the ring nor in the dead one's hands"));
    }
    Ok(Progress { sent, taken })
}

/// The process ends if it uses this much processor time before the next call: nothing here loops that long.
pub(crate) fn guard(seconds: i64) {
    let every = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let timer =
        libc::itimerval { it_interval: every, it_value: libc::timeval { tv_sec: seconds, tv_usec: 0 } };
    // SAFETY: `timer` is a complete value, and the old one is not asked for.
    let set = unsafe { libc::setitimer(libc::ITIMER_VIRTUAL, &raw const timer, std::ptr::null_mut()) };
    assert_eq!(set, 0, "setitimer");
}

/// Drops a handle that was leaked with `Box::leak`. It must not be used afterwards.
pub(crate) fn drop_leaked(link: &'static Link) {
    // SAFETY: it came from `Box::leak`, and the caller gives up the only use of it.
    drop(unsafe { Box::from_raw(std::ptr::from_ref(link).cast_mut()) });
}

/// The number that a forked child goes by: that of the process whose handles it inherited. 0: its own.
static IDENTITY: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

/// For a child that attaches by itself: goes by its own number from now on.
pub(crate) fn be_myself() {
    IDENTITY.store(0, std::sync::atomic::Ordering::Relaxed);
}

/// Stands before the C library's. A handle knows its process by this number, and would not leave its seat in a
/// forked child.
// It has the name and signature of the C library's function, and does what it does.
#[unsafe(no_mangle)]
extern "C" fn getpid() -> libc::pid_t {
    match IDENTITY.load(std::sync::atomic::Ordering::Relaxed) {
        // SAFETY: has no arguments and cannot fail.
        0 => libc::pid_t::try_from(unsafe { libc::syscall(libc::SYS_getpid) }).unwrap_or(0),
        identity => identity.cast_signed(),
    }
}
