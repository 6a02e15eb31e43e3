//! What the tests share: directories, configurations, a watchdog, and peers that are processes of their own.
//!
//! A peer is this test binary, started again to run one test only: `peer_process`, which each test that includes this
//! module defines. It obeys lines on its standard input and answers each with one line, so a test reads like a script
//! and can kill its peers wherever it likes.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(dead_code, reason = "each test binary includes this module and uses a part of it")]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::TimeVal;
use shmesh::client::Happened;
use shmesh::config::{Backing, LinkConfig, PoolConfig, PoolId, RingMode};
use shmesh::device::{BareTgid, DeviceKey, DevicePool, ExportFlags, HostMemory, PoolMemory, Session};
use shmesh::sys::socket;
use shmesh::{Error, Link, LinkOptions, Side};

/// Longer than any one step here takes, on the slowest machine: only something that hangs lasts so long.
pub(crate) const HANGS: Duration = Duration::from_secs(60);
/// The same of a whole test.
const TEST_HANGS: Duration = Duration::from_secs(600);

/// An IPC directory of its own: on tmpfs where there is one, because that is where links live.
pub(crate) fn ipc_dir() -> tempfile::TempDir {
    let shm = Path::new("/dev/shm");
    tempfile::Builder::new()
        .prefix("shmesh-test-")
        .tempdir_in(shm)
        .or_else(|_| tempfile::tempdir())
        .expect("a directory for the test")
}

/// Ends the process if the test has not ended in time.
pub(crate) struct Watchdog(Option<mpsc::Sender<()>>);

impl Watchdog {
    pub(crate) fn start() -> Self {
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

/// Looks again and again until it is so.
pub(crate) fn until(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < HANGS, "never came true: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Connects to the broker of the link `link` as a stranger would, and waits for its answers as long as any step here may take.
pub(crate) fn stranger(dir: &Path) -> OwnedFd {
    let fd = socket::connect_to(&dir.join("link.broker")).unwrap();
    let limit = TimeVal::new(HANGS.as_secs().cast_signed(), 0);
    setsockopt(&fd, sockopt::ReceiveTimeout, &limit).unwrap();
    setsockopt(&fd, sockopt::SendTimeout, &limit).unwrap();
    fd
}

/// A small link, with changes as `key=value` words: what peers and tests both understand.
pub(crate) fn config(name: &str, changes: &str) -> LinkConfig {
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
            "mode" => config.ring_mode = if value == "spsc" { RingMode::Spsc } else { RingMode::Mpmc },
            "backing" => config.backing = if value == "memfd" { Backing::Memfd } else { Backing::Named },
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
pub(crate) fn kind_of(error: &Error) -> String {
    format!("{error:?}").split([' ', '(']).next().unwrap_or_default().to_owned()
}

/// The error of a call that must fail.
#[track_caller]
pub(crate) fn refused<T>(result: shmesh::Result<T>) -> Error {
    match result {
        Ok(_) => panic!("this must be refused"),
        Err(error) => error,
    }
}

/// Sends one text.
pub(crate) fn send(link: &Link, msg_id: i32, text: &str) -> shmesh::Result<()> {
    let mut loan = link.loan()?;
    loan.msg_mut(text.len())?.copy_from_slice(text.as_bytes());
    loan.with_msg_id(msg_id).send()
}

/// Receives one text.
pub(crate) fn receive(link: &Link) -> shmesh::Result<Option<(i32, String)>> {
    Ok(link.receive()?.map(|message| (message.msg_id(), String::from_utf8_lossy(message.msg()).into_owned())))
}

/// Another process.
pub(crate) struct Peer {
    child: Child,
    commands: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl Peer {
    /// Starts one that works in `dir`.
    pub(crate) fn start(dir: &Path) -> Self {
        Self::start_by(Command::new(std::env::current_exe().expect("the path of this test")), dir)
    }

    /// As `start`, in a pid namespace of its own, where it is process 1. Takes root.
    pub(crate) fn start_alone(dir: &Path) -> Self {
        let mut unshare = Command::new("unshare");
        unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        unshare.arg(std::env::current_exe().expect("the path of this test"));
        Self::start_by(unshare, dir)
    }

    /// By a command that ends in this test.
    pub(crate) fn start_by(mut command: Command, dir: &Path) -> Self {
        let mut child = command
            .args(["peer_process", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env("SHMESH_DIR", dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start a peer");
        let commands = child.stdin.take();
        let output = child.stdout.take().expect("piped");
        let (tell, answers) = mpsc::channel();
        std::thread::spawn(move || {
            // The test harness talks too; what is ours begins with '@', wherever in the line that is.
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some((_, answer)) = line.split_once('@')
                    && tell.send(answer.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        let peer = Self { child, commands, answers };
        assert_eq!(peer.answer(), "ready");
        peer
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Gives an order without waiting for the answer.
    #[track_caller]
    pub(crate) fn order(&mut self, line: &str) {
        let commands = self.commands.as_mut().expect("the peer lives");
        commands.write_all(format!("{line}\n").as_bytes()).expect("the peer lives");
    }

    /// The answer to the last order.
    #[track_caller]
    pub(crate) fn answer(&self) -> String {
        self.answers.recv_timeout(HANGS).expect("an answer of the peer")
    }

    /// Whether it has answered its last order, and what.
    pub(crate) fn answered(&self) -> Option<String> {
        self.answers.try_recv().ok()
    }

    /// Gives an order and waits for the answer.
    #[track_caller]
    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.order(line);
        self.answer()
    }

    /// Gives an order that must be answered with "ok" alone.
    #[track_caller]
    pub(crate) fn tell(&mut self, line: &str) {
        assert_eq!(self.ask(line), "ok", "{line}");
    }

    /// Ends it as a crash does.
    pub(crate) fn kill(mut self) {
        let pid = self.pid();
        // In a namespace of its own it is the child of who made that, and dies after it.
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        self.child.kill().expect("kill the peer");
        self.child.wait().expect("reap the peer");
        for child in children.split_whitespace() {
            let stat = PathBuf::from(format!("/proc/{child}/stat"));
            until("the peer has ended", || {
                let text = std::fs::read_to_string(&stat).unwrap_or_default();
                // Its first thread may end before the others, which have the descriptors, too.
                text.rsplit_once(") ").is_none_or(|(_, rest)| {
                    rest.starts_with(['Z', 'X']) && rest.split(' ').nth(17) == Some("1")
                })
            });
        }
    }

    /// Lets it end as a program does that returns from `main`.
    pub(crate) fn exit(mut self) {
        drop(self.commands.take());
        let start = Instant::now();
        while self.child.try_wait().expect("look at the peer").is_none() {
            assert!(start.elapsed() < HANGS, "the peer does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops it, as a debugger does, and waits until it is.
    pub(crate) fn stop(&self) {
        self.signal(nix::sys::signal::Signal::SIGSTOP);
        until("the peer stops", || self.state() == Some('T'));
    }

    pub(crate) fn go_on(&self) {
        self.signal(nix::sys::signal::Signal::SIGCONT);
    }

    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(self.pid().cast_signed());
        nix::sys::signal::kill(pid, signal).expect("signal the peer");
    }

    /// What `/proc/PID/stat` says after the name: from the state on.
    fn stat(&self) -> Option<Vec<String>> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).ok()?;
        Some(stat.rsplit_once(") ")?.1.split(' ').map(str::to_owned).collect())
    }

    /// The state of its main thread.
    fn state(&self) -> Option<char> {
        self.stat()?.first()?.chars().next()
    }

    /// Hundredths of a second that it has run, in user and kernel mode.
    pub(crate) fn ticks(&self) -> u64 {
        let stat = self.stat().expect("the peer lives");
        stat[11..13].iter().map(|ticks| ticks.parse::<u64>().expect("ticks")).sum()
    }

    /// Waits until the thread that obeys sleeps in `poll`.
    pub(crate) fn until_asleep(&self) {
        let numbers = [
            libc::SYS_ppoll,
            // One that a signal interrupted goes on as this.
            libc::SYS_restart_syscall,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll,
        ];
        self.until_in(&numbers);
    }

    /// Waits until the thread that obeys is in one of these system calls.
    pub(crate) fn until_in(&self, numbers: &[i64]) {
        let tasks = PathBuf::from(format!("/proc/{}/task", self.pid()));
        let text = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        until("the peer is in the system call", || {
            let threads = std::fs::read_dir(&tasks).expect("the peer lives");
            let mut threads = threads.map_while(Result::ok).map(|thread| thread.path());
            let obeys = threads.find(|thread| text(thread.join("comm")).trim() == "peer_process");
            let call = text(obeys.expect("the thread of the test").join("syscall"));
            let number = call.split(' ').next().and_then(|number| number.parse().ok());
            number.is_some_and(|number| numbers.contains(&number))
        });
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The other end of [`Peer`]: obeys until its standard input ends.
pub(crate) fn serve() {
    let mut obedient =
        Obedient { pool: OnDevice(None), link: None, clones: Vec::new(), device: None, imported: Vec::new() };
    serve_by(|line| obedient.obey(line).unwrap_or_else(|error| format!("err {} {error}", kind_of(&error))));
}

/// As [`serve`], for peers that obey something else.
pub(crate) fn serve_by(mut obey: impl FnMut(&str) -> String) {
    // A test that fails takes its peers with it, whatever they wait for.
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).expect("end with the test");
    say("ready");
    for line in std::io::stdin().lines().map_while(Result::ok) {
        say(&obey(&line));
    }
}

fn say(answer: &str) {
    let mut out = std::io::stdout().lock();
    // In one piece, whatever else the process prints.
    let _ = out.write_all(format!("@{answer}\n").as_bytes());
    let _ = out.flush();
}

/// What a peer does with `cuda_data` of its link, in device memory of this kind.
pub(crate) struct OnDevice<M: PoolMemory>(pub(crate) Option<DevicePool<M>>);

impl<M: PoolMemory> OnDevice<M> {
    pub(crate) fn obey(
        &mut self,
        link: &Link,
        words: &[&str],
        make: impl FnOnce(u64) -> std::io::Result<M>,
    ) -> shmesh::Result<String> {
        let text_of = |message: &shmesh::Message<'_>, pool: &DevicePool<M>| {
            let data = pool.data(message)?;
            let mut bytes = vec![0; data.len()];
            data.copy_to_host(0, &mut bytes).expect("copied");
            Ok(format!("{} {}", message.msg_id(), String::from_utf8_lossy(&bytes)))
        };
        let loan = |pool: &DevicePool<M>, text: &str| {
            let mut loan = link.loan_with(PoolId::CudaData)?;
            let mut data = pool.data_mut(&mut loan, text.len())?;
            data.copy_to_device(0, text.as_bytes()).expect("copied");
            Ok::<_, Error>(loan)
        };
        match (words, &self.0) {
            (["open"], _) => {
                let mut made = "found";
                let pool = link.device_pool(PoolId::CudaData, |size| {
                    made = "made";
                    make(size)
                })?;
                self.0 = Some(pool);
                return Ok(made.to_owned());
            }
            (["close"], _) => self.0 = None,
            (["send", id, text], Some(pool)) => {
                loan(pool, text)?.with_msg_id(id.parse().expect("an id")).send()?;
            }
            (["receive"], Some(pool)) => {
                return link.receive()?.map_or(Ok("none".to_owned()), |message| text_of(&message, pool));
            }
            // Sends until it is killed; the text tells the id.
            (["pump"], Some(pool)) => {
                for id in 0.. {
                    loop {
                        let sent =
                            loan(pool, &format!("payload-{id}")).and_then(|loan| loan.with_msg_id(id).send());
                        match sent {
                            Ok(()) => break,
                            Err(error) if error.is_retryable() => std::thread::yield_now(),
                            Err(error) => return Err(error),
                        }
                    }
                }
            }
            // As a program does that is killed with them in its hands.
            (["hold", text], Some(pool)) => std::mem::forget(loan(pool, text)?),
            (["hold-message"], Some(_)) => std::mem::forget(link.receive()?.expect("a message")),
            _ => panic!("no such order: {words:?}, or the pool is not open"),
        }
        Ok("ok".to_owned())
    }
}

struct Obedient {
    /// Before the link that it is of.
    pool: OnDevice<HostMemory>,
    link: Option<Link>,
    clones: Vec<Link>,
    device: Option<Session>,
    /// What it has imported, by the key as text.
    imported: Vec<(String, std::sync::Arc<HostMemory>)>,
}

/// A key as tests pass it on: its characters, without the zero.
pub(crate) fn key_text(key: &DeviceKey) -> String {
    key.as_bytes()[..64].iter().map(|&byte| char::from(byte)).collect()
}

pub(crate) fn key_of(text: &str) -> DeviceKey {
    let bytes: Vec<u8> = text.bytes().chain([0]).collect();
    DeviceKey::from_wild(&bytes).expect("64 characters")
}

/// What happened, as tests ask for it.
pub(crate) fn event_text(happened: Option<Happened>) -> String {
    let text = match happened {
        None => "none",
        Some(Happened::PeerDied(tgid)) => return format!("died {tgid}"),
        Some(Happened::RegionLost(_)) => "lost",
        Some(Happened::ExporterClosing(_)) => "closing",
        Some(Happened::Unused(_)) => "unused",
        Some(Happened::Admit(_)) => "admit",
    };
    text.to_owned()
}

/// One order about device memory.
fn obey_device(obedient: &mut Obedient, words: &[&str]) -> shmesh::Result<String> {
    if words == ["connect"] {
        let dir = std::env::var_os("SHMESH_DIR").expect("the directory");
        obedient.device = Some(Session::connect(dir, "link")?);
        return Ok("ok".to_owned());
    }
    if words == ["drop"] {
        obedient.device = None;
        return Ok("ok".to_owned());
    }
    let session = obedient.device.as_mut().expect("connected");
    match *words {
        ["tgid"] => return Ok(session.bare_tgid()?.0.to_string()),
        ["export", text, flags] => {
            let memory = HostMemory::new(4096).expect("memory");
            memory.write_at(0, text.as_bytes()).expect("written");
            return Ok(key_text(&session.export_key(memory, ExportFlags(flags.parse().expect("flags")))?));
        }
        ["admit", key, tgid] => {
            session.set_import_pid(&key_of(key), &[BareTgid(tgid.parse().expect("a tgid"))])?
        }
        ["import", key] => {
            let memory = session.import_by_key(&key_of(key))?;
            let mut bytes = [0; 8];
            memory.read_at(0, &mut bytes).expect("read");
            obedient.imported.push((key.to_owned(), memory));
            return Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned());
        }
        ["close", key] => {
            obedient.imported.retain(|(imported, _)| imported != key);
            session.close(&key_of(key))?;
        }
        ["force", key] => session.force_close(&key_of(key))?,
        ["event"] => {
            return Ok(event_text(session.event()?));
        }
        _ => panic!("no such order: {words:?}"),
    }
    Ok("ok".to_owned())
}

impl Obedient {
    fn obey(&mut self, line: &str) -> shmesh::Result<String> {
        let (order, rest) = line.split_once(' ').unwrap_or((line, ""));
        let words: Vec<&str> = rest.split_whitespace().collect();
        let word = |i: usize| *words.get(i).unwrap_or_else(|| panic!("{line}: too few words"));
        let number = |i: usize| word(i).parse::<i64>().unwrap_or_else(|_| panic!("{line}: not a number"));
        let millis = |i: usize| match number(i) {
            -1 => None,
            millis => Some(Duration::from_millis(millis.cast_unsigned())),
        };
        let ok = Ok("ok".to_owned());
        match order {
            "create" => {
                let (name, changes) = rest.split_once(' ').unwrap_or((rest, ""));
                self.link = Some(Link::create(&config(name, changes))?);
                return ok;
            }
            "attach" => {
                let side = if word(1) == "primary" { Side::Primary } else { Side::Secondary };
                let options = LinkOptions::new().timeout(millis(2).unwrap_or_default());
                self.link = Some(options.attach(word(0), side)?);
                return ok;
            }
            "close" => {
                self.pool = OnDevice(None);
                self.clones.clear();
                self.link = None;
                return ok;
            }
            "prepare" => {
                prepare(&words);
                return ok;
            }
            "device" => return obey_device(self, &words),
            _ => {}
        }
        let link = self.link.as_ref().expect("attached");
        if order == "pool" {
            return self.pool.obey(link, &words, HostMemory::new);
        }
        match order {
            "send" => send(link, i32::try_from(number(0)).expect("an id"), word(1))?,
            "inline" => {
                link.send_inline(i32::try_from(number(0)).expect("an id"), 0, word(1).as_bytes())?;
            }
            "data" => {
                let mut loan = link.loan_with(PoolId::CpuData)?;
                let len = usize::try_from(number(1)).expect("a length");
                loan.data_mut(len)?.fill(number(0).to_le_bytes()[0]);
                loan.with_msg_id(i32::try_from(number(0)).expect("an id")).send()?;
            }
            "receive" => {
                return Ok(receive(link)?.map_or("none".to_owned(), |(id, text)| format!("{id} {text}")));
            }
            "receive-data" => {
                return Ok(link.receive()?.map_or("none".to_owned(), |message| {
                    let same = message.data().iter().all(|&byte| i32::from(byte) == message.msg_id());
                    format!("{} {} {same}", message.msg_id(), message.data().len())
                }));
            }
            // As a program does that is killed with them in its hands.
            "hold-loan" => std::mem::forget(link.loan_with(PoolId::CpuData)?),
            "hold-message" => std::mem::forget(link.receive()?.expect("a message")),
            "clone" => {
                let clone = link.try_clone()?;
                self.clones.push(clone);
            }
            "notify" => link.notify()?,
            "post" => link.post()?,
            "wait" => return Ok(link.wait(millis(0))?.to_string()),
            "wait-tti" => return Ok(link.wait_tti(millis(0))?.to_string()),
            "arm" => {
                link.fd()?;
            }
            "poll" => {
                let fd = link.fd()?;
                let timeout = millis(0).map_or(nix::poll::PollTimeout::NONE, |time| {
                    nix::poll::PollTimeout::try_from(time).expect("a timeout")
                });
                let mut fds = [nix::poll::PollFd::new(fd, nix::poll::PollFlags::POLLIN)];
                return Ok((nix::poll::poll(&mut fds, timeout).expect("poll") > 0).to_string());
            }
            "value" => return Ok(format!("{:?}", link.value()?)),
            "strict" => {
                let trips = i32::try_from(number(0)).expect("a number");
                // Lists and roles are set up at the first use.
                send(link, -1, "x")?;
                link.send_inline(-1, 0, b"x")?;
                allow_only_read_and_write();
                for i in 0..trips {
                    if i % 2 == 0 {
                        send(link, i, "x")?
                    } else {
                        link.send_inline(i, 0, b"x")?
                    }
                    link.notify()?;
                    while link.receive()?.is_none() {
                        std::hint::spin_loop();
                    }
                }
            }
            "participants" => return Ok(link.participants().count().to_string()),
            "queued" => return Ok(link.queued().to_string()),
            _ => panic!("no such order: {line}"),
        }
        ok
    }
}

#[expect(unsafe_code, reason = "nix has no call for strict seccomp")]
fn allow_only_read_and_write() {
    // SAFETY: it changes nothing but what the kernel lets this thread do: any other system call kills the process.
    let done = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT) };
    assert_eq!(done, 0, "strict seccomp");
}

/// What a peer does to itself before it comes to the link.
fn prepare(words: &[&str]) {
    use nix::mount::{MsFlags, mount};
    use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};
    let private = || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("a mount namespace");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
            .expect("private");
    };
    match *words {
        // A small tmpfs on a directory, that only this process sees.
        ["tmpfs", dir, size] => {
            private();
            let size = format!("size={size}");
            mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::empty(), Some(size.as_str()))
                .expect("mount a tmpfs");
        }
        // Memory cgroups of both versions that say so, that only this process sees.
        ["memory", limit, usage] => {
            private();
            let root = PathBuf::from("/sys/fs/cgroup");
            mount(Some("tmpfs"), &root, Some("tmpfs"), MsFlags::empty(), None::<&str>)
                .expect("mount a tmpfs");
            std::fs::create_dir(root.join("memory")).expect("a directory");
            for (file, value) in [
                ("memory.max", limit),
                ("memory.current", usage),
                ("memory/memory.limit_in_bytes", limit),
                ("memory/memory.usage_in_bytes", usage),
            ] {
                std::fs::write(root.join(file), value).expect("a file");
            }
        }
        ["user", uid, gid] => {
            let (uid, gid) = (uid.parse().expect("a uid"), gid.parse().expect("a gid"));
            setgroups(&[Gid::from_raw(gid)]).expect("setgroups");
            setgid(Gid::from_raw(gid)).expect("setgid");
            setuid(Uid::from_raw(uid)).expect("setuid");
        }
        // It has all that it may have, or may have more.
        ["descriptors", wanted] => {
            use nix::sys::resource::{Resource, getrlimit, setrlimit};
            let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("the limit");
            let limit = if wanted == "none" { 64 } else { most };
            setrlimit(Resource::RLIMIT_NOFILE, limit, most).expect("set the limit");
            if wanted == "none" {
                while let Ok(file) = std::fs::File::open("/dev/null") {
                    std::mem::forget(file);
                }
            }
        }
        // Fewer than it has already.
        ["limit", limit] => {
            use nix::sys::resource::{Resource, getrlimit, setrlimit};
            let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("the limit");
            setrlimit(Resource::RLIMIT_NOFILE, limit.parse().expect("a number"), most)
                .expect("set the limit");
        }
        ["umask", mask] => {
            let bits = u32::from_str_radix(mask, 8).expect("an octal number");
            nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(bits));
        }
        _ => panic!("no such preparation: {words:?}"),
    }
}

/// Whether this process may change users and mount; says so if it may not.
pub(crate) fn is_root() -> bool {
    let root = nix::unistd::Uid::effective().is_root();
    if !root {
        println!("skipped: it takes root to change the user and to mount");
    }
    root
}

/// Names of the files in `dir`, sorted.
pub(crate) fn files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("the directory");
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
