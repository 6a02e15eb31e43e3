//! Typed requests: a client asks for samples and gets batches of numbers; a client with other types is refused.
//!
//! `cargo run -p shmesh --example typed_request`. Server and client are threads here and could as well be processes: a client
//! attaches by the link's name.

use std::error::Error;
use std::time::Duration;

use shmesh::config::LinkConfig;
use shmesh::{ErrorKind, LinkOptions, Result, Side, TypedRequests};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// No padding, and any bytes are a valid value: the derives check both.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Query {
    batches: u32,
    batch_len: u32,
}

/// The names of the types with their versions, which change with their fields.
const REQUEST: &str = "samples.Query/1";
const REPLY: &str = "samples.Batch/1";
/// How long the server waits for a client that takes no replies.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) fn main() -> std::result::Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let options = LinkOptions::new().dir(dir.path()); // /dev/shm unless named
    let mut config = LinkConfig::new("samples".parse()?);
    config.request_window = 8; // in YAML: `requests: { window: 8 }`
    let server = options.create(&config)?.typed_requests_as::<Query, [f32]>(REQUEST, REPLY)?;
    let client = options.attach("samples", Side::Secondary)?;
    let client = client.typed_requests_as::<Query, [f32]>(REQUEST, REPLY)?;
    let server = std::thread::spawn(move || serve(&server));

    // An iterator that waits for each reply. It ends after the last one.
    let mut received = 0;
    for batch in client.request(&Query { batches: 20, batch_len: 4_000 })? {
        let batch = batch?;
        assert!(batch.value().iter().all(|&sample| sample == 0.25));
        received += batch.value().len();
    }
    assert_eq!(received, 80_000);
    println!("{received} samples");
    assert!(server.join().expect("it does not panic")?);

    // A program of another version learns it at once.
    let newer = options.attach("samples", Side::Secondary)?;
    let refused = newer.typed_requests_as::<Query, [f32]>(REQUEST, "samples.Batch/2");
    println!("{}", refused.err().ok_or("another type")?);
    Ok(())
}

/// Answers one request with a stream. Returns `false` if the client gave it up, or takes no replies.
fn serve(link: &TypedRequests<Query, [f32]>) -> Result<bool> {
    loop {
        link.wait_request(None)?;
        let Some(mut request) = link.receive_request()? else { continue };
        let Query { batches, batch_len } = request.copied();
        for left in (0..batches).rev() {
            let mut loan = request.loan_slice(batch_len as usize)?; // written where it is read
            loan.value_mut()?.fill(0.25);
            loop {
                let sent = if left == 0 { request.reply_loan(loan) } else { request.stream_loan(loan) };
                match sent {
                    Ok(true) => break,
                    Ok(false) => return Ok(false),
                    // The client is slow.
                    Err(failed) if matches!(failed.error.kind(), ErrorKind::RepliesFull { .. }) => {
                        loan = failed.loan;
                        // A server with other clients must not wait for one that takes no replies.
                        if !request.wait_room(Some(PATIENCE))? {
                            return Ok(false);
                        }
                    }
                    Err(failed) => return Err(failed.error),
                }
            }
        }
        return Ok(true);
    }
}
