//! The operations that a participant is stopped in: what there was before, and what must be found after.

use shmesh::config::{PoolId, RingMode};
use shmesh::{Link, Loan, Message, PendingReply, Request, Side};

use crate::layout;
use crate::world::{Base, Expect, RING_LEN, TO_PRIMARY, TO_SECONDARY, Tag, inline, msg, msg_data};

/// The handles, loans and messages of the participant.
///
/// Handles live for ever, so that loans and messages can be kept beside them; nothing of a scene is dropped but
/// in the process that dies.
#[derive(Debug)]
pub(crate) struct Scene {
    pub(crate) victim: &'static Link,
    pub(crate) loans: Vec<Loan<'static>>,
    pub(crate) messages: Vec<Message<'static>>,
    pub(crate) pending: Vec<PendingReply<'static>>,
    pub(crate) requests: Vec<Request<'static>>,
    /// Another participant. Of a broadcast ring: its writer, which lives.
    pub(crate) third: Option<&'static Link>,
    /// For recovery: a participant that is dead already.
    pub(crate) dead: Option<&'static Link>,
    /// A reader of a broadcast ring that lives.
    pub(crate) witness: Option<&'static Link>,
    /// The handle to detach.
    pub(crate) leaver: Option<Link>,
    /// Options for attaching, and the link.
    pub(crate) options: (shmesh::LinkOptions, &'static str),
    pub(crate) result: shmesh::Result<()>,
}

impl Scene {
    fn new(base: &Base) -> Self {
        Self::on(base, Side::Secondary)
    }

    pub(crate) fn on(base: &Base, side: Side) -> Self {
        Self {
            victim: forever(base.handle(side)),
            loans: Vec::new(),
            messages: Vec::with_capacity(8),
            pending: Vec::with_capacity(8),
            requests: Vec::with_capacity(8),
            third: None,
            dead: None,
            witness: None,
            leaver: None,
            options: base.options(),
            result: Ok(()),
        }
    }

    pub(crate) fn receive(&mut self) {
        match self.victim.receive() {
            Ok(Some(message)) => self.messages.push(message),
            Ok(None) => {}
            Err(error) => self.result = Err(error),
        }
    }

    pub(crate) fn recover(&mut self) {
        let seat = self.dead.map(Link::seat);
        let dead = self.victim.participants().find(|other| Some(other.seat) == seat);
        if let Some(dead) = dead {
            self.result = self.victim.recover_participant(dead.seat, dead.word).map(drop);
        }
    }
}

pub(crate) fn forever(link: Link) -> &'static Link {
    Box::leak(Box::new(link))
}

/// An operation of a scene.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) expect: Expect,
    pub(crate) prepare: fn(&Base) -> Scene,
    /// Before the operation, in the process that runs it: no child may drop a handle of its parent.
    pub(crate) in_child: Option<fn(&mut Scene)>,
    pub(crate) operation: fn(&mut Scene),
}

/// Sends from the primary side by a handle that then leaves.
fn from_primary(base: &Base, tags: &[Tag]) {
    let peer = base.handle(Side::Primary);
    for tag in tags {
        tag.send(&peer).expect("room for what waits");
    }
}

fn from_secondary(base: &Base, tags: &[Tag]) {
    let peer = base.handle(Side::Secondary);
    for tag in tags {
        tag.send(&peer).expect("room for what waits");
    }
}

const WAITING: [Tag; 3] = [msg(1), inline(2), msg_data(3)];
const FULL: [Tag; 4] = [inline(10), msg(11), inline(12), msg(13)];

fn loans(name: &'static str, prepare: fn(&Base) -> Scene, operation: fn(&mut Scene)) -> Case {
    Case { name, expect: Expect { held: 2, ..Expect::default() }, prepare, in_child: None, operation }
}

fn sends(name: &'static str, sends: &[Tag], prepare: fn(&Base) -> Scene, operation: fn(&mut Scene)) -> Case {
    let waiting = [vec![inline(20)], vec![]];
    Case {
        name,
        expect: Expect { waiting, sends: sends.to_vec(), held: 3, ..Expect::default() },
        prepare,
        in_child: None,
        operation,
    }
}

fn takes(
    name: &'static str,
    waiting: &[Tag],
    takes: usize,
    prepare: fn(&Base) -> Scene,
    operation: fn(&mut Scene),
) -> Case {
    let waiting = [vec![], waiting.to_vec()];
    Case {
        name,
        expect: Expect { waiting, takes, held: 3, ..Expect::default() },
        prepare,
        in_child: None,
        operation,
    }
}

/// One message waits already, so that the slot is not the first.
fn sender(base: &Base) -> Scene {
    from_secondary(base, &[inline(20)]);
    Scene::new(base)
}

fn sender_of(base: &Base, tag: Tag) -> Scene {
    let mut scene = sender(base);
    scene.loans.push(tag.loan(scene.victim).expect("a buffer"));
    scene
}

fn receiver(base: &Base, waiting: &[Tag]) -> Scene {
    from_primary(base, waiting);
    Scene::new(base)
}

/// Has gone round the ring once, so that slots, hints and the handle's own state are not fresh.
fn seasoned(base: &Base) -> Scene {
    let scene = Scene::new(base);
    let peer = base.handle(Side::Primary);
    for round in 0..RING_LEN + 1 {
        for tag in [msg_data(round.into()), inline(round.into())] {
            tag.send(scene.victim).expect("send");
            drop(peer.receive().expect("receive").expect("it was sent"));
            tag.send(&peer).expect("send");
            drop(scene.victim.receive().expect("receive").expect("it was sent"));
        }
    }
    drop(peer);
    scene
}

/// The primary side has used all buffers, so the hints are in other hands.
fn hints_elsewhere(base: &Base) -> Scene {
    let peer = base.handle(Side::Primary);
    let mut loans = Vec::new();
    while let Ok(loan) = peer.loan_with(PoolId::CpuData) {
        loans.push(loan);
    }
    while let Ok(loan) = peer.loan() {
        loans.push(loan);
    }
    drop(loans);
    drop(peer);
    Scene::new(base)
}

fn keep(scene: &mut Scene, loan: shmesh::Result<Loan<'static>>) {
    match loan {
        Ok(loan) => scene.loans.push(loan),
        Err(error) => scene.result = Err(error),
    }
}

pub(crate) fn send(scene: &mut Scene) {
    if let Some(loan) = scene.loans.pop() {
        scene.result = loan.send().map_err(Into::into);
    }
}

fn batch(scene: &mut Scene) {
    let done = scene.victim.receive_batch(&mut scene.messages, 3);
    scene.result = done.map(drop);
}

/// Everything that a participant can hold or leave behind.
fn hoarder(base: &Base, side: Side) -> &'static Link {
    let other = if side == Side::Primary { Side::Secondary } else { Side::Primary };
    let third = forever(base.handle(side));
    let peer = base.handle(other);
    for tag in [msg(1), msg_data(2)] {
        tag.send(&peer).expect("send");
    }
    // Received and kept; the second, as if it had died before `head` moved, if there is one consumer.
    std::mem::forget(third.receive());
    std::mem::forget(third.receive());
    if base.single() {
        let ring = if side == Side::Secondary { 0 } else { 1 };
        let head = base.segments[0].word(base.layout().control(ring, layout::HEAD));
        head.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
    }
    hoard(third);
    third
}

fn hoard(third: &Link) {
    for tag in [inline(30), msg(31)] {
        tag.send(third).expect("send");
    }
    std::mem::forget(msg(32).loan(third));
    std::mem::forget(msg_data(33).loan(third));
}

fn hoarded(base_single: bool) -> Expect {
    let waiting = [vec![inline(30), msg(31)], if base_single { vec![msg_data(2)] } else { vec![] }];
    Expect { waiting, held: 6, ..Expect::default() }
}

/// How much of the operations a test goes through.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Extent {
    /// Sends a single message.
    One,
    /// One of each kind, all of which together take a second or two.
    Few,
    All,
}

/// The operations of this extent, or those that `SHMESH_CRASH_ONLY` names.
pub(crate) fn chosen(mode: RingMode, extent: Extent) -> Vec<Case> {
    const FEW: [&str; 4] = ["send MSG+DATA", "send inline", "receive MSG+DATA", "release MSG+DATA"];
    let mut cases = cases(mode);
    match std::env::var("SHMESH_CRASH_ONLY") {
        Ok(only) => cases.retain(|case| case.name.contains(&only)),
        Err(_) => match extent {
            Extent::One => cases.retain(|case| case.name == FEW[0]),
            Extent::Few => cases.retain(|case| FEW.contains(&case.name)),
            Extent::All => {}
        },
    }
    assert!(!cases.is_empty(), "no operation has such a name");
    cases
}

/// All operations on mapped memory.
fn cases(mode: RingMode) -> Vec<Case> {
    let single = mode == RingMode::Spsc;
    let mut cases = vec![
        loans("loan MSG", Scene::new, |s| {
            let loan = s.victim.loan();
            keep(s, loan);
        }),
        loans("loan MSG, from another's hints", hints_elsewhere, |s| {
            let loan = s.victim.loan();
            keep(s, loan);
        }),
        loans("loan MSG, released before", seasoned, |s| {
            let loan = s.victim.loan();
            keep(s, loan);
        }),
        loans("loan MSG+DATA", Scene::new, |s| {
            let loan = s.victim.loan_with(PoolId::CpuData);
            keep(s, loan);
        }),
        loans("loan MSG+DATA, other's hints", hints_elsewhere, |s| {
            let loan = s.victim.loan_with(PoolId::CpuData);
            keep(s, loan);
        }),
        loans("loan MSG+DATA, released before", seasoned, |s| {
            let loan = s.victim.loan_with(PoolId::CpuData);
            keep(s, loan);
        }),
        loans(
            "drop a loan MSG",
            |base| {
                let mut scene = Scene::new(base);
                scene.loans.push(msg(1).loan(scene.victim).expect("a buffer"));
                scene
            },
            |s| drop(s.loans.pop()),
        ),
        loans(
            "drop a loan MSG+DATA",
            |base| {
                let mut scene = Scene::new(base);
                scene.loans.push(msg_data(1).loan(scene.victim).expect("buffers"));
                scene
            },
            |s| drop(s.loans.pop()),
        ),
        sends("send MSG", &[msg(1)], |base| sender_of(base, msg(1)), send),
        sends("send MSG+DATA", &[msg_data(1)], |base| sender_of(base, msg_data(1)), send),
        sends("send inline", &[inline(1)], sender, |s| s.result = inline(1).send(s.victim)),
        sends("loan, write, send MSG+DATA", &[msg_data(1)], sender, |s| {
            s.result = msg_data(1).send(s.victim)
        }),
        sends(
            "send a batch of 2",
            &[msg(1), msg_data(2)],
            |base| {
                let mut scene = sender_of(base, msg(1));
                scene.loans.push(msg_data(2).loan(scene.victim).expect("buffers"));
                scene
            },
            |s| s.result = s.victim.send_batch(&mut s.loans).map(drop),
        ),
        Case {
            name: "send, again round the ring",
            expect: Expect { sends: vec![inline(1), msg(2)], held: 1, ..Expect::default() },
            prepare: seasoned,
            in_child: None,
            operation: |s| {
                s.result = inline(1).send(s.victim);
                s.result = msg(2).send(s.victim);
            },
        },
        Case {
            name: "send into a full ring",
            expect: Expect { waiting: [FULL.to_vec(), vec![]], held: 1, ..Expect::default() },
            prepare: |base| {
                from_secondary(base, &FULL);
                let mut scene = Scene::new(base);
                scene.loans.push(msg_data(1).loan(scene.victim).expect("buffers"));
                scene
            },
            in_child: None,
            operation: send,
        },
        Case {
            name: "send inline into a full ring",
            expect: Expect { waiting: [FULL.to_vec(), vec![]], held: 1, ..Expect::default() },
            prepare: |base| {
                from_secondary(base, &FULL);
                Scene::new(base)
            },
            in_child: None,
            operation: |s| s.result = inline(1).send(s.victim),
        },
        takes("receive MSG", &WAITING, 1, |base| receiver(base, &WAITING), Scene::receive),
        takes("receive MSG+DATA", &[msg_data(1)], 1, |base| receiver(base, &[msg_data(1)]), Scene::receive),
        takes(
            "receive inline",
            &[inline(1), inline(2)],
            1,
            |base| receiver(base, &[inline(1), inline(2)]),
            Scene::receive,
        ),
        takes("receive from a full ring", &FULL, 1, |base| receiver(base, &FULL), Scene::receive),
        takes("receive from an empty ring", &[], 0, |base| receiver(base, &[]), Scene::receive),
        takes("receive a batch of 3", &WAITING, 3, |base| receiver(base, &WAITING), batch),
        takes(
            "receive 3 one by one, keep all",
            &WAITING,
            3,
            |base| receiver(base, &WAITING),
            |s| {
                s.receive();
                s.receive();
                s.receive();
            },
        ),
        takes(
            "release MSG+DATA",
            &[],
            0,
            |base| {
                let mut scene = receiver(base, &[msg_data(1)]);
                scene.receive();
                assert_eq!(scene.messages.len(), 1);
                scene
            },
            |s| drop(s.messages.pop()),
        ),
        loans("attach on mapped memory", Scene::new, |s| match s.victim.try_clone() {
            Ok(link) => std::mem::forget(link),
            Err(error) => s.result = Err(error),
        }),
        Case {
            name: "attach, first send and receive",
            expect: Expect {
                waiting: [vec![inline(20)], WAITING.to_vec()],
                sends: vec![inline(1)],
                takes: 1,
                held: 2,
            },
            prepare: |base| {
                from_primary(base, &WAITING);
                sender(base)
            },
            in_child: None,
            operation: |s| {
                let Ok(link) = s.victim.try_clone() else { panic!("no seat") };
                let link = forever(link);
                s.result = inline(1).send(link);
                std::mem::forget(link.receive());
            },
        },
        sends("declare a type, send", &[inline(1)], sender, |s| match s.victim.try_clone() {
            Ok(link) => match link.typed::<[u64]>() {
                Ok(typed) => {
                    s.result = inline(1).send(s.victim);
                    std::mem::forget(typed);
                }
                Err(error) => s.result = Err(error),
            },
            Err(error) => s.result = Err(error),
        }),
        Case {
            name: "recover one with hands full",
            expect: hoarded(single),
            prepare: |base| {
                let mut scene = Scene::on(base, Side::Primary);
                scene.dead = Some(hoarder(base, Side::Secondary));
                scene
            },
            in_child: None,
            operation: Scene::recover,
        },
    ];
    if !single {
        cases.push(detach());
        cases.push(Case {
            name: "evict one with hands full",
            expect: hoarded(false),
            prepare: |base| {
                let mut scene = Scene::on(base, Side::Primary);
                scene.dead = Some(hoarder(base, Side::Secondary));
                scene
            },
            in_child: None,
            operation: |s| {
                if let Some(dead) = s.dead {
                    s.result = s.victim.evict(dead.seat()).map(drop);
                }
            },
        });
    }
    for case in &cases {
        assert!(case.expect.waiting[TO_PRIMARY].len() + case.expect.waiting[TO_SECONDARY].len() <= 8);
    }
    cases
}

/// Leaving a link with all that a participant can hold. Of ring mode mpmc: the side of a link with one producer is taken, by the
/// parent.
pub(crate) fn detach() -> Case {
    Case {
        name: "detach with hands full",
        expect: hoarded(false),
        prepare: |base| {
            from_primary(base, &[msg(1), msg_data(2)]);
            Scene::new(base)
        },
        in_child: Some(|s| {
            let leaver = s.options.0.attach(s.options.1, Side::Secondary).expect("attach");
            std::mem::forget(leaver.receive());
            std::mem::forget(leaver.receive());
            hoard(&leaver);
            s.leaver = Some(leaver);
        }),
        operation: |s| drop(s.leaver.take()),
    }
}

/// A whole attach by name, beside the living roots.
pub(crate) fn attach_by_name(side: Side) -> Case {
    let (name, operation): (_, fn(&mut Scene)) = match side {
        Side::Secondary => ("attach by name, secondary", |s| {
            match s.options.0.attach(s.options.1, Side::Secondary) {
                Ok(link) => std::mem::forget(link),
                // With one producer the side is taken: by the root, which lives.
                Err(error) => s.result = Err(error),
            }
        }),
        Side::Primary => {
            ("attach by name, primary", |s| match s.options.0.attach(s.options.1, Side::Primary) {
                Ok(link) => std::mem::forget(link),
                Err(error) => s.result = Err(error),
            })
        }
    };
    Case {
        name,
        expect: Expect { waiting: [vec![inline(20)], WAITING.to_vec()], held: 0, ..Expect::default() },
        prepare: |base| {
            from_primary(base, &WAITING);
            sender(base)
        },
        in_child: None,
        operation,
    }
}
