//! The socket of a connection, whose first frames are inspected.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::oneshot;

use super::Authority;

const PREFACE_BYTES: usize = 24;
const FRAME_HEADER_BYTES: usize = 9;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;

/// A socket that signals when the server's SETTINGS have arrived, and that puts the authority into the first request.
#[derive(Debug)]
pub(crate) struct Tap {
    socket: UnixStream,
    /// Set when the server ends the connection, before the clients know.
    broken: Arc<AtomicBool>,
    greeting: Vec<u8>,
    greeted: Option<oneshot::Sender<()>>,
    /// Bytes that are not inspected yet. It is used until the placeholder was found and replaced by `authority`.
    held: Vec<u8>,
    preface_passed: bool,
    authority: Option<Authority>,
    /// Bytes that were inspected and are not written yet.
    ready: Vec<u8>,
}

impl Tap {
    pub(crate) fn new(
        socket: UnixStream,
        authority: Authority,
        broken: Arc<AtomicBool>,
    ) -> (Self, oneshot::Receiver<()>) {
        let (greeted, greeting) = oneshot::channel();
        let tap = Self {
            socket,
            broken,
            greeting: Vec::new(),
            greeted: Some(greeted),
            held: Vec::new(),
            preface_passed: false,
            authority: Some(authority),
            ready: Vec::new(),
        };
        (tap, greeting)
    }

    /// Inspects and passes on every complete frame, and all bytes once the authority was inserted.
    fn look_through(&mut self) {
        while let Some(authority) = &self.authority {
            if !self.preface_passed {
                if self.held.len() < PREFACE_BYTES {
                    return;
                }
                self.ready.extend(self.held.drain(..PREFACE_BYTES));
                self.preface_passed = true;
                continue;
            }
            let Some(header) = self.held.first_chunk::<FRAME_HEADER_BYTES>().copied() else { return };
            let [a, b, c, kind, rest @ ..] = header;
            let payload_bytes = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            let end = FRAME_HEADER_BYTES + payload_bytes;
            if self.held.len() < end {
                return;
            }
            let frame: Vec<u8> = self.held.drain(..end).collect();
            let replaced =
                (kind == HEADERS).then(|| authority.replace(&frame[FRAME_HEADER_BYTES..])).flatten();
            let Some(block) = replaced else {
                self.ready.extend(frame);
                continue;
            };
            let length = u32::try_from(block.len()).expect("a header block of some hundred bytes");
            self.ready.extend(&length.to_be_bytes()[1..]);
            self.ready.push(kind);
            self.ready.extend(rest);
            self.ready.extend(block);
            self.authority = None;
        }
        self.ready.append(&mut self.held);
    }

    fn write_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.ready.is_empty() {
            let written = ready!(Pin::new(&mut self.socket).poll_write(cx, &self.ready))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.ready.drain(..written);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Tap {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.socket).poll_read(cx, buffer));
        if read.is_err() || buffer.filled().len() == before {
            self.broken.store(true, Ordering::Release);
        }
        if self.greeted.is_some() {
            self.greeting.extend(&buffer.filled()[before..]);
            if self.greeting.len() >= FRAME_HEADER_BYTES && self.greeting[3] == SETTINGS {
                let _ = self.greeted.take().map(|greeted| greeted.send(()));
            }
        }
        Poll::Ready(read)
    }
}

impl AsyncWrite for Tap {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        // Accepted bytes are written before more are accepted, so no more is buffered than the socket's limit.
        ready!(self.write_ready(cx))?;
        self.held.extend(bytes);
        self.look_through();
        match self.write_ready(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Ready(Ok(bytes.len())),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.write_ready(cx))?;
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.write_ready(cx))?;
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
