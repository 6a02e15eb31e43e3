//! Connecting to a server: retries until the server speaks HTTP/2, or until the time limit.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use hyper::rt::Executor as _;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use super::tap::Tap;
use super::{Authority, Channel};
use crate::clock::Clock;
use crate::process::Process;

const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Connects to the server at `path`. Returns the error text of grpc-go if there is no connection within `limit`.
pub(crate) async fn dial(
    path: &Path,
    authority: &Authority,
    limit: Duration,
    clock: &Clock,
    process: &Process,
) -> Result<Channel, &'static str> {
    let attempts = async {
        let mut pause = FIRST_PAUSE;
        loop {
            if let Ok(channel) = attempt(path, authority, process).await {
                return channel;
            }
            clock.sleep(pause).await;
            pause = pause.mul_f64(1.6);
        }
    };
    clock.timeout(limit, attempts).await.ok_or("context deadline exceeded")
}

/// Runs hyper's tasks of one connection, which end when the connection is closed.
#[derive(Clone, Debug)]
struct Streams {
    process: Process,
    closed: CancellationToken,
}

impl<F> hyper::rt::Executor<F> for Streams
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, work: F) {
        let closed = self.closed.clone();
        self.process.spawn(async move {
            tokio::select! {
                biased;
                () = closed.cancelled() => {}
                _ = work => {}
            }
        });
    }
}

/// Connects once. Fails with the error text of Go.
pub(crate) async fn attempt(
    path: &Path,
    authority: &Authority,
    process: &Process,
) -> Result<Channel, String> {
    let socket = UnixStream::connect(path).await.map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::NotFound => "no such file or directory".to_owned(),
            io::ErrorKind::ConnectionRefused => "connection refused".to_owned(),
            _ => error.to_string(),
        };
        format!("dial unix {}: connect: {why}", path.display())
    })?;
    let broken = Arc::new(AtomicBool::new(false));
    let (tap, greeting) = Tap::new(socket, authority.clone(), Arc::clone(&broken));
    let closed = CancellationToken::new();
    let abandoned = closed.clone().drop_guard();
    let streams = Streams { process: process.clone(), closed };
    let (requests, connection) = hyper::client::conn::http2::handshake(streams.clone(), TokioIo::new(tap))
        .await
        .map_err(|error| error.to_string())?;
    let ended = CancellationToken::new();
    let over = ended.clone().drop_guard();
    streams.execute(async move {
        let _ = connection.await;
        drop(over);
    });
    // The server must send its SETTINGS: a listener that does not accept is not a server.
    greeting.await.map_err(|_| "error reading server preface: EOF".to_owned())?;
    let closed = abandoned.disarm();
    Ok(Channel::new(requests, authority.placeholder(), (closed, ended), broken))
}
