//! Configurations: from YAML, of our form or of NVIPC's.

use std::ffi::{CStr, CString, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use shmesh::ErrorKind;
use shmesh::config::{LinkConfig, LoadedConfig, from_file, from_yaml};

use crate::error::{Failed, argument, guarded, shmesh_error_t, uncancelled};
use shmesh_error_t::SHMESH_OK;

/// The links of a configuration. Free it with `shmesh_config_free`.
#[derive(Debug)]
pub struct shmesh_config_t {
    pub(crate) links: Vec<(CString, LinkConfig)>,
}

/// A text of the caller's.
///
/// # Safety
/// `text` is NULL or ends with a NUL.
pub(crate) unsafe fn text<'a>(what: &str, text: *const c_char) -> Result<&'a str, Failed> {
    if text.is_null() {
        return Err(argument(&format!("{what} is NULL; pass a text")));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| argument(&format!("{what} is no UTF-8; pass one")))
}

/// Where to put what is made; NULL in it until that is there.
///
/// # Safety
/// `out` is NULL or points to a pointer.
pub(crate) unsafe fn place<'a, T>(what: &str, out: *mut *mut T) -> Result<&'a mut *mut T, Failed> {
    // SAFETY: the caller's promise.
    let place =
        unsafe { out.as_mut() }.ok_or_else(|| argument(&format!("{what} is NULL; pass where to put it")))?;
    *place = std::ptr::null_mut();
    Ok(place)
}

fn boxed(links: Vec<LinkConfig>) -> *mut shmesh_config_t {
    let named = |link: LinkConfig| (CString::new(link.name.as_str()).unwrap_or_default(), link);
    Box::into_raw(Box::new(shmesh_config_t { links: links.into_iter().map(named).collect() }))
}

fn taken(loaded: Result<LoadedConfig, shmesh::config::ConfigError>) -> Result<*mut shmesh_config_t, Failed> {
    let loaded = loaded.map_err(|error| shmesh::Error::from(ErrorKind::Config(error)))?;
    Ok(boxed(loaded.links))
}

/// Reads a text of YAML, of shmesh's form (`links:`) or of NVIPC's (`transport:`).
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
        let (place, yaml) = unsafe { (place("config", config)?, text("yaml", yaml)?) };
        *place = taken(from_yaml(yaml))?;
        Ok(SHMESH_OK)
    })
}

/// Reads a file of YAML.
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
        let place = unsafe { place("config", config) }?;
        if path.is_null() {
            return Err(argument("path is NULL; pass that of a file"));
        }
        // SAFETY: the caller's promise.
        let path = unsafe { CStr::from_ptr(path) };
        *place = taken(from_file(Path::new(OsStr::from_bytes(path.to_bytes()))))?;
        Ok(SHMESH_OK)
    })
}

/// The built-in defaults for a link of this name: cpu_msg of 1024 x 8 KiB, cpu_data of 256 x 64 KiB, no other pool.
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
        let (place, name) = unsafe { (place("config", config)?, text("name", name)?) };
        let name = name.parse().map_err(|error| shmesh::Error::from(ErrorKind::Name(error)))?;
        *place = boxed(vec![LinkConfig::new(name)]);
        Ok(SHMESH_OK)
    })
}

/// How many links it has; 0 for NULL.
///
/// # Safety
/// `config` is NULL or a configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_config_count(config: *const shmesh_config_t) -> usize {
    // SAFETY: the caller's promise.
    unsafe { config.as_ref() }.map_or(0, |config| config.links.len())
}

/// The name of a link; NULL if there is none of that index. Valid as long as the configuration.
///
/// # Safety
/// `config` is NULL or a configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_config_name(config: *const shmesh_config_t, index: usize) -> *const c_char {
    // SAFETY: the caller's promise.
    let link = unsafe { config.as_ref() }.and_then(|config| config.links.get(index));
    link.map_or(std::ptr::null(), |(name, _)| name.as_ptr())
}

/// Frees it. NULL is nothing to free.
///
/// # Safety
/// `config` is NULL or a configuration, which is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_config_free(config: *mut shmesh_config_t) {
    if !config.is_null() {
        // SAFETY: the caller's promise; made by `boxed`.
        drop(unsafe { Box::from_raw(config) });
    }
}
