//! The plugin as a process: the identity service in real namespaces, the device plugin beside a kubelet double, and
//! the chart.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod chart;
mod dra;
mod hostile;
mod injection;
mod kubelet;
mod lingering;
mod namespaces;
mod prepare;
mod support;

/// The entry point of other processes of the tests. As a test it does nothing.
#[test]
fn helper() {
    match std::env::var(support::ROLE).as_deref() {
        Ok("asks") => support::asks(),
        Ok("client") => namespaces::client(),
        Ok("sidecar") => namespaces::sidecar(),
        Ok("forks") => namespaces::forks(),
        Ok("arena") => namespaces::arena(),
        _ => {}
    }
}
