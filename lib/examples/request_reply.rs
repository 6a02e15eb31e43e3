//! Request and reply: two clients ask one server, and each gets its own answers.
//!
//! `cargo run --example request_reply`. Server and clients are threads here and could as well be processes: a client attaches by
//! the link's name.

use std::time::{Duration, Instant};

use shmesh::config::LinkConfig;
use shmesh::{ErrorKind, Link, LinkOptions, Request, Result, Side};

/// Message ids of the requests.
const SQUARE: i32 = 1;
const COUNT_DOWN: i32 = 2;
const STOP: i32 = 3;
/// How long the server waits for a client that takes no replies.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let options = LinkOptions::new().dir(dir.path()); // /dev/shm unless named
    let mut config = LinkConfig::new("numbers".parse()?);
    config.request_window = 8; // in YAML: `requests: { window: 8 }`
    let server = options.create(&config)?;
    let server = std::thread::spawn(move || serve(&server));

    let clients: Vec<_> = (1..=2_u64)
        .map(|n| {
            let link = options.attach("numbers", Side::Secondary)?;
            Ok(std::thread::spawn(move || ask(&link, n)))
        })
        .collect::<Result<_>>()?;
    for client in clients {
        println!("{}", client.join().expect("it does not panic")?);
    }

    let link = options.attach("numbers", Side::Secondary)?;
    let mut pending = link.request_inline(STOP, 0, b"")?;
    pending.wait(None)?;
    server.join().expect("it does not panic")?;
    Ok(())
}

fn number(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Answers until a client asks it to stop.
fn serve(link: &Link) -> Result<()> {
    loop {
        link.wait_request(None)?;
        let Some(mut request) = link.receive_request()? else { continue };
        let n = number(request.msg());
        match request.msg_id() {
            SQUARE => {
                // Larger answers go into a buffer, which the client reads where it is.
                let mut loan = link.loan()?;
                loan.resize_msg(8)?.copy_from_slice(&(n * n).to_le_bytes());
                let mut unsent = Some(loan);
                send(&mut request, |request| match unsent.take() {
                    Some(loan) => request.reply(loan).map_err(|failed| {
                        unsent = Some(failed.loan);
                        failed.error
                    }),
                    None => Ok(false),
                })?;
            }
            // A stream: several replies, the last of which is marked.
            COUNT_DOWN => {
                for left in (0..=n).rev() {
                    let (id, bytes) = (COUNT_DOWN, left.to_le_bytes());
                    let is_sent = send(&mut request, |request| match left {
                        0 => request.reply_inline(id, 0, &bytes),
                        _ => request.stream_inline(id, 0, &bytes),
                    })?;
                    if !is_sent {
                        break;
                    }
                }
            }
            STOP => return request.reply_inline(STOP, 0, b"").map(drop),
            // Dropped without a reply: the client gets an error.
            _ => {}
        }
    }
}

/// Sends a reply, and waits for a slow client. Returns `false` if the client gave the request up or takes no replies: then
/// the request is dropped, because this server has others to answer.
fn send<'a>(
    request: &mut Request<'a>,
    mut attempt: impl FnMut(&mut Request<'a>) -> Result<bool>,
) -> Result<bool> {
    let start = Instant::now();
    loop {
        match attempt(request) {
            Err(error) if matches!(error.kind(), ErrorKind::RepliesFull { .. }) => {
                let left = PATIENCE.saturating_sub(start.elapsed());
                if left.is_zero() || !request.wait_room(Some(left))? {
                    return Ok(false);
                }
            }
            sent => return sent,
        }
    }
}

fn ask(link: &Link, n: u64) -> Result<String> {
    // Several requests can be pending. Their replies come in any order.
    let mut square = link.request_inline(SQUARE, 0, &n.to_le_bytes())?;
    let mut count = link.request_inline(COUNT_DOWN, 0, &(10 * n).to_le_bytes())?;
    let mut received = Vec::new();
    while !count.is_over() {
        // With a timeout, so that a server that hangs is detected. A server that dies is an error: `ServerGone`.
        if let Some(reply) = count.wait(Some(Duration::from_secs(60)))? {
            received.push(number(reply.msg()));
        }
    }
    assert_eq!(received, (0..=10 * n).rev().collect::<Vec<_>>());
    let square = square.wait(None)?.map_or(0, |reply| number(reply.msg()));
    assert_eq!(square, n * n);
    Ok(format!("{n} squared is {square}; counted down from {}", 10 * n))
}
