//! Device memory shared with exactly the admitted processes: the five calls of the Ascend runtime, over any mechanism,
//! brokered by the sidecar.
//!
//! | call of the Ascend runtime | call of this library |
//! |---|---|
//! | `aclrtDeviceGetBareTgid` | [`Session::bare_tgid`] |
//! | `aclrtIpcMemGetExportKey` | [`Session::export_key`] |
//! | `aclrtIpcMemSetImportPid` | [`Session::set_import_pid`] |
//! | `aclrtIpcMemImportByKey` | [`Session::import_by_key`] |
//! | `aclrtIpcMemClose` | [`Session::close`] |
//!
//! The key identifies memory and admits no process by itself: importers are admitted by their identity from the kernel.
//! Importers must close before the exporter: until then the exporter's `close` fails with
//! [`Busy`](crate::ErrorKind::Busy), and its memory stays.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | [`Session`], and the trait [`DeviceMemory`] that mechanisms implement |
//! | `host.rs` | [`HostMemory`]: a memfd in place of device memory |
//! | `cuda/` | [`CudaMemory`] and [`CudaLegacyMemory`]: memory of NVIDIA GPUs (feature `cuda`) |
//! | `ascend/` | [`AscendMemory`]: memory of Ascend NPUs (feature `ascend`) |
//! | `state.rs` | the keys of a session, and their registration with the next sidecar |
//! | `pool.rs` | [`DevicePool`]: a link's pool in device memory |
//! | `library.rs` | vendors' libraries, loaded at their first use |

#[cfg(feature = "ascend")]
mod ascend;
#[cfg(feature = "cuda")]
mod cuda;
mod host;
#[cfg(any(feature = "ascend", feature = "cuda"))]
mod library;
mod pool;
mod state;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use shmesh_proto::broker::{
    self, Ack, Admit, Close, ImportByKey, Mechanism, SetImportPid, Stands, event::SessionEvent, reply,
    request,
};
pub use shmesh_proto::key::DeviceKey;
use shmesh_proto::key::KEY_BYTES;

use self::state::{Export, ImportState, Shared, State};
use crate::error::{Error, ErrorKind, Result};
#[cfg(feature = "ascend")]
pub use ascend::{AscendDevice, AscendMemory};
#[cfg(feature = "cuda")]
pub use cuda::{CudaDevice, CudaLegacyMemory, CudaMemory, CudaStream, CudaTimeline, DeviceUuid, PageLocked};
pub use host::HostMemory;
pub use pool::{DeviceBuffer, DevicePool, PoolMemory};

/// A process, by its thread-group id in the outermost pid namespace. [`Session::bare_tgid`] returns the id of this
/// process; `getpid` returns a different number in each container.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct BareTgid(pub i32);

/// Which processes may import a key.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ExportFlags(pub u64);

impl ExportFlags {
    /// Only processes that [`Session::set_import_pid`] or [`Session::admit`] admits.
    pub const DEFAULT: Self = Self(0);
    /// Every process that knows the key. The operator's policy must permit it.
    pub const DISABLE_PID_VALIDATION: Self = Self(1);
}

/// Memory that can be exported and imported, implemented by each mechanism. A thread of the session reads its size,
/// handle and descriptor after a restart of the sidecar.
///
/// ```
/// use shmesh::device::{DeviceMemory, HostMemory};
/// let memory = HostMemory::new(4096)?;
/// assert_eq!(memory.size(), 4096);
/// # Ok::<(), std::io::Error>(())
/// ```
pub trait DeviceMemory: Sized + Send + Sync + 'static {
    /// The mechanism of sharing.
    const MECHANISM: Mechanism;

    /// The size in bytes.
    fn size(&self) -> u64;

    /// The descriptor that is passed to importers, for mechanisms that have one.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// The vendor's key or handle, for mechanisms that have one.
    fn handle(&self) -> Vec<u8>;

    /// Maps memory that another process exported.
    ///
    /// # Errors
    /// The descriptor or handle is invalid, or cannot be mapped.
    fn import(size: u64, fd: Option<OwnedFd>, handle: &[u8]) -> std::io::Result<Self>;

    /// Prepares the memory for its export with these flags, if the driver has to know them.
    ///
    /// # Errors
    /// The driver refuses.
    fn prepare(&mut self, flags: ExportFlags) -> std::io::Result<()> {
        let _ = flags;
        Ok(())
    }

    /// The process id by which the driver identifies this process, if it has one: the broker must know the same.
    ///
    /// # Errors
    /// The driver refuses the query.
    fn driver_tgid() -> std::io::Result<Option<BareTgid>> {
        Ok(None)
    }

    /// Admits a process in the exporter's driver, if the driver has a list of processes.
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
/// It survives restarts of the sidecar: exports and imports are registered with the next one, under the same keys, and
/// imported memory stays mapped meanwhile. While there is no sidecar, a call waits some seconds for it. A key that
/// cannot be registered again is reported as [`RegionLost`](SessionEvent::RegionLost), to the exporter and to importers.
///
/// ```no_run
/// use shmesh::device::{ExportFlags, HostMemory, Session};
/// let mut session = Session::connect("/dev/shm", "fronthaul")?; // a sidecar must serve the link
/// let key = session.export_key(HostMemory::new(4096)?, ExportFlags::DISABLE_PID_VALIDATION)?;
/// // Another process imports `key.as_bytes()`.
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Session<M: DeviceMemory = HostMemory> {
    shared: Arc<Shared<M>>,
    link: Arc<str>,
    /// The process that connected. A forked child has neither the thread nor the connection, and may inherit a lock
    /// that is never released, so it must connect itself.
    process: u32,
}

impl<M: DeviceMemory> Session<M> {
    /// Connects to the broker of `link` in the IPC directory `dir`. Waits some seconds for it if the link
    /// exists and no process serves it.
    ///
    /// # Errors
    /// As [`Client::connect`](crate::client::Client::connect).
    pub fn connect(dir: impl AsRef<Path>, link: &str) -> Result<Self> {
        let shared = Arc::new(Shared::new(state::connect(dir.as_ref(), link)?)?);
        Ok(Self { shared, link: link.into(), process: std::process::id() })
    }

    fn shared(&self) -> Result<&Arc<Shared<M>>> {
        if std::process::id() == self.process {
            return Ok(&self.shared);
        }
        let doing = "use a session of the parent process after fork: connect a session in this process";
        Err(Error::system(&self.link, doing, std::io::ErrorKind::PermissionDenied.into()))
    }

    /// The thread-group id by which other processes admit this process.
    ///
    /// # Errors
    /// [`Refused`](crate::ErrorKind::Refused) if the broker cannot identify this process.
    pub fn bare_tgid(&mut self) -> Result<BareTgid> {
        let shared = self.shared()?;
        bare_tgid(shared, &mut shared.lock())
    }

    /// Exports memory. The session keeps it until it is closed.
    ///
    /// # Errors
    /// [`Refused`](crate::ErrorKind::Refused): a size of 0, a flag that the policy does not permit, a limit.
    pub fn export_key(&mut self, mut memory: M, flags: ExportFlags) -> Result<DeviceKey> {
        let shared = self.shared()?;
        let state = &mut *shared.lock();
        agree(shared, state)?;
        shared.watch(state)?;
        memory
            .prepare(flags)
            .map_err(|error| Error::system(&state.client.link().into(), "export the memory", error))?;
        let export = request::Op::ExportKey(state::exported(&memory, flags));
        let fds: Vec<_> = memory.fd().into_iter().collect();
        let (result, _) = shared.ask(state, &export, &fds)?;
        let reply::Result::Exported(exported) = result else { return Err(state.client.unexpected()) };
        let key = DeviceKey::from_wild(&exported.key).ok_or_else(|| state.client.unexpected())?;
        let secret = exported.secret;
        let export = Export {
            memory,
            flags,
            secret,
            admitted: BTreeMap::new(),
            pods: BTreeSet::new(),
            service_accounts: BTreeSet::new(),
            is_forced: false,
        };
        state.exports.insert(*key.as_bytes(), export);
        Ok(key)
    }

    /// Admits processes to a key of this process: all of them or none.
    ///
    /// # Errors
    /// [`Denied`](crate::ErrorKind::Denied) if this process has not exported the key;
    /// [`Refused`](crate::ErrorKind::Refused) if one of the processes is not alive, or there are more than 31.
    pub fn set_import_pid(&mut self, key: &DeviceKey, importers: &[BareTgid]) -> Result<()> {
        let admit = SetImportPid {
            key: key.as_bytes().to_vec(),
            bare_tgids: importers.iter().map(|tgid| tgid.0).collect(),
            ..SetImportPid::default()
        };
        let shared = self.shared()?;
        let state = &mut *shared.lock();
        let done = shared.done(state, &request::Op::SetImportPid(admit))?;
        if let Some(export) = state.exports.get_mut(key.as_bytes()) {
            export.admitted.extend(done.admitted.into_iter().map(|admitted| (admitted.bare_tgid, admitted)));
        }
        Ok(())
    }

    /// Admits all processes of pods and of service accounts, now and later, to a key of this process. Each is written
    /// `namespace/name`. They match processes whose pod the node's identity service has confirmed.
    ///
    /// # Errors
    /// [`Denied`](crate::ErrorKind::Denied) if this process has not exported the key;
    /// [`Refused`](crate::ErrorKind::Refused) if a name has another form, or the key admits more than 64 of them.
    pub fn admit(&mut self, key: &DeviceKey, pods: &[&str], service_accounts: &[&str]) -> Result<()> {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let (pods, service_accounts) = (owned(pods), owned(service_accounts));
        let admit = SetImportPid {
            key: key.as_bytes().to_vec(),
            pods: pods.clone(),
            service_accounts: service_accounts.clone(),
            ..SetImportPid::default()
        };
        let shared = self.shared()?;
        let state = &mut *shared.lock();
        shared.done(state, &request::Op::SetImportPid(admit))?;
        if let Some(export) = state.exports.get_mut(key.as_bytes()) {
            export.pods.extend(pods);
            export.service_accounts.extend(service_accounts);
        }
        Ok(())
    }

    /// Maps the memory of a key. Importing it again returns the same memory, and each import must be closed once.
    ///
    /// # Errors
    /// [`Denied`](crate::ErrorKind::Denied): the key does not exist, or this process is not admitted. The error does not say which.
    pub fn import_by_key(&mut self, key: &DeviceKey) -> Result<Arc<M>> {
        let shared = self.shared()?;
        let state = &mut *shared.lock();
        if let Some(import) = state.imports.get_mut(key.as_bytes()) {
            import.count += 1;
            return Ok(Arc::clone(&import.memory));
        }
        agree(shared, state)?;
        shared.watch(state)?;
        let import = request::Op::ImportByKey(ImportByKey { key: key.as_bytes().to_vec() });
        let (result, fds) = shared.ask(state, &import, &[])?;
        let reply::Result::Imported(imported) = result else { return Err(state.client.unexpected()) };
        let mapped = if imported.mechanism() == M::MECHANISM {
            M::import(imported.size, fds.into_iter().next(), &imported.handle)
        } else {
            Err(std::io::Error::other("the memory was exported with another mechanism"))
        };
        let ack = request::Op::Ack(Ack { grant: imported.grant, done: mapped.is_ok() });
        let memory = match mapped {
            Ok(memory) => Arc::new(memory),
            Err(error) => {
                let _ = shared.done(state, &ack);
                let _ = say_closed(shared, state, key, false);
                return Err(Error::system(&state.client.link().into(), "map the memory", error));
            }
        };
        // First, so that it is registered with a sidecar that replaces the current one.
        state.imports.insert(*key.as_bytes(), ImportState { memory: Arc::clone(&memory), count: 1 });
        let reconnected = state.reconnected;
        match shared.done(state, &ack) {
            Err(error) if state.reconnected == reconnected => {
                state.imports.remove(key.as_bytes());
                drop(memory);
                let _ = say_closed(shared, state, key, false);
                Err(error)
            }
            // The next sidecar knows of the import, and of no grant.
            _ => Ok(memory),
        }
    }

    /// Ends an import, or an export that no process imports any more. An import whose exporter has died is closed in
    /// this process only, because the broker has forgotten it.
    ///
    /// # Errors
    /// [`StillMapped`](crate::ErrorKind::StillMapped) while an `Arc` of the imported memory is held;
    /// [`Busy`](crate::ErrorKind::Busy) with the processes that still import it; [`Denied`](crate::ErrorKind::Denied)
    /// if this process has no such key.
    pub fn close(&mut self, key: &DeviceKey) -> Result<()> {
        let shared = self.shared()?;
        let state = &mut *shared.lock();
        if state.imports.contains_key(key.as_bytes()) {
            return close_import(shared, state, key);
        }
        say_closed(shared, state, key, false)?;
        state.exports.remove(key.as_bytes());
        Ok(())
    }

    /// Ends an export while others import it: they get an event, and the memory is kept until they have closed it
    /// ([`Unused`](SessionEvent::Unused)) or the session is dropped.
    ///
    /// # Errors
    /// [`Denied`](crate::ErrorKind::Denied) if this process has not exported it.
    pub fn force_close(&mut self, key: &DeviceKey) -> Result<()> {
        let shared = self.shared()?;
        let state = &mut *shared.lock();
        let Some(export) = state.exports.get_mut(key.as_bytes()) else {
            let text = "this session has not exported this key".to_owned();
            return Err(ErrorKind::Denied { link: state.client.link().into(), text }.into());
        };
        // First, so that a sidecar that replaces the current one admits no process either.
        let was_forced = std::mem::replace(&mut export.is_forced, true);
        if let Err(error) = say_closed(shared, state, key, true) {
            let is_known = !matches!(error.kind(), ErrorKind::NoBroker { .. } | ErrorKind::System { .. });
            if let Some(export) = state.exports.get_mut(key.as_bytes()).filter(|_| is_known) {
                export.is_forced = was_forced;
            }
            return Err(error);
        }
        match say_closed(shared, state, key, false) {
            Err(error) if matches!(error.kind(), ErrorKind::Busy { .. }) => {
                // No importer is admitted any more, so an `Unused` event from before this answer is obsolete.
                state.client.forget(
                    |happened| matches!(happened, SessionEvent::Unused(unused) if unused == key.as_bytes()),
                );
                Ok(())
            }
            Err(error) if matches!(error.kind(), ErrorKind::NoBroker { .. } | ErrorKind::System { .. }) => {
                Err(error)
            }
            // No process imports it any more, and the broker has forgotten it.
            _ => {
                state.exports.remove(key.as_bytes());
                Ok(())
            }
        }
    }

    /// Takes the oldest event; never waits. Admits importers in the exporter's driver, so call it whenever the
    /// session's descriptor is readable.
    ///
    /// While there is no sidecar there are no events; the session connects to the next one by itself.
    ///
    /// # Errors
    /// [`System`](crate::ErrorKind::System): the connection cannot be read.
    pub fn event(&mut self) -> Result<Option<SessionEvent>> {
        let shared = self.shared()?;
        let state = &mut *shared.lock();
        shared.hear();
        loop {
            let happened = match state.client.event() {
                answer if state::is_away(&answer) => {
                    // The session's thread connects to the next sidecar.
                    shared.lose(state);
                    shared.watch(state)?;
                    state.client.kept_event()
                }
                answer => answer?,
            };
            match happened {
                None => return Ok(None),
                Some(SessionEvent::Admit(admit)) => {
                    let done = admit_in_driver(shared, state, &admit);
                    // Refused if the importer has ended meanwhile, which needs no handling.
                    let _ = shared.done(state, &request::Op::Ack(Ack { grant: admit.grant, done }));
                }
                Some(happened) => {
                    if let SessionEvent::Unused(key) = &happened
                        && let Ok(key) = <[u8; KEY_BYTES]>::try_from(key.as_slice())
                        && state.exports.get(&key).is_some_and(|export| export.is_forced)
                    {
                        state.exports.remove(&key);
                    }
                    return Ok(Some(happened));
                }
            }
        }
    }
}

fn bare_tgid<M: DeviceMemory>(shared: &Shared<M>, state: &mut State<M>) -> Result<BareTgid> {
    match shared.ask(state, &request::Op::BareTgid(broker::BareTgid {}), &[])? {
        (reply::Result::Tgid(tgid), _) => Ok(BareTgid(tgid.bare_tgid)),
        _ => Err(state.client.unexpected()),
    }
}

/// Compares, once, the process ids of this process at the broker and at the driver. A process id that admits another
/// process would be worse than none.
fn agree<M: DeviceMemory>(shared: &Shared<M>, state: &mut State<M>) -> Result<()> {
    if state.agreed.is_some() {
        return Ok(());
    }
    let link: Arc<str> = state.client.link().into();
    let drivers = M::driver_tgid()
        .map_err(|error| Error::system(&link, "query the identity of this process at the driver", error))?;
    if let Some(BareTgid(driver)) = drivers {
        let BareTgid(broker) = bare_tgid(shared, state)?;
        if driver != broker {
            let text = format!(
                "the broker identifies this process as {broker}, the driver as {driver}: the sidecar needs the identity \
                 service of this node (--identity)"
            );
            return Err(ErrorKind::Denied { link, text }.into());
        }
    }
    state.agreed = Some(drivers);
    Ok(())
}

/// Puts an importer on the driver's list. The driver identifies it by its process id, and this may be long after the
/// broker's request: if that process has died, the id may belong to another one. So the broker is asked immediately
/// before.
fn admit_in_driver<M: DeviceMemory>(shared: &Shared<M>, state: &mut State<M>, admit: &Admit) -> bool {
    if shared.done(state, &request::Op::Stands(Stands { grant: admit.grant.clone() })).is_err() {
        return false;
    }
    let export = state.exports.get(admit.key.as_slice());
    export.is_some_and(|export| export.memory.admit(BareTgid(admit.bare_tgid)).is_ok())
}

fn say_closed<M: DeviceMemory>(
    shared: &Shared<M>,
    state: &mut State<M>,
    key: &DeviceKey,
    force: bool,
) -> Result<()> {
    shared.done(state, &request::Op::Close(Close { key: key.as_bytes().to_vec(), force })).map(drop)
}

/// Unmaps the memory before informing the broker: from then on the exporter may free it.
fn close_import<M: DeviceMemory>(shared: &Shared<M>, state: &mut State<M>, key: &DeviceKey) -> Result<()> {
    let Some(ImportState { memory, count }) = state.imports.remove(key.as_bytes()) else { return Ok(()) };
    if count > 1 {
        state.imports.insert(*key.as_bytes(), ImportState { memory, count: count - 1 });
        return Ok(());
    }
    match Arc::try_unwrap(memory) {
        Ok(memory) => drop(memory),
        Err(memory) => {
            state.imports.insert(*key.as_bytes(), ImportState { memory, count: 1 });
            return Err(ErrorKind::StillMapped { link: state.client.link().into() }.into());
        }
    }
    match say_closed(shared, state, key, false) {
        // The exporter has died, or the sidecar was replaced: no process waits for this close.
        Err(error) if matches!(error.kind(), ErrorKind::Denied { .. }) => Ok(()),
        closed => closed,
    }
}

impl<M: DeviceMemory> Drop for Session<M> {
    /// Ends the session's imports, and its exports by force, whose memory is freed.
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // The memory belongs to the parent, and so does its lock.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        let state = &mut *self.shared.lock();
        // Memory that is still in use here is not closed: the broker keeps the import until this process ends.
        // Unmapped before the broker knows of it.
        let closed = |(key, import): (_, ImportState<M>)| {
            Arc::try_unwrap(import.memory).is_ok().then_some((key, false))
        };
        let imports: Vec<_> = state.imports.drain().filter_map(closed).collect();
        let exports: Vec<_> = state.exports.keys().map(|key| (*key, true)).collect();
        for (key, force) in imports.into_iter().chain(exports) {
            let close = request::Op::Close(Close { key: key.to_vec(), force });
            // A sidecar that has ended needs no message, and the next one does not know the import.
            if state.client.ask(close, &[]).is_err_and(|error| {
                matches!(error.kind(), ErrorKind::NoBroker { .. } | ErrorKind::System { .. })
            }) {
                break;
            }
        }
        state.exports.clear();
        self.shared.end(state);
    }
}

impl<M: DeviceMemory> std::os::fd::AsFd for Session<M> {
    /// Readable if there is an event, as a [`Client`](crate::client::Client)'s descriptor; it stays the same as long as the session lives.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.readiness().as_fd()
    }
}
