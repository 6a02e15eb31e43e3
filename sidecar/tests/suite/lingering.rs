//! Descriptors whose close blocks or lingers.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::support::Sidecar;
use crate::support::client::{HELLO, answer, packet_of, tell};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::TimeVal;
use shmesh_proto::broker::{ExportKey, Mechanism, reply, request::Op};
use shmesh_proto::limits::MAX_FDS;
use shmesh_sys::socket;
use shmesh_testing::{Stubborn, Watchdog, ipc_dir, own_process, stranger, until};

fn is_welcome(fd: &OwnedFd) -> bool {
    tell(fd, HELLO, &[]);
    matches!(answer(fd), Some(reply::Result::Welcome(_)))
}

fn export(mechanism: Mechanism) -> Op {
    Op::ExportKey(ExportKey { size: 1, flags: 0, mechanism: mechanism.into(), handle: Vec::new() })
}

/// A way of sending a descriptor over a connection.
type Way = dyn Fn(&OwnedFd, BorrowedFd<'_>);

#[test]
fn lingering_sockets_affect_only_their_sender() {
    // Children of other tests have copies of every descriptor for a moment, and the sidecar must have the last copy. So
    // this test runs in a process of its own.
    own_process(|| {
        let _watchdog = Watchdog::start();
        let dir = ipc_dir();
        let sidecar = Sidecar::start_with_limit(dir.path(), "mpmc", 640, &[]);
        let before = sidecar.fds();
        let mut stubborn = Stubborn::listen();
        let other = stranger(dir.path());
        setsockopt(&other, sockopt::ReceiveTimeout, &TimeVal::new(60, 0)).unwrap();
        assert!(is_welcome(&other));

        let ways: [(&str, &Way); 7] = [
            ("with nothing", &|fd, stream| socket::send(fd, &[], &[stream]).unwrap()),
            ("with nothing, behind an invalid packet", &|fd, stream| {
                socket::send(fd, &[0xff; 100], &[]).unwrap();
                socket::send(fd, &[], &[stream]).unwrap();
            }),
            ("with a request that takes none", &|fd, stream| tell(fd, HELLO, &[stream])),
            ("as memory", &|fd, stream| tell(fd, export(Mechanism::Host), &[stream])),
            ("as a device", &|fd, stream| tell(fd, export(Mechanism::CudaVmm), &[stream])),
            ("with too many", &|fd, stream| tell(fd, HELLO, &[stream; MAX_FDS + 1])),
            ("behind an invalid packet", &|fd, stream| {
                socket::send(fd, &[0xff; 100], &[]).unwrap();
                tell(fd, HELLO, &[stream]);
            }),
        ];
        for (way, send) in ways {
            let attacker = stranger(dir.path());
            assert!(is_welcome(&attacker));
            // While the sidecar is stopped, this test closes its own descriptor. The sidecar then has the last one.
            let stream = stubborn.one();
            sidecar.pause();
            send(&attacker, stream.as_fd());
            drop((stream, attacker));
            sidecar.go_on();
            assert!(is_welcome(&other), "{way}: another one does not notice");
        }

        // The attackers' places are free again when all that they sent is closed.
        until("the other one is alone", || sidecar.metric("shmesh_sidecar_sessions") == 1);
        // A connection beyond the limit is closed together with everything that it has sent.
        let mut crowd = Vec::new();
        until("there is no more room", || {
            crowd.extend([(); 16].map(|()| stranger(dir.path())));
            sidecar.metric("shmesh_sidecar_refused_connections_total") > 0
        });
        let streams: Vec<_> = (0..20).map(|_| stubborn.one()).collect();
        sidecar.pause();
        for stream in streams {
            let one_more = stranger(dir.path());
            tell(&one_more, HELLO, &[stream.as_fd()]);
        }
        sidecar.go_on();
        assert!(is_welcome(&other), "too many: another one does not notice");
        let late = stranger(dir.path());
        setsockopt(&late, sockopt::ReceiveTimeout, &TimeVal::new(60, 0)).unwrap();
        // It may be closed already. Or there is room again, because the crowd said nothing for long.
        let _ = socket::send(&late, &packet_of(HELLO), &[]);
        let end = socket::receive(&late).map_or_else(|error| error.kind(), |_| ErrorKind::UnexpectedEof);
        assert_ne!(end, ErrorKind::WouldBlock, "a newcomer is refused, or welcome");

        // When the other ends close, these do too.
        drop((stubborn, crowd, other, late));
        until("all descriptors are closed", || sidecar.fds() <= before);
        sidecar.stop();
    });
}
