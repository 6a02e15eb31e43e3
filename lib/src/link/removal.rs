//! Removing the files of a link when the last process has left it.
//!
//! A process that detaches, or gives up an attempt to open the link, calls [`retire`], the only place that ends a presence.
//! Two rules make it safe; each pairs a lock that one process takes with a check by another, as in Dekker's algorithm, so at least
//! one of the two sees the other (the kernel orders the locks of a file):
//!
//! - No process loses its files. A process that opens a link takes the attachment lock, or the number of a socket, and *then* checks
//!   that the link is not closed, that no process completes a removal, and that the lock file has its name
//!   ([`Lock::is_open`]). A process that removes closes the link (host role, then the attachment lock exclusively) and *then* checks that
//!   no socket has a number; one that completes a removal locks its byte and *then* checks that the link is closed and without sockets. So
//!   a lock file keeps its name while a process has one of these two locks and has checked it.
//! - No file stays without a process. A process first releases its locks and *then* checks for others: if it sees a lock,
//!   that process has still to do this. A process that finds the host role taken leaves the removal to the process that has it, which
//!   checks again after it has released that role.
//!
//! Files are removed by epoch, the lock file by inode, and only while the lock file has its name: a process that was
//! stopped meanwhile finds the files of the next link, which has another lock file.

use std::io::ErrorKind::NotFound;

use super::core::Core;
use super::host::lock_file;
use super::{Shared, core_of};
use crate::config::{Backing, PoolId};
use crate::error::ErrorKind;
use crate::segment::lock::Lock;
use crate::segment::store::Store;

/// Maximum number of processes that may leave one after the other while one of them checks whether it is the last.
const ROUNDS_MAX: u32 = 128;

/// Whether the files of a link were removed.
#[derive(PartialEq)]
enum Outcome {
    Removed,
    /// The link stays for its queued messages.
    Kept,
    /// This user may not remove the link, or it cannot be read.
    Failed,
}

/// Ends the presence of a process: releases its locks except those of seats, and removes the link if no other process is on
/// it and no message is queued. `mine` is the link that this process had. Sockets must be closed already.
pub(crate) fn retire(store: &Store, lock: &Lock, mine: Option<&Shared>) {
    lock.release();
    remove_if_last(store, lock, mine);
    lock.release();
    // A creator that did not wait for a stopped process may have created a link too late for this lock file.
    if !lock.is_named()
        && std::fs::symlink_metadata(store.path(None)).is_ok()
        && let Ok(Some(next)) = lock_file(store, false)
    {
        remove_if_last(store, &next, None);
    }
}

fn remove_if_last(store: &Store, lock: &Lock, mine: Option<&Shared>) {
    // Repeated for each process that leaves at this moment.
    for _ in 0..ROUNDS_MAX {
        let is_used = || Ok::<_, std::io::Error>(lock.others_joined()? || lock.others_host()?);
        if is_used().unwrap_or(true) || !lock.try_take_host_role().unwrap_or(false) || !lock.is_named() {
            return;
        }
        if lock.try_close().unwrap_or(false) && !lock.others_host().unwrap_or(true) {
            if remove_files(store, lock, mine) == Outcome::Removed {
                let _ = lock.remove();
            }
            return;
        }
        lock.release();
    }
}

/// Completes the removal that another process began before it was stopped, so that the link can be created again: a
/// process with the old lock file open is not on the new link. A link with messages is adopted, with another lock file. Files that
/// this user may not remove stay, and so does the link.
pub(super) fn complete(store: &Store, lock: &Lock) {
    if !lock.try_complete().unwrap_or(false) {
        return;
    }
    let is_abandoned = || Ok::<_, std::io::Error>(lock.is_closed()? && !lock.others_host()?);
    if is_abandoned().unwrap_or(false)
        && lock.is_named()
        && remove_files(store, lock, None) != Outcome::Failed
    {
        let _ = lock.remove();
    }
    lock.leave_completion();
}

/// Removes the link that this process had, and the one that has the name: a creator that waited for a stopped process in
/// vain may have created it beside this process. The link must be closed.
fn remove_files(store: &Store, lock: &Lock, mine: Option<&Shared>) -> Outcome {
    if let Some(shared) = mine.filter(|shared| shared.store.backing == Backing::Named) {
        let removal = remove_link(lock, store, &shared.core, shared.epoch());
        if removal != Outcome::Removed {
            return removal;
        }
    }
    let store = Store { prefault: false, lock_memory: false, ..store.clone() };
    let shm = store.path(None).display().to_string();
    let there = store.existing(Vec::new()).and_then(|segments| {
        segments.map(|segments| Ok((core_of(&store, &segments)?, segments[0].header.epoch))).transpose()
    });
    match there {
        Ok(Some((core, epoch))) => remove_link(lock, &store, &core, epoch),
        Ok(None) => Outcome::Removed,
        Err(error) => match error.kind() {
            // Another program's file has the name of the link's own segment.
            ErrorKind::NotOurs { what, .. } if *what == shm => Outcome::Removed,
            _ => Outcome::Failed,
        },
    }
}

fn remove_link(lock: &Lock, store: &Store, core: &Core, epoch: u64) -> Outcome {
    if core.rings().iter().any(|ring| ring.has_message()) {
        return Outcome::Kept;
    }
    for dead in core.seats.all() {
        let _ = std::fs::remove_file(store.bell_path(epoch, &dead));
    }
    // The link's own segment first: without it there is no link.
    for pool in std::iter::once(None).chain(PoolId::ALL.map(Some)) {
        let spare = pool.map(|pool| store.spare_path(pool, epoch));
        for path in std::iter::once(store.path(pool)).chain(spare) {
            // If this process was stopped, a creator may have given up waiting and created another link.
            if !lock.is_named() {
                return Outcome::Failed;
            }
            match store.remove(&path, pool, epoch) {
                Err(error) if pool.is_none() && error.kind() != NotFound => return Outcome::Failed,
                _ => {}
            }
        }
    }
    Outcome::Removed
}

#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use super::{complete, lock_file, retire};
    use crate::config::LinkConfig;
    use crate::segment::lock::Lock;
    use crate::{LinkOptions, Side};

    /// The process was stopped while it had the right to remove the link, and a creator went ahead without it.
    #[test]
    fn stopped_removal_does_not_remove_the_next_link() {
        let dir = tempfile::tempdir().unwrap();
        let (options, config) =
            (LinkOptions::new().dir(dir.path()), LinkConfig::new("link".parse().unwrap()));
        let old = options.create(&config).unwrap();
        let shared = std::sync::Arc::clone(&old.shared);
        // The steps of the creator.
        shared.store.remove(&shared.store.path(None), None, shared.segments[0].header.epoch).unwrap();
        assert!(shared.lock.remove().unwrap());
        let new = options.create(&config).unwrap();
        assert!(new.was_created());
        super::remove_link(&shared.lock, &shared.store, &shared.core, shared.segments[0].header.epoch);
        // Even at its last step.
        assert!(!shared.lock.remove().unwrap_or(false));
        let epoch = shared.segments[0].header.epoch;
        assert!(!shared.store.remove(&shared.store.path(None), None, epoch).unwrap());
        let mac = options.attach("link", Side::Secondary).unwrap();
        mac.send_inline(1, 0, b"to the new one").unwrap();
        assert_eq!((new.queued(), old.queued()), (1, 0));
        drop((old, mac));
        assert!(options.attach("link", Side::Secondary).is_ok());
    }

    /// Two creators complete the removal that a stopped process began.
    #[test]
    fn late_creator_does_not_remove_the_next_link() {
        let dir = tempfile::tempdir().unwrap();
        let (options, config) =
            (LinkOptions::new().dir(dir.path()), LinkConfig::new("link".parse().unwrap()));
        let store = options.store(&config);
        let old = options.create(&config).unwrap();
        old.send_inline(1, 0, b"so that the link stays").unwrap();
        drop(old);
        let open = || lock_file(&store, false).unwrap().unwrap();
        let (stopped, late) = (open(), open());
        assert!(stopped.try_take_host_role().unwrap() && stopped.try_close().unwrap());
        complete(&store, &open());
        let new = options.create(&config).unwrap();
        let mac = options.attach("link", Side::Secondary).unwrap();
        assert!(new.receive().is_ok() && mac.receive().unwrap().is_some());
        complete(&store, &late);
        retire(&store, &late, None);
        assert!(options.attach("link", Side::Secondary).is_ok());

        // The stopped process went on, and left the link as it was.
        let (stopped, late) = (open(), open());
        assert!(!stopped.try_close().unwrap());
        complete(&store, &late);
        assert!(new.shared.lock.is_named() && options.attach("link", Side::Secondary).is_ok());
    }

    /// A host that has not joined yet, and a process that has and gives up.
    #[test]
    fn link_stays_for_a_process_that_opens_it_and_goes_with_that() {
        let dir = tempfile::tempdir().unwrap();
        let (options, config) =
            (LinkOptions::new().dir(dir.path()), LinkConfig::new("link".parse().unwrap()));
        let store = options.store(&config);
        let take: [fn(&Lock); 2] = [
            |lock| assert!(lock.try_join().unwrap()),
            |lock| assert!(lock.take_socket(7, 0).unwrap().is_some()),
        ];
        for (i, take) in take.into_iter().enumerate() {
            let link = options.create(&config).unwrap();
            let lock = lock_file(&store, false).unwrap().unwrap();
            take(&lock);
            assert!(lock.is_open().unwrap());
            drop(link);
            assert!(lock.is_named() && store.path(None).exists(), "{i}");
            if i == 1 {
                lock.leave_socket(7 << 8);
            }
            retire(&store, &lock, None);
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{i}");
        }
    }
}
