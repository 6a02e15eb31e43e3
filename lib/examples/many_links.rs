//! A central with a link for each of many clients: small links, and one thread that polls all of them in turn.
//!
//! A client of its own link cannot delay the others or take their buffers. With `epoll` in place of polling (`epoll.rs`) the central sleeps.
//!
//! `cargo run -p shmesh --example many_links`

use std::error::Error;

use shmesh::config::{LinkConfig, PoolConfig, PoolId, RingMode};
use shmesh::{Link, LinkOptions, Side};

const LINKS: usize = 64;
const ROUNDS: i32 = 10;

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?; // `LinkOptions` takes /dev/shm unless told otherwise
    let options = LinkOptions::new().dir(dir.path());
    let central: Vec<Link> =
        (0..LINKS).map(|i| Ok(options.create(&small(i)?)?)).collect::<Result<_, Box<dyn Error>>>()?;

    // Each would be a process of its own.
    let clients = std::thread::spawn(move || -> shmesh::Result<()> {
        let links: Vec<Link> =
            (0..LINKS).map(|i| options.attach(&name(i), Side::Secondary)).collect::<shmesh::Result<_>>()?;
        for round in 0..ROUNDS {
            for link in &links {
                link.send_inline(round, 0, b"ping")?;
            }
            for link in &links {
                link.wait(None)?;
                let answer = link.receive()?.expect("no other receiver takes messages of this link");
                assert_eq!((answer.msg_id(), answer.msg()), (round, &b"pong"[..]));
            }
        }
        Ok(())
    });

    // A link without a message costs one load.
    let mut served = 0;
    while served < LINKS * usize::try_from(ROUNDS)? {
        let before = served;
        for link in &central {
            while let Some(message) = link.receive()? {
                link.send_inline(message.msg_id(), 0, b"pong")?;
                link.notify()?;
                served += 1;
            }
        }
        if served == before {
            std::thread::yield_now();
        }
    }
    clients.join().expect("the clients do not panic")?;
    println!("served {served} messages on {LINKS} links of {} bytes each", small(0)?.segment_bytes());
    Ok(())
}

fn name(link: usize) -> String {
    format!("client-{link}")
}

/// 24 KiB in place of 25 MB: a ring of 16 messages, and 16 buffers of 256 bytes.
fn small(link: usize) -> Result<LinkConfig, Box<dyn Error>> {
    let mut config = LinkConfig::new(name(link).parse()?);
    config.ring_mode = RingMode::Spsc;
    config.ring_len = 16;
    config.pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 256, pool_len: 16 };
    config.pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: 0, pool_len: 0 };
    Ok(config)
}
