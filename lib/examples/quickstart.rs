//! Both sides of a link: a message in buffers that are written in place, and one inside the ring.
//!
//! The README shows this program. `cargo run -p shmesh --example quickstart`

use std::error::Error;

use shmesh::config::{LinkConfig, PoolId};
use shmesh::{LinkOptions, Side};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    // One process: the primary creates the link in /dev/shm (or the directory in SHMESH_DIR).
    let phy = LinkOptions::new().create(&LinkConfig::new("fronthaul".parse()?))?;
    // Another process: the secondary reads the configuration from the link.
    let mac = LinkOptions::new().attach("fronthaul", Side::Secondary)?;

    let mut loan = mac.loan_with(PoolId::CpuData)?; // claims a MSG and a DATA buffer
    loan.resize_msg(5)?.copy_from_slice(b"hello"); // written in place
    loan.resize_data(65_536)?.fill(0xa5);
    loan.with_msg_id(7).send()?; // sends an index, not the bytes
    mac.send_inline(8, 0, b"up to 112 bytes in the slot")?; // no buffer
    mac.notify()?; // a system call only if a receiver sleeps

    phy.wait(None)?;
    while let Some(message) = phy.receive()? {
        println!("{} {} + {} bytes", message.msg_id(), message.msg().escape_ascii(), message.data().len());
    } // dropping a message releases its buffers
    Ok(())
}
