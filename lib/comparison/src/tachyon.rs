//! Tachyon: a ring for one producer and one consumer, whose memory is handed over at a Unix socket.
//!
//! Its consumer says only after each 32nd message that it has read them, so a ring must hold more than 32: with 16 messages of
//! 64 KiB, as all others here have, its producer would wait for ever.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use tachyon_ipc::{Bus, TachyonError};

use crate::harness;
use crate::leftovers::Names;
use crate::measure::{Ctx, Dist, Rx, Tx};
use crate::payload::{BULK, SMALL, fill, read};
use crate::report::{Case, Kind};

pub(crate) const CASES: &[Case] = &[
    Case::peer("tachyon-rtt", Kind::RoundTrip, 64, rtt::<SMALL>).note(NOTE),
    Case::peer("tachyon-oneway", Kind::OneWay, 64, |ctx| oneway::<SMALL>(ctx, 1024)).note(NOTE),
    Case::peer("tachyon-rtt-64k", Kind::RoundTrip, 65536, rtt::<BULK>).note(NOTE_BULK),
    Case::peer("tachyon-oneway-64k", Kind::Bulk, 65536, |ctx| oneway::<BULK>(ctx, 16)).note(NOTE_BULK),
];

const NOTE: &str = "0.5, ring of 128 KiB, polling mode";
const NOTE_BULK: &str = "0.5, ring of 4 MiB, polling mode";
/// The time for the other side to listen.
const CONNECT: Duration = Duration::from_secs(5);

/// The bytes of a ring, a power of two: 1024 small messages with their headers, or 63 large ones.
const fn capacity(words: usize) -> usize {
    if words == SMALL { 1 << 17 } else { 1 << 22 }
}

/// One end of a ring with messages of `W` words.
struct End<const W: usize>(Bus);

impl<const W: usize> End<W> {
    /// Makes the ring and waits for the other side.
    fn listen(names: &Names, direction: &str) -> Result<Self> {
        let bus =
            Bus::listen(&socket(names, direction), capacity(W)).map_err(|e| anyhow!("listening: {e}"))?;
        Ok(Self::polled(bus))
    }

    fn connect(names: &Names, direction: &str) -> Result<Self> {
        let (path, start) = (socket(names, direction), Instant::now());
        loop {
            match Bus::connect(&path) {
                Ok(bus) => return Ok(Self::polled(bus)),
                Err(error) => ensure!(start.elapsed() < CONNECT, "connecting to {path}: {error}"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Without the fence and the look at a sleeping consumer that each message costs otherwise.
    fn polled(bus: Bus) -> Self {
        bus.set_polling_mode(1);
        Self(bus)
    }
}

fn socket(names: &Names, direction: &str) -> String {
    format!("/tmp/{}_{direction}.sock", names.prefix())
}

impl<const W: usize> Tx for End<W> {
    #[inline(always)]
    fn send(&mut self, word: u64) {
        let mut slot = loop {
            match self.0.acquire_tx(W * 8) {
                Ok(slot) => break slot,
                Err(error) => assert!(error == TachyonError::BufferFull, "acquiring a slot: {error}"),
            }
        };
        // SAFETY: nothing is written beyond the slot.
        let bytes = unsafe { slot.as_mut_slice() };
        assert!(bytes.len() >= W * 8 && bytes.as_ptr().cast::<u64>().is_aligned());
        // SAFETY: exclusive until it is committed; length and alignment were checked above.
        unsafe { fill(bytes.as_mut_ptr().cast(), W, word) };
        slot.commit(W * 8, 1).expect("committing a message");
    }
}

impl<const W: usize> Rx for End<W> {
    #[inline(always)]
    fn recv(&mut self) -> u64 {
        let message = self.0.acquire_rx(u32::MAX).expect("receiving a message");
        let bytes = message.data();
        assert!(bytes.len() == W * 8 && bytes.as_ptr().cast::<u64>().is_aligned());
        // SAFETY: initialised, not written before it is committed; length and alignment were checked above.
        let word = unsafe { read(bytes.as_ptr().cast(), W) };
        message.commit().expect("releasing a message");
        word
    }
}

fn rtt<const W: usize>(ctx: &Ctx) -> Result<Dist> {
    let names = Names::new();
    harness::round_trips(
        ctx,
        |_| Ok((End::<W>::connect(&names, "there")?, End::<W>::connect(&names, "back")?)),
        |_| {
            let there = End::<W>::listen(&names, "there")?;
            Ok((End::<W>::listen(&names, "back")?, there))
        },
    )
}

fn oneway<const W: usize>(ctx: &Ctx, batch: u64) -> Result<Dist> {
    let names = Names::new();
    harness::stream(ctx, batch, |_| End::<W>::listen(&names, "there"), |_| End::<W>::connect(&names, "there"))
}
