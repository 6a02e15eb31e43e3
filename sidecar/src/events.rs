//! Descriptors of strangers are closed where nobody waits.
//!
//! A close may take as long as the maker of the descriptor likes: a socket that lingers, a file of a file system of their own,
//! and any connection in whose queue there is one of these.

use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shmesh_sys::socket::hang_up;
use tokio::sync::oneshot;

const STACK_BYTES: usize = 64 * 1024;
/// Until the next attempt to start a thread.
const NO_THREAD_PAUSE: Duration = Duration::from_millis(500);

/// Closes what a stranger has sent, in a thread of its own. Returns when it is closed.
///
/// Without a thread it waits: in a pod, another container can use up all process ids.
pub(crate) async fn close_elsewhere<T: Send + 'static>(strange: Vec<T>) {
    if strange.is_empty() {
        return;
    }
    // Never dropped on this thread: a thread that cannot be started drops what it was given, and the end of this process
    // closes the rest without lingering.
    let strange = Arc::new(Mutex::new(Some(ManuallyDrop::new(strange))));
    loop {
        let (done, closed) = oneshot::channel();
        let taken = Arc::clone(&strange);
        let close = move || {
            let strange = taken.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(strange.map(ManuallyDrop::into_inner));
            let _ = done.send(());
        };
        match std::thread::Builder::new().name("close".into()).stack_size(STACK_BYTES).spawn(close) {
            Ok(_) => return drop(closed.await),
            Err(error) => tracing::warn!(%error, "no thread to close descriptors: tries again"),
        }
        tokio::time::sleep(NO_THREAD_PAUSE).await;
    }
}

/// Ends a connection, and closes what waits in it.
pub(crate) async fn close_connection(connection: OwnedFd) {
    close_elsewhere(hang_up(connection).into_iter().collect()).await;
}
