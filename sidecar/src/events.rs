//! Closing descriptors of clients, which can block, outside the thread of the event loop.

use std::os::fd::OwnedFd;
use std::time::Duration;

use shmesh_sys::closing::Lingering;
use shmesh_sys::socket::hang_up;
use tokio::sync::{Semaphore, oneshot};

const STACK_BYTES: usize = 64 * 1024;
/// Pause before the next attempt to start a thread or a process.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Permits of sessions to close descriptors. Each takes a thread and a child process for some milliseconds, and so
/// memory, which must not add up if many sessions send strange descriptors at once.
static SESSIONS: Semaphore = Semaphore::const_new(2);

/// Closes descriptors that a session has sent. Returns when they are closed. Waits for other sessions, but not for a
/// close that blocks.
pub(crate) async fn close_foreign(strange: impl Into<Lingering>) {
    let strange = strange.into();
    if !strange.is_empty() {
        // The semaphore is never closed.
        let _permit = SESSIONS.acquire().await;
        close_now(strange).await;
    }
}

/// Closes descriptors without waiting for a permit. Returns when they are closed, within some 20 ms.
///
/// While no thread or process can be started, it retries: in a pod, another container can use up all process ids.
pub(crate) async fn close_now(strange: impl Into<Lingering>) {
    let mut strange = strange.into();
    while !strange.is_empty() {
        let (done, closed) = oneshot::channel();
        // If a thread cannot be started, its closure is dropped, which would leak the descriptors. So they are passed
        // to the thread afterwards.
        let (give, take) = std::sync::mpsc::channel::<Lingering>();
        let close = move || {
            if let Ok(mut strange) = take.recv() {
                let result = strange.close();
                let _ = done.send((strange, result));
            }
        };
        let started = std::thread::Builder::new().name("close".into()).stack_size(STACK_BYTES).spawn(close);
        let failed = match started {
            Ok(_) => {
                let _ = give.send(strange);
                match closed.await {
                    Ok((_, Ok(()))) | Err(_) => return,
                    Ok((rest, Err(error))) => {
                        strange = rest;
                        error
                    }
                }
            }
            Err(error) => error,
        };
        tracing::warn!(error = %failed, "cannot close descriptors of a client: no thread or process can be started; retrying");
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

/// Ends a connection, and closes what its queue contains.
pub(crate) async fn close_connection(connection: OwnedFd) {
    if let Some(unread) = hang_up(connection) {
        close_foreign(unread).await;
    }
}
