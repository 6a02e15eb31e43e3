//! Messages between the processes: one packet of JSON, with a descriptor if one is passed.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use shmesh_sys::socket;

/// The mechanism by which memory is passed to another process.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum Transfer {
    /// As a file descriptor.
    Vmm,
    /// By a legacy IPC handle.
    Legacy,
}

/// An order for a process. Each process has at most one own and one imported memory.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum Order {
    /// Report the device and its attributes.
    Probe,
    /// Allocate and export memory; answered by [`OrderResult::Made`] and a descriptor.
    Make { how: Transfer, size: u64 },
    /// Import the memory of the descriptor or handle in this packet.
    Import { how: Transfer, size: u64, handle: Vec<u8> },
    /// Fill the memory with a pattern.
    Fill { seed: u32 },
    /// Set the words of the timeline to 0.
    Zero,
    /// Compare every word of the memory with the pattern.
    Verify { seed: u32 },
    /// Release own and imported memory.
    Drop,
    /// Copy the imported memory to own memory and back, and own memory to own memory, in each round.
    Bandwidth { rounds: u32 },
    /// Write a word and wait for the answer, in each round.
    Ping { rounds: u32 },
    /// Answer each word of the other process.
    Pong { rounds: u32 },
    /// Report the number of free bytes of the device.
    FreeMemory,
    /// Report the number of open descriptors.
    Descriptors,
}

/// The answer to an order.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum OrderResult {
    Probed {
        device: String,
        uuid: String,
        driver: i32,
        granularity: u64,
        free: u64,
        all: u64,
        missing: Vec<String>,
        /// Values of `CUdevice_attribute`, by number.
        attributes: Vec<(i32, Option<i32>)>,
        ascend: String,
    },
    Made {
        size: u64,
        handle: Vec<u8>,
        nanos: u64,
    },
    Imported {
        nanos: u64,
    },
    Dropped {
        nanos: u64,
    },
    /// The number of words that differ from the pattern.
    Verified {
        wrong: u64,
    },
    /// Bytes per second: own to own, imported to own, own to imported.
    Bandwidth {
        rates: [f64; 3],
        size: u64,
    },
    /// One time for each round.
    Pinged {
        nanos: Vec<u64>,
    },
    Number(u64),
    Done,
    Refused(String),
    /// There is no driver or no device, for this reason.
    Absent(String),
}

pub(super) fn send(socket: &impl AsFd, what: &impl Serialize, fd: Option<&OwnedFd>) -> io::Result<()> {
    let fds: Vec<_> = fd.into_iter().map(AsFd::as_fd).collect();
    socket::send(socket, &serde_json::to_vec(what)?, &fds)
}

/// Receives a packet. `None` if the other process has ended.
pub(super) fn receive<T: DeserializeOwned>(socket: &impl AsFd) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let (bytes, fds) = socket::receive(socket)?;
    if bytes.is_empty() {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&bytes)?, fds.into_iter().next())))
}
