//! Helpers of the tests: directories, and peers in processes of their own.
//!
//! The peers are those of the transport's tests, which execute the commands below.

#![allow(unsafe_code, reason = "buffers are addresses; each access says why it is allowed")]

use std::path::Path;
use std::time::Duration;

pub(crate) use shmesh_testing::{Peer, ipc_dir, is_root, until};

use shmesh::config::{LinkConfig, PoolConfig, PoolId};
use shmesh_nvipc_wire::{Buffers, Endpoint, Error, Message, Options};

/// Longer than any step takes on the slowest machine, so only a hang reaches it.
pub(crate) const HANGS: Duration = Duration::from_secs(120);

/// Small pools: 8 MSG buffers of 256 bytes, 4 DATA buffers of 4096, 2 large ones of 8192.
pub(crate) fn pools() -> [PoolConfig; PoolId::COUNT] {
    let mut pools = [PoolConfig::DISABLED; PoolId::COUNT];
    for (pool, (buf_size_bytes, pool_len)) in pools.iter_mut().zip([(256, 8), (4096, 4), (8192, 2)]) {
        *pool = PoolConfig { buf_size_bytes, pool_len };
    }
    pools
}

/// The pools of NVIPC's shipped configuration.
pub(crate) fn default_pools() -> [PoolConfig; PoolId::COUNT] {
    LinkConfig::nvipc_defaults("nvipc".parse().unwrap()).pools
}

pub(crate) fn options(dir: &Path) -> Options {
    Options::new().dir(dir).patience(HANGS)
}

/// Whether the kernel reports the end of a peer, which Linux does since 6.5. Tests of that are skipped on older kernels.
pub(crate) fn notices_deaths() -> bool {
    let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let notices = shmesh_sys::socket::peer_pidfd(&one).is_ok();
    if !notices {
        eprintln!("skipped: this kernel gives no pidfd of a peer");
    }
    notices
}

/// The byte at index `i` of a message with this id.
pub(crate) fn pattern(msg_id: i32, i: usize) -> u8 {
    u8::try_from((usize::try_from(msg_id).unwrap_or(0) * 31 + i * 7) % 251).unwrap()
}

/// Fills and sends one message.
pub(crate) fn send(
    link: &Endpoint,
    msg_id: i32,
    len: usize,
    data: Option<(PoolId, usize)>,
) -> Result<(), Error> {
    let buffers = link.allocate(data.map(|(pool, _)| pool))?;
    let data_len = data.map_or(0, |(_, len)| len);
    for i in 0..len {
        // SAFETY: the buffer is ours, and the tests ask for no more bytes than it has.
        unsafe { buffers.msg.add(i).write(pattern(msg_id, i)) };
    }
    for i in 0..data_len {
        // SAFETY: as above.
        unsafe { buffers.data.add(i).write(pattern(msg_id + 1, i)) };
    }
    let int = |len: usize| i32::try_from(len).unwrap();
    link.send(Message { msg_id, cell_id: msg_id % 20, msg_len: int(len), data_len: int(data_len), buffers })
}

/// Checks every byte of a message.
pub(crate) fn check(message: &Message) {
    let id = message.msg_id;
    assert_eq!(message.cell_id, id % 20);
    check_part(message.buffers.msg, message.msg_len, id);
    if !message.buffers.data.is_null() {
        check_part(message.buffers.data, message.data_len, id + 1);
    }
}

fn check_part(part: *mut u8, len: i32, id: i32) {
    for i in 0..usize::try_from(len).unwrap() {
        // SAFETY: ours until it is released, and the length is no more than the buffer's.
        let byte = unsafe { part.add(i).read() };
        assert_eq!(byte, pattern(id, i), "{id} at {i}");
    }
}

/// Receives one message, checks it and releases it.
pub(crate) fn receive(link: &Endpoint) -> Result<Option<i32>, Error> {
    let Some(message) = link.receive()? else { return Ok(None) };
    check(&message);
    link.release(message.buffers)?;
    Ok(Some(message.msg_id))
}

/// Counts the free MSG buffers by allocating them all.
pub(crate) fn count_free(link: &Endpoint, pool: Option<PoolId>) -> usize {
    let mut all = Vec::new();
    while let Ok(buffers) = link.allocate(pool) {
        all.push(buffers);
    }
    all.iter().for_each(|buffers| link.release(*buffers).unwrap());
    all.len()
}

/// The child process of [`Peer`].
pub(crate) fn serve() {
    let dir = std::env::var("SHMESH_DIR").unwrap();
    let mut link = None;
    let mut held: Vec<Buffers> = Vec::new();
    shmesh_testing::serve_by(|line| {
        obey(Path::new(&dir), &mut link, &mut held, line).unwrap_or_else(|error| format!("err {error}"))
    });
}

fn obey(
    dir: &Path,
    link: &mut Option<Endpoint>,
    held: &mut Vec<Buffers>,
    line: &str,
) -> Result<String, Error> {
    let mut words = line.split(' ');
    let verb = words.next().unwrap_or_default();
    let mut number = || words.next().and_then(|word| word.parse::<usize>().ok());
    let ok = || Ok("ok".to_owned());
    match verb {
        "create" => *link = Some(options(dir).create(line.split(' ').nth(1).unwrap(), pools())?),
        "attach" => *link = Some(options(dir).attach(line.split(' ').nth(1).unwrap())?),
        "close" => *link = None,
        // Ends without the goodbye, as NVIPC does.
        "forget" => std::mem::forget(link.take()),
        // The primary accepts its peer in a thread of its own, perhaps after the peer has attached.
        "meet" => until("the other end is here", || link.as_ref().unwrap().has_peer()),
        "notify" => link.as_ref().unwrap().notify()?,
        "wait" => return Ok(link.as_ref().unwrap().wait(Some(HANGS))?.to_string()),
        "send" => {
            let id = i32::try_from(number().unwrap()).unwrap();
            let len = number().unwrap();
            let data = number().and_then(|pool| PoolId::from_index(u32::try_from(pool).unwrap()));
            let data = data.zip(number());
            send(link.as_ref().unwrap(), id, len, data)?;
        }
        "receive" => {
            return Ok(receive(link.as_ref().unwrap())?.map_or("none".to_owned(), |id| id.to_string()));
        }
        // Receives a message and holds it.
        "keep" => match link.as_ref().unwrap().receive()? {
            None => return Ok("none".to_owned()),
            Some(message) => held.push(message.buffers),
        },
        "hold" => held.push(link.as_ref().unwrap().allocate(Some(PoolId::CpuData))?),
        "free" => return Ok(count_free(link.as_ref().unwrap(), None).to_string()),
        // Sends back this many messages.
        "echo" => {
            let link = link.as_ref().unwrap();
            let mut left = number().unwrap();
            while left > 0 {
                while !link.wait(Some(HANGS))? {}
                while let Some(message) = link.receive()? {
                    check(&message);
                    link.send(message)?;
                    left -= 1;
                }
                link.notify()?;
            }
        }
        _ => panic!("unknown command: {line}"),
    }
    ok()
}
