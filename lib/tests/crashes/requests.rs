//! A client or a server dies at every machine instruction of what it does with a request. No buffer may be lost, and no
//! client may wait for a request that no server has.

use std::sync::atomic::Ordering::Relaxed;

use shmesh::config::{PoolId, RingMode};
use shmesh::{Link, Loan, Participant, SeatIndex, Side};

use crate::crash_points::{Kills, Verify, header, one};
use crate::harness::{self, long, quick};
use crate::layout::{LINE, WORD};
use crate::scenes::{Case, Scene, forever};
use crate::world::{
    Bad, Base, Class, DATA_LEN, Expect, MSG_LEN, Order, Progress, bad, loanable, recover, recover_but, wedged,
};

pub(crate) const CASES: &[harness::Case] = &[
    quick("requests::crash_points", || all(&["request MSG+DATA", "reply MSG+DATA"])),
    long("requests::crash_points_of_every_operation", || all(&[])),
];

/// Requests that a client can have pending.
const WINDOW: u32 = 2;
/// Values of a slot's status word and of its reply words.
const STATUS: u64 = 3;
const IDLE: u64 = 0;
const PENDING: u64 = 1;
const FULL: u64 = 1 << 32;
const LAST: u64 = 1 << 33;

fn all(only: &[&str]) {
    let [original, copy] = [(); 2].map(|()| Base::with_requests(RingMode::Mpmc, WINDOW));
    let empty = original.save();
    header();
    let mut failed = Vec::new();
    let client_dies: Verify = |base, _, order| verify(base, order, false);
    let client_lives: Verify = |base, _, order| verify(base, order, true);
    let cases = of_clients().into_iter().map(|case| (case, client_dies));
    let cases: Vec<_> = cases.chain(of_servers().into_iter().map(|case| (case, client_lives))).collect();
    let chosen = |case: &Case| only.is_empty() || only.contains(&case.name);
    for (case, verify) in cases.iter().filter(|(case, _)| chosen(case)) {
        original.restore(&empty);
        if !one(RingMode::Mpmc, case, &original, &copy, Kills::AtChanges, *verify) {
            failed.push(case.name);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

fn loan(link: &Link) -> shmesh::Result<Loan<'_>> {
    let mut loan = link.loan_with(PoolId::CpuData)?;
    loan.resize_msg(16)?.fill(7);
    loan.resize_data(16)?.fill(7);
    Ok(loan)
}

/// The victim is a client with a request of each kind pending, of which the server has the first.
fn client(base: &Base, replies: usize) -> Scene {
    let mut scene = Scene::on(base, Side::Secondary);
    let server = forever(base.handle(Side::Primary));
    scene.pending.push(scene.victim.request(loan(scene.victim).expect("a buffer")).expect("room"));
    scene.pending.push(scene.victim.request_inline(1, 2, &[7; 48]).expect("room"));
    let mut request = server.receive_request().expect("no damage").expect("it was made");
    for i in 0..replies {
        match i {
            0 => request.stream(loan(server).expect("a buffer")).expect("room"),
            1 => request.stream_inline(1, 2, &[7; 100]).expect("room"),
            // Without a DATA part: the pool for those is so small that a client has one of its buffers at most.
            _ => request.stream(server.loan().expect("a buffer")).expect("room"),
        };
    }
    std::mem::forget(request);
    scene
}

/// The victim is a server, and another participant a client with a request of each kind, of which the victim has so many.
fn server(base: &Base, taken: usize) -> Scene {
    let mut scene = Scene::on(base, Side::Primary);
    let client = forever(base.handle(Side::Secondary));
    scene.third = Some(client);
    std::mem::forget(client.request(loan(client).expect("a buffer")).expect("room"));
    std::mem::forget(client.request_inline(1, 2, &[7; 48]).expect("room"));
    for _ in 0..taken {
        scene.requests.push(scene.victim.receive_request().expect("no damage").expect("it was made"));
    }
    scene
}

fn take(scene: &mut Scene) {
    match scene.victim.receive_request() {
        Ok(request) => scene.requests.extend(request),
        Err(error) => scene.result = Err(error),
    }
}

fn reply_inline(scene: &mut Scene, i: usize) {
    scene.result = scene.requests[i].reply_inline(1, 2, &[7; 100]).map(drop);
}

fn take_reply(scene: &mut Scene) {
    match scene.pending[0].try_take() {
        Ok(reply) => scene.messages.extend(reply),
        Err(error) => scene.result = Err(error),
    }
}

fn case(name: &'static str, prepare: fn(&Base) -> Scene, operation: fn(&mut Scene)) -> Case {
    Case { name, expect: Expect::default(), prepare, in_child: None, operation }
}

fn of_clients() -> Vec<Case> {
    vec![
        case(
            "request inline",
            |base| Scene::on(base, Side::Secondary),
            |s| match s.victim.request_inline(1, 2, &[7; 48]) {
                Ok(pending) => s.pending.push(pending),
                Err(error) => s.result = Err(error),
            },
        ),
        case(
            "request MSG+DATA",
            |base| {
                let mut scene = Scene::on(base, Side::Secondary);
                scene.loans.push(loan(scene.victim).expect("a buffer"));
                scene
            },
            |s| {
                if let Some(loan) = s.loans.pop() {
                    match s.victim.request(loan) {
                        Ok(pending) => s.pending.push(pending),
                        Err(refused) => s.result = Err(refused.into()),
                    }
                }
            },
        ),
        case("take a reply MSG+DATA", |base| client(base, 1), take_reply),
        case(
            "take a reply inline",
            |base| {
                let mut scene = client(base, 2);
                take_reply(&mut scene);
                scene
            },
            take_reply,
        ),
        case("drop a pending reply", |base| client(base, 3), |s| drop(s.pending.remove(0))),
        case(
            "recover a dead client",
            |base| {
                let mut scene = client(base, 3);
                scene.third = Some(scene.victim);
                scene.victim = forever(base.handle(Side::Secondary));
                scene
            },
            recovers,
        ),
    ]
}

fn of_servers() -> Vec<Case> {
    vec![
        case("take a request MSG+DATA", |base| server(base, 0), take),
        case("take a request inline", |base| server(base, 1), take),
        case("reply inline", |base| server(base, 1), |s| reply_inline(s, 0)),
        case(
            "reply MSG+DATA",
            |base| {
                let mut scene = server(base, 2);
                scene.loans.push(loan(scene.victim).expect("a buffer"));
                scene
            },
            |s| {
                if let Some(loan) = s.loans.pop() {
                    s.result = s.requests[1].reply(loan).map(drop).map_err(Into::into);
                }
            },
        ),
        case(
            "stream 2 and reply",
            |base| server(base, 1),
            |s| {
                for _ in 0..2 {
                    s.result = s.requests[0].stream_inline(1, 2, &[7; 48]).map(drop);
                }
                reply_inline(s, 0);
            },
        ),
        case("drop a request MSG+DATA", |base| server(base, 1), |s| drop(s.requests.pop())),
        case("drop a request inline", |base| server(base, 2), |s| drop(s.requests.pop())),
        case(
            "recover a dead server",
            |base| {
                let mut scene = server(base, 1);
                scene.requests[0].stream(loan(scene.victim).expect("a buffer")).expect("room");
                std::mem::forget(loan(scene.victim));
                let dead = scene.victim;
                scene.victim = forever(base.handle(Side::Primary));
                // The client stays.
                scene.third = Some(dead);
                scene
            },
            recovers,
        ),
    ]
}

fn recovers(scene: &mut Scene) {
    let Some(dead) = scene.third else { return };
    let Some(found) = scene.victim.participants().find(|other| other.seat == dead.seat()) else { return };
    scene.result = scene.victim.recover_participant(found.seat, found.word).map(drop);
}

/// The words of a client's slots.
fn slots(base: &Base, seat: SeatIndex) -> Vec<[u64; LINE / WORD]> {
    let start = base.layout().replies().start + usize::from(seat.value()) * WINDOW as usize * LINE;
    let word = |slot: usize, i: usize| base.segments[0].word(start + slot * LINE + i * WORD).load(Relaxed);
    (0..WINDOW as usize).map(|slot| std::array::from_fn(|i| word(slot, i))).collect()
}

/// Takes all requests, and answers those that are wanted.
fn answer_all(server: &Link) -> Result<(), Bad> {
    for i in 0..100 {
        let Some(mut request) = server.receive_request().map_err(wedged("receive a request"))? else {
            return Ok(());
        };
        let is_wanted = request.is_wanted();
        let sent = if i % 2 == 0 {
            request.reply_inline(1, 2, &[7; 8]).map_err(wedged("reply"))?
        } else {
            let loan = server.loan().map_err(wedged("loan a reply"))?;
            request.reply(loan).map_err(|refused| wedged("reply")(refused.into()))?
        };
        if sent != is_wanted {
            return bad(Class::Lost, "a reply to a client that waits for it");
        }
    }
    bad(Class::Doubled, "requests without end")
}

/// A client asks, and is answered, with its window full.
fn round_trips(client: &Link, server: &Link) -> Result<(), Bad> {
    for text in [&b"one"[..], b"two"] {
        let mut pending = Vec::new();
        for i in 0..WINDOW {
            pending.push(if i % 2 == 0 {
                client.request_inline(1, 2, text).map_err(wedged("request"))?
            } else {
                let mut loan = client.loan().map_err(wedged("loan a request"))?;
                loan.resize_msg(text.len()).map_err(wedged("write a request"))?.copy_from_slice(text);
                client.request(loan).map_err(|refused| wedged("request")(refused.into()))?
            });
        }
        for mut pending in pending {
            if pending.try_take().map_err(wedged("look for a reply"))?.is_some() {
                return bad(Class::Doubled, "a reply before there is one");
            }
            loop {
                let request = server.receive_request().map_err(wedged("receive a request"))?;
                let Some(mut request) = request else { return bad(Class::Lost, "a request") };
                // Others may wait before it, also of an earlier participant in its seat.
                let is_mine = request.client() == client.seat() && request.is_wanted();
                if is_mine && request.msg() != text {
                    return bad(Class::Damaged, "a request");
                }
                request.reply_inline(3, 4, text).map_err(wedged("reply"))?;
                if is_mine {
                    break;
                }
            }
            match pending.try_take().map_err(wedged("take a reply"))? {
                Some(reply) if reply.msg() == text && pending.is_over() => {}
                other => return bad(Class::Lost, format!("the reply is {other:?}")),
            }
        }
    }
    Ok(())
}

/// Examines a link in which all participants but the two roots are dead, and first the client that was not meant to die.
fn verify(base: &Base, order: Order, client_lives: bool) -> Result<Progress, Bad> {
    let living = [base.primary.seat(), base.secondary.seat()];
    let others: Vec<_> = base.primary.participants().filter(|other| !living.contains(&other.seat)).collect();
    if order == Order::WorkFirst {
        let (client, server) = (base.handle(Side::Secondary), base.handle(Side::Primary));
        round_trips(&client, &server)?;
        answer_all(&server)?;
    }
    // A client that lives must wait for nothing that does not come.
    let before = base.save();
    let lives = |other: &&Participant| client_lives && other.word.side() == Side::Secondary;
    for client in others.iter().filter(lives) {
        base.restore(&before);
        recover_but(base, Some(client.seat))?;
        answer_all(&base.handle(Side::Primary))?;
        for words in slots(base, client.seat) {
            let is_answered = words[1..].iter().any(|word| word & FULL != 0 && word & LAST != 0);
            if words[0] & STATUS == PENDING && !is_answered {
                return bad(Class::Wedged, format!("the client in seat {} waits for ever", client.seat));
            }
        }
    }
    base.restore(&before);
    recover(base)?;
    let (client, server) = (base.handle(Side::Secondary), base.handle(Side::Primary));
    while let Some(request) = server.receive_request().map_err(wedged("receive a request"))? {
        if request.is_wanted() {
            return bad(Class::Lost, "a request of a dead client is wanted");
        }
    }
    for other in &others {
        for words in slots(base, other.seat) {
            if words[0] & STATUS != IDLE || words[1..].iter().any(|word| word & FULL != 0) {
                return bad(Class::Leaked, format!("a slot of seat {}: {words:x?}", other.seat));
            }
        }
    }
    round_trips(&client, &server)?;
    for (name, pool, len) in [("cpu_msg", None, MSG_LEN), ("cpu_data", Some(PoolId::CpuData), DATA_LEN)] {
        for link in [&client, &server] {
            let found = loanable(link, pool)?;
            if found != len {
                return bad(Class::Leaked, format!("{found} of {len} buffers of {name} can be loaned"));
            }
        }
    }
    let inline = base.layout().inline();
    let held =
        (0..inline.len).filter(|&cell| base.segments[0].word(inline.owner(cell)).load(Relaxed) & 3 != 0);
    match held.count() {
        0 => {}
        held => return bad(Class::Leaked, format!("{held} inline cells are held")),
    }
    drop((client, server));
    match base.primary.participants().count() {
        2 => Ok(Progress::default()),
        seats => bad(Class::Leaked, format!("{seats} seats are taken")),
    }
}
