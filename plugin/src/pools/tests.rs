use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::time::{Duration, SystemTime};

use proptest::prelude::*;

use super::*;

fn mode(path: &std::path::Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// A group to which this user can give files.
fn own_gid() -> u32 {
    nix::unistd::getegid().as_raw()
}

#[test]
fn pool_directory_is_created_and_corrected() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("shmesh/a");
    prepare("pool", &pool, own_gid(), true).unwrap();
    assert_eq!((mode(&pool), fs::metadata(&pool).unwrap().gid()), (0o3770, own_gid()));
    fs::set_permissions(&pool, fs::Permissions::from_mode(0o700)).unwrap();
    prepare("pool", &pool, own_gid(), true).unwrap();
    assert_eq!(mode(&pool), 0o3770);
    prepare("pool", &pool, own_gid(), false).unwrap();
    assert_eq!(mode(&pool), 0o1777);
    assert!(free(&pool).unwrap() > 0);
}

#[test]
fn symlink_as_pool_directory_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let (victim, pool) = (dir.path().join("victim"), dir.path().join("a"));
    fs::create_dir(&victim).unwrap();
    let before = mode(&victim);
    symlink(&victim, &pool).unwrap();
    assert!(prepare("pool", &pool, own_gid(), true).is_err());
    assert_eq!(mode(&victim), before);
    fs::remove_file(&pool).unwrap();
    fs::write(&pool, "").unwrap();
    assert!(prepare("pool", &pool, own_gid(), true).is_err());
}

#[test]
fn directory_of_another_user_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("b/a");
    prepare("pool", &pool, own_gid(), true).unwrap();
    let opened = fs::File::open(&pool).unwrap();
    let uid = nix::unistd::geteuid().as_raw();
    own(&opened, 0o3770, Some(own_gid()), Some(uid)).unwrap();
    let error = own(&opened, 0o3770, Some(own_gid()), Some(uid + 1)).unwrap_err();
    assert!(error.to_string().contains("belongs to uid"), "{error:#}");
    // A user with write permission on the parent could replace the directory.
    let above = dir.path().join("b");
    fs::set_permissions(&above, fs::Permissions::from_mode(0o777)).unwrap();
    let error = format!("{:#}", prepare("pool", &pool, own_gid(), true).unwrap_err());
    assert!(error.contains("mode 777") && error.contains("sticky"), "{error}");
    fs::set_permissions(&above, fs::Permissions::from_mode(0o1777)).unwrap();
    prepare("pool", &pool, own_gid(), true).unwrap();
}

#[test]
fn sweep_removes_old_entries_and_nothing_outside() {
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
    assert_eq!(sweep(&pool, SystemTime::now() + hour, || false).files, 0, "a pod was let in");
    let swept = sweep(&pool, SystemTime::now() + hour, || true);
    assert_eq!((swept.files, swept.bytes, swept.failures), (files, bytes, 0));
    assert_eq!(used(&pool), (0, 0));
    assert_eq!(fs::read(dir.path().join("precious")).unwrap(), b"x");
}

/// Directories one in the other, by descriptor: no path is so long.
fn deep(top: &std::path::Path, levels: usize) {
    use nix::fcntl::{OFlag, open, openat};
    use nix::sys::stat::{Mode, mkdirat};
    let flags = OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut at = open(top, flags, Mode::empty()).unwrap();
    for _ in 0..levels {
        mkdirat(&at, "d", Mode::S_IRWXU).unwrap();
        at = openat(&at, "d", flags, Mode::empty()).unwrap();
    }
    let file = openat(&at, "file", OFlag::O_CREAT | OFlag::O_WRONLY, Mode::S_IRUSR).unwrap();
    nix::unistd::write(&file, b"x").unwrap();
}

#[test]
fn deep_directories_use_bounded_stack_and_descriptors() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let pool = dir.path().join("a");
    fs::create_dir_all(pool.join("wide")).unwrap();
    deep(&pool, 5_000);
    for at in 0..300 {
        fs::create_dir_all(pool.join(format!("wide/{at}/sub"))).unwrap();
    }
    // A thread of its own, with what a blocking thread has, and few descriptors to spare.
    let (before, after) = (fds(), std::sync::atomic::AtomicUsize::new(0));
    let sees = || {
        after.fetch_max(fds(), std::sync::atomic::Ordering::Relaxed);
        true
    };
    let looked = used(&pool);
    assert!(looked.1 > 300, "{looked:?}");
    let hour = Duration::from_secs(3600);
    // Not at each of so many.
    let calls = std::cell::Cell::new(0);
    let swept = sweep(&pool, SystemTime::now() + hour, || {
        calls.set(calls.get() + 1);
        if calls.get() % 500 == 0 { sees() } else { true }
    });
    assert_eq!((swept.files, swept.failures), (5_000 + 1 + 601, 0));
    assert_eq!(used(&pool), (0, 0));
    let most = after.into_inner();
    assert!(most > 0 && most < before + 200, "{before} and {most} descriptors");
}

/// Descriptors of this process; other tests have some too.
fn fds() -> usize {
    shmesh_sys::procfs::open_descriptors().unwrap()
}

#[test]
fn special_files_are_removed_without_opening() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("a");
    fs::create_dir_all(dir.path().join("outside/sub")).unwrap();
    fs::write(dir.path().join("outside/precious"), vec![1; 50_000]).unwrap();
    fs::create_dir_all(pool.join("sub")).unwrap();
    for at in [&pool, &pool.join("sub")] {
        symlink(dir.path().join("outside"), at.join("link")).unwrap();
        symlink("..", at.join("up")).unwrap();
        symlink("loop", at.join("loop")).unwrap();
        // To open one would wait for a writer for ever.
        nix::unistd::mkfifo(&at.join("fifo"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        drop(std::os::unix::net::UnixListener::bind(at.join("socket")).unwrap());
    }
    fs::write(pool.join("one"), vec![1; 40_960]).unwrap();
    for at in 0..10 {
        fs::hard_link(pool.join("one"), pool.join(format!("sub/again{at}"))).unwrap();
    }
    let (bytes, files) = used(&pool);
    assert_eq!(files, 22);
    // But for rounding.
    assert!((40_900..2 * 40_960).contains(&bytes), "a file of many names is counted once: {bytes}");
    let swept = sweep(&pool, SystemTime::now() + Duration::from_secs(3600), || true);
    assert_eq!((swept.files, swept.failures), (22, 0));
    assert!((40_960..2 * 40_960).contains(&swept.bytes), "and is gone once: {}", swept.bytes);
    assert_eq!(used(&pool), (0, 0));
    assert_eq!(fs::read(dir.path().join("outside/precious")).unwrap().len(), 50_000);
    assert!(dir.path().join("outside/sub").exists());
}

#[test]
fn symlinked_pool_is_neither_counted_nor_emptied() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("victim")).unwrap();
    fs::write(dir.path().join("victim/precious"), "x").unwrap();
    let pool = dir.path().join("a");
    symlink(dir.path().join("victim"), &pool).unwrap();
    assert_eq!(used(&pool), (0, 0));
    assert_eq!(sweep(&pool, SystemTime::now() + Duration::from_secs(3600), || true).files, 0);
    assert!(dir.path().join("victim/precious").exists());
}

/// During a sweep, another process repeatedly replaces a directory by a link to the outside.
#[test]
fn concurrent_symlink_is_not_followed() {
    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let (pool, outside) = (dir.path().join("a"), dir.path().join("outside"));
    for at in [&pool, &outside] {
        fs::create_dir(at).unwrap();
    }
    for at in 0..200 {
        fs::write(outside.join(format!("f{at}")), "").unwrap();
    }
    let ended = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                for at in 0..200 {
                    let _ = fs::create_dir(pool.join("d")).and_then(|()| fs::write(pool.join("d/f"), ""));
                    let _ = fs::write(pool.join(format!("d/f{at}")), "");
                }
                let _ = symlink(&outside, pool.join("l"));
                let (d, l) = (pool.join("d"), pool.join("l"));
                let _ = renameat2(AT_FDCWD, &d, AT_FDCWD, &l, RenameFlags::RENAME_EXCHANGE);
            }
        });
        for _ in 0..200 {
            sweep(&pool, SystemTime::now() + Duration::from_secs(3600), || true);
            used(&pool);
        }
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 200);
}

proptest! {
    /// A pool is emptied only if it was unlisted and unallocated for the whole grace period.
    #[test]
    fn pool_is_emptied_only_after_the_grace_period(
        looks in proptest::collection::vec((1..20_u64, 0..4_u8), 1..60),
        grace in 1..60_u64,
    ) {
        let mut idle = IdleTimer::<Duration>::default();
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
            let emptied = idle.poll(at, is_held, allocated, Duration::from_secs(grace));
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
