//! Requests: a reply reaches its client once and no other, whichever side gives up, detaches or dies meanwhile.

use super::super::stage::{self, abandon, attach, entry_of, link_with_requests, loan, release};
use super::{Bytes, assert_all_free, consume, explore, loan_and_write, spawn, until};
use crate::link::core::{Core, RecoveryStats};
use crate::link::endpoint::Endpoint;
use crate::link::request_steps::{RequestSteps as _, TakenRequest};
use crate::participant::Participant;
use crate::participant::Side::{Primary, Secondary};
use crate::ring::reply::{ReplyOutcome, RequestId, Status};

/// A link with this many MSG buffers, a client and a server.
fn ends(msg: u32) -> (Core, Bytes, Box<Endpoint>, Box<Endpoint>) {
    let core = link_with_requests(1, false, msg, 0, 1);
    let (client, server) = (attach(&core, Secondary), attach(&core, Primary));
    (core, Bytes::new(msg as usize), client, server)
}

fn request(client: &Endpoint, bytes: &Bytes, value: i32) -> RequestId {
    let held = until(|| loan_and_write(client, bytes, value));
    stage::request(client, &held).expect("the window and the ring have room")
}

fn take(server: &Endpoint, bytes: &Bytes, value: i32) -> TakenRequest {
    let taken = server.take_request().expect("no damage").expect("it was made");
    let held = stage::open_request(server, &taken).expect("no damage");
    assert_eq!((held.msg_id, bytes.read(held.cell)), (value, value));
    taken
}

fn end(server: &Endpoint, taken: &TakenRequest) {
    let held = stage::open_request(server, taken).expect("no damage");
    stage::end_request(server, taken, &held);
}

/// Loans, writes and replies. Returns whether the client still waits.
fn reply(server: &Endpoint, bytes: &Bytes, id: RequestId, at: (u64, bool), value: i32) -> bool {
    let held = until(|| loan_and_write(server, bytes, value));
    until(|| match stage::reply(server, id, at, &held) {
        ReplyOutcome::Sent => Some(true),
        ReplyOutcome::Unwanted => Some(false),
        ReplyOutcome::Full | ReplyOutcome::OverShare => None,
    })
}

fn take_reply(client: &Endpoint, bytes: &Bytes, id: RequestId, position: u64) -> Option<(i32, bool)> {
    let (got, is_last) = stage::take_reply(client, id, position).expect("no damage")?;
    Some((consume(client, bytes, &got), is_last))
}

/// More replies than can wait.
#[test]
fn replies_arrive_in_order_with_their_bytes() {
    explore("replies_arrive_in_order_with_their_bytes", || {
        let (core, bytes, client, server) = ends(3);
        let id = request(&client, &bytes, 1);
        let serving = {
            let bytes = bytes.clone();
            spawn(move || {
                let taken = take(&server, &bytes, 1);
                for position in 0..3 {
                    let value = 10 + i32::try_from(position).unwrap();
                    assert!(reply(&server, &bytes, taken.id, (position, position == 2), value));
                }
                end(&server, &taken);
            })
        };
        for position in 0..3 {
            let got = until(|| take_reply(&client, &bytes, id, position));
            assert_eq!(got, (10 + i32::try_from(position).unwrap(), position == 2));
        }
        serving.join().unwrap();
        assert_eq!(client.request_status(id), Status::Over);
        assert_all_free(&attach(&core, Primary), &bytes);
    });
}

/// The next request in the slot gets none of its replies.
#[test]
fn late_reply_does_not_reach_a_later_request() {
    explore("late_reply_does_not_reach_a_later_request", || {
        let (core, bytes, client, server) = ends(3);
        let first = request(&client, &bytes, 1);
        let taken = take(&server, &bytes, 1);
        let serving = {
            let bytes = bytes.clone();
            spawn(move || {
                reply(&server, &bytes, taken.id, (0, true), 10);
                end(&server, &taken);
                server
            })
        };
        client.close_request(first);
        let second = request(&client, &bytes, 2);
        assert_eq!(take_reply(&client, &bytes, second, 0), None);
        let server = serving.join().unwrap();
        assert_eq!(take_reply(&client, &bytes, second, 0), None);
        let taken = take(&server, &bytes, 2);
        assert!(reply(&server, &bytes, taken.id, (0, true), 20));
        assert_eq!(take_reply(&client, &bytes, second, 0), Some((20, true)));
        end(&server, &taken);
        assert_all_free(&attach(&core, Primary), &bytes);
    });
}

/// A server drops the request while its client gives up, and the next request is made.
#[test]
fn late_failure_does_not_reach_a_later_request() {
    explore("late_failure_does_not_reach_a_later_request", || {
        let (core, bytes, client, server) = ends(2);
        let first = request(&client, &bytes, 1);
        let taken = take(&server, &bytes, 1);
        let serving = spawn(move || server.release_request(&taken));
        client.close_request(first);
        let second = request(&client, &bytes, 2);
        serving.join().unwrap();
        assert_eq!(client.request_status(second), Status::Pending);
        client.close_request(second);
        let server = attach(&core, Primary);
        server.release_request(&server.take_request().unwrap().unwrap());
        assert_all_free(&server, &bytes);
    });
}

/// Recovers `dead` in a thread of its own, while `live` runs.
fn recovered(core: &Core, dead: Participant, live: impl FnOnce()) -> RecoveryStats {
    let recoverer = {
        let (core, me) = (core.clone(), attach(core, Primary));
        spawn(move || {
            let done = core.reclaim(&dead, me.me.seat, false);
            core.leave(&me.me);
            done
        })
    };
    live();
    recoverer.join().unwrap()
}

#[test]
fn dead_clients_replies_are_freed() {
    explore("dead_clients_replies_are_freed", || {
        let (core, bytes, client, server) = ends(2);
        let id = client.open_request().expect("a slot");
        assert!(reply(&server, &bytes, id, (0, false), 10));
        let done = recovered(&core, abandon(client), || {
            reply(&server, &bytes, id, (1, true), 11);
        });
        assert!(matches!(done.messages, 1 | 2), "a reply, or both");
        assert_eq!(server.request_status(id), Status::Over);
        assert_all_free(&server, &bytes);
    });
}

/// The client dies after the exchange on the owner word of a reply, and before the one on the slot. One recoverer has freed
/// the reply, and its buffer is loaned again under an epoch that looks the same in a model, while another recoverer still
/// checks the slot.
#[test]
fn client_dead_in_a_reception() {
    explore("client_dead_in_a_reception", || {
        let (core, bytes, client, server) = ends(1);
        let id = client.open_request().expect("a slot");
        let held = loan_and_write(&server, &bytes, 10).expect("a buffer");
        assert_eq!(stage::reply(&server, id, (0, true), &held), ReplyOutcome::Sent);
        assert!(crate::ring::Owners::take(&client.receiving(), entry_of(&held), held.owner.0));
        let dead = abandon(client);
        let (first, late) = (attach(&core, Primary), attach(&core, Primary));
        let late = {
            let core = core.clone();
            spawn(move || core.close_requests(&dead, late.me.seat, &mut RecoveryStats::default()))
        };
        assert_eq!(core.reclaim(&dead, first.me.seat, false).messages, 1);
        for value in 2..4 {
            let held = loan_and_write(&server, &bytes, value).expect("it is free");
            assert!(release(&server, &held), "no other participant has it");
        }
        late.join().unwrap();
        assert_all_free(&server, &bytes);
    });
}

#[test]
fn client_of_a_dead_server_gets_its_replies_then_an_error() {
    explore("client_of_a_dead_server_gets_its_replies_then_an_error", || {
        let (core, bytes, client, server) = ends(3);
        let id = request(&client, &bytes, 1);
        let taken = take(&server, &bytes, 1);
        assert!(reply(&server, &bytes, taken.id, (0, false), 10));
        loan(&server).expect("a buffer");
        let done = recovered(&core, abandon(server), || {
            assert_eq!(take_reply(&client, &bytes, id, 0), Some((10, false)));
            assert_eq!(take_reply(&client, &bytes, id, 1), None);
        });
        assert_eq!(done.messages, 2, "the request and a loan");
        assert_eq!(client.request_status(id), Status::ServerDied(1));
        client.close_request(id);
        assert_all_free(&client, &bytes);
    });
}

/// One recoverer has freed the buffer of the request, and it holds another request, while the other recoverer still looks.
#[test]
fn late_recovery_does_not_fail_a_later_request() {
    explore("late_recovery_does_not_fail_a_later_request", || {
        let (core, bytes, client, server) = ends(1);
        let first = request(&client, &bytes, 1);
        take(&server, &bytes, 1);
        let dead = abandon(server);
        let late = {
            let core = core.clone();
            spawn(move || core.fail_requests(&dead))
        };
        let recoverer = attach(&core, Primary);
        core.reclaim(&dead, recoverer.me.seat, false);
        assert_eq!(client.request_status(first), Status::ServerDied(1));
        client.close_request(first);
        let second = request(&client, &bytes, 2);
        late.join().unwrap();
        assert_eq!(client.request_status(second), Status::Pending);
        client.close_request(second);
        recoverer.release_request(&recoverer.take_request().unwrap().unwrap());
        assert_all_free(&recoverer, &bytes);
    });
}

/// A newcomer takes the seat as soon as it is vacant, while another process still recovers its predecessor.
#[test]
fn newcomer_keeps_its_request() {
    explore("newcomer_keeps_its_request", || {
        let (core, bytes, client, server) = ends(2);
        let first = client.open_request().expect("a slot");
        assert!(reply(&server, &bytes, first, (0, false), 10));
        let dead = abandon(client);
        let (recoverer, late) = (attach(&core, Primary), attach(&core, Primary));
        let late = {
            let core = core.clone();
            spawn(move || core.close_requests(&dead, late.me.seat, &mut RecoveryStats::default()))
        };
        core.reclaim(&dead, recoverer.me.seat, false);
        let client = attach(&core, Secondary);
        assert_eq!(client.me.seat, dead.seat);
        let second = client.open_request().expect("a slot");
        assert_eq!(take_reply(&client, &bytes, second, 0), None);
        assert!(!reply(&server, &bytes, first, (1, true), 11));
        assert!(reply(&server, &bytes, second, (0, true), 20));
        assert_eq!(take_reply(&client, &bytes, second, 0), Some((20, true)));
        late.join().unwrap();
        assert_all_free(&server, &bytes);
    });
}
