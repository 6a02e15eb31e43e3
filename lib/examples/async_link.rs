//! Two links in one task: `select!` over both, with a deadline, and a message that is held across `.await` in another task.
//!
//! `cargo run -p shmesh --example async_link`

use std::error::Error;
use std::time::Duration;

use shmesh::config::LinkConfig;
use shmesh::{AsyncLink, LinkOptions, Side};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run())
}

async fn run() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?; // `LinkOptions` uses SHMESH_DIR or /dev/shm by default
    let options = LinkOptions::new().dir(dir.path());
    let mut uplink = AsyncLink::new(options.create(&LinkConfig::new("uplink".parse()?))?)?;
    let mut downlink = AsyncLink::new(options.create(&LinkConfig::new("downlink".parse()?))?)?;

    let mut peers = Vec::new();
    for name in ["uplink", "downlink"] {
        let mut peer = AsyncLink::new(options.attach(name, Side::Secondary)?)?; // usually in other processes
        peers.push(tokio::spawn(async move {
            let mut loan = peer.loan(name.len()).await?; // waits for a free buffer
            loan.msg_mut().copy_from_slice(name.as_bytes());
            peer.send(loan).await // waits for a slot
        }));
    }
    for _ in 0..2 {
        let message = tokio::select! {
            message = uplink.recv() => message?,
            message = downlink.recv() => message?,
            () = tokio::time::sleep(Duration::from_secs(60)) => return Err("no message came in a minute".into()),
        };
        tokio::spawn(async move {
            tokio::task::yield_now().await;
            println!("{}", String::from_utf8_lossy(message.msg()));
        })
        .await?;
    }
    for peer in peers {
        peer.await??;
    }
    Ok(())
}
