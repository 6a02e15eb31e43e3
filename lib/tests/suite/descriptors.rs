//! Descriptors for which there are no numbers left.

use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use shmesh::LinkOptions;
use shmesh_sys::socket;
use shmesh_testing::{Peer, Stubborn, Watchdog, config, ipc_dir, own_process, pose_as_host, until};

fn open_descriptors() -> usize {
    shmesh_sys::procfs::open_descriptors().expect("/proc")
}

#[test]
fn packet_with_too_many_descriptors_leaks_none() {
    // The limit is that of the whole process.
    own_process(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("link.broker");
        let listener = socket::listen_on(&path, 0o600).expect("a listener");
        let client = socket::connect_to(&path).expect("a connection");
        let server = socket::accept(&listener).expect("a connection");
        let file = std::fs::File::open("/dev/null").expect("a file");
        let eight: [BorrowedFd<'_>; 8] = [file.as_fd(); 8];
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("the limit");
        for room in 0..8 {
            socket::send(&client, b"take these", &eight).expect("sent");
            let before = open_descriptors();
            // Numbers are given from the lowest that is free: as many as `room` below the limit, with one for counting.
            let highest = std::fs::read_dir("/proc/self/fd")
                .expect("/proc")
                .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u64>().ok())
                .max()
                .expect("some");
            let holes: Vec<_> = (0..highest).filter_map(|_| file.try_clone().ok()).collect();
            let taken = open_descriptors() as u64 - 1;
            setrlimit(Resource::RLIMIT_NOFILE, taken + room, hard).expect("a lower limit");
            let received = socket::receive(&server);
            setrlimit(Resource::RLIMIT_NOFILE, soft, hard).expect("the limit again");
            drop(holes);
            let error = received.expect_err("some do not fit");
            assert_eq!(error.raw_os_error(), Some(libc::EMFILE), "{room}");
            assert_eq!(open_descriptors(), before, "{room}: those that came are closed");
        }
        socket::send(&client, b"take these", &eight).expect("sent");
        assert_eq!(socket::receive(&server).expect("all fit").1.len(), 8);
    });
}

#[test]
fn links_use_one_descriptor_each_and_one_thread() {
    own_process(|| {
        const LINKS: usize = 300;
        let threads = || std::fs::read_dir("/proc/self/task").expect("/proc").count();
        let dir = ipc_dir();
        let options = LinkOptions::new().dir(dir.path());
        let create = |i: usize| options.create(&config(&format!("link{i}"), "ring=2 msg=64x2 data=64x2"));
        let first = create(0).expect("a link");
        let (fds, before) = (open_descriptors(), threads());
        let links: Vec<_> = (1..=LINKS).map(|i| create(i).expect("another link")).collect();
        assert_eq!((open_descriptors() - fds, threads() - before), (LINKS, 0));
        drop((first, links));
    });
}

#[test]
fn too_many_links_for_the_limit_of_open_files_name_it_and_the_remedy() {
    own_process(|| {
        let dir = ipc_dir();
        let options = LinkOptions::new().dir(dir.path());
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("the limit");
        let limit = open_descriptors() as u64 + 20;
        setrlimit(Resource::RLIMIT_NOFILE, limit, hard).expect("a lower limit");
        let create = |i: usize| options.create(&config(&format!("link{i}"), "ring=2 msg=64x2 data=64x2"));
        let mut links = Vec::new();
        let error = loop {
            match create(links.len()) {
                Ok(link) => links.push(link),
                Err(error) => break error.to_string(),
            }
        };
        for word in [
            format!("link link{}", links.len()),
            format!("{limit} open files"),
            "ulimit -n".to_owned(),
            hard.to_string(),
        ] {
            assert!(error.contains(&word), "{word}: {error}");
        }
        assert!(links.len() > 10, "{error}");
        // It raises the limit, and goes on.
        shmesh_sys::rlimit::set_open_files(hard).expect("a higher limit");
        links.push(create(links.len()).expect("another link"));
    });
}

/// A process that listens in the place of a host sends descriptors whose close takes ten minutes: deaths are noticed all the
/// same.
#[test]
fn descriptor_that_lingers_does_not_hold_up_the_monitor() {
    // In a process of its own: a child that another test starts has copies of all descriptors for a moment, and would hang at its
    // start if its copy of one that lingers is the last.
    own_process(|| {
        let _watchdog = Watchdog::start();
        let dir = ipc_dir();
        let listener = socket::listen_on(&pose_as_host(dir.path()), 0o600).unwrap();
        let mut phy = Peer::start(dir.path());
        phy.tell("create link mode=mpmc");
        // Its monitor connects, and asks.
        let connection = socket::accept(&listener).unwrap();
        socket::receive(&connection).unwrap();
        phy.stop();
        let mut stubborn = Stubborn::listen();
        // The second one waits in the connection when that is closed.
        for packet in [b"x", b"y"] {
            socket::send(&connection, packet, &[stubborn.one().as_fd()]).unwrap();
        }
        drop(connection);
        phy.go_on();

        let mut mac = Peer::start(dir.path());
        mac.tell("attach link secondary 1000");
        assert_eq!(phy.ask("participants"), "2");
        mac.kill();
        until("the monitor reaps the dead one", || phy.ask("participants") == "1");
        drop(stubborn);
    });
}
