//! The kubelet's claims, and their checkpoint: `dra_manager_state`, in the format of the real kubelet.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::{Deserialize, Serialize};
use shmesh_kubelet_api::dra::{Claim, Device};

/// A claim that pods of this node use, as the kubelet's checkpoint has it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct ClaimInfo {
    #[serde(rename = "ClaimUID")]
    pub(crate) claim_uid: String,
    pub(crate) claim_name: String,
    pub(crate) namespace: String,
    #[serde(rename = "PodUIDs")]
    pods: BTreeMap<String, Empty>,
    driver_state: BTreeMap<String, DriverState>,
    /// Not in the checkpoint, so it is lost when the kubelet restarts.
    #[serde(skip)]
    pub(crate) prepared: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
struct Empty {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "PascalCase")]
struct DriverState {
    devices: Option<Vec<DeviceState>>,
}

/// A device as its driver described it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct DeviceState {
    pub(crate) pool_name: String,
    pub(crate) device_name: String,
    #[serde(rename = "ShareID")]
    share_id: Option<String>,
    pub(crate) request_names: Option<Vec<String>>,
    #[serde(rename = "CDIDeviceIDs")]
    pub(crate) cdi_device_ids: Option<Vec<String>>,
}

impl ClaimInfo {
    pub(crate) fn new(uid: &str, name: &str, namespace: &str, drivers: BTreeSet<String>) -> Self {
        Self {
            claim_uid: uid.to_owned(),
            claim_name: name.to_owned(),
            namespace: namespace.to_owned(),
            pods: BTreeMap::new(),
            driver_state: drivers.into_iter().map(|driver| (driver, DriverState::default())).collect(),
            prepared: false,
        }
    }

    pub(crate) fn pods(&self) -> impl Iterator<Item = &String> {
        self.pods.keys()
    }

    pub(crate) fn add_pod(&mut self, uid: &str) {
        self.pods.insert(uid.to_owned(), Empty {});
    }

    pub(crate) fn remove_pod(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    pub(crate) fn drivers(&self) -> impl Iterator<Item = &String> {
        self.driver_state.keys()
    }

    /// Adds a device to the list of a driver; earlier entries stay, even if it is the same device.
    pub(crate) fn add_device(&mut self, driver: &str, device: Device) {
        let filled = |list: Vec<String>| Some(list).filter(|list| !list.is_empty());
        let device = DeviceState {
            pool_name: device.pool_name,
            device_name: device.device_name,
            share_id: device.share_id,
            request_names: filled(device.request_names),
            cdi_device_ids: filled(device.cdi_device_ids),
        };
        self.driver_state.entry(driver.to_owned()).or_default().devices.get_or_insert_default().push(device);
    }

    pub(crate) fn devices(&self) -> impl Iterator<Item = (&String, &DeviceState)> {
        self.driver_state
            .iter()
            .flat_map(|(driver, state)| state.devices.iter().flatten().map(move |device| (driver, device)))
    }

    /// Returns the CDI names of the devices for a request, or of all.
    pub(crate) fn cdi_devices(&self, request: Option<&str>) -> impl Iterator<Item = &String> {
        let wanted = move |device: &&DeviceState| match (&device.request_names, request) {
            (Some(names), Some(request)) => names.iter().any(|name| name == request),
            _ => true,
        };
        self.devices()
            .map(|(_, device)| device)
            .filter(wanted)
            .flat_map(|device| device.cdi_device_ids.iter().flatten())
    }

    /// Returns what a driver gets to know of the claim.
    pub(crate) fn message(&self) -> Claim {
        Claim {
            namespace: self.namespace.clone(),
            uid: self.claim_uid.clone(),
            name: self.claim_name.clone(),
        }
    }
}

/// The claims of one run of the kubelet, by namespace and name.
#[derive(Debug)]
pub(crate) struct Claims {
    file: PathBuf,
    by_name: BTreeMap<(String, String), ClaimInfo>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Checkpoint {
    data: String,
    checksum: u32,
}

#[derive(Debug, Deserialize, Serialize)]
struct Data {
    kind: String,
    #[serde(rename = "apiVersion")]
    api_version: String,
    #[serde(rename = "ClaimInfoStateList")]
    list: Option<Vec<ClaimInfo>>,
}

impl Claims {
    /// Reads the checkpoint. A kubelet whose checkpoint is corrupt does not start.
    pub(crate) fn load(file: &Path) -> io::Result<Self> {
        let mut claims = Self { file: file.to_owned(), by_name: BTreeMap::new() };
        let text = match fs::read_to_string(file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                file.parent().map(fs::create_dir_all).transpose()?;
                claims.store().map_err(io::Error::other)?;
                return Ok(claims);
            }
            Err(error) => return Err(error),
        };
        let checkpoint: Checkpoint = serde_json::from_str(&text)?;
        if checkpoint.checksum != crc32(checkpoint.data.as_bytes()) {
            let error = "could not get checkpoint dra_manager_state: checkpoint is corrupted";
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        let data: Data = serde_json::from_str(&checkpoint.data)?;
        let key = |info: ClaimInfo| ((info.namespace.clone(), info.claim_name.clone()), info);
        claims.by_name = data.list.into_iter().flatten().map(key).collect();
        Ok(claims)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &ClaimInfo> {
        self.by_name.values()
    }

    pub(crate) fn get(&self, namespace: &str, name: &str) -> Option<&ClaimInfo> {
        self.by_name.get(&(namespace.to_owned(), name.to_owned()))
    }

    pub(crate) fn get_mut(&mut self, namespace: &str, name: &str) -> Option<&mut ClaimInfo> {
        self.by_name.get_mut(&(namespace.to_owned(), name.to_owned()))
    }

    /// Returns the claim of the same name, or this one, which is added.
    pub(crate) fn get_or_add(&mut self, info: ClaimInfo) -> &mut ClaimInfo {
        let key = (info.namespace.clone(), info.claim_name.clone());
        self.by_name.entry(key).or_insert(info)
    }

    pub(crate) fn remove(&mut self, namespace: &str, name: &str) {
        self.by_name.remove(&(namespace.to_owned(), name.to_owned()));
    }

    /// Writes the checkpoint: another file, which is renamed.
    pub(crate) fn store(&self) -> Result<(), String> {
        let data = Data {
            kind: "DRACheckpoint".to_owned(),
            api_version: "checkpoint.dra.kubelet.k8s.io/v1".to_owned(),
            list: Some(self.by_name.values().cloned().collect::<Vec<_>>()).filter(|list| !list.is_empty()),
        };
        let write = || {
            let data = serde_json::to_string(&data)?;
            let checkpoint = Checkpoint { checksum: crc32(data.as_bytes()), data };
            let aside = self.file.with_extension("tmp");
            fs::write(&aside, serde_json::to_string(&checkpoint)?)?;
            fs::rename(aside, &self.file)
        };
        write().map_err(|error: io::Error| format!("could not save checkpoint dra_manager_state: {error}"))
    }
}

/// The checksum of IEEE 802.3.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 & 0_u32.wrapping_sub(sum & 1)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_is_the_common_one() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn checkpoint_is_restored_without_what_is_prepared() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("dra_manager_state");
        let mut claims = Claims::load(&file).unwrap();
        let info = claims.get_or_add(ClaimInfo::new("u", "c", "ns", ["d".to_owned()].into()));
        info.add_pod("p");
        info.add_device(
            "d",
            Device { pool_name: "pool".to_owned(), device_name: "x".to_owned(), ..Device::default() },
        );
        info.prepared = true;
        let expected = ClaimInfo { prepared: false, ..info.clone() };
        claims.store().unwrap();
        assert_eq!(Claims::load(&file).unwrap().get("ns", "c"), Some(&expected));
        let text = fs::read_to_string(&file).unwrap();
        let entry = r#"{\"ClaimUID\":\"u\",\"ClaimName\":\"c\",\"Namespace\":\"ns\",\"PodUIDs\":{\"p\":{}},\"DriverState\":{\"d\":{\"Devices\":[{\"PoolName\":\"pool\",\"DeviceName\":\"x\",\"ShareID\":null,\"RequestNames\":null,\"CDIDeviceIDs\":null}]}}}"#;
        assert!(text.contains(entry), "{text}");
        fs::write(&file, text.replace("pool", "poor")).unwrap();
        assert!(Claims::load(&file).unwrap_err().to_string().ends_with("checkpoint is corrupted"));
    }
}
