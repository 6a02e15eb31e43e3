//! One writer and three readers that each get every message: for example a trainer that sends new weights to its inference
//! ranks.
//!
//! `cargo run -p shmesh --example broadcast`

use std::error::Error;
use std::thread;

use shmesh::config::{LinkConfig, PoolId, RingMode};
use shmesh::{LinkOptions, Side};

const READERS: usize = 3;
const VERSIONS: i32 = 10;

pub(crate) fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    // A real program does not set `dir`, and uses SHMESH_DIR or /dev/shm.
    let dir = tempfile::tempdir()?;
    let options = LinkOptions::new().dir(dir.path());
    let mut config = LinkConfig::new("weights".parse()?);
    config.ring_mode = RingMode::Broadcast;
    config.ring_len = 4;
    let writer = options.create(&config)?;

    // Each would be a process of its own.
    let ranks: Vec<_> = (0..READERS)
        .map(|_| {
            let options = options.clone();
            thread::spawn(move || -> Result<u64, Box<dyn Error + Send + Sync>> {
                let reader = options.attach("weights", Side::Secondary)?;
                let mut sum = 0;
                for expected in 0..VERSIONS {
                    reader.wait(None)?;
                    let message = reader.receive()?.ok_or("a message waits")?;
                    assert_eq!(message.msg_id(), expected, "each gets all, in order");
                    sum += message.data().iter().map(|&byte| u64::from(byte)).sum::<u64>();
                }
                Ok(sum)
            })
        })
        .collect();

    writer.wait_for_readers(READERS, None)?;
    for version in 0..VERSIONS {
        let mut loan = loop {
            // The slowest rank sets the pace.
            match writer.loan_with(PoolId::CpuData) {
                Err(error) if error.is_retryable() => thread::yield_now(),
                loan => break loan?,
            }
        };
        loan.resize_data(4096)?.fill(version.to_le_bytes()[0]);
        let mut loan = loan.with_msg_id(version);
        while let Err(failed) = loan.send() {
            if !failed.error.is_retryable() {
                return Err(failed.error.into());
            }
            loan = failed.loan;
            thread::yield_now();
        }
        writer.notify()?;
    }
    for rank in ranks {
        let sum = rank.join().map_err(|_| "a rank has panicked")??;
        println!("a rank has read {VERSIONS} versions, sum {sum}");
        assert_eq!(sum, 45 * 4096);
    }
    Ok(())
}
