//! A side that ends and starts again: the other one keeps its handle, and messages that were sent stay sent.
//!
//! `cargo run -p shmesh --example reconnect`

use std::error::Error;

use shmesh::config::LinkConfig;
use shmesh::{LinkOptions, PeerEvent, Side};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?; // `LinkOptions` uses SHMESH_DIR or /dev/shm by default
    let options = LinkOptions::new().dir(dir.path());
    let config = LinkConfig::new("fronthaul".parse()?);
    let phy = options.create(&config)?;
    let mac = options.attach("fronthaul", Side::Secondary)?;

    drop(phy); // an orderly end; a killed process is recovered by those that live
    mac.send_inline(1, 0, b"sent while the primary was away")?;
    mac.notify()?;

    let phy = options.create(&config)?; // the same call as at first: it finds the link
    assert!(!phy.was_created());
    let message = phy.receive()?.ok_or("what was sent stays sent")?;
    println!("{}", String::from_utf8_lossy(message.msg()));

    while let Some(event) = mac.next_event() {
        match event {
            PeerEvent::Attached(peer) => println!("process {} attached", peer.word.pid()),
            PeerEvent::Detached(peer) => println!("process {} detached", peer.word.pid()),
            other => println!("{other:?}"),
        }
    }
    Ok(())
}
