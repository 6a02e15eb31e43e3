//! A client that speaks to a sidecar without the library.

use std::os::fd::{BorrowedFd, OwnedFd};

use shmesh_proto::broker::{Hello, Refused, Reply, Request, reply, request::Op};
use shmesh_proto::packet;
use shmesh_sys::socket;

/// The number of all requests.
const ID: u64 = 5;

pub(crate) const HELLO: Op = Op::Hello(Hello {});

/// Encodes a request with this number.
pub(crate) fn packet_of(op: Op) -> Vec<u8> {
    packet::encode(&Request::new(ID, op))
}

/// Sends a request, with descriptors.
pub(crate) fn tell(fd: &OwnedFd, op: Op, fds: &[BorrowedFd<'_>]) {
    socket::send(fd, &packet_of(op), fds).unwrap();
}

/// Receives the next answer to a request, or `None` if there is none any more.
pub(crate) fn answer(fd: &OwnedFd) -> Option<reply::Result> {
    loop {
        let (bytes, _) = socket::receive(fd).ok().filter(|(bytes, _)| !bytes.is_empty())?;
        let reply: Reply = packet::decode(&bytes).unwrap();
        // Events have no number, and neither has the refusal of a connection.
        if reply.id == ID || matches!(reply.result, Some(reply::Result::Refused(_))) {
            return reply.result;
        }
    }
}

/// Sends a request and receives its answer.
pub(crate) fn ask(fd: &OwnedFd, op: Op, fds: &[BorrowedFd<'_>]) -> reply::Result {
    tell(fd, op, fds);
    answer(fd).expect("closed without an answer")
}

/// The refusal in an answer.
pub(crate) fn refusal(result: reply::Result) -> Refused {
    match result {
        reply::Result::Refused(refused) => refused,
        other => panic!("this must be refused: {other:?}"),
    }
}
