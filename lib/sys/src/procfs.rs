//! Reading and parsing files of `/proc`. The parsers are pure and accept any text.
//!
//! The crate `procfs` does not serve here: it reads files without a limit and parses all of them into owned structures. These
//! functions read a few fields of files whose length and content a hostile process influences.

use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Bytes read of `fdinfo`, `stat` and `status`. The needed fields are in the first kilobyte; `status` grows with the
/// number of groups.
const MAX_PROC_BYTES: usize = 4096;
/// Bytes read of `cgroup`: enough for a path of maximum length in each hierarchy.
const MAX_CGROUP_BYTES: usize = 65_536;

/// A file of `/proc/PID`. Reading these does not take the lock of the process's memory map, which a hostile process
/// could hold.
///
/// ```
/// use shmesh_sys::procfs::{ProcFile, Kernel, Proc, start_time};
/// let stat = Kernel.read(std::process::id().cast_signed(), ProcFile::Stat)?;
/// assert!(start_time(&stat).is_some());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ProcFile {
    /// The file `/proc/<pid>/stat`: state and start time.
    Stat,
    /// The file `/proc/<pid>/status`: user and namespaces.
    Status,
    /// The file `/proc/<pid>/cgroup`: cgroup paths.
    Cgroup,
}

/// The source of `/proc` files; tests let processes end between two reads.
///
/// ```
/// use shmesh_sys::procfs::{ProcFile, Proc};
/// /// Has one file for all processes.
/// struct Made;
/// impl Proc for Made {
///     fn read(&self, _tgid: i32, _file: ProcFile) -> std::io::Result<String> {
///         Ok("Tgid:\t1\n".into())
///     }
/// }
/// ```
pub trait Proc {
    /// The beginning of a file of `/proc/PID`, whole lines only.
    ///
    /// # Errors
    /// The process does not exist, `/proc` hides it (`hidepid`), or no descriptor is left.
    fn read(&self, tgid: i32, file: ProcFile) -> io::Result<String>;
}

/// The procfs at `/proc`.
#[derive(Clone, Copy, Debug)]
pub struct Kernel;

impl Proc for Kernel {
    fn read(&self, tgid: i32, file: ProcFile) -> io::Result<String> {
        of(&tgid.to_string(), file)
    }
}

/// The beginning of a file of `/proc/self`.
///
/// # Errors
/// `/proc` is not mounted.
pub fn own(file: ProcFile) -> io::Result<String> {
    of("self", file)
}

fn of(whose: &str, file: ProcFile) -> io::Result<String> {
    let (name, limit) = match file {
        ProcFile::Stat => ("stat", MAX_PROC_BYTES),
        ProcFile::Status => ("status", MAX_PROC_BYTES),
        ProcFile::Cgroup => ("cgroup", MAX_CGROUP_BYTES),
    };
    beginning(&format!("/proc/{whose}/{name}"), limit)
}

/// The first `limit` bytes of a file, whole lines only, because a truncated number would be another number.
fn beginning(path: &str, limit: usize) -> io::Result<String> {
    let mut bytes = Vec::with_capacity(limit.min(MAX_PROC_BYTES));
    fs::File::open(path)?.take(limit as u64).read_to_end(&mut bytes)?;
    if bytes.len() == limit {
        bytes.truncate(bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1));
    }
    // A process name may have any bytes; the needed fields are ASCII.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Reads `/proc/self/fdinfo/FD`. Unlike `fstat`, this does not ask the file system, which may belong to a client and
/// never answer.
pub(crate) fn fdinfo(fd: BorrowedFd<'_>) -> io::Result<String> {
    beginning(&format!("/proc/self/fdinfo/{}", fd.as_raw_fd()), MAX_PROC_BYTES)
}

/// The process of a pidfd, by the field `Pid:` of its fdinfo.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum PidfdSays {
    /// The process with this id in our pid namespace.
    Pid(i32),
    /// A process that is not visible in our pid namespace.
    OutOfSight,
    /// A process that has ended and was reaped.
    Gone,
    /// The descriptor is not a pidfd.
    NoPidfd,
}

/// Parses the fdinfo of a descriptor that may be a pidfd.
pub(crate) fn pidfd_says(fdinfo: &str) -> PidfdSays {
    match field(fdinfo, "Pid").and_then(|value| value.trim().parse::<i32>().ok()) {
        Some(-1) => PidfdSays::Gone,
        Some(0) => PidfdSays::OutOfSight,
        Some(pid) if pid > 0 => PidfdSays::Pid(pid),
        _ => PidfdSays::NoPidfd,
    }
}

/// Fields of the file `status`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Status {
    /// The thread group, which is the process.
    pub(crate) tgid: i32,
    /// The effective user id.
    pub(crate) uid: u32,
    /// The effective group id.
    pub(crate) gid: u32,
}

/// Parses `/proc/PID/status`; the kernel escapes line ends in the process name.
pub(crate) fn status(text: &str) -> Option<Status> {
    let effective = |name| field(text, name)?.split_ascii_whitespace().nth(1)?.parse().ok();
    Some(Status {
        tgid: field(text, "Tgid")?.trim().parse().ok()?,
        uid: effective("Uid")?,
        gid: effective("Gid")?,
    })
}

/// The start time of a process in clock ticks after boot, from its `stat`. `None` if it has ended and only waits to be
/// reaped.
#[must_use]
pub fn start_time(stat: &str) -> Option<u64> {
    // The process name, field 2, may contain spaces and parentheses, so fields are counted from the last parenthesis.
    let after_name = stat.rsplit_once(')')?.1;
    let mut fields = after_name.split_ascii_whitespace();
    let state = fields.next()?;
    let threads: u64 = fields.nth(16)?.parse().ok()?;
    let start_time = fields.nth(1)?.parse().ok()?;
    // The main thread may end before the others: the process is dead if it is the last one.
    if matches!(state, "Z" | "X" | "x") && threads <= 1 { None } else { Some(start_time) }
}

/// Whether a `stat` belongs to the process with this id.
pub(crate) fn is_pid(stat: &str, pid: u32) -> bool {
    stat.split(' ').next() == Some(pid.to_string().as_str())
}

/// The value of `name` in lines of the form `name: value`, as in `/proc/PID/status`.
#[must_use]
pub fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
}

/// The bytes of a field of `/proc/meminfo`, of the `meminfo` of a NUMA node, whose lines begin with `Node 0 `, or of `status`.
#[must_use]
pub fn field_bytes(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| {
        let of_node = line.strip_prefix("Node ").and_then(|rest| rest.split_once(' '));
        of_node.map_or(line, |(_, rest)| rest).strip_prefix(name)?.strip_prefix(':')
    })?;
    value.strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Number of descriptors that this process has open, with the one by which they are counted.
///
/// # Errors
/// `/proc` is not mounted, or no descriptor is free.
pub fn open_descriptors() -> io::Result<usize> {
    Ok(fs::read_dir("/proc/self/fd")?.count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pidfd_identifies_its_process() {
        let text =
            |pid| format!("pos:\t0\nflags:\t02000002\nmnt_id:\t15\nino:\t1066\nPid:\t{pid}\nNSpid:\t{pid}\n");
        assert_eq!(pidfd_says(&text("4711")), PidfdSays::Pid(4711));
        assert_eq!(pidfd_says(&text("0")), PidfdSays::OutOfSight);
        assert_eq!(pidfd_says(&text("-1")), PidfdSays::Gone);
        assert_eq!(pidfd_says(&text("-2")), PidfdSays::NoPidfd);
        assert_eq!(pidfd_says(&text("99999999999")), PidfdSays::NoPidfd);
        assert_eq!(pidfd_says("pos:\t0\nflags:\t02\neventfd-count: 0\n"), PidfdSays::NoPidfd);
        assert_eq!(pidfd_says("NSpid:\t7\n"), PidfdSays::NoPidfd);
    }

    #[test]
    fn effective_user_counts() {
        let text =
            "Name:\tsh\\nTgid:\\t1\nUmask:\t0022\nTgid:\t42\nPid:\t42\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\n";
        assert_eq!(status(text), Some(Status { tgid: 42, uid: 2, gid: 6 }));
        assert_eq!(status("Tgid:\t42\nUid:\t1\n"), None);
    }

    const STAT: &str = "42 (a) b (c) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 3 0 777 1 2 3";

    #[test]
    fn start_time_is_parsed_after_any_process_name() {
        assert_eq!(start_time(STAT), Some(777));
        assert_eq!(start_time(""), None);
        assert_eq!(start_time("1 (x) S"), None);
    }

    #[test]
    fn zombie_has_no_start_time_unless_other_threads_run() {
        let zombie = STAT.replace(" S ", " Z ");
        assert_eq!(start_time(&zombie), Some(777));
        assert_eq!(start_time(&zombie.replace(" 3 0 777", " 1 0 777")), None);
    }

    #[test]
    fn fields_match_whole_names() {
        let text = "Seccomp:\t2\nSeccomp_filters:\t1\n";
        assert_eq!(field(text, "Seccomp"), Some("2"));
        assert_eq!(field(text, "Seccomp_filters"), Some("1"));
        assert_eq!(field(text, "NoNewPrivs"), None);
        assert_eq!(
            field_bytes("MemTotal: 99999999999999999999 kB\nNode MemFree: 1\nHugePages: 4\n", "HugePages"),
            None
        );
    }

    #[test]
    fn opened_descriptor_is_counted() {
        shmesh_testing::own_process(|| {
            let before = open_descriptors().unwrap();
            let _file = fs::File::open("/dev/null").unwrap();
            assert_eq!(open_descriptors().unwrap(), before + 1);
        });
    }

    #[test]
    fn long_text_is_cut_between_lines() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "Uid:\t10\nGid:\t1234\n").unwrap();
        let path = file.path().to_str().unwrap();
        assert_eq!(beginning(path, 16).unwrap(), "Uid:\t10\n");
        assert_eq!(beginning(path, 4).unwrap(), "");
        assert_eq!(beginning(path, 100).unwrap(), "Uid:\t10\nGid:\t1234\n");
    }

    proptest::proptest! {
        #[test]
        fn no_text_causes_a_panic(
            text: String,
            lines in "((Pid|Tgid|Uid|Gid|x):?\t?(-?[0-9]{0,20}[ \t]?){0,5}\n|[0-9]+ \\(.{0,16}\\)( -?[0-9]{0,20}){0,30}){0,6}",
        ) {
            for text in [text, lines] {
                let _ = pidfd_says(&text);
                let _ = status(&text);
                let _ = start_time(&text);
                let _ = field_bytes(&text, "x");
                let _ = crate::mountinfo::parse(&text);
            }
        }
    }
}
