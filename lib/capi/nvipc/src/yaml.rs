//! Settings of a file that a link's configuration does not have: the layout, UDP, and the filters of a tap.

use std::ffi::c_int;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use shmesh::config::{ConfigError, LinkConfig, MAX_FILE_BYTES, from_file, from_yaml};
use shmesh_sys::causes::with_causes;

use crate::layout::NvipcLayout;
use crate::log::say;
use crate::types::{NVIPC_MAX_MSG_ID, nv_ipc_config_t, nv_ipc_config_udp_t, nv_ipc_debug_config_t, text};

/// The content of a file.
pub(crate) enum FileContent {
    /// A link with its layout, the number of its GPU, and the filters of a tap.
    Shm(Box<LinkConfig>, Option<NvipcLayout>, c_int, Box<nv_ipc_debug_config_t>),
    Udp(nv_ipc_config_udp_t, Option<NvipcLayout>),
}

#[derive(Deserialize)]
struct NvipcFile {
    transport: Option<Transports>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Transports {
    One(Box<Transport>),
    Many(Vec<Transport>),
}

#[derive(Deserialize)]
struct Transport {
    #[serde(rename = "type")]
    kind: Option<String>,
    layout: Option<String>,
    udp_config: Option<Udp>,
    app_config: Option<Perhaps<App>>,
    shm_config: Option<Shm>,
}

/// The settings for NVIPC's application that have an effect here.
#[derive(Default, Deserialize)]
struct App {
    grpc_forward: Option<Perhaps<i32>>,
    msg_filter: Option<Perhaps<Vec<i64>>>,
    cell_filter: Option<Perhaps<Vec<i64>>>,
}

/// A setting on which the link does not depend. Another type of value does not make the whole file unreadable.
#[derive(Deserialize)]
#[serde(untagged)]
enum Perhaps<T> {
    Is(T),
    Other(serde::de::IgnoredAny),
}

#[derive(Default, Deserialize)]
struct Shm {
    cuda_device_id: Option<i32>,
}

#[derive(Default, Deserialize)]
struct Udp {
    local_port: Option<i32>,
    remote_port: Option<i32>,
    local_addr: Option<String>,
    remote_addr: Option<String>,
    msg_buf_size: Option<i32>,
    data_buf_size: Option<i32>,
}

/// Reads a file: the first transport, if there are several. `udp` has the defaults.
pub(crate) fn load(path: &Path, udp: nv_ipc_config_udp_t) -> Result<FileContent, String> {
    let mut bytes = Vec::new();
    let limit = u64::try_from(MAX_FILE_BYTES).unwrap_or(u64::MAX);
    let read = std::fs::File::open(path).and_then(|file| file.take(limit + 1).read_to_end(&mut bytes));
    let (Ok(_), Ok(yaml), false) = (read, str::from_utf8(&bytes), bytes.len() > MAX_FILE_BYTES) else {
        // `from_file` words the error.
        return Err(match from_file(path) {
            Err(error) => with_causes(&error),
            Ok(_) => format!("{}: the file changed while it was read; retry", path.display()),
        });
    };
    parse(yaml, &path.display().to_string(), udp)
}

/// As [`load`], from text that came from `origin`.
pub(crate) fn parse(yaml: &str, origin: &str, udp: nv_ipc_config_udp_t) -> Result<FileContent, String> {
    let named = |text: &str| format!("{origin}: {text}");
    let (first, is_read) = match first_of(yaml) {
        Some(first) => (first, true),
        None => (None, false),
    };
    let layout = match first.as_ref().and_then(|first| first.layout.as_deref()) {
        None => None,
        Some(given) => Some(
            NvipcLayout::of(given)
                .ok_or_else(|| named(&format!("transport.layout is {given:?}; set it to nvipc or shmesh")))?,
        ),
    };
    let debug = match first.as_ref().and_then(|first| first.app_config.as_ref()) {
        Some(Perhaps::Is(app)) => traced(app).map_err(|what| named(&what))?,
        _ => nv_ipc_config_t::zeroed().debug_configs,
    };
    let shm = first.as_ref().and_then(|first| first.shm_config.as_ref());
    let cuda_device_id = shm.and_then(|shm| shm.cuda_device_id).unwrap_or(-1);
    if let Some(Transport { kind: Some(kind), udp_config, .. }) = first
        && kind.eq_ignore_ascii_case("udp")
    {
        return overlaid(udp, udp_config.unwrap_or_default())
            .map(|udp| FileContent::Udp(udp, layout))
            .map_err(|what| named(&what));
    }
    let in_file = |error: ConfigError| named(&with_causes(&error));
    let loaded = from_yaml(yaml).map_err(in_file)?;
    let links = loaded.links;
    // Other keys without a meaning here are in all of NVIPC's files; this one is a mistake.
    for key in loaded.ignored.iter().filter(|key| key.path.ends_with("(given twice)")) {
        say!("{origin}: line {}: ignored, because it is not below transport: {}", key.line, key.path);
    }
    if !is_read {
        // An ignored layout setting would create a link that the other side never finds.
        return Err(named(
            "below transport, type or layout is not a string, or shm_config.cuda_device_id, udp_config or app_config has an \
             value that it cannot have",
        ));
    }
    let link = links.into_iter().next().ok_or_else(|| named("the file has no link; add one"))?;
    Ok(FileContent::Shm(Box::new(link), layout, cuda_device_id, Box::new(debug)))
}

/// The filters of a tap, with one byte for each id.
fn traced(app: &App) -> Result<nv_ipc_debug_config_t, String> {
    let mut debug = nv_ipc_config_t::zeroed().debug_configs;
    match app.grpc_forward {
        Some(Perhaps::Is(count)) => debug.grpc_forward = count,
        Some(Perhaps::Other(_)) => return Err("app_config.grpc_forward is not a number".into()),
        None => {}
    }
    for (what, ids, filter) in [
        ("msg_filter", &app.msg_filter, &mut debug.msg_filter),
        ("cell_filter", &app.cell_filter, &mut debug.cell_filter),
    ] {
        let ids = match ids {
            Some(Perhaps::Is(ids)) => ids,
            Some(Perhaps::Other(_)) => return Err(format!("app_config.{what} is not a list of ids")),
            None => continue,
        };
        for id in ids {
            let place = usize::try_from(*id).ok().and_then(|id| filter.get_mut(id));
            *place.ok_or_else(|| {
                format!("app_config.{what} has {id}; ids are 0 to {}", NVIPC_MAX_MSG_ID - 1)
            })? = 1;
        }
        // An empty list means all.
        if ids.is_empty() {
            filter.fill(1);
        }
    }
    Ok(debug)
}

/// The first transport, if there is one. Returns `None` if it cannot be parsed; `from_yaml` words most errors.
fn first_of(yaml: &str) -> Option<Option<Transport>> {
    // Duplicate keys are checked in `from_yaml`.
    let options = serde_saphyr::options! {
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::FirstWins,
        emit_comments: false,
        with_snippet: false,
    };
    Some(match serde_saphyr::from_str_with_options::<NvipcFile>(yaml, options).ok()?.transport {
        None => None,
        Some(Transports::One(one)) => Some(*one),
        Some(Transports::Many(many)) => many.into_iter().next(),
    })
}

fn overlaid(defaults: nv_ipc_config_udp_t, given: Udp) -> Result<nv_ipc_config_udp_t, String> {
    let address = |what: &str, given: Option<String>, default| match given {
        None => Ok(default),
        Some(address) => match address.parse::<std::net::Ipv4Addr>() {
            Ok(parsed) => Ok(text(&parsed.to_string())),
            Err(_) => Err(format!("udp_config.{what} is {address:?}; give an IPv4 address")),
        },
    };
    Ok(nv_ipc_config_udp_t {
        local_port: given.local_port.unwrap_or(defaults.local_port),
        remote_port: given.remote_port.unwrap_or(defaults.remote_port),
        local_addr: address("local_addr", given.local_addr, defaults.local_addr)?,
        remote_addr: address("remote_addr", given.remote_addr, defaults.remote_addr)?,
        msg_buf_size: given.msg_buf_size.unwrap_or(defaults.msg_buf_size),
        data_buf_size: given.data_buf_size.unwrap_or(defaults.data_buf_size),
    })
}
