//! Streams: work done in order by a thread of its own, as a device does it, and the words by which they wait for each other.
//!
//! Copies and fills on the device are given to the default stream by the calls that have no stream, and no call waits for
//! them. Memory that goes while there is still work for it is a fault of the device: from then on every call fails.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{Outcome, code, device, done, linear, put, space};

/// `CU_STREAM_WAIT_VALUE_GEQ` and `_EQ`.
const GEQ: c_uint = 0;
const EQ: c_uint = 1;
/// The stream that is there before any is made.
const DEFAULT: usize = 0;

enum Work {
    Write(u64, u64),
    Wait(u64, u64, c_uint),
    Copy(u64, u64, usize),
    Fill(u64, u32, usize),
    /// Bytes that were taken from the host, and are on their way.
    Arrive(u64, Vec<u8>),
    Tell(Sender<()>),
}

/// Streams by device and name: each device has a default one.
type Streams = HashMap<(c_int, usize), Sender<Work>>;

static STREAMS: Mutex<Option<Streams>> = Mutex::new(None);
/// Addresses that there is still work for, where they begin and end.
static BUSY: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());
/// A device has touched memory that had gone.
static FAULT: AtomicBool = AtomicBool::new(false);

fn busy<T>(act: impl FnOnce(&mut Vec<(u64, u64)>) -> T) -> T {
    act(&mut BUSY.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Whether all is well with the device.
pub(crate) fn sound() -> Outcome {
    if FAULT.load(Ordering::Acquire) { Err(code::ILLEGAL_ADDRESS) } else { Ok(()) }
}

/// Frees memory. The driver does not wait for pending work.
pub(crate) fn goes(start: u64, size: u64) {
    if busy(|all| all.iter().any(|(from, to)| *from < start.saturating_add(size) && start < *to)) {
        FAULT.store(true, Ordering::Release);
    }
}

fn streams<T>(act: impl FnOnce(&mut Streams) -> T) -> T {
    let mut all: MutexGuard<'_, _> = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    act(all.get_or_insert_with(HashMap::new))
}

impl Work {
    /// The memory that it is for: where that begins, and how many bytes.
    fn places(&self) -> Vec<(u64, usize)> {
        match self {
            Self::Write(address, _) | Self::Wait(address, ..) => vec![(*address, 8)],
            Self::Copy(to, from, len) => vec![(*to, *len), (*from, *len)],
            Self::Fill(to, _, words) => vec![(*to, words.saturating_mul(4))],
            Self::Arrive(to, staged) => vec![(*to, staged.len())],
            Self::Tell(_) => Vec::new(),
        }
    }

    fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.places().into_iter().map(|(start, len)| (start, start.saturating_add(len as u64)))
    }

    fn obey(self) -> Outcome {
        if matches!(self, Self::Copy(..) | Self::Fill(..) | Self::Arrive(..)) && is_lazy() {
            // So late that code that does not wait for it notices.
            std::thread::sleep(Duration::from_millis(20));
        }
        match self {
            Self::Write(address, value) => {
                let (at, _held) = space::with(|space| space.bytes(address, 8))?;
                let value = usize::try_from(value).unwrap_or_default();
                // SAFETY: as in `word`.
                unsafe { AtomicUsize::from_ptr(at.cast()) }.store(value, Ordering::Release);
            }
            Self::Wait(address, value, how) => {
                let reached = |now: u64| match how {
                    // Half of the numbers lie ahead, half behind.
                    GEQ => now.wrapping_sub(value).cast_signed() >= 0,
                    _ => now == value,
                };
                while !reached(word(address)?) {
                    std::thread::sleep(Duration::from_micros(20));
                }
            }
            Self::Copy(to, from, len) => linear::on_device(to, from, len)?,
            Self::Fill(to, value, words) => linear::fill(to, value, words)?,
            Self::Arrive(to, staged) => linear::arrive(to, &staged)?,
            Self::Tell(done) => drop(done.send(())),
        }
        Ok(())
    }
}

/// The 64 bits at an address, as the device sees them.
fn word(address: u64) -> Outcome<u64> {
    let (at, _held) = space::with(|space| space.bytes(address, 8))?;
    // SAFETY: it lies in a mapping that is held here, and callers have checked that it is aligned.
    Ok(unsafe { AtomicUsize::from_ptr(at.cast()) }.load(Ordering::Acquire) as u64)
}

/// Whether what is given to the device is done so late that one can see it.
pub(crate) fn is_lazy() -> bool {
    std::env::var_os("FAKE_CUDA_LAZY_COPIES").is_some()
}

fn run(work: &Receiver<Work>) {
    while let Ok(next) = work.recv() {
        let ranges: Vec<_> = next.ranges().collect();
        // It was checked when it was given: what it is for has gone since.
        if next.obey().is_err() {
            FAULT.store(true, Ordering::Release);
        }
        busy(|all| {
            for range in ranges {
                let at = all.iter().position(|known| *known == range);
                at.map(|at| all.swap_remove(at));
            }
        });
    }
}

fn start() -> Sender<Work> {
    let (give, take) = channel();
    std::thread::spawn(move || run(&take));
    give
}

fn give(stream: usize, work: Work) -> Outcome {
    let device = device::current()?;
    let uuid = device::uuid(device)?;
    for (address, len) in work.places() {
        space::with(|space| space.reached(&uuid, address, len))?;
    }
    streams(|all| {
        let queue = match stream {
            DEFAULT => all.entry((device, DEFAULT)).or_insert_with(start),
            _ => all.get_mut(&(device, stream)).ok_or(code::INVALID_HANDLE)?,
        };
        busy(|all| all.extend(work.ranges()));
        queue.send(work).map_err(|_| code::INVALID_HANDLE)
    })
}

/// A copy from pageable memory: the call returns when the driver has read the bytes.
pub(crate) fn later(to: u64, staged: Vec<u8>) -> Outcome {
    give(DEFAULT, Work::Arrive(to, staged))
}

fn drain(device: c_int, stream: usize) -> Outcome {
    let (tell, told) = channel();
    streams(|all| match all.get(&(device, stream)) {
        Some(queue) => queue.send(Work::Tell(tell)).map_err(|_| code::INVALID_HANDLE),
        // Nothing was ever given to it.
        None if stream == DEFAULT => {
            drop(tell);
            Ok(())
        }
        None => Err(code::INVALID_HANDLE),
    })?;
    let _ = told.recv();
    sound()
}

/// Copies that wait come after what was given to the default stream.
pub(crate) fn drain_default() -> Outcome {
    drain(device::current()?, DEFAULT)
}

pub(crate) fn drain_all(device: c_int) -> Outcome {
    for (_, stream) in
        streams(|all| all.keys().copied().filter(|(whose, _)| *whose == device).collect::<Vec<_>>())
    {
        drain(device, stream)?;
    }
    sound()
}

/// Whether it waits for the default stream and that for it is not looked at.
#[unsafe(no_mangle)]
extern "C" fn cuStreamCreate(out: *mut usize, flags: c_uint) -> c_int {
    let make = || {
        let device = device::current()?;
        if flags > 1 {
            return Err(code::INVALID_VALUE);
        }
        Ok(streams(|all| {
            let name = all.keys().map(|(_, stream)| *stream).max().unwrap_or(DEFAULT) + 16;
            all.insert((device, name), start());
            name
        }))
    };
    put(out, make())
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: usize) -> c_int {
    let destroy = |device| streams(|all| all.remove(&(device, stream)).map(drop).ok_or(code::INVALID_HANDLE));
    done(device::current().and_then(destroy))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: usize) -> c_int {
    done(device::current().and_then(|device| drain(device, stream)))
}

fn is_word(address: u64) -> Outcome {
    if address.is_multiple_of(8) { Ok(()) } else { Err(code::INVALID_VALUE) }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWriteValue64_v2(stream: usize, address: u64, value: u64, flags: c_uint) -> c_int {
    if flags > 1 {
        return code::INVALID_VALUE;
    }
    done(is_word(address).and_then(|()| give(stream, Work::Write(address, value))))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitValue64_v2(stream: usize, address: u64, value: u64, flags: c_uint) -> c_int {
    if !matches!(flags, GEQ | EQ) {
        return code::NOT_SUPPORTED;
    }
    done(is_word(address).and_then(|()| give(stream, Work::Wait(address, value, flags))))
}

pub(crate) fn copy(to: u64, from: u64, len: usize) -> Outcome {
    give(DEFAULT, Work::Copy(to, from, len))
}

pub(crate) fn fill(to: u64, value: c_uint, words: usize) -> Outcome {
    if to.is_multiple_of(4) { give(DEFAULT, Work::Fill(to, value, words)) } else { Err(code::INVALID_VALUE) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: usize) -> c_int {
    done(give(stream, Work::Copy(to, from, len)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32Async(to: u64, value: c_uint, words: usize, stream: usize) -> c_int {
    done(give(stream, Work::Fill(to, value, words)))
}
