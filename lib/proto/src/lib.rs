//! The messages on a link's broker socket and on the node's identity socket. `docs/protocol.md` describes the protocol.
//!
//! | file | concept |
//! |---|---|
//! | `limits.rs` | every limit, by name |
//! | `packet.rs` | one packet: encoded, decoded, checked against the limits |
//! | [`broker`] | participants and the broker of a link |
//! | [`identity`] | sidecars and the node's identity service |
//! | [`key`] | the 65 bytes that identify exported device memory |
//!
//! A packet is one protobuf message in one `SOCK_SEQPACKET` packet; descriptors are passed with it as ancillary data,
//! in the order that the message defines. This crate does no I/O.

pub mod broker;
pub mod identity;
pub mod key;
pub mod limits;
pub mod packet;
