//! A link that is inspected repeatedly.

use std::path::{Path, PathBuf};

use super::View;
use crate::config::LinkName;
use crate::error::Result;

/// A view of a link that is opened once, and again when another link has its name.
///
/// It keeps the memory of a removed link mapped until the next call of [`get`](Self::get).
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// let mut view = shmesh::inspect::CachedView::new(dir.path(), &config.name);
/// assert!(view.get().is_err(), "there is no link yet");
/// let first = options.create(&config)?;
/// let epoch = view.get()?.epoch();
/// let peer = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// assert_eq!((view.get()?.epoch(), view.get()?.seats().len()), (epoch, 2));
/// drop((first, peer));
/// let _second = options.create(&config)?;
/// assert_ne!(view.get()?.epoch(), epoch);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CachedView {
    dir: PathBuf,
    name: LinkName,
    view: Option<View>,
}

impl CachedView {
    /// Opens nothing yet: the link `name` in `dir` need not exist.
    #[must_use]
    pub fn new(dir: &Path, name: &LinkName) -> Self {
        Self { dir: dir.to_path_buf(), name: name.clone(), view: None }
    }

    /// Returns the view of the link that has the name now. Opens no file if that is the link of the last call.
    ///
    /// # Errors
    /// Those of [`View::open`].
    pub fn get(&mut self) -> Result<&View> {
        let view = match self.view.take().filter(View::is_current) {
            Some(view) => view,
            None => View::open(&self.dir, &self.name)?,
        };
        Ok(self.view.insert(view))
    }
}

#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use std::fs;

    use super::*;
    use crate::config::{Backing, LinkConfig};
    use crate::error::ErrorKind;
    use crate::{Link, LinkOptions, Side};

    fn create(dir: &Path, backing: Backing) -> Link {
        let mut config = LinkConfig::new("radio".parse().unwrap());
        config.backing = backing;
        LinkOptions::new().dir(dir).create(&config).unwrap()
    }

    fn is_kept(cached: &CachedView) -> bool {
        cached.view.as_ref().is_some_and(View::is_current)
    }

    #[test]
    fn link_is_opened_once_and_its_successor_is_noticed() {
        for backing in [Backing::Named, Backing::Memfd] {
            let dir = tempfile::tempdir().unwrap();
            let mut cached = CachedView::new(dir.path(), &"radio".parse().unwrap());
            let link = create(dir.path(), backing);
            let epoch = cached.get().unwrap().epoch();
            let peer = LinkOptions::new().dir(dir.path()).attach("radio", Side::Secondary).unwrap();
            peer.send_inline(1, 0, b"").unwrap();
            assert!(is_kept(&cached), "{backing:?}: participants come, messages are sent");
            drop(link.receive().unwrap());
            drop(peer);
            assert!(is_kept(&cached), "{backing:?}: participants go");
            drop(link);
            assert!(!is_kept(&cached), "{backing:?}");
            assert!(matches!(cached.get().unwrap_err().kind(), ErrorKind::NotFound { .. }), "{backing:?}");
            assert!(cached.view.is_none(), "{backing:?}: the memory of a removed link is not kept");
            let link = create(dir.path(), backing);
            let second = cached.get().unwrap().epoch();
            drop(link);
            let _link = create(dir.path(), backing);
            assert!(!is_kept(&cached), "{backing:?}: created again between two looks");
            let third = cached.get().unwrap().epoch();
            assert!(epoch != second && second != third, "{backing:?}");
        }
    }

    #[test]
    fn another_lock_file_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let _link = create(dir.path(), Backing::Named);
        let mut cached = CachedView::new(dir.path(), &"radio".parse().unwrap());
        cached.get().unwrap().locks.host();
        assert!(is_kept(&cached));
        fs::remove_file(dir.path().join("radio.lock")).unwrap();
        assert!(!is_kept(&cached));
        cached.get().unwrap();
    }
}
