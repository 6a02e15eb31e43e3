//! The tasks of one run of the kubelet. When it is killed, all of them stop at once.

use std::future::Future;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A set of tasks that end together, as the threads of a process do.
#[derive(Clone, Debug, Default)]
pub(crate) struct Process {
    tasks: TaskTracker,
    killed: CancellationToken,
}

impl Process {
    /// Runs `work` until it ends or the process is killed.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let killed = self.killed.clone();
        self.tasks.spawn(async move {
            // The end of the process is checked first, so that an error that it causes has no effect.
            tokio::select! {
                biased;
                () = killed.cancelled() => {}
                () = work => {}
            }
        });
    }

    /// Runs `work` as a part of this process. Returns `None` if the process is killed first.
    pub(crate) async fn run<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.killed.cancelled() => None,
            done = work => Some(done),
        }
    }

    /// Ends every task, and returns when all of them have released their resources.
    pub(crate) async fn kill(&self) {
        self.killed.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// HTTP/2 streams belong to the process too.
impl<F> hyper::rt::Executor<F> for Process
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, work: F) {
        self.spawn(async move {
            let _ = work.await;
        });
    }
}
