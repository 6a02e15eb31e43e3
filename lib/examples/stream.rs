//! A stream of large messages from one thread to another: written in place, with one wake-up for each batch.
//!
//! `cargo run -p shmesh --example stream`

use std::error::Error;

use shmesh::config::{LinkConfig, PoolConfig, PoolId, RingMode};
use shmesh::{ErrorKind, Link, LinkOptions, Side};

const MESSAGES: u64 = 1_000;
const BYTES: usize = 65_536;

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?; // `LinkOptions` uses SHMESH_DIR or /dev/shm by default
    let options = LinkOptions::new().dir(dir.path());
    let mut config = LinkConfig::new("batches".parse()?);
    config.ring_mode = RingMode::Spsc; // one sender, one receiver
    config.pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: 65_536, pool_len: 32 };
    let trainer = options.create(&config)?;
    let loader = options.attach("batches", Side::Secondary)?; // usually in another process

    let sender = std::thread::spawn(move || send_all(&loader));
    let mut sum = 0;
    for _ in 0..MESSAGES {
        trainer.wait(None)?;
        let message = trainer.receive()?.ok_or("no other receiver takes messages of this link")?;
        sum += u64::from_le_bytes(message.msg().try_into()?);
        assert_eq!(message.data().len(), BYTES);
        // Dropped here: the buffer is free again.
    }
    sender.join().expect("the sender does not panic")?;
    assert_eq!(sum, (0..MESSAGES).sum::<u64>());
    println!("received {MESSAGES} messages of {BYTES} bytes");
    Ok(())
}

fn send_all(link: &Link) -> shmesh::Result<()> {
    for number in 0..MESSAGES {
        let mut loan = loop {
            match link.loan_with(PoolId::CpuData) {
                Ok(loan) => break loan,
                // The receiver is behind, and has all buffers.
                Err(error) if matches!(error.kind(), ErrorKind::Exhausted { .. }) => std::thread::yield_now(),
                Err(error) => return Err(error),
            }
        };
        loan.resize_msg(8)?.copy_from_slice(&number.to_le_bytes());
        loan.resize_data(BYTES)?.fill(7);
        loan.send()?;
        link.notify()?;
    }
    Ok(())
}
