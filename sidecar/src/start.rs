//! Waits until the sidecar of this pod has started, which holds back the other containers until the links are there.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Longest wait for one answer, of which a busy sidecar gives one in milliseconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// More than the names and failures of all links have.
const ANSWER_BYTES: u64 = 64 << 10;
/// Shortest and longest pause between two questions.
const PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// Returns when each link was kept once, or has failed for ten seconds: as soon as `/startupz` says so.
///
/// # Errors
/// That is not so within the limit; the error names what is missing.
///
/// ```no_run
/// use std::time::Duration;
/// shmesh_sidecar::start::wait("127.0.0.1:9902".parse()?, Duration::from_secs(60))?;
/// # Ok::<(), anyhow::Error>(())
/// ```
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
