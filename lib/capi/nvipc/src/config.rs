//! Default configurations, and the creation of links from a configuration.

use std::collections::BTreeMap;
use std::ffi::{CStr, OsStr, OsString, c_char, c_int};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use shmesh::config::{LinkConfig, MAX_RING_LEN, PoolConfig, PoolId};
use shmesh::{Error, ErrorKind, LinkOptions, Side};
use shmesh_nvipc_wire::Options as WireOptions;
use shmesh_sys::causes::with_causes;

use crate::backend::{Backend, Failure, LinkBackend, Maker, UdpBackend, WireBackend, present};
use crate::guard::guarded;
use crate::layout::NvipcLayout;
use crate::log::say;
use crate::types::*;
use crate::yaml::{self, FileContent};

/// Limit in seconds for a secondary that waits for its primary. Unset means no limit.
const TIMEOUT_VARIABLE: &str = "SHMESH_NVIPC_TIMEOUT_S";
/// The helpers access the headers of messages with only an address, so every MSG buffer must have this size.
const MSG_BYTES_MIN: u32 = 16;
/// Interval of the log lines of a secondary that waits for its primary.
const REMIND: Duration = Duration::from_secs(10);

/// Links from YAML files, by name. A file can have more settings than the C structure, for example huge pages or the
/// layout.
static LOADED: Mutex<BTreeMap<String, FileLink>> = Mutex::new(BTreeMap::new());

/// A link, and the layout if the file names one.
type FileLink = (Option<LinkConfig>, Option<NvipcLayout>);

fn loaded(name: &str) -> FileLink {
    let all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    all.get(name).cloned().unwrap_or_default()
}

/// The key under which UDP settings of a file are stored. No link can have this name.
fn udp_name(udp: &nv_ipc_config_udp_t) -> String {
    format!("udp {}", udp.local_port)
}

/// The side that a module number stands for.
pub(crate) fn side_of(module: c_int) -> Option<Side> {
    match module {
        NV_IPC_MODULE_PHY | NV_IPC_MODULE_PRIMARY => Some(Side::Primary),
        NV_IPC_MODULE_MAC | NV_IPC_MODULE_SECONDARY => Some(Side::Secondary),
        _ => None,
    }
}

/// The text in a fixed array of bytes. `Err` if there is no NUL, or the text is not UTF-8.
fn text_in(bytes: &[c_char]) -> Result<String, ()> {
    let bytes: Vec<u8> = bytes.iter().map(|byte| byte.to_ne_bytes()[0]).collect();
    let text = CStr::from_bytes_until_nul(&bytes).map_err(|_| ())?;
    text.to_str().map(str::to_owned).map_err(|_| ())
}

fn sizes(pools: [(i32, i32); NV_IPC_MEMPOOL_NUM]) -> [nv_ipc_mempool_size_t; NV_IPC_MEMPOOL_NUM] {
    pools.map(|(buf_size, pool_len)| nv_ipc_mempool_size_t { buf_size, pool_len })
}

fn default_pools() -> [nv_ipc_mempool_size_t; NV_IPC_MEMPOOL_NUM] {
    sizes([(8192, 4096), (576_000, 1024), (4_096_000, 64), (576_000, 0), (576_000, 0)])
}

fn default_shm() -> nv_ipc_config_shm_t {
    nv_ipc_config_shm_t {
        cuda_device_id: -1,
        ring_len: 8192,
        mempool_size: default_pools(),
        prefix: text("nvipc"),
    }
}

fn default_udp(primary: bool) -> nv_ipc_config_udp_t {
    let ports = if primary { (38_556, 38_555) } else { (38_555, 38_556) };
    nv_ipc_config_udp_t {
        local_port: ports.0,
        remote_port: ports.1,
        local_addr: text("127.0.0.1"),
        remote_addr: text("127.0.0.1"),
        msg_buf_size: 152,
        data_buf_size: 153_600,
    }
}

/// Sets the defaults of the transport in `cfg->ipc_transport`. Returns -1 if there is no such transport.
///
/// # Safety
/// `cfg` is NULL or points to a configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn set_nv_ipc_default_config(cfg: *mut nv_ipc_config_t, module_type: c_int) -> c_int {
    guarded("set_nv_ipc_default_config", -1, || {
        // SAFETY: guaranteed by the caller.
        let Some(config) = (unsafe { cfg.as_mut() }) else {
            say!("set_nv_ipc_default_config: cfg is NULL; pass a configuration");
            return -1;
        };
        if side_of(module_type).is_none() && module_type != NV_IPC_MODULE_IPC_DUMP {
            say!(
                "set_nv_ipc_default_config: module_type {module_type} is not valid; use NV_IPC_MODULE_PRIMARY or _SECONDARY"
            );
            return -1;
        }
        let primary = side_of(module_type) == Some(Side::Primary);
        match config.ipc_transport {
            NV_IPC_TRANSPORT_SHM => config.transport_config.shm = default_shm(),
            NV_IPC_TRANSPORT_UDP => {
                config.transport_config.udp = default_udp(primary);
            }
            NV_IPC_TRANSPORT_DPDK => {
                config.transport_config.dpdk = nv_ipc_config_dpdk_t {
                    primary: primary.into(),
                    cuda_device_id: -1,
                    need_eal_init: 1,
                    lcore_id: 5,
                    nic_mtu: 1536,
                    mempool_size: default_pools(),
                    prefix: text("nvipc"),
                    local_nic_pci: text("b5:00.1"),
                    peer_nic_mac: text(""),
                };
            }
            NV_IPC_TRANSPORT_DOCA => {
                config.transport_config.doca = nv_ipc_config_doca_t {
                    primary: primary.into(),
                    cuda_device_id: -1,
                    cpu_core: 5,
                    nic_mtu: 1536,
                    mempool_size: default_pools(),
                    prefix: text("nvipc"),
                    host_pci: text("ca:00.0"),
                    dpu_pci: text("b3:00.0"),
                };
            }
            other => {
                say!(
                    "set_nv_ipc_default_config: ipc_transport {other} is not valid; set it to NV_IPC_TRANSPORT_SHM before the call"
                );
                return -1;
            }
        }
        config.module_type = module_type;
        config.debug_configs = nv_ipc_config_t::zeroed().debug_configs;
        0
    })
}

/// Reads a configuration file in NVIPC's or shmesh's form. Returns -1 on failure; then `cfg` is unchanged.
///
/// # Safety
/// `cfg` is NULL or points to a configuration; `yaml_path` is NULL or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn load_nv_ipc_yaml_config(
    cfg: *mut nv_ipc_config_t,
    yaml_path: *const c_char,
    module_type: c_int,
) -> c_int {
    guarded("load_nv_ipc_yaml_config", -1, || {
        // SAFETY: guaranteed by the caller.
        let Some(config) = (unsafe { cfg.as_mut() }) else {
            say!("load_nv_ipc_yaml_config: cfg is NULL; pass a configuration");
            return -1;
        };
        if yaml_path.is_null() {
            say!("load_nv_ipc_yaml_config: yaml_path is NULL; pass the path of a file");
            return -1;
        }
        if side_of(module_type).is_none() {
            say!(
                "load_nv_ipc_yaml_config: module_type {module_type} is not valid; use NV_IPC_MODULE_PRIMARY or _SECONDARY"
            );
            return -1;
        }
        // SAFETY: guaranteed by the caller.
        let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(yaml_path) }.to_bytes()));
        filled("load_nv_ipc_yaml_config", config, module_type, |udp| yaml::load(path, udp))
    })
}

/// As [`load_nv_ipc_yaml_config`], from text. `nv_ipc_parse_yaml_node` of `nv_ipc.hpp` calls this.
///
/// # Safety
/// `cfg` is NULL or points to a configuration; `text` is NULL or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_nvipc_parse_yaml(
    cfg: *mut nv_ipc_config_t,
    text: *const c_char,
    module_type: c_int,
) -> c_int {
    const WHAT: &str = "nv_ipc_parse_yaml_node";
    guarded(WHAT, -1, || {
        // SAFETY: guaranteed by the caller.
        let Some(config) = (unsafe { cfg.as_mut() }) else {
            say!("{WHAT}: cfg is NULL; pass a configuration");
            return -1;
        };
        if text.is_null() {
            say!("{WHAT}: the text is NULL; pass a YAML node");
            return -1;
        }
        // SAFETY: guaranteed by the caller.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        filled(WHAT, config, module_type, |udp| yaml::parse(&text, "the node", udp))
    })
}

/// Fills in a parsed configuration. Returns -1 after a log line on failure; then `config` is unchanged.
fn filled(
    what: &str,
    config: &mut nv_ipc_config_t,
    module_type: c_int,
    read: impl FnOnce(nv_ipc_config_udp_t) -> Result<FileContent, String>,
) -> c_int {
    let primary = side_of(module_type) == Some(Side::Primary);
    let mut debug = nv_ipc_config_t::zeroed().debug_configs;
    let (name, known) = match read(default_udp(primary)) {
        Err(text) => {
            say!("{what}: {text}");
            return -1;
        }
        Ok(FileContent::Udp(udp, layout)) => {
            config.ipc_transport = NV_IPC_TRANSPORT_UDP;
            config.transport_config.udp = udp;
            (udp_name(&udp), (None, layout))
        }
        Ok(FileContent::Shm(link, layout, cuda_device_id, traced)) => {
            debug = *traced;
            config.ipc_transport = NV_IPC_TRANSPORT_SHM;
            config.transport_config.shm = shm_of(&link, cuda_device_id);
            (link.name.as_str().to_owned(), (Some(*link), layout))
        }
    };
    config.module_type = module_type;
    config.debug_configs = debug;
    LOADED.lock().unwrap_or_else(PoisonError::into_inner).insert(name, known);
    0
}

fn signed(value: u32) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

fn shm_of(link: &LinkConfig, cuda_device_id: c_int) -> nv_ipc_config_shm_t {
    nv_ipc_config_shm_t {
        cuda_device_id,
        ring_len: signed(link.ring_len),
        mempool_size: sizes(PoolId::ALL.map(|pool| {
            let size = link.pool(pool);
            (signed(size.buf_size_bytes), signed(size.pool_len))
        })),
        prefix: text(link.name.as_str()),
    }
}

/// The configuration of an existing link as its backend reports it, for a secondary.
fn shm_as_it_is(backend: &dyn Backend, name: &str) -> nv_ipc_config_shm_t {
    nv_ipc_config_shm_t {
        cuda_device_id: backend.cuda_device_id(),
        ring_len: signed(backend.ring_len()),
        mempool_size: sizes(PoolId::ALL.map(|pool| {
            let (size, len) = backend.pool(pool).unwrap_or_default();
            (signed(size), signed(len))
        })),
        prefix: text(name),
    }
}

/// The name in a configuration of shared memory.
pub(crate) fn name_of(config: &nv_ipc_config_t) -> Result<String, Failure> {
    // SAFETY: all bytes of the union are the caller's integers, so any bytes are valid.
    let shm = unsafe { &config.transport_config.shm };
    text_in(&shm.prefix).map_err(|()| {
        Failure::Refused(format!(
            "create_nv_ipc_interface: prefix is not valid; set it to at most {} bytes of UTF-8 with a NUL after them",
            NV_NAME_MAX_LEN - 1
        ))
    })
}

fn link_config(
    config: &nv_ipc_config_t,
    name: &str,
    of_file: Option<LinkConfig>,
) -> Result<LinkConfig, Failure> {
    // SAFETY: as in `name_of`.
    let shm = unsafe { config.transport_config.shm };
    let wrong =
        |error: &dyn std::error::Error| Failure::Refused(format!("link {name}: {}", with_causes(error)));
    let mut link = match of_file {
        Some(link) => link,
        None => LinkConfig::nvipc_defaults(name.parse().map_err(|error| wrong(&error))?),
    };
    for (pool, size) in PoolId::ALL.into_iter().zip(shm.mempool_size) {
        let number = |what: &str, value: i32| {
            u32::try_from(value).map_err(|_| {
                Failure::Refused(format!(
                    "link {name}: {what} of pool {pool} is {value}; set it to 0 or more"
                ))
            })
        };
        link.pools[pool.index()] = PoolConfig {
            buf_size_bytes: number("buf_size", size.buf_size)?,
            pool_len: number("pool_len", size.pool_len)?,
        };
    }
    // With as many slots as MSG buffers, a send never finds the ring full.
    let msg_len = link.pool(PoolId::CpuMsg).pool_len;
    link.ring_len = u32::try_from(shm.ring_len).unwrap_or(0).max(msg_len).clamp(1, MAX_RING_LEN);
    link.validate().map_err(|error| wrong(&error))?;
    Ok(link)
}

/// Creates or attaches as the configuration says. Returns the name, the backend, and the primary's configuration. For a
/// secondary, `config` is filled in from the link.
pub(crate) fn open(
    config: &mut nv_ipc_config_t,
) -> Result<(String, Arc<dyn Backend>, nv_ipc_config_t), Failure> {
    let refused = |text: String| Failure::Refused(format!("create_nv_ipc_interface: {text}"));
    let Some(side) = side_of(config.module_type) else {
        return Err(refused(format!(
            "module_type {} is not a side; use NV_IPC_MODULE_PRIMARY or _SECONDARY, and `shmesh dump` to inspect a link",
            config.module_type
        )));
    };
    let (name, backend) = match config.ipc_transport {
        NV_IPC_TRANSPORT_SHM => open_shm(config, side)?,
        NV_IPC_TRANSPORT_UDP => open_udp(config)?,
        other => {
            let text = format!("ipc_transport {other} is not supported; use NV_IPC_TRANSPORT_SHM or _UDP");
            return Err(refused(text));
        }
    };
    let msg_bytes = backend.pool(PoolId::CpuMsg).map_or(0, |(bytes, _)| bytes);
    if msg_bytes < MSG_BYTES_MIN {
        backend.close();
        return Err(refused(format!(
            "buffers of cpu_msg have {msg_bytes} bytes; give {MSG_BYTES_MIN} or more, for the headers of messages"
        )));
    }
    let primary = nv_ipc_config_t { module_type: NV_IPC_MODULE_PRIMARY, ..*config };
    Ok((name, backend, primary))
}

fn open_shm(config: &mut nv_ipc_config_t, side: Side) -> Result<(String, Arc<dyn Backend>), Failure> {
    let name = name_of(config)?;
    let (of_file, layout) = loaded(&name);
    // SAFETY: all bytes of the union are the caller's integers, so any bytes are valid.
    let gpu = unsafe { config.transport_config.shm.cuda_device_id };
    // A secondary's own setting of a GPU is ignored: it does not describe the link.
    let gpu = if side == Side::Primary { present(&name, gpu) } else { -1 };
    let backend: Arc<dyn Backend> = match (NvipcLayout::chosen(layout)?, side) {
        (NvipcLayout::Shmesh, Side::Primary) => {
            let link = LinkOptions::new().create(&link_config(config, &name, of_file)?);
            let link = link.map_err(|error| shown(&error))?;
            Arc::new(LinkBackend::new(link, Maker::Us(gpu), gpu)?)
        }
        (NvipcLayout::Shmesh, Side::Secondary) => {
            // One deadline for all that it waits for. Without one if it is too far away for the clock.
            let deadline = patience()?.and_then(|limit| Instant::now().checked_add(limit));
            loop {
                match LinkBackend::new(attach(&name, deadline)?, Maker::Other(deadline), gpu) {
                    Ok(backend) => break Arc::new(backend),
                    // This side has detached meanwhile, and the memory is freed when the last participant detaches.
                    Err(Failure::PrimaryLeft(text)) => say!("{text}"),
                    Err(failure) => return Err(failure),
                }
            }
        }
        (NvipcLayout::Nvipc, Side::Primary) => {
            let link = link_config(config, &name, of_file)?;
            let options = WireOptions::new().dir(ipc_dir()).file_mode(link.file_mode);
            Arc::new(WireBackend::create(&options, &name, link.pools)?)
        }
        (NvipcLayout::Nvipc, Side::Secondary) => Arc::new(attach_to_theirs(&name)?),
    };
    if side == Side::Secondary {
        config.transport_config.shm = shm_as_it_is(&*backend, &name);
        config.debug_configs = nv_ipc_config_t::zeroed().debug_configs;
    }
    Ok((name, backend))
}

fn open_udp(config: &nv_ipc_config_t) -> Result<(String, Arc<dyn Backend>), Failure> {
    // SAFETY: all bytes of the union are the caller's integers, so any bytes are valid.
    let udp = unsafe { config.transport_config.udp };
    let refused = |text: String| Failure::Refused(format!("create_nv_ipc_interface: udp: {text}"));
    let address = |what: &str, bytes: &[c_char], port: c_int| {
        let port =
            u16::try_from(port).map_err(|_| refused(format!("{what}_port is {port}; give 0 to 65535")))?;
        let given = text_in(bytes).unwrap_or_default();
        let parsed = given.parse::<Ipv4Addr>();
        let ip = parsed.map_err(|_| refused(format!("{what}_addr is {given:?}; give an IPv4 address")))?;
        Ok(SocketAddr::new(IpAddr::V4(ip), port))
    };
    let (local, remote) = (
        address("local", &udp.local_addr, udp.local_port)?,
        address("remote", &udp.remote_addr, udp.remote_port)?,
    );
    if remote.port() == 0 {
        return Err(refused("remote_port is 0; give the port of the peer".into()));
    }
    let size = |what: &str, size: i32| {
        u32::try_from(size).map_err(|_| refused(format!("{what} is {size}; give 0 or more")))
    };
    let sizes = (size("msg_buf_size", udp.msg_buf_size)?, size("data_buf_size", udp.data_buf_size)?);
    let name = udp_name(&udp);
    let theirs = NvipcLayout::chosen(loaded(&name).1)? == NvipcLayout::Nvipc;
    Ok((name, Arc::new(UdpBackend::open(local, remote, sizes, theirs)?)))
}

fn shown(error: &Error) -> Failure {
    Failure::Refused(with_causes(error))
}

/// The limit of a secondary that waits for its primary.
fn patience() -> Result<Option<Duration>, Failure> {
    match std::env::var(TIMEOUT_VARIABLE) {
        Err(_) => Ok(None),
        Ok(seconds) => {
            let parsed = seconds.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            parsed.map(Some).ok_or_else(|| {
                Failure::Refused(format!("{TIMEOUT_VARIABLE} is {seconds:?}; set it to a number of seconds"))
            })
        }
    }
}

/// Attaches as a secondary, which may be started before its primary.
fn attach(name: &str, deadline: Option<Instant>) -> Result<shmesh::Link, Failure> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let slice = left.unwrap_or(REMIND).min(REMIND);
        match LinkOptions::new().timeout(slice).attach(name, Side::Secondary) {
            Ok(link) => return Ok(link),
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound { .. } | ErrorKind::NoDirectory { .. }) =>
            {
                if left.is_some_and(|left| left <= slice) {
                    return Err(shown(&error));
                }
                say!("create_nv_ipc_interface: waiting for the primary: {}", with_causes(&error));
            }
            Err(error) => return Err(shown(&error)),
        }
    }
}

/// Attaches to a link in NVIPC's layout.
fn attach_to_theirs(name: &str) -> Result<WireBackend, Failure> {
    let options = WireOptions::new().dir(ipc_dir()).report_wait(REMIND, |why| {
        say!("create_nv_ipc_interface: waiting for the primary: {}", with_causes(why));
    });
    WireBackend::attach(&patience()?.into_iter().fold(options, WireOptions::patience), name)
}

/// The IPC directory, as `LinkOptions::new` determines it.
pub(crate) fn ipc_dir() -> OsString {
    let named = std::env::var_os(shmesh::DIR_VARIABLE).filter(|dir| !dir.is_empty());
    named.unwrap_or_else(|| shmesh::DEFAULT_DIR.into())
}

/// Reads the configuration of an existing link.
pub(crate) fn lookup(name: &str) -> Result<nv_ipc_config_shm_t, Failure> {
    let wrong =
        |error: &dyn std::error::Error| Failure::Refused(format!("link {name}: {}", with_causes(error)));
    let parsed = name.parse().map_err(|error| wrong(&error))?;
    let view = shmesh::inspect::View::open(Path::new(&ipc_dir()), &parsed).map_err(|error| wrong(&error))?;
    let mut shm = nv_ipc_config_shm_t {
        cuda_device_id: -1,
        ring_len: signed(view.ring_len()),
        mempool_size: Default::default(),
        prefix: text(name),
    };
    for pool in view.pools() {
        if let Some(size) = shm.mempool_size.get_mut(pool.pool.index()) {
            let (buf_size, pool_len) = (signed(pool.buf_size_bytes), signed(pool.pool_len));
            *size = nv_ipc_mempool_size_t { buf_size, pool_len };
        }
    }
    Ok(shm)
}
