use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::time::{Duration, SystemTime};

use proptest::prelude::*;

use super::*;

fn mode(path: &std::path::Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// Group that whoever runs the tests may give files to.
fn own_gid() -> u32 {
    nix::unistd::getegid().as_raw()
}

#[test]
fn made_and_made_right_again() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("shmesh/a");
    prepare(&pool, own_gid(), true).unwrap();
    assert_eq!((mode(&pool), fs::metadata(&pool).unwrap().gid()), (0o3770, own_gid()));
    fs::set_permissions(&pool, fs::Permissions::from_mode(0o700)).unwrap();
    prepare(&pool, own_gid(), true).unwrap();
    assert_eq!(mode(&pool), 0o3770);
    prepare(&pool, own_gid(), false).unwrap();
    assert_eq!(mode(&pool), 0o1777);
    assert!(free(&pool).unwrap() > 0);
}

#[test]
fn a_link_in_its_place_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let (victim, pool) = (dir.path().join("victim"), dir.path().join("a"));
    fs::create_dir(&victim).unwrap();
    let before = mode(&victim);
    symlink(&victim, &pool).unwrap();
    assert!(prepare(&pool, own_gid(), true).is_err());
    assert_eq!(mode(&victim), before);
    fs::remove_file(&pool).unwrap();
    fs::write(&pool, "").unwrap();
    assert!(prepare(&pool, own_gid(), true).is_err());
}

#[test]
fn everything_old_goes_and_nothing_outside() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("a");
    fs::create_dir_all(pool.join("sub/sub")).unwrap();
    fs::write(pool.join("link_shm"), vec![1; 10_000]).unwrap();
    fs::write(pool.join("sub/sub/file"), vec![1; 10_000]).unwrap();
    fs::write(dir.path().join("precious"), "x").unwrap();
    symlink(dir.path().join("precious"), pool.join("link")).unwrap();
    let (bytes, files) = used(&pool);
    assert!(bytes >= 20_000 && files == 5, "{bytes} {files}");

    let hour = Duration::from_secs(3600);
    assert_eq!(sweep(&pool, SystemTime::now() - hour, || true).files, 0, "all is new");
    assert_eq!(sweep(&pool, SystemTime::now() + hour, || false).files, 0, "somebody came");
    let swept = sweep(&pool, SystemTime::now() + hour, || true);
    assert_eq!((swept.files, swept.bytes, swept.failures), (files, bytes, 0));
    assert_eq!(used(&pool), (0, 0));
    assert_eq!(fs::read(dir.path().join("precious")).unwrap(), b"x");
}

proptest! {
    /// Never emptied unless, for the whole grace before, every list was empty and nobody was let in.
    #[test]
    fn emptied_only_after_a_whole_grace(
        looks in proptest::collection::vec((1..20_u64, 0..4_u8), 1..60),
        grace in 1..60_u64,
    ) {
        let mut idle = Idle::<Duration>::default();
        let (mut now, mut busy, mut first) = (0, None, None);
        let mut allocated = None;
        for (passed, what) in looks {
            now += passed;
            let at = Duration::from_secs(now);
            match what {
                0 => allocated = Some(at),
                1 => {
                    idle.unknown();
                    (busy, first) = (Some(now), None);
                    continue;
                }
                _ => {}
            }
            let is_held = what == 2;
            let emptied = idle.looked(at, is_held, allocated, Duration::from_secs(grace));
            if is_held || what == 0 {
                busy = Some(now);
            }
            if is_held {
                first = None;
            } else {
                first = first.or(Some(now));
            }
            let quiet = now - busy.unwrap_or(0).max(first.unwrap_or(now));
            prop_assert_eq!(emptied, !is_held && quiet >= grace, "at {}", now);
        }
    }
}
