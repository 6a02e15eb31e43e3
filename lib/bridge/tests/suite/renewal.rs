//! Certificate files that are replaced while bridges run, as Kubernetes does it: all at once, by a symlink.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use shmesh::{Link, LinkOptions, MAX_SEATS, PeerEvent, Side};
use shmesh_bridge::bridge::{Bridge, BridgeConfig, ClusterPlace, Metrics};
use shmesh_bridge::certificates::Certificates;
use shmesh_bridge::frame::VERSIONS;
use shmesh_bridge::session::BridgeEnd;
use shmesh_bridge::zenoh_engine::{NetworkPlace, ZenohEngine};
use shmesh_testing::until;
use tempfile::TempDir;

use crate::processes::{attach, create, dir, free_address, lost_at};
use crate::wait_for_peer;

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// A new certificate, and its key.
    fn certificate(&self) -> (String, String) {
        self.certificate_of("ran")
    }

    fn certificate_of(&self, namespace: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["localhost".into(), "127.0.0.1".into()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, format!("{namespace}.shmesh"));
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

/// A volume with the files of a Secret.
struct Secret {
    dir: TempDir,
    generation: u32,
}

impl Secret {
    fn new(authorities: &[&Authority], certificate: &(String, String)) -> Self {
        let mut secret = Self { dir: dir(), generation: 0 };
        secret.replace(authorities, certificate);
        for file in ["ca.crt", "tls.crt", "tls.key"] {
            std::os::unix::fs::symlink(Path::new("..data").join(file), secret.path(file)).unwrap();
        }
        secret
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    fn files(&self) -> Certificates {
        Certificates {
            authority: self.path("ca.crt"),
            certificate: self.path("tls.crt"),
            key: self.path("tls.key"),
        }
    }

    fn replace(&mut self, authorities: &[&Authority], (certificate, key): &(String, String)) {
        self.generation += 1;
        let name = format!("..{}", self.generation);
        std::fs::create_dir(self.path(&name)).unwrap();
        let authorities: String = authorities.iter().map(|authority| authority.pem.as_str()).collect();
        for (file, content) in [("ca.crt", &authorities), ("tls.crt", certificate), ("tls.key", key)] {
            std::fs::write(self.path(&name).join(file), content).unwrap();
        }
        std::os::unix::fs::symlink(&name, self.path("..next")).unwrap();
        std::fs::rename(self.path("..next"), self.path("..data")).unwrap();
    }
}

/// A bridge of a pod, in the test's process.
struct Pod {
    dir: TempDir,
    metrics: Metrics,
    /// Stops before its engine.
    bridge: Option<Bridge>,
    _engine: ZenohEngine,
}

impl Pod {
    fn start(end: BridgeEnd, address: &str, node: &str, secret: &Secret) -> Self {
        let (dir, metrics) = (dir(), Metrics::default());
        let addresses = vec![address.to_owned()];
        let (listen, connect) =
            if end == BridgeEnd::Home { (addresses, Vec::new()) } else { (Vec::new(), addresses) };
        let place = NetworkPlace {
            listen,
            connect,
            connect_links: Vec::new(),
            group: "east/ran".to_owned(),
            certificates: Some(secret.files()),
            certificate_interval: Duration::from_millis(50),
            allowed_certificates: vec!["ran.shmesh".to_owned()],
        };
        let engine = ZenohEngine::new(place, metrics.certificates.clone());
        let config = BridgeConfig {
            end,
            dir: dir.path().to_owned(),
            links: vec!["fronthaul".parse().unwrap()],
            node: node.to_owned(),
            // A connection takes long on a busy machine; how long a silence may be is tested elsewhere.
            peers: MAX_SEATS,
            peer_timeout: Duration::from_secs(60),
            versions: VERSIONS,
            cluster: Some(ClusterPlace { place: node.to_owned(), near: vec!["fronthaul".parse().unwrap()] }),
        };
        let bridge = Some(Bridge::start(&config, &engine, &metrics).unwrap());
        Self { dir, metrics, bridge, _engine: engine }
    }

    fn renewed(&self) -> u64 {
        self.metrics.certificates.renewed.get()
    }

    fn unusable(&self) -> u64 {
        self.metrics.certificates.unusable.get()
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if let Some(bridge) = self.bridge.take() {
            bridge.stop();
        }
    }
}

/// The last number of a stream.
const LAST: u64 = u64::MAX;

/// Sends numbers until `is_over`, and receives the other side's: each once, in order.
fn pump(link: &Link, is_over: &AtomicBool) {
    let (mut sent, mut received) = (0, 0);
    let (mut is_sent, mut is_received) = (false, false);
    let begun = Instant::now();
    while !is_sent || !is_received {
        assert!(begun.elapsed() < Duration::from_secs(120), "{sent} sent, {received} received");
        while let Some(message) = link.receive().unwrap() {
            match u64::from_le_bytes(message.msg().try_into().unwrap()) {
                LAST => is_received = true,
                number => {
                    assert_eq!(number, received);
                    received += 1;
                }
            }
        }
        let number = if is_over.load(Ordering::Acquire) { LAST } else { sent };
        if !is_sent && link.send_inline(1, 0, &number.to_le_bytes()).is_ok() {
            link.notify().unwrap();
            sent += 1;
            is_sent = number == LAST;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    println!("{sent} sent, {received} received");
}

/// Sends numbers both ways while `change` runs: each arrives once, in order, and no peer detaches.
fn undisturbed(links: [&mut Link; 2], change: impl FnOnce()) {
    let is_over = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ends = links.map(|link| {
            while link.next_event().is_some() {}
            scope.spawn(move || {
                pump(link, is_over);
                // Its peer may have been seen by `participants` alone.
                let mut events = std::iter::from_fn(|| link.next_event());
                assert!(events.all(|event| matches!(event, PeerEvent::Attached(_))), "a peer has detached");
            })
        });
        // The senders end, whatever the change does.
        let changed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(change));
        is_over.store(true, Ordering::Release);
        ends.into_iter().for_each(|end| end.join().unwrap());
        if let Err(panic) = changed {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Two pods with the two ends of a link, and their certificates.
struct TwoPods {
    address: String,
    at_home: Secret,
    at_far: Secret,
    phy: Link,
    mac: Link,
    home: Pod,
    far: Pod,
}

impl TwoPods {
    fn start(authority: &Authority) -> Self {
        let secret = || Secret::new(&[authority], &authority.certificate());
        let (at_home, at_far) = (secret(), secret());
        let address = format!("quic/{}", free_address());
        let home = Pod::start(BridgeEnd::Home, &address, "a", &at_home);
        let far = Pod::start(BridgeEnd::Far, &address, "b", &at_far);
        let (phy, mac) = (create(home.dir.path()), attach(far.dir.path()));
        wait_for_peer(&phy);
        Self { address, at_home, at_far, phy, mac, home, far }
    }
}

/// Waits until the bridge has replaced its certificates once more.
fn until_renewed(pods: &[&Pod], change: impl FnOnce()) {
    let before: Vec<_> = pods.iter().map(|pod| pod.renewed()).collect();
    change();
    until("the certificates are replaced", || {
        pods.iter().zip(&before).all(|(pod, before)| pod.renewed() > *before)
    });
}

/// The authority is replaced in three steps: files with both, new certificates, files with the new one alone.
#[test]
fn authority_is_replaced_while_messages_cross() {
    let (old, new) = (Authority::new(), Authority::new());
    let TwoPods { address, mut at_home, mut at_far, home, far, mut phy, mut mac } = TwoPods::start(&old);
    undisturbed([&mut phy, &mut mac], || {
        let old_certificate = old.certificate();
        // One after the other, then both at once.
        until_renewed(&[&home], || at_home.replace(&[&old, &new], &old_certificate));
        until_renewed(&[&far], || at_far.replace(&[&old, &new], &old_certificate));
        until_renewed(&[&home, &far], || {
            at_home.replace(&[&old, &new], &new.certificate());
            at_far.replace(&[&old, &new], &new.certificate());
        });
        until_renewed(&[&far], || at_far.replace(&[&new], &new.certificate()));
        until_renewed(&[&home], || at_home.replace(&[&new], &new.certificate()));
    });
    assert_eq!(lost_at(home.dir.path()) + lost_at(far.dir.path()), 0);
    assert_eq!(home.unusable() + far.unusable(), 0);
    // What listens has the new files, for those that come now.
    let stranger = Pod::start(BridgeEnd::Far, &address, "d", &Secret::new(&[&old, &new], &old.certificate()));
    let late = Pod::start(BridgeEnd::Far, &address, "c", &at_far);
    attach(late.dir.path());
    let options = LinkOptions::new().dir(stranger.dir.path()).timeout(Duration::from_secs(1));
    assert!(options.attach("fronthaul", Side::Secondary).is_err(), "the old authority is trusted");
}

#[test]
fn certificates_that_do_not_work_are_not_used() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let TwoPods { address, mut at_home, mut at_far, home, far, mut phy, mut mac } = TwoPods::start(&ours);
    let until_refused = |pod: &Pod| {
        // After the first time, the next attempt may have read the files before these.
        let before = pod.unusable();
        let attempts = if before == 0 { 1 } else { 2 };
        until("the files are refused", || pod.unusable() >= before + attempts);
    };
    undisturbed([&mut phy, &mut mac], || {
        // A key of another certificate.
        at_home.replace(&[&ours], &(ours.certificate().0, ours.certificate().1));
        until_refused(&home);
        // A certificate that the other bridge does not trust.
        at_far.replace(&[&ours], &theirs.certificate());
        until_refused(&far);
        // A certificate of a name that the other bridge does not allow.
        at_far.replace(&[&ours], &ours.certificate_of("core"));
        until_refused(&far);
        at_home.replace(&[&ours], &ours.certificate_of("core"));
        until_refused(&home);
        assert_eq!(home.renewed() + far.renewed(), 0);
    });
    let late = Pod::start(BridgeEnd::Far, &address, "c", &Secret::new(&[&ours], &ours.certificate()));
    drop(attach(late.dir.path()));
    // Or it would get some of the messages below.
    drop(late);
    undisturbed([&mut phy, &mut mac], || {
        until_renewed(&[&home, &far], || {
            at_home.replace(&[&ours], &ours.certificate());
            at_far.replace(&[&ours], &ours.certificate());
        });
    });
    assert_eq!(lost_at(far.dir.path()), 0);
}

#[test]
fn certificate_of_another_namespace_has_no_access() {
    let authority = Authority::new();
    let address = format!("quic/{}", free_address());
    let secret = |namespace: &str| Secret::new(&[&authority], &authority.certificate_of(namespace));
    let (of_ran, of_core) = (secret("ran"), secret("core"));
    let home = Pod::start(BridgeEnd::Home, &address, "a", &of_ran);
    let phy = create(home.dir.path());
    let stranger = Pod::start(BridgeEnd::Far, &address, "b", &of_core);
    until("the refusal is counted", || home.metrics.certificates.refused.get() > 0);
    let options = LinkOptions::new().dir(stranger.dir.path()).timeout(Duration::from_secs(2));
    assert!(options.attach("fronthaul", Side::Secondary).is_err(), "a stranger has made a replica");
    assert_eq!(phy.participants().count(), 1, "a stranger has attached");
    let far = Pod::start(BridgeEnd::Far, &address, "c", &of_ran);
    attach(far.dir.path());
}
