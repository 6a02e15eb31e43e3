//! Connections that do not let themselves be closed, because of what waits in their queues.

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use crate::support::*;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{setsockopt, sockopt};
use nix::unistd::Pid;
use shmesh_proto::identity::{Question, Subject};
use shmesh_proto::packet;
use shmesh_testing::own_process;

#[test]
fn unread_data_of_a_closed_connection_affects_only_its_client() {
    // Children that other tests start have copies of every descriptor for a moment, and the service
    // must have the last.
    own_process(|| {
        let service = Service::start();
        let (me, before) = (me(), service.open_fds());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        setsockopt(&listener, sockopt::RcvBuf, &4096).unwrap();
        let linger = libc::linger { l_onoff: 1, l_linger: 600 };
        let full = || {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (peer, _) = listener.accept().unwrap();
            setsockopt(&stream, sockopt::Linger, &linger).unwrap();
            stream.set_nonblocking(true).unwrap();
            while std::io::Write::write(&mut &stream, &[0; 65_536]).is_ok() {}
            (stream, peer)
        };
        let question = packet::encode(&Question::new(1, Subject::Pidfd));
        let mut other = service.asker();
        assert!(other.ask(Subject::Pidfd, &me).is_ok());

        // Behind a packet that ends the connection.
        let (stream, _first_peer) = full();
        let ends = service.asker();
        service.pause();
        ends.send(&[0xff; 100], &[]).unwrap();
        ends.send(&question, &[stream.as_fd()]).unwrap();
        drop(stream);
        kill(Pid::from_raw(service.pid()), Signal::SIGCONT).unwrap();
        // An answer, or a reset.
        let _ = ends.answer();
        assert!(other.ask(Subject::Pidfd, &me).is_ok(), "another does not notice");

        // On a connection for which there is no place.
        let crowd: Vec<_> = (0..62).map(|_| service.asker()).collect();
        let (stream, _second_peer) = full();
        service.pause();
        let one_more: Vec<_> = (0..3).map(|_| service.asker()).collect();
        for fd in &one_more {
            fd.send(&question, &[stream.as_fd()]).unwrap();
        }
        drop(stream);
        kill(Pid::from_raw(service.pid()), Signal::SIGCONT).unwrap();
        assert!(other.ask(Subject::Pidfd, &me).is_ok(), "another does not notice");

        drop((crowd, one_more, ends, listener, _first_peer, _second_peer, other));
        back_to(&service, before);
    });
}
