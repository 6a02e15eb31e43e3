//! Zenoh's shared memory: payloads in a pool of the sender, what says where they are over a Unix stream socket.
//!
//! Both sides sleep while they wait, as Zenoh does: its own threads, which share a core with the worker here, must run in
//! between. A message sleeps and wakes in several of them.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};
use zenoh::Wait;
use zenoh::handlers::{FifoChannel, FifoChannelHandler};
use zenoh::pubsub::{Publisher, Subscriber};
use zenoh::qos::CongestionControl;
use zenoh::sample::Sample;
use zenoh::shm::{
    AllocAlignment, Defragment, GarbageCollect, PosixShmProviderBackend, ShmProvider, ShmProviderBuilder,
    ZAllocError, ZLayoutAllocError, ZShmMut, cleanup_orphaned_shm_segments,
};

use crate::harness::{self, Meet};
use crate::leftovers::Names;
use crate::measure::{Ctx, Dist, Rx, Tx};
use crate::payload::{BULK, SMALL, fill, read};
use crate::report::{Case, Kind};

pub(crate) const CASES: &[Case] = &[
    Case::peer("zenoh-rtt", Kind::RoundTrip, 64, rtt::<SMALL>).note(NOTE),
    Case::peer("zenoh-oneway", Kind::OneWay, 64, |ctx| oneway::<SMALL>(ctx, 1024)).note(NOTE),
    Case::peer("zenoh-rtt-64k", Kind::RoundTrip, 65536, rtt::<BULK>).note(NOTE),
    Case::peer("zenoh-oneway-64k", Kind::Bulk, 65536, |ctx| oneway::<BULK>(ctx, 16)).note(NOTE),
];

const NOTE: &str = "1.10, shared memory, Unix socket, express, sleeping";
/// The memory of a sender: Zenoh's own choice for the pool that it makes where an application makes none.
const POOL: usize = 16 << 20;
/// The time until the publisher knows of its subscriber.
const MATCHED: Duration = Duration::from_secs(5);

fn problem(error: zenoh::Error) -> anyhow::Error {
    anyhow!("{error}")
}

/// A session of the two workers alone. The side that listens opens it first.
fn session(names: &Names, meet: &Meet<'_>, listen: bool) -> Result<zenoh::Session> {
    if !listen {
        meet.wait();
    }
    let endpoint = format!("[\"unixsock-stream//tmp/{}.sock\"]", names.prefix());
    let (to, from) = if listen { ("[]", endpoint.as_str()) } else { (endpoint.as_str(), "[]") };
    let mut config = zenoh::Config::default();
    for (key, value) in [
        ("mode", "\"peer\""),
        ("connect/endpoints", to),
        ("listen/endpoints", from),
        ("scouting/multicast/enabled", "false"),
        ("scouting/gossip/enabled", "false"),
        ("transport/shared_memory/enabled", "true"),
        ("transport/shared_memory/mode", "\"init\""),
    ] {
        config.insert_json5(key, value).map_err(problem)?;
    }
    let session = zenoh::open(config).wait().map_err(problem)?;
    if listen {
        meet.wait();
    }
    Ok(session)
}

/// The sender's end. The session lives as long as it.
struct Put<const W: usize> {
    publisher: Publisher<'static>,
    pool: ShmProvider<PosixShmProviderBackend>,
    _session: zenoh::Session,
}

impl<const W: usize> Put<W> {
    fn new(session: &zenoh::Session, key: &'static str) -> Result<Self> {
        let publisher = session
            .declare_publisher(key)
            .congestion_control(CongestionControl::Block)
            .express(true)
            .wait()
            .map_err(problem)?;
        let pool = ShmProviderBuilder::default_backend((POOL, AllocAlignment::ALIGN_8_BYTES))
            .wait()
            .map_err(problem)?;
        Ok(Self { publisher, pool, _session: session.clone() })
    }

    /// Waits until the other side's subscription is known; what is sent before that goes nowhere.
    fn matched(&self) -> Result<()> {
        let start = Instant::now();
        while !self.publisher.matching_status().wait().map_err(problem)?.matching() {
            ensure!(start.elapsed() < MATCHED, "no subscriber within {MATCHED:?}");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// A buffer, as soon as one was released.
    fn buffer(&self) -> Result<ZShmMut> {
        loop {
            let layout = (W * 8, AllocAlignment::ALIGN_8_BYTES);
            match self.pool.alloc(layout).with_policy::<Defragment<GarbageCollect>>().wait() {
                Ok(buffer) => return Ok(buffer),
                Err(ZLayoutAllocError::Alloc(ZAllocError::OutOfMemory | ZAllocError::NeedDefragment)) => {
                    thread::yield_now();
                }
                Err(error) => bail!("allocating {} bytes: {error}", W * 8),
            }
        }
    }
}

impl<const W: usize> Tx for Put<W> {
    fn send(&mut self, word: u64) {
        let mut buffer = self.buffer().expect("allocating a buffer");
        let bytes: &mut [u8] = &mut buffer;
        assert!(bytes.len() == W * 8 && bytes.as_ptr().cast::<u64>().is_aligned());
        // SAFETY: the buffer is ours alone until it is put; length and alignment were checked above.
        unsafe { fill(bytes.as_mut_ptr().cast(), W, word) };
        self.publisher.put(buffer).wait().map_err(problem).expect("putting a message");
    }
}

/// The receiver's end. The session lives as long as it.
struct Take<const W: usize> {
    subscriber: Subscriber<FifoChannelHandler<Sample>>,
    _session: zenoh::Session,
}

impl<const W: usize> Take<W> {
    fn new(session: &zenoh::Session, key: &'static str, depth: usize) -> Result<Self> {
        let subscriber =
            session.declare_subscriber(key).with(FifoChannel::new(depth)).wait().map_err(problem)?;
        Ok(Self { subscriber, _session: session.clone() })
    }
}

impl<const W: usize> Rx for Take<W> {
    fn recv(&mut self) -> u64 {
        let sample = self.subscriber.recv().map_err(problem).expect("receiving a message");
        let bytes: &[u8] = sample.payload().as_shm().expect("a payload that came in shared memory");
        assert!(bytes.len() == W * 8 && bytes.as_ptr().cast::<u64>().is_aligned());
        // SAFETY: initialised, and not written while the sample lives; length and alignment were checked above.
        unsafe { read(bytes.as_ptr().cast(), W) }
    }
}

/// Removes the segments of workers that have ended. Their names are Zenoh's, and a worker leaves without its exit handlers.
fn swept(result: Result<Dist>) -> Result<Dist> {
    cleanup_orphaned_shm_segments();
    result
}

fn rtt<const W: usize>(ctx: &Ctx) -> Result<Dist> {
    let names = Names::new();
    let ends = |meet: &Meet<'_>, to: &'static str, from: &'static str, listen: bool| {
        let session = session(&names, meet, listen)?;
        let (tx, rx) = (Put::<W>::new(&session, to)?, Take::<W>::new(&session, from, 16)?);
        tx.matched()?;
        Ok((tx, rx))
    };
    swept(harness::round_trips(
        ctx,
        |meet| ends(meet, "comparison/there", "comparison/back", true),
        |meet| ends(meet, "comparison/back", "comparison/there", false),
    ))
}

fn oneway<const W: usize>(ctx: &Ctx, batch: u64) -> Result<Dist> {
    let names = Names::new();
    swept(harness::stream(
        ctx,
        batch,
        |meet| {
            let tx = Put::<W>::new(&session(&names, meet, true)?, "comparison/there")?;
            tx.matched()?;
            Ok(tx)
        },
        |meet| Take::<W>::new(&session(&names, meet, false)?, "comparison/there", batch as usize),
    ))
}
