//! A descriptor that does not let itself be closed.

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use crate::support::*;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{setsockopt, sockopt};
use nix::unistd::Pid;
use shmesh_proto::identity::{Question, Subject, Unknown};
use shmesh_proto::packet;
use shmesh_testing::own_process;

#[test]
fn blocking_close_affects_only_its_sender() {
    // Children that other tests start have copies of every descriptor for a moment, and the service
    // must have the last.
    own_process(|| {
        let service = Service::start();
        let (me, before) = (me(), service.open_fds());
        let mut asker = service.asker();
        assert!(asker.ask(Subject::Pidfd, &me).is_ok());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // What is sent has no room at the other end, not even later.
        setsockopt(&listener, sockopt::RcvBuf, &4096).unwrap();
        // Unread bytes, and SO_LINGER: the close by the service, which has the last descriptor, blocks.
        let linger = libc::linger { l_onoff: 1, l_linger: 600 };
        let full = || {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (peer, _) = listener.accept().unwrap();
            setsockopt(&stream, sockopt::Linger, &linger).unwrap();
            stream.set_nonblocking(true).unwrap();
            while std::io::Write::write(&mut &stream, &[0; 65_536]).is_ok() {}
            (stream, peer)
        };
        let ((first, first_peer), (second, second_peer)) = (full(), full());
        let clients = [service.asker(), service.asker()];
        // While the service is stopped this test closes its own descriptors: then the service has the last. Both at once, for a
        // signal would end the waiting.
        service.pause();
        for (client, stream) in clients.iter().zip([first, second]) {
            client.send(&packet::encode(&Question::new(1, Subject::Pidfd)), &[stream.as_fd()]).unwrap();
        }
        kill(Pid::from_raw(service.pid()), Signal::SIGCONT).unwrap();
        for client in &clients {
            assert_eq!(client.answer().as_ref().and_then(unknown), Some(Unknown::BadDescriptor));
        }
        // Another client does not notice; this one may not send more before these are closed.
        let mut other = Helper::start("asks", "", false);
        other.say(service.path().to_str().unwrap());
        assert_eq!(other.hear(), "identified");
        asker.send(&packet::encode(&Question::new(2, Subject::Pidfd)), &[me.as_fd()]).unwrap();
        assert_eq!(asker.answer(), None, "let go");
        // Their other ends close: so do they.
        drop((first_peer, second_peer, clients));
        back_to(&service, before);
        assert!(service.asker().ask(Subject::Pidfd, &me).is_ok());
        assert_eq!(service.stop()["exhausted"], 1);
    });
}
