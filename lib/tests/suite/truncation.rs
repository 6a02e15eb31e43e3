//! A peer truncates a named segment: a guarded process lives, its calls on that link fail, and its other links go on.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use shmesh::config::PoolId;
use shmesh::inspect::CachedView;
use shmesh::{Error, Link, LinkOptions, Side};
use shmesh_testing::{Watchdog, config, ipc_dir, kind_of, own_process};

fn pair(dir: &Path, name: &str) -> (Link, Link) {
    let options = LinkOptions::new().dir(dir).guard_truncation(true);
    let phy = options.create(&config(name, "")).unwrap();
    (phy, options.attach(name, Side::Secondary).unwrap())
}

fn talk(phy: &Link, mac: &Link) -> Result<(), Error> {
    phy.send_inline(1, 0, b"there")?;
    if let Some(message) = mac.receive()? {
        assert!(message.msg().len() <= 5);
    }
    let mut loan = mac.loan_with(PoolId::CpuData)?;
    loan.resize_data(4096)?.fill(7);
    loan.send()?;
    mac.notify()?;
    phy.wait(Some(Duration::ZERO))?;
    if let Some(message) = phy.receive()? {
        assert!(message.data().len() <= 4096);
    }
    phy.recover()?;
    Ok(())
}

/// The call that meets the damage reads zeros; a later one fails.
fn damage(link: &Link) -> Error {
    loop {
        let calls = [
            link.send_inline(1, 0, b"there"),
            link.loan_with(PoolId::CpuData).and_then(|loan| Ok(loan.send()?)),
            link.receive().map(drop),
            link.recover().map(drop),
        ];
        if let Some(error) =
            calls.into_iter().filter_map(Result::err).find(|error| kind_of(error) == "Damaged")
        {
            return error;
        }
    }
}

#[test]
fn guarded_process_survives_and_its_calls_name_the_link() {
    own_process(|| {
        let _watchdog = Watchdog::start();
        for (file, len) in [("aaa_shm", 0), ("aaa_shm", 4096), ("aaa_cpu_msg", 0), ("aaa_cpu_data", 0)] {
            let dir = ipc_dir();
            let (phy, mac) = pair(dir.path(), "aaa");
            let (other_phy, other_mac) = pair(dir.path(), "bbb");
            talk(&phy, &mac).unwrap();
            phy.send_inline(2, 0, b"held").unwrap();
            let held = mac.receive().unwrap().unwrap();
            let sleeper = mac.try_clone().unwrap();
            // What it finds first may be a message of the calls below.
            let sleeper = std::thread::spawn(move || {
                loop {
                    if let Err(error) = sleeper.wait(None) {
                        break error;
                    }
                }
            });

            File::options().write(true).open(dir.path().join(file)).unwrap().set_len(len).unwrap();
            // Each of the two has mapped the link by itself.
            for link in [&phy, &mac] {
                let text = damage(link).to_string();
                assert!(
                    text.contains("link aaa") && text.contains(file) && text.contains("truncated"),
                    "{text}"
                );
                assert_eq!(kind_of(&link.loan().unwrap_err()), "Damaged", "{file}");
                assert_eq!(kind_of(&link.receive().unwrap_err()), "Damaged", "{file}");
            }
            assert_eq!(kind_of(&sleeper.join().unwrap()), "Damaged", "{file}: a call that waits fails, too");
            assert!(held.msg().len() <= 4);
            drop(held);
            drop((phy, mac));
            talk(&other_phy, &other_mac).unwrap();

            for name in ["aaa_shm", "aaa_cpu_msg", "aaa_cpu_data"] {
                let _ = std::fs::remove_file(dir.path().join(name));
            }
            let (phy, mac) = pair(dir.path(), "aaa");
            talk(&phy, &mac).unwrap();
        }
    });
}

#[test]
fn cached_view_does_not_read_a_truncated_link() {
    own_process(|| {
        let _watchdog = Watchdog::start();
        for file in ["aaa_shm", "aaa_cpu_data"] {
            let dir = ipc_dir();
            let (_phy, _mac) = pair(dir.path(), "aaa");
            let mut view = CachedView::new(dir.path(), &"aaa".parse().unwrap());
            assert_eq!(view.get().unwrap().seats().len(), 2);
            File::options().write(true).open(dir.path().join(file)).unwrap().set_len(0).unwrap();
            let error = view.get().unwrap_err().to_string();
            assert!(error.contains(file), "{error}");
        }
    });
}
