//! Aeron's IPC channels between two processes, with its media driver in a third.
//!
//! The driver moves the limit up to which a publication may write, so it has to run now and then: it has no core of its own
//! here, wakes ten thousand times a second, and goes before the workers. A term of 16 MiB is long enough that they do not
//! wait for it. A message of 64 KiB is longer than the longest frame, so it travels as two, which the receiver puts together.

use std::ffi::CString;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use rusteron_media_driver::bindings::aeron_threading_mode_enum;
use rusteron_media_driver::{
    AERON_IPC_STREAM, Aeron, AeronCError, AeronContext, AeronDriver, AeronDriverContext,
    AeronExclusivePublication, AeronImage, AeronSubscription, Handlers,
};

use crate::harness::{self, checked};
use crate::leftovers::Names;
use crate::measure::{Ctx, Dist, Rx, Tx};
use crate::payload::{BULK, SMALL, fill, read};
use crate::report::{Case, Kind};

pub(crate) const CASES: &[Case] = &[
    Case::peer("aeron-rtt", Kind::RoundTrip, 64, rtt::<SMALL>).note(NOTE),
    Case::peer("aeron-oneway", Kind::OneWay, 64, |ctx| oneway::<SMALL>(ctx, 1024)).note(NOTE),
    Case::peer("aeron-rtt-64k", Kind::RoundTrip, 65536, rtt::<BULK>).note(NOTE_BULK),
    Case::peer("aeron-oneway-64k", Kind::Bulk, 65536, |ctx| oneway::<BULK>(ctx, 16)).note(NOTE_BULK),
];

const NOTE: &str = "1.54 C, aeron:ipc, exclusive, claimed in place, driver beside";
const NOTE_BULK: &str = "1.54 C, aeron:ipc, exclusive, offered in two frames, driver beside";

const TERM: usize = 16 << 20;
/// The longest frame that the driver allows.
const FRAME: usize = 65504;
/// Fragments that one poll may take.
const POLL: usize = 16;
const DRIVER_SLEEP: Duration = Duration::from_micros(100);
const CONNECTED: Duration = Duration::from_secs(5);
/// The workers do not tell the driver that they live while they measure.
const LIVENESS_NS: u64 = 3600 * 1_000_000_000;

fn problem(error: AeronCError) -> anyhow::Error {
    anyhow!("{error}")
}

fn directory(names: &Names) -> Result<CString> {
    CString::new(format!("/dev/shm/{}_aeron", names.prefix())).context("the name of the driver's directory")
}

/// The media driver, until it is killed.
fn drive(names: &Names) -> Result<()> {
    before_workers()?;
    let context = AeronDriverContext::new().map_err(problem)?;
    context.set_dir(&directory(names)?).map_err(problem)?;
    context.set_dir_delete_on_start(true).map_err(problem)?;
    context.set_threading_mode(aeron_threading_mode_enum::AERON_THREADING_MODE_SHARED).map_err(problem)?;
    context.set_ipc_term_buffer_length(TERM).map_err(problem)?;
    context.set_ipc_mtu_length(FRAME).map_err(problem)?;
    context.set_client_liveness_timeout_ns(LIVENESS_NS).map_err(problem)?;
    context.set_publication_unblock_timeout_ns(2 * LIVENESS_NS).map_err(problem)?;
    let driver = AeronDriver::new(&context).map_err(problem)?;
    driver.start(true).map_err(problem)?;
    loop {
        driver.main_do_work().map_err(problem)?;
        std::thread::sleep(DRIVER_SLEEP);
    }
}

/// Lets this process run before workers of a real-time class, which would leave it no core.
fn before_workers() -> Result<()> {
    // SAFETY: an all-zero value is valid, and only a place for the answer.
    let mut param: libc::sched_param = unsafe { std::mem::zeroed() };
    // SAFETY: 0 is this process, and `param` a valid place for the answer.
    let class = checked(unsafe { libc::sched_getscheduler(0) }).context("asking for the class")?;
    // SAFETY: as above.
    checked(unsafe { libc::sched_getparam(0, &mut param) }).context("asking for the priority")?;
    if class == libc::SCHED_FIFO || class == libc::SCHED_RR {
        param.sched_priority += 1;
        // SAFETY: `param` outlives the call.
        checked(unsafe { libc::sched_setscheduler(0, class, &param) }).context("raising the priority")?;
    }
    Ok(())
}

/// A client without a thread of its own: its upkeep is done in [`Client::until`].
struct Client(Aeron);

impl Client {
    fn new(names: &Names) -> Result<Self> {
        let context = AeronContext::new().map_err(problem)?;
        context.set_dir(&directory(names)?).map_err(problem)?;
        context.set_use_conductor_agent_invoker(true).map_err(problem)?;
        context.set_pre_touch_mapped_memory(true).map_err(problem)?;
        let aeron = Aeron::new(&context).map_err(problem)?;
        aeron.start().map_err(problem)?;
        Ok(Self(aeron))
    }

    fn publish<const W: usize>(&self, stream: i32) -> Result<Publish<W>> {
        let publication =
            self.0.async_add_exclusive_publication(AERON_IPC_STREAM, stream).map_err(problem)?;
        let publication = publication.poll_blocking(CONNECTED).map_err(problem)?;
        Ok(Publish { publication, message: Box::new([1; W]), _client: self.0.clone() })
    }

    fn subscribe(&self, stream: i32) -> Result<AeronSubscription> {
        let subscription = self
            .0
            .async_add_subscription(AERON_IPC_STREAM, stream, Handlers::NONE, Handlers::NONE)
            .map_err(problem)?;
        subscription.poll_blocking(CONNECTED).map_err(problem)
    }

    fn until<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> Result<T> {
        let start = Instant::now();
        loop {
            self.0.main_do_work().map_err(problem)?;
            if let Some(found) = look() {
                return Ok(found);
            }
            ensure!(start.elapsed() < CONNECTED, "no {what} within {CONNECTED:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn connected<const W: usize>(&self, publish: &Publish<W>) -> Result<()> {
        self.until("subscriber", || publish.publication.is_connected().then_some(()))
    }

    fn image<const W: usize>(&self, subscription: AeronSubscription) -> Result<Subscribe<W>> {
        let image = self.until("publisher", || subscription.image_at_index(0))?;
        let words = FragmentReader { message: Box::new([1; W]), filled: 0, words: [0; POLL], count: 0 };
        Ok(Subscribe {
            image,
            received: words,
            next: 0,
            _subscription: subscription,
            _client: self.0.clone(),
        })
    }
}

struct Publish<const W: usize> {
    publication: AeronExclusivePublication,
    /// The source of messages that do not fit a frame.
    message: Box<[u64; W]>,
    _client: Aeron,
}

impl<const W: usize> Tx for Publish<W> {
    #[inline(always)]
    fn send(&mut self, word: u64) {
        if W == BULK {
            // SAFETY: our own message of W words.
            unsafe { fill(self.message.as_mut_ptr(), W, word) };
            // SAFETY: initialised bytes of our own message, which nothing writes meanwhile.
            let bytes = unsafe { std::slice::from_raw_parts(self.message.as_ptr().cast::<u8>(), W * 8) };
            while let Err(error) = self.publication.offer(bytes) {
                assert!(error.is_retryable(), "offering a message: {error}");
            }
            return;
        }
        let mut claim = loop {
            match self.publication.try_claim_owned(W * 8) {
                Ok(claim) => break claim,
                Err(error) => assert!(error.is_retryable(), "claiming a message: {error}"),
            }
        };
        let bytes = claim.data();
        assert!(bytes.len() == W * 8 && bytes.as_ptr().cast::<u64>().is_aligned());
        // SAFETY: exclusive until it is committed; length and alignment were checked above.
        unsafe { fill(bytes.as_mut_ptr().cast(), W, word) };
        claim.commit().expect("committing a message");
    }
}

/// The messages of one poll, read, and the beginning of one that came in part.
struct FragmentReader<const W: usize> {
    message: Box<[u64; W]>,
    filled: usize,
    words: [u64; POLL],
    count: usize,
}

impl<const W: usize> FragmentReader<W> {
    #[inline(always)]
    fn fragment(&mut self, bytes: &[u8]) {
        let mut from = bytes.as_ptr().cast::<u64>();
        if bytes.len() != W * 8 {
            assert!(self.filled + bytes.len() <= W * 8);
            // SAFETY: the rest of our own message has room for it, as was checked above.
            unsafe {
                let rest = self.message.as_mut_ptr().cast::<u8>().add(self.filled);
                rest.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            }
            self.filled += bytes.len();
            if self.filled < W * 8 {
                return;
            }
            self.filled = 0;
            from = self.message.as_ptr();
        }
        assert!(from.is_aligned());
        // SAFETY: W initialised words: a fragment of this length, or our own message; aligned as was checked above.
        self.words[self.count] = unsafe { read(from, W) };
        self.count += 1;
    }
}

struct Subscribe<const W: usize> {
    image: AeronImage,
    received: FragmentReader<W>,
    next: usize,
    _subscription: AeronSubscription,
    _client: Aeron,
}

impl<const W: usize> Rx for Subscribe<W> {
    #[inline(always)]
    fn recv(&mut self) -> u64 {
        while self.next == self.received.count {
            (self.next, self.received.count) = (0, 0);
            let received = &mut self.received;
            self.image.poll_fn(|bytes, _| received.fragment(bytes), POLL).expect("polling");
        }
        self.next += 1;
        self.received.words[self.next - 1]
    }
}

fn with_driver(run: impl FnOnce(&Names) -> Result<Dist>) -> Result<Dist> {
    let names = Names::new();
    harness::beside(|| drive(&names).expect("running the media driver"), || run(&names))
}

fn rtt<const W: usize>(ctx: &Ctx) -> Result<Dist> {
    let ends = |names: &Names, to: i32, from: i32| {
        let client = Client::new(names)?;
        let (subscription, publish) = (client.subscribe(from)?, client.publish::<W>(to)?);
        client.connected(&publish)?;
        Ok((publish, client.image::<W>(subscription)?))
    };
    with_driver(|names| harness::round_trips(ctx, |_| ends(names, 1, 2), |_| ends(names, 2, 1)))
}

fn oneway<const W: usize>(ctx: &Ctx, batch: u64) -> Result<Dist> {
    with_driver(|names| {
        harness::stream(
            ctx,
            batch,
            |_| {
                let client = Client::new(names)?;
                let publish = client.publish::<W>(1)?;
                client.connected(&publish)?;
                Ok(publish)
            },
            |_| {
                let client = Client::new(names)?;
                let subscription = client.subscribe(1)?;
                client.image::<W>(subscription)
            },
        )
    })
}
