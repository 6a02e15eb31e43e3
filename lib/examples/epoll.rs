//! Many links in one event loop: a descriptor for each, one thread for all.
//!
//! `cargo run -p shmesh --example epoll`

use std::error::Error;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use shmesh::config::LinkConfig;
use shmesh::{Link, LinkOptions, PeerEvent, Side};

const NAMES: [&str; 3] = ["fronthaul", "midhaul", "backhaul"];

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?; // `LinkOptions` uses SHMESH_DIR or /dev/shm by default
    let options = LinkOptions::new().dir(dir.path());
    let mut links = Vec::new();
    for name in NAMES {
        links.push(options.create(&LinkConfig::new(name.parse()?))?);
    }
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    for (number, link) in (0..).zip(&links) {
        epoll.add(link.fd()?, EpollEvent::new(EpollFlags::EPOLLIN, number))?;
    }

    let peers = std::thread::spawn(move || -> shmesh::Result<()> {
        for name in NAMES {
            let peer = options.attach(name, Side::Secondary)?; // usually in other processes
            peer.send_inline(1, 0, name.as_bytes())?;
            peer.notify()?;
        }
        Ok(())
    });
    let (mut received, mut left) = (0, 0);
    while received < NAMES.len() || left < NAMES.len() {
        let mut ready = [EpollEvent::empty(); 8];
        let count = epoll.wait(&mut ready, EpollTimeout::NONE)?;
        for event in &ready[..count] {
            let link = &links[usize::try_from(event.data())?];
            let (messages, ends) = serve(link)?;
            received += messages;
            left += ends;
        }
    }
    peers.join().expect("the peers do not panic")?;
    Ok(())
}

/// Consumes the signals first, then everything they were for: what arrives later signals again.
fn serve(link: &Link) -> shmesh::Result<(usize, usize)> {
    while link.take_signal()?.is_some() {}
    let (mut messages, mut ends) = (0, 0);
    while let Some(message) = link.receive()? {
        println!("{}: {}", link.name(), String::from_utf8_lossy(message.msg()));
        messages += 1;
    }
    while let Some(event) = link.next_event() {
        if matches!(event, PeerEvent::Detached(_) | PeerEvent::Died(_)) {
            println!("{}: the peer has left", link.name());
            ends += 1;
        }
    }
    Ok((messages, ends))
}
