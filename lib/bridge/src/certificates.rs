//! Certificates of a bridge, and their replacement.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use anyhow::{Context, Result};
use prometheus_client::metrics::counter::Counter;
use shmesh_sys::file::memfd;
use x509_parser::pem::Pem;

/// Files with certificates, in PEM.
#[derive(Clone, Debug)]
pub struct Certificates {
    /// The certificate of the authority that signed the other bridges' certificates.
    pub authority: PathBuf,
    /// The certificate of this bridge.
    pub certificate: PathBuf,
    /// The private key of this bridge.
    pub key: PathBuf,
}

/// Counters of certificates that were refused, replaced or unusable.
#[derive(Clone, Debug, Default)]
pub struct CertificateCounts {
    /// Connections with a certificate that may not use the keys of this bridge.
    pub refused: Counter,
    /// Replacements of the bridge's own certificates.
    pub renewed: Counter,
    /// Attempts to use new certificate files that failed, so that the last ones stay in use.
    pub unusable: Counter,
}

/// The contents of certificate files at one time.
///
/// Zenoh takes paths, and reads the files again for each connection. It gets copies in memory, so that a session never mixes old and new
/// files, and can be opened again with files that have been replaced since.
#[derive(Debug)]
pub(crate) struct LoadedCertificates {
    contents: [Vec<u8>; 3],
    copies: [File; 3],
}

impl LoadedCertificates {
    pub(crate) fn read(files: &Certificates) -> Result<Self> {
        let read = |path: &PathBuf| {
            std::fs::read(path)
                .with_context(|| format!("cannot read the certificate file {}", path.display()))
        };
        let read_all = || {
            Ok::<_, anyhow::Error>([read(&files.authority)?, read(&files.certificate)?, read(&files.key)?])
        };
        let mut contents = read_all()?;
        // Until they were not replaced while they were read.
        loop {
            let again = read_all()?;
            if again == contents {
                break;
            }
            contents = again;
        }
        let copy = |content: &Vec<u8>| -> std::io::Result<File> {
            let mut copy = memfd("shmesh-bridge-tls", false)?;
            copy.write_all(content)?;
            Ok(copy)
        };
        let [authority, certificate, key] = contents.each_ref().map(copy);
        let copies = (|| Ok::<_, std::io::Error>([authority?, certificate?, key?]))();
        Ok(Self { contents, copies: copies.context("cannot copy the certificate files into memory")? })
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.contents == other.contents
    }

    /// The common name of the bridge's certificate, by which other bridges may allow it; `None` if it has none.
    pub(crate) fn common_name(&self) -> Result<Option<String>> {
        let [_, certificate, _] = &self.contents;
        let mut parts = Pem::iter_from_buffer(certificate).filter_map(Result::ok);
        let first = parts.find(|part| part.label == "CERTIFICATE").context("the file has no certificate")?;
        let certificate = first.parse_x509().context("the certificate cannot be read")?;
        let name = certificate.subject().iter_common_name().next();
        Ok(name.and_then(|name| name.as_str().ok()).map(str::to_owned))
    }

    /// The paths of the copies: of the authority, the certificate and the key.
    pub(crate) fn paths(&self) -> [String; 3] {
        self.copies.each_ref().map(|copy| format!("/proc/self/fd/{}", copy.as_raw_fd()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_outlive_the_files() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        let files = Certificates { authority: file("ca"), certificate: file("crt"), key: file("key") };
        let missing = LoadedCertificates::read(&files).unwrap_err();
        assert!(format!("{missing:#}").contains("ca: No such file"), "{missing:#}");
        for name in ["ca", "crt", "key"] {
            std::fs::write(file(name), name).unwrap();
        }
        let old = LoadedCertificates::read(&files).unwrap();
        assert!(old.is_same(&LoadedCertificates::read(&files).unwrap()));
        std::fs::write(file("key"), "new").unwrap();
        assert!(!old.is_same(&LoadedCertificates::read(&files).unwrap()));
        let texts = old.paths().map(|path| std::fs::read_to_string(path).unwrap());
        assert_eq!(texts, ["ca", "crt", "key"]);
    }
}
