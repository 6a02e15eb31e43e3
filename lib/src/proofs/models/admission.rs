//! Admission: of two newcomers exactly one gets a side that takes one process, and a link is not emptied while a newcomer
//! attaches.

use super::super::stage::{link, process};
use super::{explore, spawn, until};
use crate::link::core::Core;
use crate::participant::Side::{Primary, Secondary};
use crate::participant::{Admission, Participant, SeatStage};

fn decide(core: &Core, me: &Participant, process: u32) -> Admission {
    let is_mine = |other: &Participant| other.word.pid() == process;
    core.seats.admit_alone(me, core.admission_role(Secondary), is_mine)
}

/// The steps of `LinkOptions::admit` and of the end of `LinkOptions::try_open`. Returns whether it was admitted.
fn come(core: &Core, pid: u32) -> bool {
    let me = core.seats.attach(&process(pid), Secondary).unwrap();
    let is_admitted = until(|| match decide(core, &me, pid) {
        Admission::Admitted => Some(true),
        Admission::Taken(_) => Some(false),
        Admission::Undecided(_) => None,
    });
    if is_admitted {
        core.seats.record_attached(&me);
        assert!(core.admission_role(Secondary).release(&me));
    } else {
        assert!(core.seats.vacate(&me));
    }
    is_admitted
}

#[test]
fn one_of_two_newcomers_is_admitted() {
    explore("one_of_two_newcomers_is_admitted", || {
        let core = link(1, true, 1, 0);
        let other = {
            let core = core.clone();
            spawn(move || come(&core, 2))
        };
        let mine = come(&core, 3);
        let theirs = other.join().unwrap();
        assert!(mine != theirs, "one of two");
    });
}

/// The first handle of the process that has the side detaches, and leaves a clone in a seat that is checked before its own.
#[test]
fn clone_keeps_the_side() {
    explore("clone_keeps_the_side", || {
        let core = link(1, true, 1, 0);
        let below = core.seats.attach(&process(1), Primary).unwrap();
        let first = core.seats.attach(&process(2), Secondary).unwrap();
        core.seats.record_attached(&first);
        assert!(core.seats.vacate(&below));
        let holder = {
            let core = core.clone();
            spawn(move || {
                let clone = core.seats.attach(&process(2), Secondary).unwrap();
                core.seats.record_attached(&clone);
                core.seats.record_end(&first, SeatStage::Detached);
                assert!(core.seats.vacate(&first));
            })
        };
        let me = core.seats.attach(&process(3), Secondary).unwrap();
        assert_ne!(decide(&core, &me, 3), Admission::Admitted);
        holder.join().unwrap();
    });
}

#[test]
fn newcomer_or_emptier_sees_the_other() {
    explore("newcomer_or_emptier_sees_the_other", || {
        let core = link(1, true, 1, 0);
        let emptier = core.seats.attach(&process(1), Primary).unwrap();
        let newcomer = {
            let core = core.clone();
            spawn(move || {
                core.seats.attach(&process(2), Secondary).unwrap();
                core.seats.emptier(core.emptier_role()).is_some()
            })
        };
        core.seats.begin_to_empty(&emptier, core.emptier_role()).unwrap();
        let is_alone = core.seats.all_at_once().is_some_and(|all| all.len() == 1);
        assert!(newcomer.join().unwrap() || !is_alone);
    });
}
