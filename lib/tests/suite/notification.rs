//! Waiting and waking: no wake-up is lost, and none costs a system call while the peer is awake.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::select::{FdSet, select};
use nix::sys::time::TimeVal;
use shmesh::{Link, LinkOptions, Side};
use shmesh_testing::{Peer, Watchdog, config, ipc_dir, notified, send, until};

const KINDS: [&str; 4] = ["mode=mpmc", "mode=spsc", "mode=mpmc backing=memfd", "mode=spsc backing=memfd"];

struct Ends {
    primary: Link,
    secondary: Link,
    _dir: tempfile::TempDir,
}

fn ends(changes: &str) -> Ends {
    let dir = ipc_dir();
    let options = LinkOptions::new().dir(dir.path());
    let primary = options.create(&config("link", changes)).unwrap();
    let secondary = options.attach("link", Side::Secondary).unwrap();
    Ends { primary, secondary, _dir: dir }
}

fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).unwrap() > 0
}

#[test]
fn poll_select_and_epoll_report_notifications() {
    for kind in KINDS {
        let Ends { primary, secondary, _dir } = ends(kind);
        for (from, to) in [(&primary, &secondary), (&secondary, &primary)] {
            let fd = to.fd().unwrap();
            let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
            epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 42)).unwrap();
            let seen = || {
                let mut events = [EpollEvent::empty()];
                let by_epoll = epoll.wait(&mut events, EpollTimeout::ZERO).unwrap() > 0;
                assert!(!by_epoll || events[0].data() == 42);
                let (mut set, mut now) = (FdSet::new(), TimeVal::new(0, 0));
                set.insert(fd);
                let by_select = select(None, &mut set, None, None, &mut now).unwrap() > 0;
                [is_readable(fd), by_select, by_epoll]
            };
            assert_eq!(seen(), [false; 3], "{kind}");
            send(from, 1, "x").unwrap();
            assert_eq!(seen(), [false; 3], "{kind}: sending alone wakes no participant");
            from.notify().unwrap();
            assert_eq!(seen(), [true; 3], "{kind}");
            assert_eq!(seen(), [true; 3], "{kind}: until the signal is taken");
            assert_eq!(notified(to), Some(1), "{kind}");
            assert_eq!(seen(), [false; 3], "{kind}");
            assert!(to.receive().unwrap().is_some());
        }
    }
}

#[test]
fn each_notification_is_one_signal() {
    let Ends { primary, secondary, _dir } = ends("");
    let fd = primary.fd().unwrap();
    assert_eq!(notified(&primary), None);
    for _ in 0..5 {
        secondary.notify().unwrap();
    }
    for _ in 0..5 {
        assert!(is_readable(fd));
        assert_eq!(notified(&primary), Some(1));
    }
    assert!(!is_readable(fd));
    assert_eq!(notified(&primary), None);
    // Each side has its own.
    assert!(!is_readable(secondary.fd().unwrap()));
}

#[test]
fn awake_peer_is_not_woken() {
    for kind in KINDS {
        let Ends { primary, secondary, _dir } = ends(kind);
        // It waits and polls, and comes back; it never asked for the descriptor.
        assert!(!primary.wait(Some(Duration::from_millis(1))).unwrap());
        for i in 0..1_000 {
            send(&secondary, i, "x").unwrap();
            secondary.notify().unwrap();
            assert!(primary.wait(None).unwrap(), "a message waits, so this returns at once");
            assert_eq!(primary.receive().unwrap().unwrap().msg_id(), i);
        }
        assert_eq!(notified(&primary), None, "{kind}: the doorbell was never touched");
    }
}

#[test]
fn messages_between_awake_peers_make_no_system_call() {
    exchange_without_system_calls(50);
}

#[test]
#[ignore = "long: 20,000 round trips of each kind"]
fn messages_between_awake_peers_make_no_system_call_in_thousands_of_trips() {
    exchange_without_system_calls(20_000);
}

fn exchange_without_system_calls(trips: i32) {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        let dir = ipc_dir();
        let primary = LinkOptions::new().dir(dir.path()).create(&config("link", kind)).unwrap();
        let mut peer = Peer::start(dir.path());
        peer.tell("attach link secondary 0");
        // From here on the kernel kills it for any system call but read and write: and a write to the doorbell shows.
        peer.order(&format!("strict {trips}"));
        for i in [-1].into_iter().chain(-1..trips) {
            let message = loop {
                match primary.receive().unwrap() {
                    Some(message) => break message,
                    None => std::hint::spin_loop(),
                }
            };
            assert_eq!(message.msg_id(), i, "{kind}");
            if i >= 0 {
                primary.send_inline(i, 0, b"").unwrap();
                primary.notify().unwrap();
            }
        }
        assert_eq!(peer.answer(), "ok", "{kind}");
        assert_eq!(notified(&primary), None, "{kind}: no signal");
    }
}

#[test]
fn timeouts() {
    for kind in ["", "notify=off", "spin=200"] {
        let Ends { primary, secondary, _dir } = ends(kind);
        assert!(!primary.wait(Some(Duration::ZERO)).unwrap(), "{kind}");
        for millis in [1, 20] {
            let start = Instant::now();
            let timeout = Duration::from_millis(millis);
            assert!(!primary.wait(Some(timeout)).unwrap(), "{kind}");
            assert!(start.elapsed() >= timeout, "{kind}: not before its time");
        }
        secondary.send_inline(1, 0, b"").unwrap();
        for timeout in [Some(Duration::ZERO), Some(Duration::from_secs(1)), Some(Duration::MAX), None] {
            assert!(primary.wait(timeout).unwrap(), "{kind}: it is there already");
        }
    }
}

#[test]
fn sleeper_without_a_timeout_is_woken() {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        let dir = ipc_dir();
        let mut sleeper = Peer::start(dir.path());
        sleeper.tell(&format!("create link {kind}"));
        let link = LinkOptions::new().dir(dir.path()).attach("link", Side::Secondary).unwrap();
        for i in 0..20 {
            sleeper.order("wait -1");
            sleeper.until_asleep();
            assert_eq!(sleeper.answered(), None);
            send(&link, i, "wake").unwrap();
            link.notify().unwrap();
            assert_eq!(sleeper.answer(), "true", "{kind}");
            assert_eq!(sleeper.ask("receive"), format!("{i} wake"));
        }
    }
}

#[test]
fn no_wake_up_is_lost_in_a_ping_pong() {
    ping_pong(300);
}

#[test]
#[ignore = "long: 20,000 round trips of each kind"]
fn no_wake_up_is_lost_in_a_long_ping_pong() {
    ping_pong(20_000);
}

fn ping_pong(trips: i32) {
    let _watchdog = Watchdog::start();
    for kind in ["mode=mpmc spin=0", "mode=spsc spin=0", "mode=mpmc spin=20", "mode=spsc spin=20"] {
        let Ends { primary, secondary, _dir } = ends(kind);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for i in 0..trips {
                    assert!(secondary.wait(None).unwrap());
                    assert_eq!(secondary.receive().unwrap().unwrap().msg_id(), i);
                    secondary.send_inline(i, 0, b"").unwrap();
                    secondary.notify().unwrap();
                }
            });
            for i in 0..trips {
                primary.send_inline(i, 0, b"").unwrap();
                primary.notify().unwrap();
                assert!(primary.wait(None).unwrap());
                assert_eq!(primary.receive().unwrap().unwrap().msg_id(), i);
            }
        });
    }
}

#[test]
fn no_signal_is_lost_in_a_ping_pong_over_epoll() {
    ping_pong_over_epoll(500);
}

#[test]
#[ignore = "long: 20,000 round trips of each kind"]
fn no_signal_is_lost_in_a_long_ping_pong_over_epoll() {
    ping_pong_over_epoll(20_000);
}

fn ping_pong_over_epoll(trips: i32) {
    let _watchdog = Watchdog::start();
    for kind in ["mode=mpmc", "mode=spsc"] {
        let Ends { primary, secondary, _dir } = ends(kind);
        let next = |link: &Link| {
            let fd = link.fd().unwrap();
            let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
            while poll(&mut fds, PollTimeout::NONE).unwrap_or(0) == 0 {}
            assert_eq!(notified(link), Some(1));
            link.receive().unwrap().expect("each signal stands for a message here").msg_id()
        };
        // Before the first message: from then on each one rings.
        primary.fd().unwrap();
        secondary.fd().unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(move || {
                for i in 0..trips {
                    assert_eq!(next(&secondary), i);
                    secondary.send_inline(i, 0, b"").unwrap();
                    secondary.notify().unwrap();
                }
                secondary
            });
            for i in 0..trips {
                primary.send_inline(i, 0, b"").unwrap();
                primary.notify().unwrap();
                assert_eq!(next(&primary), i);
            }
            let secondary = other.join().unwrap();
            assert_eq!(notified(&primary), None);
            drop(secondary);
            assert_eq!(primary.take_signal().unwrap(), Some(0), "detaching rings as well");
        });
    }
}

#[test]
fn posts_add_up() {
    for kind in KINDS {
        let Ends { primary, secondary, _dir } = ends(kind);
        assert!(!primary.wait_tti(Some(Duration::ZERO)).unwrap());
        for tti in 0..3 {
            for message in 0..4 {
                secondary.send_inline(tti, message, b"").unwrap();
            }
            secondary.post().unwrap();
        }
        let mut received = 0;
        for _ in 0..3 {
            assert!(primary.wait_tti(None).unwrap(), "{kind}");
            while primary.receive().unwrap().is_some() {
                received += 1;
            }
        }
        assert_eq!(received, 12, "{kind}");
        assert!(!primary.wait_tti(Some(Duration::from_millis(1))).unwrap(), "{kind}: each post counts once");
        assert!(!secondary.wait_tti(Some(Duration::ZERO)).unwrap(), "{kind}: the other side has its own");
        // A message is no post, and a post is no message.
        secondary.send_inline(0, 0, b"").unwrap();
        secondary.notify().unwrap();
        assert!(!primary.wait_tti(Some(Duration::from_millis(1))).unwrap(), "{kind}");
        assert!(primary.receive().unwrap().is_some());
        secondary.post().unwrap();
        assert!(!primary.wait(Some(Duration::from_millis(1))).unwrap(), "{kind}");
        assert!(primary.wait_tti(Some(Duration::ZERO)).unwrap(), "{kind}");
    }
}

#[test]
fn posts_are_kept_for_later_participants() {
    let dir = ipc_dir();
    let mut primary = Peer::start(dir.path());
    primary.tell("create link");
    let link = LinkOptions::new().dir(dir.path()).attach("link", Side::Secondary).unwrap();
    link.post().unwrap();
    link.post().unwrap();
    assert_eq!(primary.ask("wait-tti 0"), "true");
    primary.kill();
    let mut primary = Peer::start(dir.path());
    primary.tell("create link");
    assert_eq!((primary.ask("wait-tti 0"), primary.ask("wait-tti 0")), ("true".into(), "false".into()));
}

#[test]
fn post_wakes_sleepers() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let mut sleeper = Peer::start(dir.path());
    sleeper.tell("create link");
    let link = LinkOptions::new().dir(dir.path()).attach("link", Side::Secondary).unwrap();
    for _ in 0..20 {
        sleeper.order("wait-tti -1");
        sleeper.until_asleep();
        link.post().unwrap();
        assert_eq!(sleeper.answer(), "true");
    }
    assert_eq!(sleeper.ask("wait-tti 0"), "false");
}

#[test]
fn each_post_wakes_one_of_several_threads() {
    const THREADS: usize = 4;
    const POSTS: usize = 2_000;
    let _watchdog = Watchdog::start();
    let Ends { primary, secondary, _dir } = ends("mode=mpmc");
    let taken = Arc::new(AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            let (link, taken) = (primary.try_clone().unwrap(), Arc::clone(&taken));
            scope.spawn(move || {
                for _ in 0..POSTS / THREADS {
                    assert!(link.wait_tti(None).unwrap());
                    taken.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..POSTS {
            secondary.post().unwrap();
        }
    });
    assert_eq!(taken.load(Ordering::Relaxed), POSTS);
    assert!(!primary.wait_tti(Some(Duration::ZERO)).unwrap());
}

#[test]
fn one_notification_of_a_batch_wakes_all_receivers() {
    const THREADS: usize = 4;
    let _watchdog = Watchdog::start();
    for round in 0..200 {
        let Ends { primary, secondary, _dir } = ends("mode=mpmc");
        let waiting = Arc::new(AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                let (link, waiting) = (primary.try_clone().unwrap(), Arc::clone(&waiting));
                scope.spawn(move || {
                    waiting.fetch_add(1, Ordering::Relaxed);
                    // Each takes one message and then does something else.
                    loop {
                        assert!(link.wait(None).unwrap());
                        if link.receive().unwrap().is_some() {
                            return;
                        }
                    }
                });
            }
            until("all are about to wait", || waiting.load(Ordering::Relaxed) == THREADS);
            if round % 2 == 0 {
                // Give them time to fall asleep; both orders must work.
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut loans: Vec<_> = (0..THREADS).map(|_| secondary.loan().unwrap()).collect();
            assert_eq!(secondary.send_batch(&mut loans).unwrap(), THREADS);
            secondary.notify().unwrap();
        });
    }
}

#[test]
fn receivers_can_poll_without_notification() {
    let _watchdog = Watchdog::start();
    for mode in ["mode=mpmc", "mode=spsc"] {
        let Ends { primary, secondary, _dir } = ends(&format!("{mode} notify=off"));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for i in 0..200 {
                    // `wait` works without a notification.
                    assert!(primary.wait(None).unwrap());
                    assert_eq!(primary.receive().unwrap().unwrap().msg_id(), i);
                    primary.send_inline(i, 0, b"").unwrap();
                }
            });
            for i in 0..200 {
                secondary.send_inline(i, 0, b"").unwrap();
                while secondary.receive().unwrap().is_none() {
                    std::thread::yield_now();
                }
            }
        });
    }
}

extern "C" fn on_signal(_: libc::c_int) {
    SIGNALLED.store(true, Ordering::Relaxed);
}
static SIGNALLED: AtomicBool = AtomicBool::new(false);

#[test]
fn signal_does_not_end_a_wait() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let mut sleeper = Peer::start(dir.path());
    sleeper.tell("create link");
    let link = LinkOptions::new().dir(dir.path()).attach("link", Side::Secondary).unwrap();
    sleeper.order("wait -1");
    for _ in 0..10 {
        sleeper.until_asleep();
        // Stopping and going on interrupts the poll of a thread that has no handler at all.
        sleeper.stop();
        sleeper.go_on();
    }
    sleeper.until_asleep();
    assert_eq!(sleeper.answered(), None);
    link.send_inline(1, 0, b"").unwrap();
    link.notify().unwrap();
    assert_eq!(sleeper.answer(), "true");
}

#[test]
fn signal_handler_without_restart_does_not_end_a_wait() {
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal};
    let _watchdog = Watchdog::start();
    let action = SigAction::new(SigHandler::Handler(on_signal), SaFlags::empty(), SigSet::empty());
    install(Signal::SIGUSR1, &action);
    let Ends { primary, secondary, _dir } = ends("");
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(move || {
            tell.send(nix::unistd::gettid()).unwrap();
            let start = Instant::now();
            // Two signals' worth of time out, then for ever.
            assert!(!primary.wait(Some(Duration::from_millis(50))).unwrap());
            assert!(start.elapsed() >= Duration::from_millis(50), "the signals did not shorten it");
            primary.wait(None).unwrap()
        });
        let thread = told.recv().unwrap();
        for _ in 0..100 {
            interrupt(thread, Signal::SIGUSR1);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!waiter.is_finished(), "no signal is a message");
        secondary.send_inline(1, 0, b"").unwrap();
        secondary.notify().unwrap();
        assert!(waiter.join().unwrap());
    });
    assert!(SIGNALLED.load(Ordering::Relaxed));
}

#[test]
fn signals_do_not_disturb_attach_and_detach() {
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal};
    let _watchdog = Watchdog::start();
    install(
        Signal::SIGUSR1,
        &SigAction::new(SigHandler::Handler(on_signal), SaFlags::empty(), SigSet::empty()),
    );
    let done = AtomicBool::new(false);
    let me = nix::unistd::gettid();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // As many as there can be: some come while it waits for an answer.
            while !done.load(Ordering::Relaxed) {
                interrupt(me, Signal::SIGUSR1);
                std::thread::yield_now();
            }
        });
        // Large enough that a signal comes while it is being made.
        for backing in ["", "backing=memfd"] {
            for _ in 0..20 {
                let Ends { primary, secondary, _dir } = ends(&format!("data=65536x256 {backing}"));
                secondary.send_inline(1, 0, b"").unwrap();
                assert!(primary.receive().unwrap().is_some());
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    // The threads of the library leave the application's signals to the application.
    let Ends { primary: _primary, secondary: _secondary, _dir } = ends("");
    let blocked_of = |task: std::fs::DirEntry| {
        let text = |file| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let status = text("status");
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:"))?.trim();
        (text("comm").trim() == "shmesh-monitor").then(|| u64::from_str_radix(blocked, 16).unwrap())
    };
    // A thread gives itself its name.
    until("the monitor is there, and blocks the signal", || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().map_while(Result::ok);
        let blocked: Vec<_> = tasks.filter_map(blocked_of).collect();
        !blocked.is_empty() && blocked.iter().all(|mask| mask & 1 << (Signal::SIGUSR1 as u32 - 1) != 0)
    });
}

// A raw system call, for a signal to one thread.
#[expect(unsafe_code, reason = "nix sends signals to processes only")]
fn interrupt(thread: nix::unistd::Pid, signal: nix::sys::signal::Signal) {
    let (process, thread) = (std::process::id(), thread.as_raw());
    // SAFETY: it sends a signal that has a handler to a thread of this process.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal as libc::c_int) };
    assert_eq!(sent, 0);
}

// A signal handler is process-wide state.
#[expect(unsafe_code, reason = "the handler stores one atomic and nothing else")]
fn install(signal: nix::sys::signal::Signal, action: &nix::sys::signal::SigAction) {
    // SAFETY: the handler is async-signal-safe: it stores to an atomic.
    unsafe { nix::sys::signal::sigaction(signal, action) }.unwrap();
}

#[test]
fn eviction_wakes_a_receiver_that_polls() {
    let Ends { primary, secondary, _dir } = ends("mode=mpmc");
    let fd = secondary.fd().unwrap();
    primary.evict(secondary.seat()).unwrap();
    assert!(is_readable(fd));
}

#[test]
fn descriptor_outlives_the_peer() {
    // An event loop may keep a duplicate; the doorbell is one for both sides of the socket.
    let Ends { primary, secondary, _dir } = ends("");
    let kept = primary.fd().unwrap().try_clone_to_owned().unwrap();
    drop(primary);
    secondary.notify().unwrap();
    assert!(!is_readable(kept.as_fd()), "no participant is left to wake");
}
