//! The checkpoint of the device manager: `kubelet_internal_checkpoint`, in the format of the real kubelet.
//!
//! Its checksum is FNV-1a over the data as the Go library *spew* prints them with their types.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::{fs, io};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost::Message as _;
use serde::{Deserialize, Serialize};
use shmesh_kubelet_api::deviceplugin::ContainerAllocateResponse;

use super::held::Share;

#[derive(Debug, Deserialize, Serialize)]
struct Checkpoint {
    #[serde(rename = "Data")]
    data: Data,
    #[serde(rename = "Checksum")]
    checksum: u64,
}

#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Data {
    #[serde(rename = "PodDeviceEntries")]
    pub(super) pod_device_entries: Option<Vec<Entry>>,
    #[serde(rename = "RegisteredDevices")]
    pub(super) registered_devices: BTreeMap<String, Vec<String>>,
}

#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Entry {
    #[serde(rename = "PodUID")]
    pub(super) pod_uid: String,
    #[serde(rename = "ContainerName")]
    pub(super) container_name: String,
    #[serde(rename = "ResourceName")]
    pub(super) resource_name: String,
    #[serde(rename = "DeviceIDs")]
    pub(super) device_ids: BTreeMap<i64, Vec<String>>,
    #[serde(rename = "AllocResp")]
    answer: String,
}

impl Entry {
    pub(super) fn new(uid: &str, container: &str, resource: &str, share: &Share) -> Self {
        Self {
            pod_uid: uid.to_owned(),
            container_name: container.to_owned(),
            resource_name: resource.to_owned(),
            device_ids: share.devices.clone(),
            answer: STANDARD.encode(share.answer.encode_to_vec()),
        }
    }

    /// The answer of Allocate; `None` if it cannot be parsed, and then the entry is dropped.
    pub(super) fn answer(&self) -> Option<ContainerAllocateResponse> {
        let bytes = STANDARD.decode(&self.answer).ok()?;
        ContainerAllocateResponse::decode(&*bytes).ok()
    }
}

/// Reads the data. Returns `None` if there is no checkpoint.
pub(super) fn read(path: &Path) -> Result<Option<Data>, String> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let Checkpoint { data, checksum } = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    if checksum != sum(&data) {
        return Err("checkpoint is corrupted".to_owned());
    }
    Ok(Some(data))
}

/// Writes another file and renames it, so that a reader gets the old checkpoint or the new one.
pub(super) fn write(path: &Path, data: Data) -> io::Result<()> {
    let checkpoint = Checkpoint { checksum: sum(&data), data };
    let mut text = serde_json::to_string(&checkpoint)?;
    for (plain, escaped) in [("&", "\\u0026"), ("<", "\\u003c"), (">", "\\u003e")] {
        text = text.replace(plain, escaped);
    }
    let aside = path.with_file_name(".kubelet_internal_checkpoint");
    let mut file = fs::File::create(&aside)?;
    file.write_all(text.as_bytes())?;
    fs::rename(aside, path)
}

/// Whether the checksum matches the data; `None` if the text cannot be parsed.
pub(crate) fn checksum_matches(text: &str) -> Option<bool> {
    let Checkpoint { data, checksum } = serde_json::from_str(text).ok()?;
    Some(checksum == sum(&data))
}

fn sum(data: &Data) -> u64 {
    let fnv = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    u64::from(printed(data).bytes().fold(0x811c_9dc5, fnv))
}

fn printed(data: &Data) -> String {
    let mut text = "(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)".to_owned();
    match &data.pod_device_entries {
        None => text.push_str("<nil>"),
        Some(entries) => {
            let entries: Vec<String> = entries.iter().map(printed_entry).collect();
            let _ = write!(text, "[{}]", entries.join(" "));
        }
    }
    let devices = data.registered_devices.iter().map(|(name, ids)| format!("{name}:[{}]", ids.join(" ")));
    let devices = devices.collect::<Vec<_>>().join(" ");
    let _ = write!(text, " RegisteredDevices:(map[string][]string)map[{devices}]}}");
    text
}

fn printed_entry(entry: &Entry) -> String {
    let devices = entry.device_ids.iter().map(|(node, ids)| format!("{node}:[{}]", ids.join(" ")));
    let devices = devices.collect::<Vec<_>>().join(" ");
    let bytes = STANDARD.decode(&entry.answer).unwrap_or_default();
    let bytes = bytes.iter().map(u8::to_string).collect::<Vec<_>>().join(" ");
    format!(
        "{{PodUID:(string){} ContainerName:(string){} ResourceName:(string){} \
         DeviceIDs:(checkpoint.DevicesPerNUMA)map[{devices}] AllocResp:([]uint8)[{bytes}]}}",
        entry.pod_uid, entry.container_name, entry.resource_name
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A checkpoint that a real kubelet wrote and that was published with its checksum.
    const REAL: &str = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{"nvidia.com/gpu":["GPU-0650a168-e770-3ea8-8ac3-8a1d419763e0"]}},"Checksum":3952659280}"#;
    const REAL_WITH_POD: &str = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"513cb897-0262-4868-826f-aa943ee45a38","ContainerName":"app","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":["GPU-77a702db-e37f-3a74-d46d-c5713f66058c"]},"AllocResp":"CkIKFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSKEdQVS03N2E3MDJkYi1lMzdmLTNhNzQtZDQ2ZC1jNTcxM2Y2NjA1OGMaJAoOL2Rldi9udmlkaWFjdGwSDi9kZXYvbnZpZGlhY3RsGgJydxomCg8vZGV2L252aWRpYS11dm0SDy9kZXYvbnZpZGlhLXV2bRoCcncaMgoVL2Rldi9udmlkaWEtdXZtLXRvb2xzEhUvZGV2L252aWRpYS11dm0tdG9vbHMaAnJ3Gi4KEy9kZXYvbnZpZGlhLW1vZGVzZXQSEy9kZXYvbnZpZGlhLW1vZGVzZXQaAnJ3GiAKDC9kZXYvbnZpZGlhMBIML2Rldi9udmlkaWEwGgJydw=="}],"RegisteredDevices":{"nvidia.com/gpu":["GPU-77a702db-e37f-3a74-d46d-c5713f66058c","GPU-9b341c59-f96b-ba85-c137-78c3652fea65","GPU-c1e9f249-b37b-81c2-a8d9-ba5ca0294841"]}},"Checksum":133412836}"#;

    #[test]
    fn checksum_matches_a_real_kubelet() {
        assert_eq!(checksum_matches(REAL), Some(true));
        assert_eq!(checksum_matches(REAL_WITH_POD), Some(true));
        assert_eq!(checksum_matches(&REAL_WITH_POD.replace("133412836", "133412837")), Some(false));
    }
}
