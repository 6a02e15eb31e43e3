//! The meaning of the runtime's error numbers. If a number can have several causes, all are listed.

use std::ffi::c_int;
use std::io::{self, ErrorKind as Kind};

/// The error number of the driver for any invalid parameter.
const PARAMETER: c_int = 507_899;

/// Converts the result of a call to an error with the name of the call and the probable causes.
pub(super) fn check(call: &str, code: c_int) -> io::Result<()> {
    let (kind, hint) = match (code, call) {
        (0, _) => return Ok(()),
        (100_000 | 107_000, _) => (
            Kind::InvalidInput,
            "a parameter is not valid: a size of 0, or more than 31 processes in one call",
        ),
        (100_001, _) => (Kind::Other, "other code in this process has shut down the runtime (aclFinalize)"),
        (107_008 | 200_000, _) => (Kind::InvalidInput, "an address is not at the beginning of a page"),
        (107_017, _) => (Kind::InvalidInput, "a pointer does not belong to this process"),
        (107_001, _) => (Kind::NotFound, "the device does not exist here: check ASCEND_RT_VISIBLE_DEVICES"),
        (107_002, _) => (Kind::Other, "this thread has no device: devices are bound to threads"),
        (207_000, _) => (
            Kind::Unsupported,
            "this product or kind of device cannot share memory: Atlas 200I/500 A2 cannot by keys, and virtual NPUs \
             cannot at all",
        ),
        (207_001, _) => {
            (Kind::OutOfMemory, "the device has not enough free memory: free some, or allocate less")
        }
        (207_004, _) => (Kind::NotFound, "there is no NPU here: give the container its device files"),
        (207_006, _) => (
            Kind::PermissionDenied,
            "the key was exported without a list of processes, so the list cannot be set, or it has a list that was not set",
        ),
        (PARAMETER, "aclrtIpcMemImportByKey") => (
            Kind::PermissionDenied,
            "one of: this process is not on the key's list; it was put there by its process id in another pid namespace, or \
             before it started; the key is closed, or its exporter has ended; the memory is on another card that this \
             product cannot reach (PCIe cards of the 910B2C cannot)",
        ),
        (PARAMETER, "aclrtIpcMemGetExportKey") => (
            Kind::InvalidInput,
            "one of: it is not device memory of this process; its address is not at the beginning of a page (2 MiB, or 4 KiB); \
             it is longer than its allocation; it is imported, or read-only",
        ),
        (PARAMETER, "aclrtIpcMemSetImportPid" | "aclrtIpcMemClose") => (
            Kind::InvalidInput,
            "one of: this process has not exported or imported the key; the key is closed; the list names only 0 and \
             the exporter itself",
        ),
        (PARAMETER, _) => (Kind::InvalidInput, "the driver rejected one of the parameters"),
        _ => (Kind::Other, "look it up under aclError in the runtime's manual"),
    };
    Err(io::Error::new(kind, format!("{call}: error {code}: {hint}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ambiguous_error_number_lists_all_causes() {
        assert!(check("aclrtIpcMemImportByKey", 0).is_ok());
        let error = check("aclrtIpcMemImportByKey", PARAMETER).unwrap_err();
        assert_eq!(error.kind(), Kind::PermissionDenied);
        let text = error.to_string();
        for cause in [
            "507899",
            "not on the key's list",
            "another pid namespace",
            "before it started",
            "closed",
            "card",
        ] {
            assert!(text.contains(cause), "{text}");
        }
        assert!(
            check("aclrtIpcMemGetExportKey", PARAMETER)
                .unwrap_err()
                .to_string()
                .contains("beginning of a page")
        );
        assert!(check("aclrtMalloc", 4711).unwrap_err().to_string().contains("4711"));
        // A file that could not be written has nothing to do with pointers.
        assert!(check("aclInit", 100_004).unwrap_err().to_string().contains("look it up"));
        assert!(check("aclInit", 100_001).unwrap_err().to_string().contains("aclFinalize"));
    }
}
