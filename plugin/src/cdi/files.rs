//! CDI specification files. They are written under a temporary name and renamed, so that the runtime never
//! sees a partial file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::{Device, agent, pool, shm, with_one_directory};
use crate::config::Bytes;
use crate::resource::{Pool, Resource, ResourceKind};

/// CDI version per class: the lowest one with the fields in use (`additionalGids` needs 0.7.0).
const VERSIONS: [(&str, &str); 4] =
    [("shm", "0.6.0"), ("pool", "0.7.0"), ("agent", "0.6.0"), (CLAIM, "0.7.0")];
/// Class of the devices of claims, which have a file for each claim.
pub(crate) const CLAIM: &str = "claim";

/// The CDI devices that the specification files must contain.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct CdiDevices {
    /// Size of a unit in bytes, and the maximum number of units per container.
    pub(super) shm: Option<(u64, u64)>,
    pools: Vec<Pool>,
    agent: PathBuf,
}

impl CdiDevices {
    /// Collects the devices that these resources need.
    pub(crate) fn for_resources<'a>(resources: impl IntoIterator<Item = &'a Resource>, agent: &Path) -> Self {
        let mut wanted = Self { agent: agent.to_owned(), ..Self::default() };
        for resource in resources {
            match &resource.kind {
                ResourceKind::Shm { unit } => wanted.shm = Some((*unit, resource.units().len() as u64)),
                ResourceKind::Pool(pool) => wanted.pools.push(pool.clone()),
                ResourceKind::Agent | ResourceKind::Slots(..) => {}
            }
        }
        wanted
    }
}

/// The specification files of one domain.
#[derive(Clone, Debug)]
pub(crate) struct SpecFiles {
    /// Directory as seen from this process.
    pub(crate) directory: PathBuf,
    pub(crate) domain: String,
}

/// The device names in a specification file.
#[derive(Deserialize)]
struct DeviceNames {
    devices: Vec<DeviceName>,
}

#[derive(Deserialize)]
struct DeviceName {
    name: String,
}

/// The devices in a specification file, as raw JSON.
#[derive(Deserialize)]
struct DeviceList {
    devices: Vec<serde_json::Value>,
}

impl SpecFiles {
    pub(super) fn path(&self, class: &str) -> PathBuf {
        self.directory.join(format!("{}-{class}.json", self.domain))
    }

    /// Whether a required specification file is missing.
    pub(crate) fn is_any_missing(&self, wanted: &CdiDevices) -> bool {
        let is_missing = |class| !self.path(class).exists();
        (wanted.shm.is_some() && is_missing("shm"))
            || (!wanted.pools.is_empty() && is_missing("pool"))
            || is_missing("agent")
    }

    /// Writes all files. Existing devices are kept, because a restarting container may still need them.
    pub(crate) fn write(&self, wanted: &CdiDevices) -> Result<()> {
        self.create_directory()?;
        if let Some((unit, count)) = wanted.shm {
            let mut sizes: BTreeSet<u64> = (1..=count).map(|units| unit * units).collect();
            sizes.extend(self.sizes_described());
            self.replace("shm", "shm", sizes.iter().copied().map(shm))?;
        }
        if !wanted.pools.is_empty() {
            let mut pools: BTreeMap<_, _> = self.pools_described();
            for one in &wanted.pools {
                pools.insert(one.name.clone(), serde_json::to_value(pool(one))?);
            }
            self.replace("pool", "pool", pools.values())?;
        }
        self.replace("agent", "agent", std::iter::once(agent(&wanted.agent)))
    }

    fn create_directory(&self) -> Result<()> {
        fs::create_dir_all(&self.directory)
            .with_context(|| format!("cannot create the CDI directory {}", self.directory.display()))
    }

    /// Writes the devices of a claim.
    pub(crate) fn write_claim(&self, uid: &str, devices: &[Device]) -> Result<()> {
        self.create_directory()?;
        self.replace(&format!("{CLAIM}-{uid}"), CLAIM, with_one_directory(uid, devices).iter())
    }

    /// Removes the devices of a claim, if there are any.
    pub(crate) fn remove_claim(&self, uid: &str) -> Result<()> {
        let path = self.path(&format!("{CLAIM}-{uid}"));
        for path in [path.with_extension("new"), path] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error)
                        .with_context(|| format!("cannot remove the CDI specification {}", path.display()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether the file of a claim lists exactly these devices.
    pub(crate) fn has_claim(&self, uid: &str, devices: &[Device]) -> bool {
        let path = self.path(&format!("{CLAIM}-{uid}"));
        self.is_unchanged(&path, CLAIM, with_one_directory(uid, devices).iter())
    }

    /// Returns the uids of the claims that have a file, or the rest of one.
    ///
    /// # Errors
    /// The directory exists and cannot be listed.
    pub(crate) fn claims(&self) -> io::Result<BTreeSet<String>> {
        let prefix = format!("{}-{CLAIM}-", self.domain);
        let uid = |name: &str| {
            let rest = name.strip_prefix(&prefix)?;
            let uid = rest.strip_suffix(".json").or_else(|| rest.strip_suffix(".new"))?;
            Some(uid.to_owned())
        };
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            entries => entries?.collect::<io::Result<Vec<_>>>()?,
        };
        Ok(entries.into_iter().filter_map(|entry| uid(entry.file_name().to_str()?)).collect())
    }

    /// Returns the names of the devices of a claim, as its file lists them.
    pub(crate) fn claim_devices(&self, uid: &str) -> Result<Vec<String>> {
        let path = self.path(&format!("{CLAIM}-{uid}"));
        let read = || -> Result<DeviceNames> { Ok(serde_json::from_slice(&fs::read(&path)?)?) };
        let read = read().with_context(|| format!("cannot read the CDI specification {}", path.display()))?;
        Ok(read.devices.into_iter().map(|device| device.name).collect())
    }

    fn sizes_described(&self) -> Vec<u64> {
        // Streamed, because the file can have megabytes.
        let Ok(file) = File::open(self.path("shm")) else { return Vec::new() };
        let names = serde_json::from_reader(BufReader::new(file))
            .map_or_else(|_| Vec::new(), |DeviceNames { devices }| devices);
        names.iter().filter_map(|one| one.name.parse().ok()).map(|Bytes(bytes)| bytes).collect()
    }

    fn pools_described(&self) -> BTreeMap<String, serde_json::Value> {
        let Ok(bytes) = fs::read(self.path("pool")) else { return BTreeMap::new() };
        let devices =
            serde_json::from_slice(&bytes).map_or_else(|_| Vec::new(), |DeviceList { devices }| devices);
        devices
            .into_iter()
            .filter_map(|device| Some((device.get("name")?.as_str()?.to_owned(), device)))
            .collect()
    }

    /// Whether the files contain every device that an allocation of this resource names.
    pub(crate) fn describes(&self, resource: &Resource) -> bool {
        let is_described = match &resource.kind {
            ResourceKind::Shm { unit } => {
                let described: BTreeSet<_> = self.sizes_described().into_iter().collect();
                return (1..=resource.units().len() as u64).all(|units| described.contains(&(unit * units)));
            }
            ResourceKind::Pool(pool) => self.pools_described().contains_key(&pool.name),
            ResourceKind::Agent | ResourceKind::Slots(..) => true,
        };
        is_described && self.path("agent").exists()
    }

    /// Replaces the file of this name by one with devices of a class.
    fn replace(
        &self,
        name: &str,
        class: &str,
        devices: impl Iterator<Item = impl Serialize> + Clone,
    ) -> Result<()> {
        let path = self.path(name);
        // An unchanged file is not rewritten: the disk may be full, and the runtime would reload it.
        if self.is_unchanged(&path, class, devices.clone()) {
            return Ok(());
        }
        // Without the suffix `.json` the runtime ignores the file until the rename.
        let new = path.with_extension("new");
        let written = || -> io::Result<()> {
            let mut out = BufWriter::new(File::create(&new)?);
            out.get_ref().set_permissions(Permissions::from_mode(0o644))?;
            self.print(&mut out, class, devices)?;
            // Not synchronised with the disk: what a failure of the node tears is written anew at the next start, as is unknown content.
            out.flush()?;
            fs::rename(&new, &path)
        };
        let outcome = written();
        if outcome.is_err() {
            // Remove the partial file, because disk space may be scarce.
            let _ = fs::remove_file(&new);
        }
        outcome.with_context(|| format!("cannot write the CDI specification {}", path.display()))
    }

    fn is_unchanged(&self, path: &Path, class: &str, devices: impl Iterator<Item = impl Serialize>) -> bool {
        let Ok(file) = File::open(path) else { return false };
        let mut same = Comparer(BufReader::new(file));
        self.print(&mut same, class, devices).is_ok() && same.0.fill_buf().is_ok_and(<[u8]>::is_empty)
    }

    fn print(
        &self,
        out: &mut impl Write,
        class: &str,
        devices: impl Iterator<Item = impl Serialize>,
    ) -> io::Result<()> {
        let version = VERSIONS.iter().find(|(of, _)| *of == class).map_or("0.7.0", |(_, version)| version);
        // One device at a time: there may be thousands.
        write!(out, "{{\"cdiVersion\":\"{version}\",\"kind\":\"{}/{class}\",\"devices\":[", self.domain)?;
        for (at, device) in devices.enumerate() {
            out.write_all(if at == 0 { b"\n" } else { b",\n" })?;
            serde_json::to_writer(&mut *out, &device)?;
        }
        out.write_all(b"\n]}\n")
    }
}

/// A writer that fails at the first byte that differs from the file.
struct Comparer(BufReader<File>);

impl Write for Comparer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let there = self.0.fill_buf()?;
        let length = there.len().min(bytes.len());
        if (length == 0 && !bytes.is_empty()) || there[..length] != bytes[..length] {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.0.consume(length);
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
