//! A container runtime, as far as the tests need one: namespaces, mounts and groups of an Allocate answer and of the CDI
//! devices in it, a user without privileges, a read-only root. The file system is this machine's.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;
use shmesh_fake_kubelet::RunOptions;

/// A container that can run programs.
pub(crate) struct Runtime {
    script: String,
    envs: Vec<(String, String)>,
}

/// As in the CDI specification.
#[derive(Deserialize)]
struct Spec {
    kind: String,
    devices: Vec<Device>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    container_edits: Edits,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Edits {
    #[serde(default)]
    mounts: Vec<Mount>,
    #[serde(default)]
    additional_gids: Vec<u32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mount {
    host_path: String,
    container_path: String,
    #[serde(rename = "type")]
    kind: String,
    options: Vec<String>,
}

impl Runtime {
    /// `root` is the node's; `user` runs the programs.
    pub(crate) fn new(root: &Path, options: &RunOptions, user: u32) -> Self {
        assert!(options.conflicts.is_empty(), "{options:?}");
        let mut mounts: Vec<Mount> = options
            .mounts
            .iter()
            .map(|mount| Mount {
                host_path: mount.host_path.clone(),
                container_path: mount.container_path.clone(),
                kind: "none".into(),
                options: vec!["rbind".into(), if mount.read_only { "ro" } else { "rw" }.into()],
            })
            .collect();
        let mut gids = Vec::new();
        for device in &options.cdi_devices {
            let edits = cdi(&root.join("var/run/cdi"), device);
            mounts.extend(edits.mounts);
            gids.extend(edits.additional_gids);
        }
        Self { script: script(root, &mounts, &gids, user), envs: options.envs.clone() }
    }

    /// A command that ends in this program, to which arguments may be added.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount", "--ipc", "--net", "--mount-proc"]);
        command.args(["sh", "-c", &self.script, "sh"]).arg(program);
        command.envs(self.envs.iter().map(|(name, value)| (name, value)));
        command
    }
}

/// The edits of a container for a CDI device, from the files that the runtime finds.
fn cdi(dir: &Path, device: &str) -> Edits {
    let (kind, name) = device.split_once('=').unwrap();
    for file in std::fs::read_dir(dir).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let spec: Spec = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        if spec.kind == kind
            && let Some(device) = spec.devices.into_iter().find(|device| device.name == name)
        {
            return device.container_edits;
        }
    }
    panic!("unresolvable CDI device {device}");
}

fn script(root: &Path, mounts: &[Mount], gids: &[u32], user: u32) -> String {
    // Sources are taken aside first: one mount may hide the source of the next.
    let mut script = String::from(
        "set -e\nmount --make-rprivate /\nmount -t tmpfs tmpfs /mnt\ntouch /mnt/program\nmount --bind \"$1\" /mnt/program\n",
    );
    for (i, mount) in mounts.iter().enumerate() {
        let (own, flags): (Vec<&str>, Vec<&str>) = mount
            .options
            .iter()
            .map(String::as_str)
            .filter(|option| !matches!(*option, "rbind" | "bind" | "rprivate" | "idmap"))
            .partition(|option| option.contains('='));
        let options = own.iter().chain(&flags).copied().collect::<Vec<_>>().join(",");
        let _ = if mount.kind == "tmpfs" {
            writeln!(script, "mkdir /mnt/{i}\nmount -t tmpfs -o {options} tmpfs /mnt/{i}")
        } else {
            let source = root.join(mount.host_path.trim_start_matches('/'));
            writeln!(
                script,
                "mkdir /mnt/{i}\nmount --bind {} /mnt/{i}\nmount -o remount,bind,{options} /mnt/{i}",
                source.display()
            )
        };
    }
    script.push_str("mount -t tmpfs tmpfs /run\nmkdir -m 755 /run/shmesh\n");
    script.push_str("touch /run/program\nmount --move /mnt/program /run/program\n");
    for mount in mounts.iter().filter(|mount| mount.container_path.starts_with("/run/")) {
        let _ = writeln!(script, "mkdir -p {}", mount.container_path);
    }
    for (i, mount) in mounts.iter().enumerate() {
        let _ = writeln!(script, "mount --move /mnt/{i} {}", mount.container_path);
    }
    let groups = gids.iter().map(u32::to_string).chain([user.to_string()]).collect::<Vec<_>>().join(",");
    let _ = write!(
        script,
        "umount /mnt\nmount -o remount,bind,ro /\nshift\nexec setpriv --reuid {user} --regid {user} --groups {groups} \
         --no-new-privs --inh-caps=-all --bounding-set=-all \
         --pdeathsig KILL -- /run/program \"$@\"\n"
    );
    script
}

/// A program of this machine, for containers.
pub(crate) fn tool(name: &str) -> PathBuf {
    PathBuf::from(format!("/usr/bin/{name}"))
}
