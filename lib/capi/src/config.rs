//! Configurations of links, read from YAML in shmesh's or NVIPC's form.

use std::collections::BTreeMap;
use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shmesh::ErrorKind;
use shmesh::config::{LinkConfig, from_file, from_yaml};

use crate::error::{CallError, argument, guarded, shmesh_error_t, uncancelled};
use crate::handles::{interned, no_fork};
use shmesh_error_t::{SHMESH_ERROR_CONFIG, SHMESH_OK};

/// A configuration: a list of links. Free it with `shmesh_config_free`. A handle is the key of a table and is never
/// dereferenced: a freed one names an empty configuration.
#[derive(Debug)]
pub struct shmesh_config_t {
    _opaque: (),
}

type ConfigLinks = Arc<[(&'static CStr, LinkConfig)]>;

/// Configurations by handle. Handles are numbers that are not valid addresses and are never reused.
static CONFIGS: Mutex<BTreeMap<usize, ConfigLinks>> = Mutex::new(BTreeMap::new());

/// The guards of the table and of the lock against `fork`; the table is unlocked first.
type ConfigsGuard = (MutexGuard<'static, BTreeMap<usize, ConfigLinks>>, MutexGuard<'static, ()>);

fn configs() -> ConfigsGuard {
    let no_fork = no_fork();
    // A panic cannot leave the map half changed, so a poisoned lock is usable.
    (CONFIGS.lock().unwrap_or_else(PoisonError::into_inner), no_fork)
}

/// The links of a configuration. `None` if it was freed, or was never valid.
pub(crate) fn links(config: *const shmesh_config_t) -> Option<ConfigLinks> {
    configs().0.get(&config.addr()).cloned()
}

fn insert_handle(links: Vec<LinkConfig>) -> *mut shmesh_config_t {
    // No handle of a link has both bits: its slot would have been used 2^42 times.
    static NEXT: AtomicUsize = AtomicUsize::new(0b11 << 62);
    let handle = NEXT.fetch_add(1, Ordering::Relaxed);
    let links = links.into_iter().map(|link| (interned(link.name.as_str()), link)).collect();
    configs().0.insert(handle, links);
    std::ptr::without_provenance_mut(handle)
}

/// Reads a string argument of the caller.
///
/// # Safety
/// `text` is NULL or ends with a NUL.
pub(crate) unsafe fn text<'a>(what: &str, text: *const c_char) -> Result<&'a str, CallError> {
    if text.is_null() {
        return Err(argument(&format!("{what} is NULL; pass a string")));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| argument(&format!("{what} is not UTF-8; pass UTF-8")))
}

/// Checks an output argument, and sets it to NULL until the call has succeeded.
///
/// # Safety
/// `out` is NULL or points to a pointer.
pub(crate) unsafe fn output<'a, T>(what: &str, out: *mut *mut T) -> Result<&'a mut *mut T, CallError> {
    // SAFETY: the caller's promise.
    let place = unsafe { out.as_mut() }
        .ok_or_else(|| argument(&format!("{what} is NULL; pass the address of a variable for it")))?;
    *place = std::ptr::null_mut();
    Ok(place)
}

/// Reads a configuration from a YAML string, in shmesh's form (`links:`) or NVIPC's (`transport:`).
///
/// # Safety
/// `yaml` is NULL or ends with a NUL; `config` is NULL or points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_config_from_yaml(
    yaml: *const c_char,
    config: *mut *mut shmesh_config_t,
) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (place, yaml) = unsafe { (output("config", config)?, text("yaml", yaml)?) };
        let loaded = from_yaml(yaml);
        let loaded = loaded.map_err(|error| CallError(SHMESH_ERROR_CONFIG, error.shown_in("yaml", yaml)))?;
        *place = insert_handle(loaded.links);
        Ok(SHMESH_OK)
    })
}

/// Reads a configuration from a YAML file.
///
/// # Safety
/// `path` is NULL or ends with a NUL; `config` is NULL or points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_config_from_file(
    path: *const c_char,
    config: *mut *mut shmesh_config_t,
) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { output("config", config) }?;
        if path.is_null() {
            return Err(argument("path is NULL; pass the path of a file"));
        }
        // SAFETY: the caller's promise.
        let path = unsafe { CStr::from_ptr(path) };
        let loaded = from_file(Path::new(OsStr::from_bytes(path.to_bytes())))
            .map_err(|error| shmesh::Error::from(ErrorKind::Config(error)))?;
        *place = insert_handle(loaded.links);
        Ok(SHMESH_OK)
    })
}

/// The default configuration of a link: cpu_msg with 1024 buffers of 8 KiB, cpu_data with 256 of 64 KiB, no other pool.
///
/// # Safety
/// `name` is NULL or ends with a NUL; `config` is NULL or points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_config_default(
    name: *const c_char,
    config: *mut *mut shmesh_config_t,
) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (place, name) = unsafe { (output("config", config)?, text("name", name)?) };
        let name = name.parse().map_err(|error| shmesh::Error::from(ErrorKind::Name(error)))?;
        *place = insert_handle(vec![LinkConfig::new(name)]);
        Ok(SHMESH_OK)
    })
}

/// The number of links in a configuration; 0 for NULL and for a freed configuration.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_config_count(config: *const shmesh_config_t) -> usize {
    links(config).map_or(0, |links| links.len())
}

/// The name of a link of a configuration, valid for the life of the process. NULL if the index is out of range.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_config_name(config: *const shmesh_config_t, index: usize) -> *const c_char {
    let name = links(config).and_then(|links| links.get(index).map(|(name, _)| *name));
    name.map_or(std::ptr::null(), CStr::as_ptr)
}

/// Frees a configuration. Does nothing for NULL and for a configuration that was freed before.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_config_free(config: *mut shmesh_config_t) {
    let freed = configs().0.remove(&config.addr());
    drop(freed);
}
