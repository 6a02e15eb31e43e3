//! Typed messages: commands of one type on one link, tensors of numbers on another; a peer with another type is refused.
//!
//! `cargo run -p shmesh --example typed`

use std::error::Error;

use shmesh::config::LinkConfig;
use shmesh::{LinkOptions, Side};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// No padding, and any bytes are a valid value: the derives check both.
#[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct SlotIndication {
    frame: u32,
    slot: u16,
    cell: u16,
}

/// The name of the type with its version, which changes with its fields.
const NAME: &str = "fronthaul.SlotIndication/1";

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?; // `LinkOptions` takes /dev/shm unless told otherwise
    let options = LinkOptions::new().dir(dir.path());

    // Values: usually in two processes.
    let phy = options.create(&LinkConfig::new("fronthaul".parse()?))?.typed_as::<SlotIndication>(NAME)?;
    let mac = options.attach("fronthaul", Side::Secondary)?.typed_as::<SlotIndication>(NAME)?;
    let sent = SlotIndication { frame: 512, slot: 3, cell: 0 };
    phy.send(&sent)?;
    phy.notify()?; // what a `Link` does, a typed one does, too
    mac.wait(None)?;
    let received = mac.receive()?.ok_or("a message waits")?;
    assert_eq!(received.value(), &sent);
    println!("{:?}", received.value());

    // A program of another version learns it at once.
    let newer =
        options.attach("fronthaul", Side::Secondary)?.typed_as::<[u32; 4]>("fronthaul.SlotIndication/2");
    println!("{}", newer.err().ok_or("another type")?);

    // Slices of any length: written in place, and read there.
    let trainer = options.create(&LinkConfig::new("batches".parse()?))?.typed::<[f32]>()?;
    let loader = options.attach("batches", Side::Secondary)?.typed::<[f32]>()?;
    let mut loan = loader.loan_slice(16_000)?;
    loan.value_mut()?.fill(0.25);
    loan.send()?;
    let tensor = trainer.receive()?.ok_or("a message waits")?;
    assert_eq!(tensor.value().iter().sum::<f32>(), 4_000.0);
    println!("{} numbers in pool {:?}", tensor.value().len(), tensor.message().data_pool());
    Ok(())
}
