//! Carries the messages of a link to another machine, and back.
//!
//! ```text
//!   home: the link                                             far node: a replica of the same shape
//!   program (primary) <-- link --> bridge (secondary) <-- engine --> bridge (primary) <-- link --> program (secondary)
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`frame`] | the bytes that cross |
//! | [`stream`] | order, acknowledgement, sending again, counting what is lost |
//! | [`journal`] | what the next process of a bridge must know |
//! | [`session`] | one link and one peer |
//! | [`connected_gauge`] | the metric that says whether the other side answers |
//! | [`bridge`] | all sessions of a process |
//! | [`place`] | whether the link is in this bridge's own IPC directory, on a cluster |
//! | [`engine`] | what carries frames: the trait, and one for tests |
//! | [`zenoh_engine`] | Zenoh |
//! | [`certificates`] | the certificates of a bridge, and their replacement |

pub mod bridge;
pub mod certificates;
pub mod connected_gauge;
pub mod engine;
pub mod frame;
pub mod journal;
pub mod place;
mod renewable_session;
pub mod session;
pub mod stream;
pub mod zenoh_engine;
