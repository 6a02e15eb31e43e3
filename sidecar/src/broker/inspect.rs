//! Listing all keys, and the number of keys of each process. The caller checks that the client is an operator.

use shmesh_proto::broker::{AllKeys, KeyInfo};
use shmesh_proto::limits::{MAX_LISTED, MAX_LISTED_IMPORTERS};

use super::region::Region;
use super::{Broker, ProcessId};

/// The number of keys of a process.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Holdings {
    /// Number of keys that it has exported.
    pub exports: usize,
    /// Number of keys that it imports, or waits to import.
    pub imports: usize,
}

impl Broker {
    /// The number of keys of a process; 0 for an unknown process.
    #[must_use]
    pub fn holdings(&self, process: &ProcessId) -> Holdings {
        let known = self.tables.processes.get(process);
        known.map_or_else(Holdings::default, |known| Holdings {
            exports: known.exports.len(),
            imports: known.imports.len(),
        })
    }

    /// All keys after the first `skip`, as many as fit into a packet, in the order in which they were exported.
    #[must_use]
    pub fn all_keys(&self, skip: u32) -> AllKeys {
        let regions = &self.tables.regions;
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        AllKeys {
            keys: regions.values().skip(skip).take(MAX_LISTED).map(info).collect(),
            total: count(regions.len()),
        }
    }
}

fn info(region: &Region) -> KeyInfo {
    KeyInfo {
        hash: region.digest.short(),
        size: region.size,
        mechanism: region.mechanism.into(),
        exporter: region.exporter.bare_tgid,
        importers: region.importers().take(MAX_LISTED_IMPORTERS).map(|p| p.bare_tgid).collect(),
        importer_count: count(region.importers().count()),
        admitted: count(region.admitted()),
        open: region.open,
        closing: region.closing,
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
