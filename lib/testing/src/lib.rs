//! Helpers for the tests of the workspace: directories, configurations, a watchdog, peers that are separate
//! processes ([`Peer`]), and tests that need a process of their own ([`own_process`]). `docs/testing.md` says how to use them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(missing_docs, missing_debug_implementations, reason = "used by tests only")]

mod device;
mod orders;
mod peer;
mod process;
mod programs;
mod reference;
mod requests;
mod stubborn;

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::TimeVal;
use shmesh::config::{Backing, LinkConfig, PoolConfig, PoolId, Receivers, RingMode, SlowReaders};
use shmesh::{Error, Link};
use shmesh_sys::socket;

pub use device::{OnDevice, event_text, key_of, key_text};
pub use orders::serve;
pub use peer::{Peer, is_peer, serve_by};
pub use process::{own_process, own_process_by, passed, this_test};
pub use programs::{output_within, run_program, succeed, write_script};
pub use reference::{assert_reference, help_page};
pub use stubborn::Stubborn;

/// Whether `SHMESH_REQUIRE_<what>=1`, as in CI: tests must not be skipped for want of it.
pub fn is_required(what: &str) -> bool {
    std::env::var_os(format!("SHMESH_REQUIRE_{what}")).is_some_and(|value| value == "1")
}

/// Prints why a test is skipped, also when it passes; fails if that is not allowed.
#[track_caller]
pub fn skip(what: &str, why: &str) {
    assert!(!is_required(what), "SHMESH_REQUIRE_{what} is set: {why}");
    // Not `eprintln`, whose output the test harness would capture.
    let _ = std::io::stderr().write_all(format!("\nSKIPPED: {why}\n").as_bytes());
}

/// The watchdog of one step of a test: longer than any step takes on the slowest machine.
pub const HANGS: Duration = Duration::from_secs(60);
/// The watchdog of a whole test.
const TEST_HANGS: Duration = Duration::from_secs(600);

/// Each legal form of a Kubernetes quantity, and its number of bytes: for tests of programs that accept bytes.
pub const LEGAL_QUANTITIES: [(&str, u64); 21] = [
    ("0", 0),
    ("100663296", 96 << 20),
    ("96Mi", 96 << 20),
    ("64M", 64_000_000),
    ("1G", 1_000_000_000),
    ("0.5Gi", 1 << 29),
    (".5Ki", 512),
    ("5.Ki", 5120),
    ("1e3", 1000),
    ("1E3", 1000),
    ("1e+09", 1_000_000_000),
    ("1E", 1_000_000_000_000_000_000),
    ("128974848000m", 128_974_848),
    ("1m", 1),
    ("2k", 2000),
    ("+1Ki", 1024),
    ("3Ti", 3 << 40),
    ("18446744073709551615", u64::MAX),
    ("1e19", 10_000_000_000_000_000_000),
    ("0000000000000000000000064Mi", 64 << 20),
    ("1.0000000000000000000000Gi", 1 << 30),
];

/// A temporary IPC directory, on tmpfs if there is one, because links live there.
pub fn ipc_dir() -> tempfile::TempDir {
    let shm = Path::new("/dev/shm");
    tempfile::Builder::new()
        .prefix("shmesh-test-")
        .tempdir_in(shm)
        .or_else(|_| tempfile::tempdir())
        .expect("a directory for the test")
}

/// Aborts the process if the test has not ended in time.
pub struct Watchdog(Option<mpsc::Sender<()>>);

impl Watchdog {
    pub fn start() -> Self {
        let (ended, watch) = mpsc::channel();
        let test = std::thread::current().name().unwrap_or("a test").to_owned();
        std::thread::spawn(move || {
            if watch.recv_timeout(TEST_HANGS) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("watchdog: {test} hangs");
                std::process::abort();
            }
        });
        Self(Some(ended))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

/// The next signal of a notification or post on this link's bell; `None` if there is none. Signals of attaching
/// participants may arrive at any time, and are skipped.
pub fn notified(link: &Link) -> Option<u64> {
    loop {
        match link.take_signal().expect("a signal can be taken") {
            Some(0) => {}
            signal => return signal,
        }
    }
}

/// Polls a condition until it is true. The pauses grow with the time waited, because many conditions are a request to
/// another process. A condition that has to be tried often must loop by itself.
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        let waited = start.elapsed();
        assert!(waited < HANGS, "still not true after {HANGS:?}: {what}");
        std::thread::sleep((waited / 8).clamp(Duration::from_millis(1), Duration::from_millis(20)));
    }
}

/// The whole answer to an HTTP request, with its head.
pub fn http_get(address: impl ToSocketAddrs, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// The number of a metric, with its labels if it has any, in the text of `/metrics`.
pub fn metric<T: std::str::FromStr>(text: &str, name: &str) -> Option<T> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// Path of the socket on which the host of the link `link` listens.
pub fn broker(dir: &Path) -> PathBuf {
    broker_of(dir, "link").expect("a host")
}

/// Path of the socket on which the host of a link listens, if there is a host.
pub fn broker_of(dir: &Path, link: &str) -> Option<PathBuf> {
    let lock = shmesh_sys::file::open(&dir.join(format!("{link}.lock")), false).ok()?;
    let number = [1 << 48, 1 << 49].into_iter().find_map(|start| {
        Some(shmesh_sys::file::locked_from(&lock, &(start..start + (1 << 40))).ok()?? - start)
    });
    Some(dir.join(format!("{link}.broker-{:x}", number?)))
}

/// Takes the lock of the host of the link `link`, as any member of the link could, until the test ends. Returns the path to listen on.
pub fn pose_as_host(dir: &Path) -> PathBuf {
    let mut options = std::fs::OpenOptions::new();
    let lock = options.create(true).truncate(false).read(true).write(true).mode(0o600);
    let lock = lock.open(dir.join("link.lock")).unwrap();
    assert!(shmesh_sys::file::try_lock_range(&lock, &((1 << 49) + 7..(1 << 49) + (1 << 40))).unwrap());
    std::mem::forget(lock);
    dir.join("link.broker-7")
}

/// Connects to the broker of the link `link` without the library, with timeouts of [`HANGS`].
pub fn stranger(dir: &Path) -> OwnedFd {
    let fd = socket::connect_to(&broker(dir)).unwrap();
    let limit = TimeVal::new(HANGS.as_secs().cast_signed(), 0);
    setsockopt(&fd, sockopt::ReceiveTimeout, &limit).unwrap();
    setsockopt(&fd, sockopt::SendTimeout, &limit).unwrap();
    fd
}

/// The configuration of a small link, with changes as `key=value` words, which peers understand too.
pub fn config(name: &str, changes: &str) -> LinkConfig {
    let mut config = LinkConfig::new(name.parse().expect("the name of a link"));
    config.ring_len = 16;
    config.spin_us = 0;
    config.pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 256, pool_len: 32 };
    config.pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: 4096, pool_len: 16 };
    for change in changes.split_whitespace() {
        let (key, value) = change.split_once('=').expect("key=value");
        let number = || value.parse::<u32>().expect("a number");
        let pool = || {
            let (size, len) = value.split_once('x').expect("size x len");
            PoolConfig {
                buf_size_bytes: size.parse().expect("a size"),
                pool_len: len.parse().expect("a number"),
            }
        };
        match key {
            "ring" => config.ring_len = number(),
            "spin" => config.spin_us = number(),
            "mode" => {
                config.ring_mode = match value {
                    "spsc" => RingMode::Spsc,
                    "broadcast" => RingMode::Broadcast,
                    _ => RingMode::Mpmc,
                }
            }
            "slow" => {
                config.broadcast.slow = match value {
                    "skip" => SlowReaders::Skip,
                    "evict" => SlowReaders::Evict,
                    _ => SlowReaders::Wait,
                }
            }
            "history" => config.broadcast.history = number(),
            "evict_after" => config.broadcast.evict_after_ms = number(),
            "backing" => config.backing = if value == "memfd" { Backing::Memfd } else { Backing::Named },
            "requests" => config.request_window = number(),
            "latency" => config.latency_sample = number(),
            "receivers" if value == "one" => config.receivers = Receivers::One,
            "notify" => config.notify = value == "on",
            "file_mode" => config.file_mode = u32::from_str_radix(value, 8).expect("an octal number"),
            "msg" => config.pools[PoolId::CpuMsg.index()] = pool(),
            "data" => config.pools[PoolId::CpuData.index()] = pool(),
            "large" => config.pools[PoolId::CpuLarge.index()] = pool(),
            "gpu" => config.pools[PoolId::GpuData.index()] = pool(),
            "cuda" => config.pools[PoolId::CudaData.index()] = pool(),
            _ => panic!("no such change: {change}"),
        }
    }
    config
}

/// The name of an error's kind, as in `ErrorKind`.
pub fn kind_of(error: &Error) -> String {
    format!("{error:?}").split([' ', '(']).next().unwrap_or_default().to_owned()
}

/// The error of a call that is expected to fail.
#[track_caller]
pub fn refused<T>(result: shmesh::Result<T>) -> Error {
    match result {
        Ok(_) => panic!("this must be refused"),
        Err(error) => error,
    }
}

/// Sends one text message.
pub fn send(link: &Link, msg_id: i32, text: &str) -> shmesh::Result<()> {
    let mut loan = link.loan()?;
    loan.resize_msg(text.len())?.copy_from_slice(text.as_bytes());
    Ok(loan.with_msg_id(msg_id).send()?)
}

/// Receives one text message.
pub fn receive(link: &Link) -> shmesh::Result<Option<(i32, String)>> {
    Ok(link.receive()?.map(|message| (message.msg_id(), String::from_utf8_lossy(message.msg()).into_owned())))
}

/// Whether this process is root and may change users and mount; prints that the test is skipped if not.
pub fn is_root() -> bool {
    let root = nix::unistd::Uid::effective().is_root();
    if !root {
        println!("skipped: changing users and mounting needs root");
    }
    root
}

/// Names of the files in `dir`, sorted.
pub fn files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("the directory");
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
