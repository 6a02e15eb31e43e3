//! The orders that peers execute, and preparations before them.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use shmesh::config::PoolId;
use shmesh::device::HostMemory;
use shmesh::{Link, LinkOptions, PeerEvent, Side};

use crate::device::{OnDevice, Sessions};
use crate::{config, kind_of, receive, send, serve_by};

/// The other end of a [`Peer`]: executes orders until its standard input ends.
pub fn serve() {
    let mut obedient =
        Obedient { pool: OnDevice(None), link: None, clones: Vec::new(), sessions: Sessions::default() };
    serve_by(|line| obedient.obey(line).unwrap_or_else(|error| format!("err {} {error}", kind_of(&error))));
}

struct Obedient {
    /// Declared before the link that it belongs to.
    pool: OnDevice<HostMemory>,
    link: Option<Link>,
    clones: Vec<Link>,
    sessions: Sessions,
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
            "become" => {
                nix::unistd::setuid(nix::unistd::Uid::from_raw(word(0).parse().expect("a uid")))
                    .expect("setuid");
                return ok;
            }
            // Until it is killed.
            "churn" => loop {
                drop(LinkOptions::new().attach(word(0), Side::Secondary));
            },
            "close" => {
                self.pool = OnDevice(None);
                self.clones.clear();
                self.link = None;
                return ok;
            }
            // As a library does that uses `fork(3)`.
            "fork" => {
                fork_child(|| {
                    // SAFETY: the child polls, and leaves.
                    #[expect(unsafe_code, reason = "nix's fork says the same")]
                    unsafe {
                        libc::fork()
                    }
                });
                return ok;
            }
            // By a system call, which runs no fork handlers: the child keeps all descriptors.
            "fork-unseen" => {
                fork_child(|| {
                    // SAFETY: as above.
                    #[expect(unsafe_code, reason = "there is no safe one")]
                    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
                    i32::try_from(child).expect("a process id")
                });
                return ok;
            }
            "prepare" => {
                prepare(&words);
                return ok;
            }
            "device" => return self.sessions.obey(&words),
            _ => {}
        }
        let link = self.link.as_ref().expect("attached");
        if order == "pool" {
            return self.pool.obey(link, &words, HostMemory::new);
        }
        if let Some(done) = crate::requests::obey(link, order, &words) {
            return done;
        }
        match order {
            "send" => send(link, i32::try_from(number(0)).expect("an id"), word(1))?,
            "inline" => {
                link.send_inline(i32::try_from(number(0)).expect("an id"), 0, word(1).as_bytes())?;
            }
            "data" => {
                let mut loan = link.loan_with(PoolId::CpuData)?;
                let len = usize::try_from(number(1)).expect("a length");
                loan.resize_data(len)?.fill(number(0).to_le_bytes()[0]);
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
            // Keeps it until the process is killed.
            "hold-loan" => std::mem::forget(link.loan_with(PoolId::CpuData)?),
            "hold-message" => std::mem::forget(link.receive()?.expect("a message")),
            "typed" => link.try_clone()?.typed_as::<[u64]>(word(0))?.send(&[1, 2, 3])?,
            // Keeps it until the process is killed.
            "hold-typed" => std::mem::forget(link.try_clone()?.typed_as::<[u64]>(word(0))?),
            "clone" => {
                let clone = link.try_clone()?;
                self.clones.push(clone);
            }
            "notify" => link.notify()?,
            "post" => link.post()?,
            "wait" => return Ok(link.wait(millis(0))?.to_string()),
            "wait-tti" => return Ok(link.wait_tti(millis(0))?.to_string()),
            "event" => {
                link.wait_event(millis(0))?;
                return Ok(event_text(link.next_event()));
            }
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
            "take_signal" => return Ok(format!("{:?}", link.take_signal()?)),
            "strict" => {
                let trips = i32::try_from(number(0)).expect("a number");
                // Lists and roles are initialized at their first use.
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

/// An event in words that are the same in each pid namespace.
fn event_text(event: Option<PeerEvent>) -> String {
    let (what, peer) = match event {
        None => return "none".to_owned(),
        Some(PeerEvent::Attached(peer)) => ("attached", peer),
        Some(PeerEvent::Detached(peer)) => ("detached", peer),
        Some(PeerEvent::Died(peer)) => ("died", peer),
        Some(PeerEvent::Evicted(peer)) => ("evicted", peer),
        Some(event) => return format!("{event:?}"),
    };
    format!("{what} {} {}", peer.word.side(), peer.seat)
}

/// Creates a child that does nothing until the test closes the standard input of this process.
fn fork_child(fork: impl FnOnce() -> i32) {
    let child = fork();
    assert!(child >= 0, "fork");
    if child == 0 {
        let mut fds = [libc::pollfd { fd: 0, events: 0, revents: 0 }];
        // SAFETY: system calls with a local value; no code of the parent may run.
        #[expect(unsafe_code, reason = "only calls that are safe after a fork")]
        unsafe {
            while libc::poll(fds.as_mut_ptr(), 1, -1) < 1 {}
            libc::_exit(0);
        }
    }
}

#[expect(unsafe_code, reason = "nix has no call for strict seccomp")]
fn allow_only_read_and_write() {
    // SAFETY: it only restricts the system calls of this thread: any other one kills the process.
    let done = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT) };
    assert_eq!(done, 0, "strict seccomp");
}

/// Prepares a peer before it attaches to the link.
fn prepare(words: &[&str]) {
    use nix::mount::{MsFlags, mount};
    use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};
    let private = || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("a mount namespace");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
            .expect("private");
    };
    match *words {
        // A small tmpfs on a directory, visible to this process only.
        ["tmpfs", dir, size] => {
            private();
            let size = format!("size={size}");
            mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::empty(), Some(size.as_str()))
                .expect("mount a tmpfs");
        }
        // Memory cgroups of both versions with these values, visible to this process only.
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
        // Its user, its group, and its supplementary groups.
        ["user", uid, gid, ref groups @ ..] => {
            let (uid, gid) = (uid.parse().expect("a uid"), gid.parse().expect("a gid"));
            let mut groups: Vec<_> =
                groups.iter().map(|group| Gid::from_raw(group.parse().expect("a gid"))).collect();
            groups.push(Gid::from_raw(gid));
            setgroups(&groups).expect("setgroups");
            setgid(Gid::from_raw(gid)).expect("setgid");
            setuid(Uid::from_raw(uid)).expect("setuid");
        }
        // Uses all descriptors of its limit, also those that another thread closes later, or raises the limit.
        ["descriptors", wanted] => {
            use nix::sys::resource::{Resource, getrlimit, setrlimit};
            static NONE_LEFT: AtomicBool = AtomicBool::new(false);
            let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("the limit");
            NONE_LEFT.store(wanted == "none", Ordering::SeqCst);
            let limit = if wanted == "none" { 64 } else { most };
            setrlimit(Resource::RLIMIT_NOFILE, limit, most).expect("set the limit");
            let take_all = || {
                while NONE_LEFT.load(Ordering::SeqCst)
                    && let Ok(file) = std::fs::File::open("/dev/null")
                {
                    std::mem::forget(file);
                }
            };
            take_all();
            std::thread::spawn(move || {
                while NONE_LEFT.load(Ordering::SeqCst) {
                    take_all();
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
        // Fewer descriptors than it has already.
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
