//! gRPC over unix sockets, as a client or server written in Go does it.
//!
//! | file | concept |
//! |---|---|
//! | `dial.rs` | connecting: again and again until the server speaks HTTP/2, or time is up |
//! | `authority.rs` | the `:authority` that Go makes of a path, which Rust's `http` would not let through |
//! | `tap.rs` | the socket, with an eye on its first frames |
//! | `channel.rs` | a connection that calls can be made on, and that can be closed under them |
//! | `errors.rs` | what Go calls an error |
//! | `serve.rs` | a server that ends with its process |

mod authority;
mod channel;
mod dial;
mod errors;
mod serve;
mod tap;

pub(crate) use authority::Authority;
pub(crate) use channel::Channel;
pub(crate) use dial::dial;
pub(crate) use errors::GoError;
pub(crate) use serve::serve;

/// What grpc-go takes from a server at most, in one message.
pub(crate) const MESSAGE_BYTES_MAX: usize = 4 << 20;
