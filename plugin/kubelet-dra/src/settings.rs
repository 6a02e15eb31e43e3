//! Where a driver's sockets are, and how they are named.

use std::io;
use std::path::{Path, PathBuf};

/// Maximum length of a socket's path on Linux, without the final zero.
const MAX_SOCKET_PATH: usize = 107;
/// Maximum length of a driver's name in the API.
const MAX_DRIVER: usize = 63;
/// Maximum length of a name of an object in the API.
const MAX_NAME: usize = 253;

/// The names of a driver and its node, and the kubelet's directories as both the driver and the kubelet see them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DriverSettings {
    /// Name of the driver, a DNS name in lower case that ends with a domain of its vendor: `gpu.example.com`.
    pub driver: String,
    /// Name of the Node object.
    pub node: String,
    /// Distinguishes instances of the driver on the node during a rolling update: the uid of the pod.
    pub instance: String,
    /// The kubelet's directory for sockets and state of plugins: `/var/lib/kubelet/plugins`. A container must mount it at the
    /// same path, because the path of the socket is sent to the kubelet.
    pub plugins_dir: PathBuf,
    /// The directory that the kubelet watches for plugins: `/var/lib/kubelet/plugins_registry`.
    pub registry_dir: PathBuf,
}

/// Why a driver cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A name that the API would refuse.
    #[error("{what} `{name}`: {problem}")]
    Name {
        /// Which of the settings it is.
        what: &'static str,
        /// The name that was refused.
        name: String,
        /// The mistake, and the valid form.
        problem: String,
    },
    /// The path of a socket is too long for the kernel.
    #[error(
        "path {path} of a socket has {length} bytes, and Linux allows {MAX_SOCKET_PATH}: use a shorter directory or instance"
    )]
    PathTooLong {
        /// Path of the socket.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
    },
    /// A directory cannot be used.
    #[error("directory {path} cannot be used")]
    Directory {
        /// Path of the directory.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// A socket cannot be opened.
    #[error("socket {path} cannot be opened")]
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
}

impl DriverSettings {
    /// The directory with the driver's sockets and, by convention, its state.
    pub fn driver_dir(&self) -> PathBuf {
        self.plugins_dir.join(&self.driver)
    }

    /// The socket on which the kubelet calls this instance.
    pub fn endpoint(&self) -> PathBuf {
        self.driver_dir().join(format!("{}{}.sock", self.endpoint_prefix(), self.instance))
    }

    /// The socket by which the kubelet finds this instance.
    pub fn registration(&self) -> PathBuf {
        self.registry_dir.join(format!("{}{}-reg.sock", self.registration_prefix(), self.instance))
    }

    /// Whether an instance's socket in [`driver_dir`](Self::driver_dir) has this file name.
    pub(crate) fn is_endpoint(&self, name: &str) -> bool {
        name.starts_with(self.endpoint_prefix()) && name.ends_with(".sock")
    }

    /// Whether an instance's socket in `registry_dir` has this file name.
    pub(crate) fn is_registration(&self, name: &str) -> bool {
        name.starts_with(&self.registration_prefix()) && name.ends_with("-reg.sock")
    }

    fn endpoint_prefix(&self) -> &'static str {
        "dra-"
    }

    /// The kubelet sends the path of this socket, percent-encoded, as `:authority`. With an `@` in it, the part before it is
    /// user information, which may contain `%`; without one, Rust's HTTP/2 refuses every request as malformed.
    fn registration_prefix(&self) -> String {
        format!("{}@", self.driver)
    }

    pub(crate) fn check(&self) -> Result<(), ServeError> {
        check_name("driver name", &self.driver, MAX_DRIVER)?;
        check_name("node name", &self.node, MAX_NAME)?;
        check_name("instance", &self.instance, MAX_DRIVER)?;
        for path in [self.endpoint(), self.registration()] {
            let length = path.as_os_str().len();
            if length > MAX_SOCKET_PATH {
                return Err(ServeError::PathTooLong { path, length });
            }
        }
        for path in [&self.plugins_dir, &self.registry_dir] {
            is_directory(path).map_err(|source| ServeError::Directory { path: path.clone(), source })?;
        }
        Ok(())
    }
}

fn is_directory(path: &Path) -> io::Result<()> {
    if path.metadata()?.is_dir() { Ok(()) } else { Err(io::ErrorKind::NotADirectory.into()) }
}

fn check_name(what: &'static str, name: &str, max: usize) -> Result<(), ServeError> {
    let refuse = |problem: String| Err(ServeError::Name { what, name: name.to_owned(), problem });
    if name.len() > max {
        return refuse(format!("{} characters, at most {max} are allowed", name.len()));
    }
    let plain = |label: &str| {
        let inner = |sign: char| sign.is_ascii_lowercase() || sign.is_ascii_digit() || sign == '-';
        !label.is_empty() && label.chars().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    if !name.split('.').all(plain) {
        return refuse(
            "only a-z, 0-9, `-` and `.` are allowed, and each part between dots begins and ends with a letter or digit"
                .into(),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> DriverSettings {
        DriverSettings {
            driver: "gpu.example.com".into(),
            node: "n1".into(),
            instance: "0af9b1c2-93a4-4c1e-8f6f-0a3a1f0f9e11".into(),
            plugins_dir: "/tmp".into(),
            registry_dir: "/tmp".into(),
        }
    }

    #[test]
    fn socket_names_carry_the_instance() {
        let settings = DriverSettings { plugins_dir: "/p".into(), registry_dir: "/r".into(), ..settings() };
        let uid = &settings.instance;
        assert_eq!(settings.endpoint(), Path::new(&format!("/p/gpu.example.com/dra-{uid}.sock")));
        assert_eq!(settings.registration(), Path::new(&format!("/r/gpu.example.com@{uid}-reg.sock")));
    }

    #[test]
    fn impossible_settings_are_refused_with_a_remedy() {
        assert!(settings().check().is_ok());
        let text = |change: &dyn Fn(&mut DriverSettings)| {
            let mut settings = settings();
            change(&mut settings);
            settings.check().expect_err("it is impossible").to_string()
        };
        assert_eq!(
            text(&|it| it.driver = "a/b".into()),
            "driver name `a/b`: only a-z, 0-9, `-` and `.` are allowed, and each part between dots begins and ends with a letter or digit"
        );
        assert_eq!(
            text(&|it| it.instance = "i".repeat(64)),
            format!("instance `{}`: 64 characters, at most 63 are allowed", "i".repeat(64))
        );
        assert!(text(&|it| it.node = String::new()).starts_with("node name ``"));
        assert!(text(&|it| it.driver = "..".into()).starts_with("driver name"));
        let long = text(&|it| it.plugins_dir = Path::new("/").join("x".repeat(90)));
        assert!(long.contains("has 153 bytes, and Linux allows 107"), "{long}");
        assert_eq!(
            text(&|it| it.registry_dir = "/dev/null/x".into()),
            "directory /dev/null/x cannot be used"
        );
    }
}
