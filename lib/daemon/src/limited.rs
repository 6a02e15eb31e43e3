//! A TCP listener that limits the number and duration of connections, so that probes always get through.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep};

/// Maximum number of concurrent connections.
const MAX_CONNECTIONS: usize = 32;
/// Maximum duration of a connection. Scrapers simply reconnect.
const MAX_DURATION: Duration = Duration::from_secs(10);

pub(crate) struct LimitedListener {
    listener: TcpListener,
    places: Arc<Semaphore>,
    limit: Duration,
}

impl LimitedListener {
    pub(crate) fn new(listener: TcpListener) -> Self {
        Self::with(listener, MAX_CONNECTIONS, MAX_DURATION)
    }

    fn with(listener: TcpListener, places: usize, limit: Duration) -> Self {
        Self { listener, places: Arc::new(Semaphore::new(places)), limit }
    }
}

impl Listener for LimitedListener {
    type Io = LimitedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (LimitedStream, SocketAddr) {
        // At the limit, new connections wait in the kernel's backlog.
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        let (stream, from) = Listener::accept(&mut self.listener).await;
        (LimitedStream { stream, _place: place, end: Box::pin(sleep(self.limit)) }, from)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that fails with a timeout after its maximum duration.
pub(crate) struct LimitedStream {
    stream: TcpStream,
    _place: Option<OwnedSemaphorePermit>,
    end: Pin<Box<Sleep>>,
}

impl LimitedStream {
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.end.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for LimitedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for LimitedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// One client sends half a request, another one does not read; a probe must still get through.
    #[tokio::test]
    async fn slow_clients_are_disconnected() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let listener = LimitedListener::with(listener, 2, Duration::from_millis(100));
        let routes = Router::new().route("/livez", get(|| async { "ok" }));
        tokio::spawn(async move { axum::serve(listener, routes).await });
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET /livez HT").await.unwrap();
        let _silent = TcpStream::connect(address).await.unwrap();
        let mut probe = TcpStream::connect(address).await.unwrap();
        probe.write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        probe.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("ok"), "{answer}");
        let mut rest = Vec::new();
        let _ = slow.read_to_end(&mut rest).await;
    }
}
