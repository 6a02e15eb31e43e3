//! The latest value: a writer that never waits, and readers that only want to know how things are now.
//!
//! `cargo run -p shmesh --example latest_value`

use std::error::Error;

use shmesh::config::{BroadcastConfig, LinkConfig, RingMode, SlowReaders};
use shmesh::{LinkOptions, Side};

pub(crate) fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let dir = tempfile::tempdir()?;
    let options = LinkOptions::new().dir(dir.path());
    let mut config = LinkConfig::new("position".parse()?);
    config.ring_mode = RingMode::Broadcast;
    config.ring_len = 2;
    config.broadcast = BroadcastConfig { slow: SlowReaders::Skip, history: 1, ..BroadcastConfig::default() };
    let sensor = options.create(&config)?;

    let display = options.attach("position", Side::Secondary)?;
    for position in 0..1_000_u32 {
        sensor.send_inline(1, 0, &position.to_le_bytes())?;
    }
    let latest = display.receive()?.ok_or("a value was sent")?;
    assert_eq!(latest.msg(), 999_u32.to_le_bytes());
    println!("the latest of 1000 values; {} were skipped", display.lost());

    // A reader that attaches later has the latest value at once.
    let late = options.attach("position", Side::Secondary)?;
    assert_eq!(late.receive()?.ok_or("the history")?.msg(), 999_u32.to_le_bytes());
    Ok(())
}
