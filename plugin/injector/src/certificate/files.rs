//! A certificate from files that are managed externally.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use super::resolver::certified;
use super::{Bundle, CertResolver, Terms};

/// Presents a certificate and key from files, reloaded when they change. cert-manager sets the `caBundle`
/// itself.
#[derive(Debug)]
pub struct CertFiles {
    certificate: PathBuf,
    key: PathBuf,
    served: CertResolver,
    read: Option<(String, String)>,
}

impl CertFiles {
    /// Creates a loader for these files.
    #[must_use]
    pub fn new(certificate: PathBuf, key: PathBuf, served: CertResolver) -> Self {
        Self { certificate, key, served, read: None }
    }

    /// Presents the certificate in the files. Returns `true` if it changed.
    ///
    /// # Errors
    /// A file cannot be read, or certificate and key do not match, as during a replacement. The previous
    /// certificate stays in use.
    pub fn step(&mut self) -> Result<bool> {
        let text = |path: &PathBuf| {
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
        };
        let read = (text(&self.certificate)?, text(&self.key)?);
        if self.read.as_ref() == Some(&read) {
            return Ok(false);
        }
        certified(&read.0, &read.1).with_context(|| self.certificate.display().to_string())?;
        let terms = Terms { names: Vec::new(), from: 0, until: 0 };
        let bundle =
            Bundle { authorities: String::new(), certificate: read.0.clone(), key: read.1.clone(), terms };
        self.served.present(&bundle)?;
        self.read = Some(read);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::certificate::make;

    #[test]
    fn unchanged_files_are_not_loaded_again() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = make(&["a".to_owned()], Duration::from_secs(60), SystemTime::now(), None).unwrap();
        let (certificate, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
        fs::write(&certificate, &bundle.certificate).unwrap();
        fs::write(&key, &bundle.key).unwrap();
        let served = CertResolver::default();
        let mut files = CertFiles::new(certificate, key, served.clone());
        assert!(files.step().unwrap() && served.is_loaded());
        assert!(!files.step().unwrap());
    }
}
