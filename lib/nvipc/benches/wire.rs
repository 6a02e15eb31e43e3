//! Performance of the NVIPC layout: two processes on a core each, which write and read all bytes that they send.
//!
//! `cargo bench -p shmesh-nvipc`. Without `--bench`, as tests start it, it runs a hundredth of the messages and measures
//! nothing.
#![expect(unsafe_code, reason = "buffers are addresses; each access says why it is allowed")]
#![expect(clippy::unwrap_used, reason = "a benchmark may panic")]

use std::hint::spin_loop;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use shmesh::config::{PoolConfig, PoolId};
use shmesh_nvipc_wire::{Endpoint, Error, Message, Options};

const PEER: &str = "NVIPC_BENCH_PEER";
const REPETITIONS: usize = 7;
const MSG_BYTES: usize = 64;
const DATA_BYTES: usize = 65_536;

/// A case: the number of messages, and the number of buffers of each kind.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    messages: usize,
    msg_len: u32,
    data_len: u32,
}

const CASES: [Case; 5] = [
    Case { name: "ping-pong, MSG, 4096 buffers", messages: 200_000, msg_len: 4096, data_len: 0 },
    Case { name: "ping-pong, MSG, 64 buffers", messages: 200_000, msg_len: 64, data_len: 0 },
    Case { name: "one-way, MSG, 4096 buffers", messages: 1_000_000, msg_len: 4096, data_len: 0 },
    Case { name: "one-way, 64 KiB DATA, 1024 buffers", messages: 100_000, msg_len: 4096, data_len: 1024 },
    Case { name: "one-way, 64 KiB DATA, 16 buffers", messages: 100_000, msg_len: 4096, data_len: 16 },
];

fn main() {
    let whole = std::env::args().any(|arg| arg == "--bench");
    if let Ok(text) = std::env::var(PEER) {
        return answer(&text);
    }
    let dir = tempfile::Builder::new()
        .prefix("nvipc-bench-")
        .tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir());
    let dir = dir.unwrap();
    for (number, case) in CASES.iter().enumerate() {
        let case = Case { messages: if whole { case.messages } else { case.messages / 100 }, ..*case };
        let repetitions = if whole { REPETITIONS } else { 1 };
        let mut results: Vec<f64> = (0..repetitions)
            .map(|turn| measure(dir.path(), number, &case, &format!("b{number}_{turn}")))
            .collect();
        results.sort_by(f64::total_cmp);
        let (best, median) = (results[0], results[results.len() / 2]);
        if whole {
            print(&case, best, median);
        }
    }
}

#[expect(clippy::print_stdout, reason = "this is what it is for")]
#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn print(case: &Case, best: f64, median: f64) {
    let rate = if case.data_len > 0 {
        format!("{:.1} GB/s", DATA_BYTES as f64 / median)
    } else {
        format!("{:.2} M/s", 1000.0 / median)
    };
    println!("{:<36} best {best:>8.0} ns   median {median:>8.0} ns   {rate}", case.name);
}

fn pools(case: &Case) -> [PoolConfig; PoolId::COUNT] {
    let mut pools = [PoolConfig::DISABLED; PoolId::COUNT];
    pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 8192, pool_len: case.msg_len };
    pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: 576_000, pool_len: case.data_len };
    pools
}

/// Nanoseconds per message, or per round trip.
#[expect(clippy::cast_precision_loss, reason = "a duration for people")]
fn measure(dir: &Path, number: usize, case: &Case, prefix: &str) -> f64 {
    let link = Options::new().dir(dir).create(prefix, pools(case)).unwrap();
    let mut peer = start(dir, number, case, prefix);
    pin(0);
    while !link.has_peer() {
        spin_loop();
    }
    let source = vec![0x5a_u8; DATA_BYTES];
    let round = number < 2;
    // Warm-up: the first messages fault pages in and wake the peer.
    let warm = case.messages / 10;
    let mut start = Instant::now();
    for i in 0..case.messages + warm {
        if i == warm {
            start = Instant::now();
        }
        send(&link, &source, case.data_len > 0);
        if round {
            receive(&link);
        }
    }
    if !round {
        // The peer answers after the last message.
        receive(&link);
    }
    let elapsed = start.elapsed().as_nanos() as f64;
    assert!(peer.wait().unwrap().success());
    elapsed / case.messages as f64
}

fn start(dir: &Path, number: usize, case: &Case, prefix: &str) -> Child {
    let text = format!("{number} {} {prefix} {}", case.messages + case.messages / 10, dir.display());
    Command::new(std::env::current_exe().unwrap()).env(PEER, text).stdin(Stdio::null()).spawn().unwrap()
}

/// Runs the peer process.
fn answer(text: &str) {
    let mut words = text.splitn(4, ' ');
    let mut word = || words.next().unwrap();
    let (number, messages, prefix) =
        (word().parse::<usize>().unwrap(), word().parse::<usize>().unwrap(), word());
    let prefix = prefix.to_owned();
    let link = Options::new().dir(word()).attach(&prefix).unwrap();
    pin(1);
    for _ in 0..messages {
        receive(&link);
        if number < 2 {
            send(&link, &[], false);
        }
    }
    if number >= 2 {
        send(&link, &[], false);
    }
}

fn send(link: &Endpoint, data: &[u8], with_data: bool) {
    let pool = with_data.then_some(PoolId::CpuData);
    let buffers = loop {
        match link.allocate(pool) {
            Ok(buffers) => break buffers,
            Err(Error::Empty { .. }) => spin_loop(),
            Err(other) => panic!("{other}"),
        }
    };
    // SAFETY: the buffer is ours and longer than this.
    unsafe { buffers.msg.write_bytes(1, MSG_BYTES) };
    let mut data_len = 0;
    if with_data {
        // SAFETY: the buffer is ours and longer than this.
        unsafe { buffers.data.copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        data_len = i32::try_from(data.len()).unwrap();
    }
    let msg_len = i32::try_from(MSG_BYTES).unwrap();
    link.send(Message { msg_id: 1, cell_id: 0, msg_len, data_len, buffers }).unwrap();
}

fn receive(link: &Endpoint) {
    let message = loop {
        match link.receive().unwrap() {
            Some(message) => break message,
            None => spin_loop(),
        }
    };
    // SAFETY: the message is ours until it is released, and `len` bytes long.
    let sum = |part: *mut u8, len: i32| unsafe {
        let words = usize::try_from(len).unwrap() / 8;
        (0..words).fold(0_u64, |sum, i| sum.wrapping_add(part.cast::<u64>().add(i).read_unaligned()))
    };
    std::hint::black_box(sum(message.buffers.msg, message.msg_len));
    if !message.buffers.data.is_null() {
        std::hint::black_box(sum(message.buffers.data, message.data_len));
    }
    link.release(message.buffers).unwrap();
}

/// Pins the thread to a core, if there are enough.
fn pin(core: usize) {
    let mut set = nix::sched::CpuSet::new();
    if set.set(core).is_ok() {
        let _ = nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set);
    }
}
