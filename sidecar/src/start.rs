//! Waits until the sidecar of this pod has started, which holds back the other containers until the links are there.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Time limit of one connection and of one answer. A busy sidecar answers in milliseconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Maximum size of an answer, which names all links and their failures.
const ANSWER_BYTES: u64 = 64 << 10;
/// Shortest and longest pause between two questions.
const PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// Returns when each link was kept once, or has failed for ten seconds: as soon as `/startupz` says so.
///
/// # Errors
/// The start is not over within the limit; the error names what is missing.
pub fn wait(admin: SocketAddr, limit: Duration) -> Result<()> {
    let start = Instant::now();
    loop {
        let missing = match ask(admin) {
            Ok(answer) if answer.starts_with("HTTP/1.1 200 ") => return Ok(()),
            Ok(answer) => {
                let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
                body.lines().collect::<Vec<_>>().join("; ")
            }
            Err(error) => format!("no answer from {admin}: {error}"),
        };
        let waited = start.elapsed();
        if waited >= limit {
            bail!("the sidecar has not started within {limit:?}: {missing}");
        }
        // An eighth longer than necessary at most, without many questions during a long start.
        std::thread::sleep((waited / 8).clamp(PAUSE.0, PAUSE.1));
    }
}

fn ask(admin: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&admin, ANSWER_LIMIT)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    stream.write_all(b"GET /startupz HTTP/1.1\r\nHost: shmesh\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(ANSWER_BYTES).read_to_string(&mut answer)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    /// Answers `count` questions with 503, and the others with 200.
    fn sidecar(count: usize) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for at in 0.. {
                let mut stream = listener.accept().unwrap().0;
                let _ = stream.read(&mut [0; 1024]).unwrap();
                let (status, body) = if at < count {
                    ("503 Service Unavailable", "waits for: link a (no room)\nwaits for: link b (no room)\n")
                } else {
                    ("200 OK", "ok\n")
                };
                write!(stream, "HTTP/1.1 {status}\r\nconnection: close\r\n\r\n{body}").unwrap();
            }
        });
        address
    }

    #[test]
    fn start_is_awaited() {
        let admin = sidecar(3);
        wait(admin, Duration::from_secs(60)).unwrap();
        // The address of an injected sidecar.
        wait((Ipv4Addr::UNSPECIFIED, admin.port()).into(), Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn timeout_names_missing_links() {
        let said = |limit| wait(sidecar(usize::MAX), limit).unwrap_err().to_string();
        let missing = "waits for: link a (no room); waits for: link b (no room)";
        for limit in [Duration::ZERO, Duration::from_millis(20)] {
            assert_eq!(said(limit), format!("the sidecar has not started within {limit:?}: {missing}"));
        }
    }

    #[test]
    fn sidecar_that_does_not_listen_is_named_by_its_address() {
        // Not a port that another test may get.
        let admin = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let said = wait(admin, Duration::ZERO).unwrap_err().to_string();
        assert!(said.contains("no answer from 127.0.0.1:1: "), "{said}");
    }
}
