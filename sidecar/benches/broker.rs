//! The cost of a sidecar and the time of its broker's answers, with 1, 100 and 10,000 live keys: `cargo bench -p shmesh-sidecar`.
//!
//! Two processes besides the sidecar: this one exports, a second one, started by it, imports. All times are of one call of the
//! library, from the caller's side.

#![allow(clippy::unwrap_used, reason = "a measurement may panic")]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use shmesh::device::{BareTgid, DeviceKey, ExportFlags, HostMemory, Session};
use shmesh::{LinkOptions, Side};

const LINK: &str = "bench";
const SAMPLES: u64 = 2_000;

struct Times(&'static str, Histogram<u64>);

impl Times {
    fn new(name: &'static str) -> Self {
        Self(name, Histogram::new_with_bounds(1, 60_000_000_000, 3).unwrap())
    }

    fn add(&mut self, time: Duration) {
        self.1.saturating_record(u64::try_from(time.as_nanos()).unwrap());
    }

    fn say(&self, keys: usize) {
        let at = |quantile| self.1.value_at_quantile(quantile) as f64 / 1e3;
        println!("{:16} {keys:8} {:10.1} {:10.1} {:10.1}", self.0, at(0.5), at(0.99), at(1.0));
    }
}

fn timed<T>(times: &mut Times, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = call();
    times.add(start.elapsed());
    done
}

/// The importer: for each key on its input, imports and closes it, and says how long each took.
fn import(dir: &str) {
    let mut session = Session::<HostMemory>::connect(dir, LINK).unwrap();
    println!("{}", session.bare_tgid().unwrap().0);
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let bytes: Vec<u8> = line.bytes().chain([0]).collect();
        let key = DeviceKey::from_wild(&bytes).unwrap();
        let start = Instant::now();
        drop(session.import_by_key(&key).unwrap());
        let imported = start.elapsed();
        let start = Instant::now();
        session.close(&key).unwrap();
        println!("{} {}", imported.as_nanos(), start.elapsed().as_nanos());
    }
}

struct Importer {
    child: Child,
    keys: ChildStdin,
    times: BufReader<ChildStdout>,
    tgid: BareTgid,
}

impl Importer {
    fn start(dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["importer", dir.to_str().unwrap()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let keys = child.stdin.take().unwrap();
        let mut times = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        times.read_line(&mut line).unwrap();
        let tgid = BareTgid(line.trim().parse().unwrap());
        Self { child, keys, times, tgid }
    }

    fn import_and_close(&mut self, key: &DeviceKey, times: &mut [Times; 2]) {
        let text = std::str::from_utf8(&key.as_bytes()[..64]).unwrap();
        writeln!(self.keys, "{text}").unwrap();
        let mut line = String::new();
        self.times.read_line(&mut line).unwrap();
        for (times, nanos) in times.iter_mut().zip(line.split_whitespace()) {
            times.add(Duration::from_nanos(nanos.parse().unwrap()));
        }
    }
}

fn keys(dir: &Path, live: usize) {
    let mut importer = Importer::start(dir);
    let mut session = Session::connect(dir, LINK).unwrap();
    let memory = || HostMemory::new(4096).unwrap();
    let others: Vec<_> =
        (1..live).map(|_| session.export_key(memory(), ExportFlags::DEFAULT).unwrap()).collect();
    let mut export = Times::new("export_key");
    let mut admit = Times::new("set_import_pid");
    let mut at_importer = [Times::new("import_by_key"), Times::new("close (import)")];
    let mut close = Times::new("close (export)");
    for _ in 0..SAMPLES {
        let one = memory();
        let key = timed(&mut export, || session.export_key(one, ExportFlags::DEFAULT)).unwrap();
        timed(&mut admit, || session.set_import_pid(&key, &[importer.tgid])).unwrap();
        importer.import_and_close(&key, &mut at_importer);
        timed(&mut close, || session.close(&key)).unwrap();
        while session.event().unwrap().is_some() {}
    }
    let [import, close_import] = at_importer;
    for times in [export, admit, import, close_import, close] {
        times.say(live);
    }
    for key in &others {
        session.close(key).unwrap();
    }
    drop(importer.keys);
    importer.child.wait().unwrap();
}

fn attaches(dir: &Path) {
    let mut attach = Times::new("attach");
    let options = LinkOptions::new().dir(dir);
    let _phy = options.attach(LINK, Side::Primary).unwrap();
    for _ in 0..SAMPLES / 4 {
        drop(timed(&mut attach, || options.attach(LINK, Side::Secondary)).unwrap());
    }
    attach.say(0);
}

/// A participant, until it is killed: on the link, with a loan.
fn victim(dir: &str) {
    let link = LinkOptions::new().dir(dir).attach(LINK, Side::Secondary).unwrap();
    let _loan = link.loan().unwrap();
    println!("here");
    std::thread::park();
}

/// From the kill of a participant until what it held is back, and until its peers have been told.
fn deaths(dir: &Path) {
    let (mut back, mut told) = (Times::new("a death: back"), Times::new("a death: told"));
    let phy = LinkOptions::new().dir(dir).attach(LINK, Side::Primary).unwrap();
    let mut session = Session::<HostMemory>::connect(dir, LINK).unwrap();
    session.bare_tgid().unwrap();
    for _ in 0..SAMPLES / 10 {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["victim", dir.to_str().unwrap()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(victim.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(phy.participants().count(), 2, "the victim and this process");
        let start = Instant::now();
        victim.kill().unwrap();
        while phy.participants().count() > 1 {
            std::thread::sleep(Duration::from_micros(20));
        }
        back.add(start.elapsed());
        while session.event().unwrap().is_none() {
            std::thread::sleep(Duration::from_micros(20));
        }
        told.add(start.elapsed());
        victim.wait().unwrap();
    }
    back.say(0);
    told.say(0);
}

fn status(pid: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap_or_default();
    line.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn switches(pid: u32) -> u64 {
    status(pid, "voluntary_ctxt_switches:") + status(pid, "nonvoluntary_ctxt_switches:")
}

fn main() {
    let args: Vec<_> = std::env::args().collect();
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    match &args[..] {
        [_, role, dir] if role == "importer" => return import(dir),
        [_, role, dir] if role == "victim" => return victim(dir),
        _ => {}
    }
    let dir = tempfile::Builder::new().prefix("shmesh-bench-").tempdir_in("/dev/shm").unwrap();
    let start = Instant::now();
    let mut sidecar = Command::new(env!("CARGO_BIN_EXE_shmesh-sidecar"))
        .args(["--link", LINK, "--log-format", "json", "--audit", "/dev/null", "--dir"])
        .arg(dir.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(sidecar.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(log.any(|line| line.contains("\"ready\"")), "it becomes ready");
    println!("start to ready, default link prefaulted: {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
    std::thread::spawn(move || log.for_each(drop));
    let pid = sidecar.id();
    let (anonymous, file) = (status(pid, "RssAnon:"), status(pid, "RssFile:"));
    println!(
        "resident, idle, one link: {anonymous} KiB of its own, {file} KiB of files (mostly its code), shared pages not counted"
    );
    let before = switches(pid);
    std::thread::sleep(Duration::from_secs(3));
    println!("woken while idle: {} times in 3 s", switches(pid) - before);

    println!("{:16} {:>8} {:>10} {:>10} {:>10}", "call", "keys", "p50 us", "p99 us", "max us");
    attaches(dir.path());
    deaths(dir.path());
    for live in [1, 100, 10_000] {
        keys(dir.path(), live);
    }
    println!("resident afterwards: {} KiB of its own", status(pid, "RssAnon:"));
    sidecar.kill().unwrap();
    sidecar.wait().unwrap();
}
