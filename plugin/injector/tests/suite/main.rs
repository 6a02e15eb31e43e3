//! Pods in and out, as a library and behind a webhook.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod cluster;
mod pods;
mod policy;
mod random;
mod support;
mod webhook;
