//! Exporting memory under a new key.

use shmesh_proto::broker::{ExportKey, Exported, Mechanism, reply};
use shmesh_proto::key::{DeviceKey, KEY_BYTES};

use super::audit::{self, Reason, Record};
use super::digest::{Digest, key_of};
use super::refusal::Refusal;
use super::region::Region;
use super::request::{Caller, Response};
use super::{Broker, FdToken};

/// The flag that opens a key to all processes: `DISABLE_PID_VALIDATION`.
pub(super) const OPEN: u64 = 1;

/// Bytes of a device's UUID, which identifies it across containers; ordinals differ from container to container.
const UUID_BYTES: usize = 16;

/// Bytes of a CUDA IPC handle (`CUDA_IPC_HANDLE_SIZE`), the device's UUID, and the exporter's process id in its own
/// namespace.
const CUDA_HANDLE_BYTES: usize = 64 + UUID_BYTES + 4;

/// Number of descriptors and bytes of handle that an export must have.
fn shape(mechanism: Mechanism) -> (usize, usize) {
    match mechanism {
        Mechanism::Unspecified => (0, 0),
        Mechanism::Host => (1, 0),
        Mechanism::CudaVmm => (1, UUID_BYTES),
        // `aclrtIpcMemGetExportKey` fixes `len` to 65, as ours.
        Mechanism::Ascend => (0, KEY_BYTES),
        Mechanism::CudaLegacy => (0, CUDA_HANDLE_BYTES),
    }
}

/// A region without a descriptor and without admitted processes.
pub(super) fn region(caller: &Caller, key: DeviceKey, export: ExportKey) -> Region {
    Region {
        key,
        digest: Digest::of(key.as_bytes()),
        exporter: caller.process,
        session: caller.session,
        size: export.size,
        mechanism: export.mechanism(),
        handle: export.handle,
        fd: None,
        open: export.flags == OPEN,
        closing: false,
        is_awaited: false,
        is_partial: false,
        is_wanted: false,
        pids: Default::default(),
        subjects: Default::default(),
        imports: Default::default(),
        grants: 0,
    }
}

impl Broker {
    /// Exports memory. Takes the descriptor out of `fds` only if a region is created to hold it.
    pub(super) fn export(
        &mut self,
        caller: &Caller,
        export: ExportKey,
        fds: &mut Vec<FdToken>,
        record: &mut Record,
    ) -> Result<Response, Refusal> {
        record.size_bytes = Some(export.size);
        let mechanism = export.mechanism();
        record.mechanism = Some(audit::name(mechanism));
        self.may_export(&export, mechanism, fds)?;
        self.has_quota(caller, export.size)?;

        let secret = self.draw();
        let key = key_of(&secret, &caller.process);
        let digest = Digest::of(key.as_bytes());
        if self.tables.is_taken(&digest) {
            return Err(Refusal::entropy());
        }
        record.key_hash = Some(digest.short());
        let mut region = region(caller, key, export);
        region.fd = fds.pop();
        self.tables.insert(region);
        let exported = Exported { key: key.as_bytes().to_vec(), secret: secret.to_vec() };
        Ok(Response::Now(reply::Result::Exported(exported), None))
    }

    pub(super) fn may_export(
        &self,
        export: &ExportKey,
        mechanism: Mechanism,
        fds: &[FdToken],
    ) -> Result<(), Refusal> {
        if export.size == 0 {
            return Err(Refusal::invalid(Reason::BadSize, "size is 0; give the size of the memory in bytes"));
        }
        if export.flags & !OPEN != 0 {
            return Err(Refusal::invalid(Reason::BadFlags, "flags are 0x0 or 0x1"));
        }
        if export.flags == OPEN && !self.policy.open_keys {
            let text = "flag 0x1 is not permitted here: admit importers, or start the sidecar with --allow-open-keys";
            return Err(Refusal::denied(Reason::OpenNotPermitted, text));
        }
        if mechanism == Mechanism::Unspecified {
            return Err(Refusal::invalid(
                Reason::BadMechanism,
                "the mechanism is unknown to this broker; run the same version on both sides",
            ));
        }
        if mechanism == Mechanism::CudaLegacy && !self.policy.cuda_legacy {
            let text = "cuda-legacy is not permitted here: use cuda-vmm, or start the sidecar with --allow-cuda-legacy";
            return Err(Refusal::denied(Reason::MechanismNotPermitted, text));
        }
        if mechanism == Mechanism::Ascend && !self.policy.bare_numbers {
            let text = "process ids here are those of a container: give the sidecar the node's identity service \
                        (--identity)";
            return Err(Refusal::denied(Reason::MechanismNotPermitted, text));
        }
        let (descriptors, handle_bytes) = shape(mechanism);
        let name = audit::name(mechanism);
        if fds.len() != descriptors {
            let text = format!("{name} takes {descriptors} descriptors, not {}", fds.len());
            return Err(Refusal::invalid(Reason::BadDescriptors, text));
        }
        if export.handle.len() != handle_bytes {
            let text = format!("{name} takes {handle_bytes} bytes of handle, not {}", export.handle.len());
            return Err(Refusal::invalid(Reason::BadHandle, text));
        }
        Ok(())
    }

    pub(super) fn has_quota(&self, caller: &Caller, size: u64) -> Result<(), Refusal> {
        let policy = &self.policy;
        if self.tables.regions.len() >= policy.keys {
            let what = "keys in all: close some, or give the sidecar more memory and descriptors";
            return Err(Refusal::limit(Reason::Keys, policy.keys, what));
        }
        let keys = self.tables.sessions.get(&caller.session).map_or(0, |session| session.keys);
        if keys >= policy.keys_per_session {
            return Err(Refusal::limit(
                Reason::KeysOfSession,
                policy.keys_per_session,
                "keys of one session: close some",
            ));
        }
        let usage = self.tables.usage(&caller.process);
        if usage.keys >= policy.keys_per_account {
            return Err(Refusal::limit(
                Reason::KeysOfAccount,
                policy.keys_per_account,
                "keys of one pod: close some",
            ));
        }
        if usage.bytes.checked_add(size).is_none_or(|sum| sum > policy.bytes_per_account) {
            return Err(Refusal::limit(
                Reason::BytesOfAccount,
                policy.bytes_per_account,
                "bytes behind the keys of one pod: close some",
            ));
        }
        Ok(())
    }
}
