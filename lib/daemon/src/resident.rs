//! Less resident memory of daemons, by unmapping code that they have used.

use std::time::Duration;

use tokio::time::sleep;

/// Longer than a start takes.
const AFTER_START: Duration = Duration::from_secs(5);

/// Long enough to cost nothing: a client of the API server uses much code when it connects, about every five minutes.
const INTERVAL: Duration = Duration::from_secs(60);

/// Unmaps the code that the daemon has used at its start, once. What it uses from then on is mapped again.
pub async fn unmap_startup_code() {
    sleep(AFTER_START).await;
    unmap().await;
}

/// Unmaps the code of the start, and every minute what was used since, for daemons that other events wake more often.
pub async fn unmap_code_each_minute() {
    unmap_startup_code().await;
    loop {
        sleep(INTERVAL).await;
        unmap().await;
    }
}

/// On a thread of its own, because the kernel looks at all pages of a link to count them.
async fn unmap() {
    match tokio::task::spawn_blocking(shmesh_sys::resident::unmap_code).await {
        Ok(Ok(bytes)) => tracing::trace!(bytes, "the code that was used is unmapped"),
        Ok(Err(error)) => tracing::debug!(%error, "the code that was used stays mapped"),
        Err(error) => tracing::debug!(%error, "the code that was used may stay mapped"),
    }
}
