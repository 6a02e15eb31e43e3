//! Orders of peers about device memory.

use shmesh::client::SessionEvent;
use shmesh::config::PoolId;
use shmesh::device::{BareTgid, DeviceKey, DevicePool, ExportFlags, HostMemory, PoolMemory, Session};
use shmesh::{Error, Link};

/// The pool `cuda_data` of a peer's link, in device memory of this kind.
pub struct OnDevice<M: PoolMemory>(pub Option<DevicePool<M>>);

impl<M: PoolMemory> OnDevice<M> {
    pub fn obey(
        &mut self,
        link: &Link,
        words: &[&str],
        make: impl FnOnce(u64) -> std::io::Result<M>,
    ) -> shmesh::Result<String> {
        let text_of = |message: &shmesh::Message<'_>, pool: &DevicePool<M>| {
            let data = pool.data(message)?;
            let mut bytes = vec![0; data.len()];
            data.copy_to_host(0, &mut bytes).expect("copied");
            Ok(format!("{} {}", message.msg_id(), String::from_utf8_lossy(&bytes)))
        };
        let loan = |pool: &DevicePool<M>, text: &str| {
            let mut loan = link.loan_with(PoolId::CudaData)?;
            let mut data = pool.resize_data(&mut loan, text.len())?;
            data.copy_to_device(0, text.as_bytes()).expect("copied");
            Ok::<_, Error>(loan)
        };
        match (words, &self.0) {
            (["open"], _) => {
                let mut made = "found";
                let pool = link.device_pool(PoolId::CudaData, |size| {
                    made = "made";
                    make(size)
                })?;
                self.0 = Some(pool);
                return Ok(made.to_owned());
            }
            (["close"], _) => self.0 = None,
            (["send", id, text], Some(pool)) => {
                loan(pool, text)?.with_msg_id(id.parse().expect("an id")).send()?;
            }
            (["receive"], Some(pool)) => {
                return link.receive()?.map_or(Ok("none".to_owned()), |message| text_of(&message, pool));
            }
            // Sends until it is killed; the text of a message contains its id.
            (["pump"], Some(pool)) => {
                for id in 0.. {
                    loop {
                        let sent = loan(pool, &format!("payload-{id}"))
                            .and_then(|loan| Ok(loan.with_msg_id(id).send()?));
                        match sent {
                            Ok(()) => break,
                            Err(error) if error.is_retryable() => std::thread::yield_now(),
                            Err(error) => return Err(error),
                        }
                    }
                }
            }
            // Keeps it until the process is killed.
            (["hold", text], Some(pool)) => std::mem::forget(loan(pool, text)?),
            (["hold-message"], Some(_)) => std::mem::forget(link.receive()?.expect("a message")),
            _ => panic!("no such order: {words:?}, or the pool is not open"),
        }
        Ok("ok".to_owned())
    }
}

/// A key as text for tests: its characters, without the zero.
pub fn key_text(key: &DeviceKey) -> String {
    key.as_bytes()[..64].iter().map(|&byte| char::from(byte)).collect()
}

pub fn key_of(text: &str) -> DeviceKey {
    let bytes: Vec<u8> = text.bytes().chain([0]).collect();
    DeviceKey::from_wild(&bytes).expect("64 characters")
}

/// An event as text for tests.
pub fn event_text(happened: Option<SessionEvent>) -> String {
    let text = match happened {
        None => "none",
        Some(SessionEvent::PeerDied(tgid)) => return format!("died {tgid}"),
        Some(SessionEvent::RegionLost(_)) => "lost",
        Some(SessionEvent::ExporterClosing(_)) => "closing",
        Some(SessionEvent::Unused(_)) => "unused",
        Some(SessionEvent::Admit(_)) => "admit",
    };
    text.to_owned()
}

/// A session with the broker, with its imports and exports.
#[derive(Default)]
pub(crate) struct Sessions {
    session: Option<Session>,
    /// Imported memory, by the key as text.
    imported: Vec<(String, std::sync::Arc<HostMemory>)>,
}

impl Sessions {
    /// Executes one order about device memory.
    pub(crate) fn obey(&mut self, words: &[&str]) -> shmesh::Result<String> {
        if words == ["connect"] {
            let dir = std::env::var_os("SHMESH_DIR").expect("the directory");
            self.session = Some(Session::connect(dir, "link")?);
            return Ok("ok".to_owned());
        }
        if words == ["drop"] {
            self.session = None;
            return Ok("ok".to_owned());
        }
        let session = self.session.as_mut().expect("connected");
        match *words {
            ["tgid"] => return Ok(session.bare_tgid()?.0.to_string()),
            ["export", text, flags] => {
                let memory = HostMemory::new(4096).expect("memory");
                memory.write_at(0, text.as_bytes()).expect("written");
                return Ok(key_text(
                    &session.export_key(memory, ExportFlags(flags.parse().expect("flags")))?,
                ));
            }
            ["admit", key, tgid] => {
                session.set_import_pid(&key_of(key), &[BareTgid(tgid.parse().expect("a tgid"))])?
            }
            ["admit-account", key, account] => session.admit(&key_of(key), &[], &[account])?,
            ["import", key] => {
                let memory = session.import_by_key(&key_of(key))?;
                let mut bytes = [0; 8];
                memory.read_at(0, &mut bytes).expect("read");
                self.imported.push((key.to_owned(), memory));
                return Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned());
            }
            ["read", key] => {
                let (_, memory) =
                    self.imported.iter().find(|(imported, _)| imported == key).expect("imported");
                let mut bytes = [0; 8];
                memory.read_at(0, &mut bytes).expect("read");
                return Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned());
            }
            ["close", key] => {
                self.imported.retain(|(imported, _)| imported != key);
                session.close(&key_of(key))?;
            }
            ["force", key] => session.force_close(&key_of(key))?,
            ["event"] => {
                return Ok(event_text(session.event()?));
            }
            _ => panic!("no such order: {words:?}"),
        }
        Ok("ok".to_owned())
    }
}
