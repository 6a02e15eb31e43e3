//! The end: SIGTERM or SIGINT cancels a token, on which everything that runs waits.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that the first SIGTERM or SIGINT cancels. A second one ends the process at once, as it would by default.
///
/// # Errors
/// The signals cannot be caught.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// let stop = shmesh_daemon::shutdown::on_signal()?;
/// assert!(!stop.is_cancelled(), "nobody has sent one");
/// # Ok(())
/// # }
/// ```
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
                tracing::warn!(signal = name, "told to end a second time: ends at once");
                std::process::exit(1);
            }
            tracing::info!(signal = name, "told to end");
            cancel.cancel();
        }
    });
    Ok(token)
}
