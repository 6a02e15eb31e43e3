//! Descriptors whose close takes long, because of unsent data.

use std::os::fd::AsFd;

use crate::support::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shmesh_proto::identity::{Question, Subject, Unknown};
use shmesh_proto::packet;
use shmesh_testing::{Stubborn, own_process};

#[test]
fn blocking_close_affects_only_its_sender() {
    // Children that other tests start have copies of every descriptor for a moment, and the service
    // must have the last.
    own_process(|| {
        let service = Service::start();
        let (me, before) = (me(), service.open_fds());
        let mut asker = service.asker();
        assert!(asker.ask(Subject::Pidfd, &me).is_ok());
        let mut stubborn = Stubborn::listen();
        let (first, second) = (stubborn.one(), stubborn.one());
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
        drop((stubborn, clients));
        back_to(&service, before);
        assert!(service.asker().ask(Subject::Pidfd, &me).is_ok());
        assert_eq!(service.stop()["exhausted"], 1);
    });
}

#[test]
fn unread_data_of_a_closed_connection_affects_only_its_client() {
    own_process(|| {
        let service = Service::start();
        let (me, before) = (me(), service.open_fds());
        let mut stubborn = Stubborn::listen();
        let question = packet::encode(&Question::new(1, Subject::Pidfd));
        let mut other = service.asker();
        assert!(other.ask(Subject::Pidfd, &me).is_ok());

        // Behind a packet that ends the connection.
        let stream = stubborn.one();
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
        let stream = stubborn.one();
        service.pause();
        let one_more: Vec<_> = (0..3).map(|_| service.asker()).collect();
        for fd in &one_more {
            fd.send(&question, &[stream.as_fd()]).unwrap();
        }
        drop(stream);
        kill(Pid::from_raw(service.pid()), Signal::SIGCONT).unwrap();
        assert!(other.ask(Subject::Pidfd, &me).is_ok(), "another does not notice");

        drop((crowd, one_more, ends, stubborn, other));
        back_to(&service, before);
    });
}
