//! Peers with device memory, whose kind comes from an environment variable.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use shmesh::client::Client;
use shmesh::config::PoolId;
use shmesh::device::{
    AscendDevice, AscendMemory, BareTgid, CudaDevice, CudaLegacyMemory, CudaMemory, CudaStream, DeviceMemory,
    ExportFlags, PageLocked, Session,
};
use shmesh::{Link, LinkOptions, Side};

use shmesh_testing::{HANGS, OnDevice, Peer, event_text, key_of, key_text, kind_of, until};

/// The variable that names the kind of memory.
const MECHANISM: &str = "PEER_MECHANISM";
/// The variable with the user id to change to.
pub(crate) const USER: &str = "PEER_USER";

/// Memory of any mechanism.
trait Memory: DeviceMemory {
    fn make(size: u64) -> io::Result<Self>;
    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Runs an order that only this mechanism supports.
    fn other(_order: &[&str], _imported: Option<&Self>) -> io::Result<String> {
        panic!("unknown order")
    }
}

impl Memory for CudaMemory {
    fn make(size: u64) -> io::Result<Self> {
        Self::new(&CudaDevice::all()?[0], size)
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_at(offset, bytes)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_at(offset, bytes)
    }

    fn other(order: &[&str], imported: Option<&Self>) -> io::Result<String> {
        match *order {
            ["misuse"] => crate::vendors::cuda::misuse(),
            ["contexts"] => crate::vendors::cuda::contexts(),
            ["work"] => crate::vendors::cuda::work(),
            // Makes the stream wait for the word after the text, and then copy the text.
            ["follow", value] => {
                let memory = imported.expect("imported");
                let stream = CudaStream::new(memory.device())?;
                memory.timeline(WORD)?.wait(&stream, value.parse().unwrap())?;
                stream.synchronize()?;
                let mut text = [0; 8];
                memory.read_at(0, &mut text)?;
                return Ok(String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned());
            }
            ["keep-context"] => std::mem::forget(CudaStream::new(&CudaDevice::all()?[0])?),
            ["free"] => return Ok(CudaDevice::all()?[0].memory_info()?.0.to_string()),
            _ => panic!("unknown order: {order:?}"),
        }
        Ok("ok".to_owned())
    }
}

/// Offset of the word of a timeline.
pub(crate) const WORD: u64 = 4096;

impl Memory for CudaLegacyMemory {
    fn make(size: u64) -> io::Result<Self> {
        Self::new(&CudaDevice::all()?[0], size)
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_at(offset, bytes)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_at(offset, bytes)
    }

    fn other(order: &[&str], _imported: Option<&Self>) -> io::Result<String> {
        match *order {
            // The memory lives as long as this process.
            ["handle"] => {
                let memory = std::mem::ManuallyDrop::new(Self::make(1 << 20)?);
                Ok(memory.handle().iter().map(|byte| format!("{byte:02x}")).collect())
            }
            ["open", handle, size] => {
                let digits = handle.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
                let bytes: Vec<_> = digits.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect();
                Ok(Self::import(size.parse().unwrap(), None, &bytes)?.size().to_string())
            }
            _ => panic!("unknown order: {order:?}"),
        }
    }
}

impl Memory for AscendMemory {
    fn make(size: u64) -> io::Result<Self> {
        Self::new(&AscendDevice::all()?[0], size)
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_at(offset, bytes)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_at(offset, bytes)
    }

    fn other(order: &[&str], _imported: Option<&Self>) -> io::Result<String> {
        match *order {
            ["misuse"] => crate::vendors::ascend::misuse(),
            ["contexts"] => crate::vendors::ascend::contexts(),
            // Imports by a vendor key that it was not given.
            ["steal", key] => {
                let key: Vec<u8> = key.bytes().chain([0]).collect();
                return Ok(text_of(&Self::import(1 << 20, None, &key)?));
            }
            _ => panic!("unknown order: {order:?}"),
        }
        Ok("ok".to_owned())
    }
}

pub(crate) fn serve() {
    match std::env::var(MECHANISM).as_deref() {
        Ok("cuda") => obey::<CudaMemory>(),
        Ok("legacy") => obey::<CudaLegacyMemory>(),
        Ok("ascend") => obey::<AscendMemory>(),
        Ok("pool") => obey_with_a_pool(),
        Ok(other) => panic!("unknown mechanism: {other}"),
        Err(_) => shmesh_testing::serve(),
    }
}

/// Runs a peer on a link whose `cuda_data` is GPU memory.
fn obey_with_a_pool() {
    // The pool is dropped before its link.
    let (mut pool, mut link) = (OnDevice::<CudaMemory>(None), None::<Link>);
    shmesh_testing::serve_by(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        let obeyed = match (&words[..], &link) {
            (["attach", side], _) => {
                let side = if *side == "primary" { Side::Primary } else { Side::Secondary };
                let attached = LinkOptions::new().timeout(HANGS).attach("link", side);
                attached.map(|attached| {
                    link = Some(attached);
                    "ok".to_owned()
                })
            }
            (["pool", rest @ ..], Some(link)) => {
                pool.obey(link, rest, |size| CudaMemory::new(&CudaDevice::all()?[0], size))
            }
            (["timeline", "write", value], Some(link)) => {
                let pool = pool.0.as_ref().expect("open");
                let stream = CudaStream::new(pool.memory().device()).expect("a stream");
                let written = pool.timeline(link.side()).expect("a word");
                written.write(&stream, value.parse().expect("a number")).expect("written");
                // Otherwise the next write, by another stream, could overtake this one.
                stream.synchronize().expect("written");
                Ok("ok".to_owned())
            }
            (["timeline", "wait", value], Some(link)) => {
                let pool = pool.0.as_ref().expect("open");
                let stream = CudaStream::new(pool.memory().device()).expect("a stream");
                let side = if link.side() == Side::Primary { Side::Secondary } else { Side::Primary };
                let waited = pool.timeline(side).expect("a word");
                waited.wait(&stream, value.parse().expect("a number")).expect("waits");
                stream.synchronize().expect("went on");
                Ok("ok".to_owned())
            }
            (["lock", pool], Some(link)) => {
                let pool = PoolId::ALL.into_iter().find(|id| id.name() == *pool).expect("a pool");
                let gpu = &CudaDevice::all().expect("a GPU")[0];
                PageLocked::of(gpu, link, pool).map(|locked| {
                    let twice = PageLocked::of(gpu, link, pool).unwrap_err();
                    let bytes = locked.bytes();
                    drop(locked);
                    let again = PageLocked::of(gpu, link, pool).is_ok();
                    format!("{bytes} {} {again}", kind_of(&twice))
                })
            }
            _ => panic!("unknown order: {line}"),
        };
        obeyed.unwrap_or_else(|error| format!("err {} {error}", kind_of(&error)))
    });
}

struct Obedient<M: DeviceMemory> {
    session: Option<Session<M>>,
    imported: HashMap<String, Arc<M>>,
}

fn obey<M: Memory>() {
    let mut obedient = Obedient::<M> { session: None, imported: HashMap::new() };
    shmesh_testing::serve_by(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        obedient.obey(&words).unwrap_or_else(|error| {
            // Some errors have the driver's error as their source.
            let mut text = format!("err {} {error}", kind_of(&error));
            let mut cause = std::error::Error::source(&error);
            while let Some(next) = cause {
                text = format!("{text}: {next}");
                cause = next.source();
            }
            text
        })
    });
}

fn system(error: &io::Error) -> String {
    format!("err System {error}")
}

impl<M: Memory> Obedient<M> {
    fn obey(&mut self, words: &[&str]) -> shmesh::Result<String> {
        if words == ["connect"] {
            if let Some(user) = std::env::var(USER).ok().and_then(|user| user.parse().ok()) {
                // Loads the libraries first: that user may not be able to read the build directory.
                let _ = (CudaDevice::all(), AscendDevice::all());
                let user = nix::unistd::Uid::from_raw(user);
                nix::unistd::setresuid(user, user, user).expect("another user");
            }
            let dir = std::env::var_os("SHMESH_DIR").expect("the directory");
            self.session = Some(Session::connect(dir, "link")?);
            return Ok("ok".to_owned());
        }
        let imported = self.imported.values().next().map(Arc::as_ref);
        if let ["other", rest @ ..] = words {
            return Ok(M::other(rest, imported).unwrap_or_else(|error| system(&error)));
        }
        let session = self.session.as_mut().expect("connected");
        match *words {
            ["tgid"] => return Ok(session.bare_tgid()?.0.to_string()),
            ["export", text, flags] => {
                let memory = match M::make(1 << 20) {
                    Ok(memory) => memory,
                    Err(error) => return Ok(system(&error)),
                };
                memory.write(0, text.as_bytes()).expect("written");
                let flags = ExportFlags(flags.parse().expect("flags"));
                return Ok(key_text(&session.export_key(memory, flags)?));
            }
            ["admit", key, tgid] => {
                session.set_import_pid(&key_of(key), &[BareTgid(tgid.parse().expect("a tgid"))])?;
            }
            ["import", key] => {
                let memory = session.import_by_key(&key_of(key))?;
                let text = text_of(&*memory);
                self.imported.insert(key.to_owned(), memory);
                return Ok(text);
            }
            ["read", key] => return Ok(text_of(&*self.imported[key])),
            ["write", key, text] => {
                self.imported[key].write(0, text.as_bytes()).expect("written");
            }
            ["write-word", key, value] => {
                let value: u64 = value.parse().expect("a number");
                self.imported[key].write(WORD, &value.to_le_bytes()).expect("written");
            }
            ["size", key] => return Ok(self.imported[key].size().to_string()),
            ["close", key] => {
                self.imported.remove(key);
                session.close(&key_of(key))?;
            }
            ["force", key] => session.force_close(&key_of(key))?,
            ["end"] => {
                self.imported.clear();
                self.session = None;
            }
            ["event"] => {
                return Ok(event_text(session.event()?));
            }
            _ => panic!("unknown order: {words:?}"),
        }
        Ok("ok".to_owned())
    }
}

fn text_of(memory: &impl Memory) -> String {
    let mut bytes = [0; 8];
    match memory.read(0, &mut bytes) {
        Ok(()) => String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned(),
        Err(error) => system(&error),
    }
}

/// Namespaces of peers: from all of the test's own to none of them.
pub(crate) const NAMESPACES: [&[&str]; 3] = [
    &[],
    &["--pid", "--fork", "--kill-child", "--mount-proc"],
    &["--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--ipc", "--net", "--uts", "--cgroup"],
];

/// Starts a peer with this memory and environment, in these namespaces.
pub(crate) fn start(dir: &Path, mechanism: &str, variables: &[(&str, &str)], namespaces: &[&str]) -> Peer {
    let this = std::env::current_exe().expect("the path of this test");
    let mut command = if namespaces.is_empty() {
        Command::new(this)
    } else {
        let mut unshare = Command::new("unshare");
        unshare.args(namespaces).arg(this);
        unshare
    };
    command.env(MECHANISM, mechanism).envs(variables.iter().copied());
    Peer::start_by(command, dir)
}

/// Number of imports in the broker's tables, including pending ones.
pub(crate) fn imports(dir: &Path) -> u32 {
    let processes = Client::connect(dir, "link").unwrap().processes().unwrap().expect("a sidecar");
    processes.processes.iter().map(|process| process.imports).sum()
}

/// Copies a fake library to `path`, with one of its functions renamed.
pub(crate) fn library_without(library: &Path, function: &str, path: &Path) -> String {
    let mut bytes = std::fs::read(library).unwrap();
    let name = format!("{function}\0").into_bytes();
    let places: Vec<_> = (0..bytes.len() - name.len()).filter(|at| bytes[*at..].starts_with(&name)).collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at] = b'x';
    }
    std::fs::write(path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Lets `importer` import while `exporter` reads its events, which a driver with a whitelist requires.
pub(crate) fn import(importer: &mut Peer, exporter: &mut Peer, key: &str) -> String {
    importer.order(&format!("import {key}"));
    let mut answer = None;
    until("the import is answered", || {
        assert_eq!(exporter.ask("event"), "none");
        answer = importer.answered();
        answer.is_some()
    });
    answer.expect("it is there")
}
