//! Graceful shutdown by a token that SIGTERM and SIGINT cancel.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Returns a token that the first SIGTERM or SIGINT cancels. A second signal exits immediately.
///
/// # Errors
/// The signal handlers cannot be installed.
pub fn on_signal() -> io::Result<CancellationToken> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let token = CancellationToken::new();
    let cancel = token.clone();
    tokio::spawn(async move {
        for first in [true, false] {
            let name = tokio::select! {
                _ = term.recv() => "SIGTERM",
                _ = int.recv() => "SIGINT",
            };
            if !first {
                tracing::warn!(signal = name, "second signal: exiting immediately");
                std::process::exit(1);
            }
            tracing::info!(signal = name, "shutting down");
            cancel.cancel();
        }
    });
    Ok(token)
}
