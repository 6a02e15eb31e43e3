//! Links between processes and threads, through the public API.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod async_broadcast;
mod async_link;
mod bad_input;
mod broadcast;
mod descriptors;
mod device_pool;
mod events;
mod examples;
mod exchange;
mod latency;
mod notification;
mod owned;
mod request;
mod restart;
mod tap;
mod threads;
mod truncation;
mod two_mappings;
mod typed;
mod typed_request;
mod ui;

shmesh_testing::peer_process!(shmesh_testing::serve);
