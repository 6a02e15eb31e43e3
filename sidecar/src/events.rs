//! Descriptors of strangers are closed where nobody waits.
//!
//! A close may take as long as the maker of the descriptor likes: a socket that lingers, a file of a file system of their own,
//! and any connection in whose queue there is one of these.

use tokio::sync::oneshot;

const STACK_BYTES: usize = 64 * 1024;

/// Closes what a stranger has sent, in a thread of its own. Returns when it is closed.
pub(crate) async fn close_elsewhere<T: Send + 'static>(strange: Vec<T>) {
    if strange.is_empty() {
        return;
    }
    let (done, closed) = oneshot::channel();
    let thread = std::thread::Builder::new().name("close".into()).stack_size(STACK_BYTES).spawn(move || {
        drop(strange);
        let _ = done.send(());
    });
    match thread {
        Ok(_) => drop(closed.await),
        // It was closed here instead.
        Err(error) => tracing::warn!(%error, "no thread to close descriptors"),
    }
}
