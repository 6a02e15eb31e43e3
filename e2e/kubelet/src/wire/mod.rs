//! gRPC over unix sockets, as a client or server written in Go does it.
//!
//! | file | concept |
//! |---|---|
//! | `dial.rs` | connecting, with retries until the server speaks HTTP/2 or the time limit |
//! | `authority.rs` | the `:authority` that Go derives from a path, which Rust's `http` does not accept |
//! | `tap.rs` | the socket, whose first frames are inspected |
//! | `channel.rs` | a connection for calls, which can be closed while calls are pending |
//! | `errors.rs` | errors as Go formats them |
//! | `serve.rs` | a server that ends with its process |

mod authority;
mod channel;
mod dial;
mod errors;
mod serve;
mod tap;

pub(crate) use authority::Authority;
pub(crate) use channel::Channel;
pub(crate) use dial::{attempt, dial};
pub(crate) use errors::GoError;
pub(crate) use serve::serve;

/// Maximum size in bytes of a message that grpc-go accepts from a server.
pub(crate) const MESSAGE_BYTES_MAX: usize = 4 << 20;
