//! The C interface over shmesh's layout and NVIPC's layout, compared with the Rust interface: `cargo bench -p
//! shmesh-nvipc-capi`. With arguments, only the runs whose names contain one of them: `-- 'one thread' failing`.
//!
//! Two threads on two cores, each with an endpoint of its own, as two processes would have. Both poll. The runs of all
//! variants alternate, so that changes in the machine's speed affect all of them. Nothing is asserted, because times depend
//! on the machine.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a benchmark may panic, and rounds")]
#![expect(unsafe_code, reason = "it calls the C interface as C does")]

use std::ffi::c_char;
use std::time::{Duration, Instant};

use shmesh::config::{LinkConfig, PoolConfig, PoolId};
use shmesh::{Link, LinkOptions, Side};
use shmesh_nvipc::calls::create_nv_ipc_interface;
use shmesh_nvipc::config::set_nv_ipc_default_config;
use shmesh_nvipc::forward::{nvipc_fw_dequeue, nvipc_fw_free, nvipc_fw_start};
use shmesh_nvipc::types::{
    NV_IPC_MODULE_PRIMARY, NV_IPC_MODULE_SECONDARY, NV_IPC_TRANSPORT_SHM, nv_ipc_config_t,
    nv_ipc_mempool_size_t, nv_ipc_msg_t, nv_ipc_t,
};

/// Number of repetitions of each run.
const TURNS: usize = 7;
const RUN: Duration = Duration::from_millis(400);
/// Number of operations between two readings of the clock.
const BATCH: u32 = 64;
const MSG_BYTES: usize = 64;
const DATA_BYTES: usize = 65_536;
/// The id of the last message of a run.
const STOP: i32 = -1;

/// One side, through either interface.
trait Endpoint: Send {
    /// Writes 64 bytes, and with `fill` a DATA part of 64 KiB, and sends them. Returns `false` if there was no buffer.
    fn try_send(&mut self, id: i32, fill: Option<&[u8]>) -> bool;
    /// Receives a message, reads its first word and releases it. Returns its id.
    fn try_receive(&mut self) -> Option<i32>;
    /// Nanoseconds of an allocation while this endpoint holds all buffers.
    fn failing_allocation(&mut self) -> f64;
}

struct Rust(Link);

impl Endpoint for Rust {
    fn try_send(&mut self, id: i32, fill: Option<&[u8]>) -> bool {
        let loan = match fill {
            None => self.0.loan(),
            Some(_) => self.0.loan_with(PoolId::CpuData),
        };
        let Ok(mut loan) = loan else { return false };
        loan.resize_msg(MSG_BYTES).unwrap().fill(1);
        if let Some(bytes) = fill {
            loan.resize_data(DATA_BYTES).unwrap().copy_from_slice(bytes);
        }
        loan.with_msg_id(id).send().is_ok()
    }

    fn try_receive(&mut self) -> Option<i32> {
        let message = self.0.receive().unwrap()?;
        std::hint::black_box(message.msg()[0]);
        Some(message.msg_id())
    }

    fn failing_allocation(&mut self) -> f64 {
        let _all: Vec<_> = std::iter::from_fn(|| self.0.loan().ok()).collect();
        timed(|| assert!(self.0.loan().is_err()))
    }
}

struct C(*mut nv_ipc_t);

// SAFETY: any thread may call an instance.
unsafe impl Send for C {}

impl C {
    fn open(name: &str, module: i32) -> Self {
        let mut config = nv_ipc_config_t::zeroed();
        config.ipc_transport = NV_IPC_TRANSPORT_SHM;
        // SAFETY: a valid configuration, whose union was just filled in for shared memory.
        let shm = unsafe {
            assert_eq!(set_nv_ipc_default_config(&raw mut config, module), 0);
            &mut config.transport_config.shm
        };
        shm.prefix.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from as c_char);
        shm.prefix[name.len()] = 0;
        shm.mempool_size = pools().map(|pool| nv_ipc_mempool_size_t {
            buf_size: i32::try_from(pool.buf_size_bytes).unwrap(),
            pool_len: i32::try_from(pool.pool_len).unwrap(),
        });
        // SAFETY: a valid configuration.
        let ipc = unsafe { create_nv_ipc_interface(&raw mut config) };
        assert!(!ipc.is_null());
        Self(ipc)
    }
}

impl Drop for C {
    fn drop(&mut self) {
        // SAFETY: an open instance.
        unsafe { ((*self.0).ipc_destroy)(self.0) };
    }
}

const EMPTY: nv_ipc_msg_t = nv_ipc_msg_t {
    msg_id: 0,
    cell_id: 0,
    msg_len: 0,
    data_len: 0,
    data_pool: -1,
    msg_buf: std::ptr::null_mut(),
    data_buf: std::ptr::null_mut(),
};

impl Endpoint for C {
    fn try_send(&mut self, id: i32, fill: Option<&[u8]>) -> bool {
        let mut msg = nv_ipc_msg_t { data_pool: if fill.is_some() { 1 } else { -1 }, msg_id: id, ..EMPTY };
        // SAFETY: an open instance and a valid message, whose parts have room for what is written.
        unsafe {
            if ((*self.0).tx_allocate)(self.0, &raw mut msg, 0) != 0 {
                return false;
            }
            msg.msg_buf.cast::<[u8; MSG_BYTES]>().write([1; MSG_BYTES]);
            msg.msg_len = 64;
            if let Some(bytes) = fill {
                msg.data_buf.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), DATA_BYTES);
                msg.data_len = 65_536;
            }
            ((*self.0).tx_send_msg)(self.0, &raw mut msg) == 0
        }
    }

    fn try_receive(&mut self) -> Option<i32> {
        let mut msg = EMPTY;
        // SAFETY: an open instance and a valid message.
        unsafe {
            if ((*self.0).rx_recv_msg)(self.0, &raw mut msg) != 0 {
                return None;
            }
            std::hint::black_box(msg.msg_buf.cast::<u8>().read());
            assert_eq!(((*self.0).rx_release)(self.0, &raw mut msg), 0);
        }
        Some(msg.msg_id)
    }

    fn failing_allocation(&mut self) -> f64 {
        let allocate = || {
            let mut msg = EMPTY;
            // SAFETY: an open instance and a valid message.
            (unsafe { ((*self.0).tx_allocate)(self.0, &raw mut msg, 0) } == 0).then_some(msg)
        };
        // In NVIPC's layout the other endpoint keeps some buffers for a while, and this one gets them in the end.
        let mut all = Vec::new();
        let time = timed(|| all.extend(allocate()));
        for mut msg in all {
            // SAFETY: an open instance and a message that it allocated.
            assert_eq!(unsafe { ((*self.0).tx_release)(self.0, &raw mut msg) }, 0);
        }
        time
    }
}

/// As [`C`], with its tap started and read after each message.
struct TappedC(C);

impl TappedC {
    fn open(name: &str, module: i32) -> Self {
        let c = C::open(name, module);
        // SAFETY: an open instance.
        assert_eq!(unsafe { nvipc_fw_start(c.0, 0) }, 0);
        Self(c)
    }
}

impl Endpoint for TappedC {
    fn try_send(&mut self, id: i32, fill: Option<&[u8]>) -> bool {
        self.0.try_send(id, fill)
    }

    fn try_receive(&mut self) -> Option<i32> {
        let id = self.0.try_receive()?;
        let (ipc, mut msg) = (self.0.0, EMPTY);
        // SAFETY: an open instance and a valid message.
        unsafe {
            while nvipc_fw_dequeue(ipc, &raw mut msg) == 0 {
                assert_eq!(nvipc_fw_free(ipc, &raw mut msg), 0);
            }
        }
        Some(id)
    }

    fn failing_allocation(&mut self) -> f64 {
        self.0.failing_allocation()
    }
}

fn pools() -> [PoolConfig; PoolId::COUNT] {
    let mut pools = [PoolConfig::DISABLED; PoolId::COUNT];
    pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 8192, pool_len: 4096 };
    pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: 65_536, pool_len: 1024 };
    pools
}

fn send(to: &mut dyn Endpoint, id: i32, fill: Option<&[u8]>) {
    while !to.try_send(id, fill) {}
}

fn receive(from: &mut dyn Endpoint) -> i32 {
    loop {
        if let Some(id) = from.try_receive() {
            return id;
        }
    }
}

fn pin(core: usize) {
    let mut set = nix::sched::CpuSet::new();
    // With one core both threads share it, and the figures mean little.
    if set.set(core).is_ok() {
        let _ = nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set);
    }
}

/// Nanoseconds per operation: the median over batches. `act` is repeated for the length of a run.
fn timed(mut act: impl FnMut()) -> f64 {
    let begin = Instant::now();
    while begin.elapsed() < RUN / 10 {
        act();
    }
    let (mut batches, begin) = (Vec::new(), Instant::now());
    while begin.elapsed() < RUN {
        let start = Instant::now();
        for _ in 0..BATCH {
            act();
        }
        batches.push(start.elapsed().as_nanos() as f64 / f64::from(BATCH));
    }
    batches.sort_by(f64::total_cmp);
    batches[batches.len() / 2]
}

/// One message there and one back.
fn ping_pong(phy: &mut dyn Endpoint, mac: &mut dyn Endpoint) -> f64 {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(1);
            while receive(phy) != STOP {
                send(phy, 1, None);
            }
        });
        pin(0);
        let time = timed(|| {
            send(mac, 0, None);
            receive(mac);
        });
        send(mac, STOP, None);
        time
    })
}

/// Messages in one direction, as fast as possible. The mean, because the sender runs ahead.
fn one_way(phy: &mut dyn Endpoint, mac: &mut dyn Endpoint, fill: Option<&[u8]>) -> f64 {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(0);
            let begin = Instant::now();
            while begin.elapsed() < RUN {
                for _ in 0..BATCH {
                    send(mac, 0, fill);
                }
            }
            send(mac, STOP, None);
        });
        pin(1);
        receive(phy);
        let (begin, mut count) = (Instant::now(), 0_u64);
        while receive(phy) != STOP {
            count += 1;
        }
        begin.elapsed().as_nanos() as f64 / count as f64
    })
}

/// One thread does everything: the cost of the calls without traffic between cores.
fn cycle(phy: &mut dyn Endpoint, mac: &mut dyn Endpoint) -> f64 {
    pin(0);
    timed(|| {
        send(mac, 0, None);
        receive(phy);
    })
}

/// One thread polls an endpoint for which there is no message.
fn empty_poll(phy: &mut dyn Endpoint) -> f64 {
    pin(0);
    timed(|| assert!(phy.try_receive().is_none()))
}

fn main() {
    let wanted: Vec<_> = std::env::args().skip(1).filter(|name| !name.starts_with("--")).collect();
    let dir = tempfile::Builder::new().prefix("shmesh-bench-").tempdir_in("/dev/shm");
    let dir = dir.or_else(|_| tempfile::tempdir()).unwrap();
    set(shmesh::DIR_VARIABLE, dir.path().as_os_str());
    let mut config = LinkConfig::nvipc_defaults("rust".parse().unwrap());
    config.pools = pools();
    let options = LinkOptions::new();
    let mut rust =
        (Rust(options.create(&config).unwrap()), Rust(options.attach("rust", Side::Secondary).unwrap()));
    let mut ours = (C::open("c", NV_IPC_MODULE_PRIMARY), C::open("c", NV_IPC_MODULE_SECONDARY));
    let mut tapped =
        (TappedC::open("tapped", NV_IPC_MODULE_PRIMARY), C::open("tapped", NV_IPC_MODULE_SECONDARY));
    set("SHMESH_NVIPC_LAYOUT", "nvipc".as_ref());
    let mut theirs = (C::open("theirs", NV_IPC_MODULE_PRIMARY), C::open("theirs", NV_IPC_MODULE_SECONDARY));
    let fill = vec![7_u8; DATA_BYTES];

    type Run<'a> = Box<dyn Fn(&mut dyn Endpoint, &mut dyn Endpoint) -> f64 + 'a>;
    let runs: [(&str, Run<'_>); 6] = [
        ("one thread: allocate, send, receive, release", Box::new(cycle)),
        ("round trip, MSG of 64 bytes", Box::new(ping_pong)),
        ("one way, MSG of 64 bytes", Box::new(|phy, mac| one_way(phy, mac, None))),
        ("one way, with 64 KiB of DATA filled", Box::new(|phy, mac| one_way(phy, mac, Some(&fill)))),
        (
            "one thread: failing allocation",
            Box::new(|_, mac| {
                pin(0);
                mac.failing_allocation()
            }),
        ),
        ("one thread: empty poll", Box::new(|phy, _| empty_poll(phy))),
    ];
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|part| name.contains(part));
    println!(
        "{:<46} {:>16} {:>16} {:>16} {:>16}",
        "nanoseconds: median of the runs (best)", "Rust", "C", "C, tap of primary", "C, layout nvipc"
    );
    for (name, run) in runs.into_iter().filter(|(name, _)| is_wanted(name)) {
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..TURNS {
            times[0].push(run(&mut rust.0, &mut rust.1));
            times[1].push(run(&mut ours.0, &mut ours.1));
            times[2].push(run(&mut tapped.0, &mut tapped.1));
            times[3].push(run(&mut theirs.0, &mut theirs.1));
        }
        let shown = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            format!("{:.1} ({:.1})", times[times.len() / 2], times[0])
        });
        println!("{name:<46} {:>16} {:>16} {:>16} {:>16}", shown[0], shown[1], shown[2], shown[3]);
    }
}

fn set(variable: &str, value: &std::ffi::OsStr) {
    #[expect(clippy::disallowed_methods, reason = "no other thread looks at the environment")]
    // SAFETY: the threads of links read no environment variable.
    unsafe {
        std::env::set_var(variable, value);
    }
}
