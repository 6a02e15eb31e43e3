//! Device memory shared with exactly the processes it was meant for: the five calls of the Ascend runtime, over any
//! mechanism, brokered by the sidecar.
//!
//! | call | here |
//! |---|---|
//! | `aclrtDeviceGetBareTgid` | [`Session::bare_tgid`] |
//! | `aclrtIpcMemGetExportKey` | [`Session::export_key`] |
//! | `aclrtIpcMemSetImportPid` | [`Session::set_import_pid`] |
//! | `aclrtIpcMemImportByKey` | [`Session::import_by_key`] |
//! | `aclrtIpcMemClose` | [`Session::close`] |
//!
//! The key is a name and no secret that admits anybody: importers are admitted by what the kernel says of them. The rule
//! that importers close before the exporter is enforced: until then the exporter's `close` is
//! [`Busy`](crate::ErrorKind::Busy), and its memory stays.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | [`Session`], and the trait [`DeviceMemory`] that mechanisms implement |
//! | `host.rs` | [`HostMemory`]: a memfd in the place of a device's memory |
//! | `cuda/` | [`CudaMemory`] and [`CudaLegacyMemory`]: memory of NVIDIA GPUs |
//! | `ascend/` | [`AscendMemory`]: memory of Ascend NPUs |
//! | `pool.rs` | [`DevicePool`]: a link's pool in device memory |
//! | `library.rs` | vendors' libraries, loaded when they are first needed |

mod ascend;
mod cuda;
mod host;
mod library;
mod pool;

use std::collections::{HashMap, HashSet};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use shmesh_proto::broker::{
    self, Ack, Admit, Close, ExportKey, ImportByKey, Mechanism, SetImportPid, Stands, event::Happened, reply,
    request,
};
pub use shmesh_proto::key::DeviceKey;
use shmesh_proto::key::KEY_BYTES;

use crate::client::Client;
use crate::error::{Error, ErrorKind, Result};
pub use ascend::{AscendDevice, AscendMemory};
pub use cuda::{CudaDevice, CudaLegacyMemory, CudaMemory, CudaStream, CudaTimeline, DeviceUuid, PageLocked};
pub use host::HostMemory;
pub use pool::{DeviceBuffer, DevicePool, PoolMemory};

/// A process, by its thread-group id in the outermost pid namespace. Only [`Session::bare_tgid`] knows one's own: a number
/// from `getpid` is another in each container.
///
/// ```
/// use shmesh::device::BareTgid;
/// assert_eq!(BareTgid(4711).0, 4711);
/// ```
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct BareTgid(pub i32);

/// Who may import.
///
/// ```
/// use shmesh::device::ExportFlags;
/// assert_eq!((ExportFlags::DEFAULT.0, ExportFlags::DISABLE_PID_VALIDATION.0), (0, 1));
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ExportFlags(pub u64);

impl ExportFlags {
    /// Those that [`Session::set_import_pid`] admits.
    ///
    /// ```
    /// assert_eq!(shmesh::device::ExportFlags::default(), shmesh::device::ExportFlags::DEFAULT);
    /// ```
    pub const DEFAULT: Self = Self(0);
    /// Whoever has the key: only where the operator's policy permits it.
    ///
    /// ```
    /// use shmesh::device::ExportFlags;
    /// assert_ne!(ExportFlags::DISABLE_PID_VALIDATION, ExportFlags::DEFAULT);
    /// ```
    pub const DISABLE_PID_VALIDATION: Self = Self(1);
}

/// Memory that can be exported and imported: what a mechanism implements.
///
/// ```
/// use shmesh::device::{DeviceMemory, HostMemory};
/// let memory = HostMemory::new(4096)?;
/// assert_eq!(memory.size(), 4096);
/// # Ok::<(), std::io::Error>(())
/// ```
pub trait DeviceMemory: Sized {
    /// Its mechanism.
    const MECHANISM: Mechanism;

    /// Bytes.
    fn size(&self) -> u64;

    /// The descriptor that travels, for mechanisms that have one.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// The vendor's key or handle, for mechanisms that have one.
    fn handle(&self) -> Vec<u8>;

    /// Maps what was imported.
    ///
    /// # Errors
    /// The descriptor or handle is not what it should be, or cannot be mapped.
    fn import(size: u64, fd: Option<OwnedFd>, handle: &[u8]) -> std::io::Result<Self>;

    /// Readies the memory for its export with these flags, where the driver has to know them.
    ///
    /// # Errors
    /// The driver refuses.
    fn prepare(&mut self, flags: ExportFlags) -> std::io::Result<()> {
        let _ = flags;
        Ok(())
    }

    /// Who this process is in the driver's eyes, where the driver has a word for that: the broker's must be the same.
    ///
    /// # Errors
    /// The driver does not say.
    fn driver_tgid() -> std::io::Result<Option<BareTgid>> {
        Ok(None)
    }

    /// Admits a process in the exporter's driver, where the driver wants to know.
    ///
    /// # Errors
    /// The driver refuses.
    fn admit(&self, importer: BareTgid) -> std::io::Result<()> {
        let _ = importer;
        Ok(())
    }
}

/// A process's session with the broker of device keys.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// # config.backing = shmesh::config::Backing::Memfd;
/// # let phy = options.create(&config)?;
/// use shmesh::device::{ExportFlags, HostMemory, Session};
/// let mut session = Session::connect(dir.path(), "fronthaul")?;
/// let exported = session.export_key(HostMemory::new(4096)?, ExportFlags::DEFAULT);
/// assert!(exported.unwrap_err().to_string().contains("run a sidecar"), "a participant serves this link");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Session<M: DeviceMemory = HostMemory> {
    client: Client,
    /// Kept until they are closed: who imports them has them mapped.
    exports: HashMap<[u8; KEY_BYTES], M>,
    imports: HashMap<[u8; KEY_BYTES], (Arc<M>, u64)>,
    /// Exports that were closed by force, and may still be mapped elsewhere.
    forced: HashSet<[u8; KEY_BYTES]>,
    /// Whether broker and driver have been found to agree on who this process is.
    is_agreed: bool,
}

impl<M: DeviceMemory> Session<M> {
    /// Connects to the broker of `link` in the IPC directory `dir`.
    ///
    /// # Errors
    /// As [`Client::connect`].
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// use shmesh::device::{HostMemory, Session};
    /// assert!(Session::<HostMemory>::connect(dir.path(), "fronthaul").is_err(), "nobody serves it");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn connect(dir: impl AsRef<Path>, link: &str) -> Result<Self> {
        let client = Client::connect(dir, link)?;
        Ok(Self {
            client,
            exports: HashMap::new(),
            imports: HashMap::new(),
            forced: HashSet::new(),
            is_agreed: false,
        })
    }

    /// This process, as others have to name it to admit it.
    ///
    /// # Errors
    /// [`Refused`](crate::ErrorKind::Refused) when the broker does not know it.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// # config.backing = shmesh::config::Backing::Memfd;
    /// # let phy = options.create(&config)?;
    /// # use shmesh::device::{HostMemory, Session};
    /// # let mut session = Session::<HostMemory>::connect(dir.path(), "fronthaul")?;
    /// match session.bare_tgid() {
    ///     Ok(me) => println!("admit {}", me.0),
    ///     Err(error) => assert!(error.to_string().contains("run a sidecar")),
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn bare_tgid(&mut self) -> Result<BareTgid> {
        match self.client.ask(request::Op::BareTgid(broker::BareTgid {}), &[])? {
            (reply::Result::Tgid(tgid), _) => Ok(BareTgid(tgid.bare_tgid)),
            _ => Err(self.client.strange()),
        }
    }

    /// Exports memory. The session keeps it until it is closed.
    ///
    /// # Errors
    /// [`Refused`](crate::ErrorKind::Refused): a size of 0, a flag that the policy does not permit, a limit.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// # config.backing = shmesh::config::Backing::Memfd;
    /// # let phy = options.create(&config)?;
    /// # use shmesh::device::{ExportFlags, HostMemory, Session};
    /// # let mut session = Session::connect(dir.path(), "fronthaul")?;
    /// let memory = HostMemory::new(1 << 21)?;
    /// memory.write_at(0, b"weights")?;
    /// if let Ok(key) = session.export_key(memory, ExportFlags::DEFAULT) {
    ///     println!("{} bytes name it", key.as_bytes().len());
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn export_key(&mut self, mut memory: M, flags: ExportFlags) -> Result<DeviceKey> {
        self.agree()?;
        memory
            .prepare(flags)
            .map_err(|error| Error::system(&self.client.link().into(), "export the memory", error))?;
        let export = ExportKey {
            size: memory.size(),
            flags: flags.0,
            mechanism: M::MECHANISM.into(),
            handle: memory.handle(),
        };
        let fds: Vec<_> = memory.fd().into_iter().collect();
        let (result, _) = self.client.ask(request::Op::ExportKey(export), &fds)?;
        let reply::Result::Exported(exported) = result else { return Err(self.client.strange()) };
        let key = DeviceKey::from_wild(&exported.key).ok_or_else(|| self.client.strange())?;
        self.exports.insert(*key.as_bytes(), memory);
        Ok(key)
    }

    /// Admits processes to a key of this process: all of them, or nobody.
    ///
    /// # Errors
    /// [`Denied`](crate::ErrorKind::Denied) when it is not this process's key; [`Refused`](crate::ErrorKind::Refused) when one of them does not live,
    /// or there are more than 31.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// # config.backing = shmesh::config::Backing::Memfd;
    /// # let phy = options.create(&config)?;
    /// # use shmesh::device::{BareTgid, DeviceKey, HostMemory, Session};
    /// # let mut session = Session::<HostMemory>::connect(dir.path(), "fronthaul")?;
    /// let key = DeviceKey::from_entropy([7; 32]);
    /// assert!(session.set_import_pid(&key, &[BareTgid(1)]).is_err(), "it is nobody's key");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_import_pid(&mut self, key: &DeviceKey, importers: &[BareTgid]) -> Result<()> {
        let admit = SetImportPid {
            key: key.as_bytes().to_vec(),
            bare_tgids: importers.iter().map(|tgid| tgid.0).collect(),
            ..SetImportPid::default()
        };
        self.done(request::Op::SetImportPid(admit))
    }

    /// Maps the memory behind a key. Importing it again gives the same memory, and each import is closed once.
    ///
    /// # Errors
    /// [`Denied`](crate::ErrorKind::Denied): there is no such key, or this process is not admitted; which of them, nobody is told.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// # config.backing = shmesh::config::Backing::Memfd;
    /// # let phy = options.create(&config)?;
    /// # use shmesh::device::{DeviceKey, HostMemory, Session};
    /// # let mut session = Session::<HostMemory>::connect(dir.path(), "fronthaul")?;
    /// assert!(session.import_by_key(&DeviceKey::from_entropy([7; 32])).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn import_by_key(&mut self, key: &DeviceKey) -> Result<Arc<M>> {
        if let Some((memory, count)) = self.imports.get_mut(key.as_bytes()) {
            *count += 1;
            return Ok(Arc::clone(memory));
        }
        self.agree()?;
        let import = ImportByKey { key: key.as_bytes().to_vec() };
        let (result, fds) = self.client.ask(request::Op::ImportByKey(import), &[])?;
        let reply::Result::Imported(imported) = result else { return Err(self.client.strange()) };
        let mapped = if imported.mechanism() == M::MECHANISM {
            M::import(imported.size, fds.into_iter().next(), &imported.handle)
        } else {
            Err(std::io::Error::other("it was exported by another mechanism"))
        };
        let ack = Ack { grant: imported.grant, done: mapped.is_ok() };
        let acknowledged = self.done(request::Op::Ack(ack));
        let memory = match mapped {
            Ok(memory) => Arc::new(memory),
            Err(error) => {
                let _ = self.say_closed(key, false);
                return Err(Error::system(&self.client.link().into(), "map the memory", error));
            }
        };
        if let Err(error) = acknowledged {
            drop(memory);
            let _ = self.say_closed(key, false);
            return Err(error);
        }
        self.imports.insert(*key.as_bytes(), (Arc::clone(&memory), 1));
        Ok(memory)
    }

    /// Ends an import, or an export that nobody imports any more. An import whose exporter has died is closed here alone: the
    /// broker has forgotten it.
    ///
    /// # Errors
    /// [`StillMapped`](crate::ErrorKind::StillMapped) while an `Arc` of the imported memory is held; [`Busy`](crate::ErrorKind::Busy) with the processes that still import it; [`Denied`](crate::ErrorKind::Denied) when this process has no such key.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// # config.backing = shmesh::config::Backing::Memfd;
    /// # let phy = options.create(&config)?;
    /// # use shmesh::device::{DeviceKey, HostMemory, Session};
    /// # let mut session = Session::<HostMemory>::connect(dir.path(), "fronthaul")?;
    /// assert!(session.close(&DeviceKey::from_entropy([7; 32])).is_err(), "it was never opened");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn close(&mut self, key: &DeviceKey) -> Result<()> {
        if self.imports.contains_key(key.as_bytes()) {
            return self.close_import(key);
        }
        self.say_closed(key, false)?;
        self.exports.remove(key.as_bytes());
        Ok(())
    }

    /// Ends an export though others import it: they are told, and the memory is kept until they have closed
    /// ([`Unused`](Happened::Unused)) or the session is dropped.
    ///
    /// # Errors
    /// [`Denied`](crate::ErrorKind::Denied) when this process has not exported it.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// # config.backing = shmesh::config::Backing::Memfd;
    /// # let phy = options.create(&config)?;
    /// # use shmesh::device::{DeviceKey, HostMemory, Session};
    /// # let mut session = Session::<HostMemory>::connect(dir.path(), "fronthaul")?;
    /// assert!(session.force_close(&DeviceKey::from_entropy([7; 32])).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn force_close(&mut self, key: &DeviceKey) -> Result<()> {
        if !self.exports.contains_key(key.as_bytes()) {
            let text = "this session has not exported it".to_owned();
            return Err(ErrorKind::Denied { link: self.client.link().into(), text }.into());
        }
        self.say_closed(key, true)?;
        match self.say_closed(key, false) {
            Err(error) if matches!(error.kind(), ErrorKind::Busy { .. }) => {
                // Nobody new comes in: who was said to be the last before this answer was not.
                self.client.forget(
                    |happened| matches!(happened, Happened::Unused(unused) if unused == key.as_bytes()),
                );
                self.forced.insert(*key.as_bytes());
                Ok(())
            }
            Err(error) if matches!(error.kind(), ErrorKind::NoBroker { .. } | ErrorKind::System { .. }) => {
                Err(error)
            }
            // Nobody had it any more, and the broker has forgotten it.
            _ => {
                self.exports.remove(key.as_bytes());
                Ok(())
            }
        }
    }

    /// Unmapped before the broker hears of it: from then on the exporter may free the memory.
    fn close_import(&mut self, key: &DeviceKey) -> Result<()> {
        let Some((memory, count)) = self.imports.remove(key.as_bytes()) else { return Ok(()) };
        if count > 1 {
            self.imports.insert(*key.as_bytes(), (memory, count - 1));
            return Ok(());
        }
        match Arc::try_unwrap(memory) {
            Ok(memory) => drop(memory),
            Err(memory) => {
                self.imports.insert(*key.as_bytes(), (memory, 1));
                return Err(ErrorKind::StillMapped { link: self.client.link().into() }.into());
            }
        }
        match self.say_closed(key, false) {
            // Its exporter has died, or the sidecar is another one: nobody waits for us.
            Err(error) if matches!(error.kind(), ErrorKind::Denied { .. }) => Ok(()),
            closed => closed,
        }
    }

    /// Compares whom the broker and the driver take this process for, once. A number that admits somebody else is worse than
    /// none.
    fn agree(&mut self) -> Result<()> {
        if self.is_agreed {
            return Ok(());
        }
        let link: Arc<str> = self.client.link().into();
        let drivers =
            M::driver_tgid().map_err(|error| Error::system(&link, "ask the driver who this is", error))?;
        if let Some(BareTgid(driver)) = drivers {
            let BareTgid(broker) = self.bare_tgid()?;
            if driver != broker {
                let text = format!(
                    "the broker takes this process for {broker}, the driver for {driver}: the sidecar needs the identity \
                     service of this node (--identity)"
                );
                return Err(ErrorKind::Denied { link, text }.into());
            }
        }
        self.is_agreed = true;
        Ok(())
    }

    /// Puts an importer on the driver's list. The driver goes by its number, and this may be long after the broker has said
    /// so: when that process has died, the number may be another's. So the broker is asked last thing before.
    fn admit(&mut self, admit: &Admit) -> bool {
        if self.done(request::Op::Stands(Stands { grant: admit.grant.clone() })).is_err() {
            return false;
        }
        let memory = self.exports.get(admit.key.as_slice());
        memory.is_some_and(|memory| memory.admit(BareTgid(admit.bare_tgid)).is_ok())
    }

    fn say_closed(&mut self, key: &DeviceKey, force: bool) -> Result<()> {
        self.done(request::Op::Close(Close { key: key.as_bytes().to_vec(), force }))
    }

    fn done(&mut self, op: request::Op) -> Result<()> {
        match self.client.ask(op, &[])? {
            (reply::Result::Done(_), _) => Ok(()),
            _ => Err(self.client.strange()),
        }
    }

    /// The oldest event that was not taken yet; never waits. What the exporter's driver has to do is done here: call it when
    /// the session's descriptor is readable.
    ///
    /// # Errors
    /// [`NoBroker`](crate::ErrorKind::NoBroker) when the broker has gone.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// # config.backing = shmesh::config::Backing::Memfd;
    /// # let phy = options.create(&config)?;
    /// # use shmesh::device::{HostMemory, Session};
    /// # let mut session = Session::<HostMemory>::connect(dir.path(), "fronthaul")?;
    /// assert!(session.event()?.is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn event(&mut self) -> Result<Option<Happened>> {
        while let Some(happened) = self.client.event()? {
            if let Happened::Unused(key) = &happened
                && let Ok(key) = <[u8; KEY_BYTES]>::try_from(key.as_slice())
                && self.forced.remove(&key)
            {
                self.exports.remove(&key);
            }
            let Happened::Admit(admit) = happened else { return Ok(Some(happened)) };
            let done = self.admit(&admit);
            // Refused when the importer has gone meanwhile, which is no concern of ours.
            let _ = self.done(request::Op::Ack(Ack { grant: admit.grant, done }));
        }
        Ok(None)
    }
}

impl<M: DeviceMemory> Drop for Session<M> {
    /// Ends what the session has: its imports, and by force its exports, whose memory goes with it.
    fn drop(&mut self) {
        // What somebody here still uses is not closed: the broker has it in its books until this process ends.
        // Unmapped before the broker hears of it.
        let closed = |(key, (memory, _))| Arc::try_unwrap(memory).is_ok().then_some((key, false));
        let imports: Vec<_> = self.imports.drain().filter_map(closed).collect();
        let exports: Vec<_> = self.exports.keys().map(|key| (*key, true)).collect();
        for (key, force) in imports.into_iter().chain(exports) {
            // Whoever has gone need not be told.
            if self.done(request::Op::Close(Close { key: key.to_vec(), force })).is_err_and(|error| {
                matches!(error.kind(), ErrorKind::NoBroker { .. } | ErrorKind::System { .. })
            }) {
                return;
            }
        }
    }
}

impl<M: DeviceMemory> std::os::fd::AsFd for Session<M> {
    /// Readable when an event comes: see [`Client`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.client.as_fd()
    }
}
