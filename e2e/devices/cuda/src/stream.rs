//! Streams: work done in order by a thread of its own, as a device does it, and the words by which they wait for each other.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint};
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

static STREAMS: Mutex<Option<HashMap<usize, Sender<Work>>>> = Mutex::new(None);

fn streams<T>(act: impl FnOnce(&mut HashMap<usize, Sender<Work>>) -> T) -> T {
    let mut all: MutexGuard<'_, _> = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    act(all.get_or_insert_with(HashMap::new))
}

/// The 64 bits at an address, as the device sees them.
fn word(address: u64) -> Outcome<u64> {
    let (at, _held) = space::with(|space| space.bytes(address, 8))?;
    // SAFETY: it lies in a mapping that is held here, and callers have checked that it is aligned.
    Ok(unsafe { std::sync::atomic::AtomicUsize::from_ptr(at.cast()) }
        .load(std::sync::atomic::Ordering::Acquire) as u64)
}

fn run(work: &Receiver<Work>) {
    while let Ok(next) = work.recv() {
        match next {
            Work::Write(address, value) => {
                let Ok((at, _held)) = space::with(|space| space.bytes(address, 8)) else { continue };
                let value = usize::try_from(value).unwrap_or_default();
                // SAFETY: as in `word`.
                unsafe { std::sync::atomic::AtomicUsize::from_ptr(at.cast()) }
                    .store(value, std::sync::atomic::Ordering::Release);
            }
            Work::Wait(address, value, how) => {
                let reached = |now: u64| match how {
                    // Half of the numbers lie ahead, half behind.
                    GEQ => now.wrapping_sub(value).cast_signed() >= 0,
                    _ => now == value,
                };
                while word(address).is_ok_and(|now| !reached(now)) {
                    std::thread::sleep(Duration::from_micros(20));
                }
            }
            Work::Copy(to, from, len) => drop(linear::on_device(to, from, len)),
            Work::Fill(to, value, words) => drop(linear::fill(to, value, words)),
            Work::Arrive(to, staged) => {
                // So late that whoever does not wait for it sees that.
                std::thread::sleep(Duration::from_millis(20));
                let _ = linear::arrive(to, &staged);
            }
            Work::Tell(done) => drop(done.send(())),
        }
    }
}

fn start() -> Sender<Work> {
    let (give, take) = channel();
    std::thread::spawn(move || run(&take));
    give
}

fn give(stream: usize, work: Work) -> Outcome {
    device::current()?;
    streams(|all| {
        let queue = match stream {
            DEFAULT => all.entry(DEFAULT).or_insert_with(start),
            _ => all.get_mut(&stream).ok_or(code::INVALID_HANDLE)?,
        };
        queue.send(work).map_err(|_| code::INVALID_HANDLE)
    })
}

/// A copy from pageable memory: the call returns when the driver has read the bytes.
pub(crate) fn later(to: u64, staged: Vec<u8>) -> Outcome {
    give(DEFAULT, Work::Arrive(to, staged))
}

fn drain(stream: usize) -> Outcome {
    let (tell, told) = channel();
    streams(|all| match all.get(&stream) {
        Some(queue) => queue.send(Work::Tell(tell)).map_err(|_| code::INVALID_HANDLE),
        // Nothing was ever given to it.
        None if stream == DEFAULT => {
            drop(tell);
            Ok(())
        }
        None => Err(code::INVALID_HANDLE),
    })?;
    let _ = told.recv();
    Ok(())
}

/// Copies that wait come after what was given to the default stream.
pub(crate) fn drain_default() {
    let _ = drain(DEFAULT);
}

pub(crate) fn drain_all() {
    for stream in streams(|all| all.keys().copied().collect::<Vec<_>>()) {
        let _ = drain(stream);
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreate(out: *mut usize, _flags: c_uint) -> c_int {
    let make = || {
        device::current()?;
        Ok(streams(|all| {
            let name = all.keys().max().copied().unwrap_or(DEFAULT) + 16;
            all.insert(name, start());
            name
        }))
    };
    put(out, make())
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: usize) -> c_int {
    let destroy = || streams(|all| all.remove(&stream).map(drop).ok_or(code::INVALID_HANDLE));
    done(device::current().and_then(|_| destroy()))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: usize) -> c_int {
    done(device::current().and_then(|_| drain(stream)))
}

fn is_word(address: u64) -> Outcome {
    if !address.is_multiple_of(8) {
        return Err(code::INVALID_VALUE);
    }
    space::with(|space| space.bytes(address, 8).map(drop))
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

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: usize) -> c_int {
    let known = || {
        space::with(|space| space.bytes(to, len).map(drop))?;
        space::with(|space| space.bytes(from, len).map(drop))
    };
    done(known().and_then(|()| give(stream, Work::Copy(to, from, len))))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32Async(to: u64, value: c_uint, words: usize, stream: usize) -> c_int {
    let len = words.saturating_mul(4);
    let known = || space::with(|space| space.bytes(to, len).map(drop));
    done(known().and_then(|()| give(stream, Work::Fill(to, value, words))))
}
