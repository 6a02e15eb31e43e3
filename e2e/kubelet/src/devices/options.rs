//! Merging the answers of all resources of a container for the runtime; on a conflict the first answer is used.

use std::collections::{BTreeMap, BTreeSet};

use shmesh_kubelet_api::deviceplugin::{ContainerAllocateResponse, Mount};

use crate::pod::{Container, RunOptions};

pub(super) fn merged<'a>(
    answers: impl Iterator<Item = &'a ContainerAllocateResponse>,
    container: &Container,
) -> RunOptions {
    let mut options = RunOptions::default();
    let (mut envs, mut mounts) = (BTreeMap::new(), BTreeMap::new());
    let (mut devices, mut names) = (BTreeMap::new(), BTreeSet::new());
    for answer in answers {
        for (name, value) in &answer.envs {
            if first(&mut envs, name, value, "env", &mut options.conflicts) {
                options.envs.push((name.clone(), value.clone()));
            }
        }
        for device in &answer.devices {
            let (path, host) = (&device.container_path, &device.host_path);
            if first(&mut devices, path, host, "device", &mut options.conflicts) {
                options.devices.push(device.clone());
            }
        }
        for mount in &answer.mounts {
            let (path, host) = (&mount.container_path, &mount.host_path);
            if first(&mut mounts, path, host, "mount", &mut options.conflicts) {
                options.mounts.push(mount.clone());
            }
        }
        for (key, value) in &answer.annotations {
            if let Some(before) = options.annotations.get(key) {
                if before != value {
                    options.conflicts.push(format!("annotation {key}: {before}, {value}"));
                }
            } else {
                options.annotations.insert(key.clone(), value.clone());
            }
        }
        for device in &answer.cdi_devices {
            if names.insert(device.name.clone()) {
                options.cdi_devices.push(device.name.clone());
            }
        }
    }
    options.envs.extend(container.env.iter().cloned());
    options.mounts.extend(container.mounts.iter().map(|(container_path, host_path)| Mount {
        container_path: container_path.clone(),
        host_path: host_path.clone(),
        read_only: false,
    }));
    options
}

/// Whether `key` was not claimed before.
fn first<'a>(
    seen: &mut BTreeMap<&'a str, &'a str>,
    key: &'a str,
    value: &'a str,
    what: &str,
    conflicts: &mut Vec<String>,
) -> bool {
    match seen.get(key) {
        None => {
            seen.insert(key, value);
            true
        }
        Some(before) => {
            if *before != value {
                conflicts.push(format!("{what} {key}: {before}, {value}"));
            }
            false
        }
    }
}
