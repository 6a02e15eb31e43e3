//! What the processes say to each other: one packet of JSON, with a descriptor where one travels.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use shmesh_sys::socket;

/// Transfer memory is passed to another process.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum Transfer {
    /// As a file descriptor.
    Vmm,
    /// By an old handle.
    Legacy,
}

/// What a side is to do. Each has at most one memory of its own and one that it has imported.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum Order {
    /// Tell what there is.
    Probe,
    /// Allocate, and export: answered by [`OrderResult::Made`] and a descriptor.
    Make { how: Transfer, size: u64 },
    /// Import what comes with it.
    Import { how: Transfer, size: u64, handle: Vec<u8> },
    /// Fill what it has with a pattern.
    Fill { seed: u32 },
    /// Set the words of a timeline to 0.
    Zero,
    /// Look at every word of what it has.
    Verify { seed: u32 },
    /// Let go of what it has.
    Drop,
    /// Copy what it has imported to its own memory and back, and its own to its own, so often.
    Bandwidth { rounds: u32 },
    /// Write a word and wait for the other, so often.
    Ping { rounds: u32 },
    /// The other side of that.
    Pong { rounds: u32 },
    /// Free bytes of the device.
    Room,
    /// Descriptors that it has.
    Descriptors,
}

/// The answer of the process.
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
        /// Numbers of `CUdevice_attribute`, and what they say.
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
    /// Transfer many words are wrong.
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
    /// There is no driver, or no device.
    Absent(String),
}

pub(super) fn send(socket: &impl AsFd, what: &impl Serialize, fd: Option<&OwnedFd>) -> io::Result<()> {
    let fds: Vec<_> = fd.into_iter().map(AsFd::as_fd).collect();
    socket::send(socket, &serde_json::to_vec(what)?, &fds)
}

/// `None`: the other end has gone.
pub(super) fn receive<T: DeserializeOwned>(socket: &impl AsFd) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let (bytes, fds) = socket::receive(socket)?;
    if bytes.is_empty() {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&bytes)?, fds.into_iter().next())))
}
