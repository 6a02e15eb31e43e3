//! The types of the payload: none is replaced while a participant uses it, or a message of that type waits.

use super::super::stage::{attach, leave, link, send_inline};
use super::{explore, spawn};
use crate::link::core::Core;
use crate::participant::Side::{Primary, Secondary};
use crate::segment::payload_type::{DeclaredType, PayloadType, PayloadTypes};

/// The types of what the primary and the secondary side send.
fn named(of_primary: &str, of_secondary: &str) -> PayloadTypes {
    let [of_primary, of_secondary] =
        [of_primary, of_secondary].map(|name| PayloadType::new(name, 8, 8, false).unwrap());
    PayloadTypes { of_primary, of_secondary }
}

fn are_declared(core: &Core, types: &PayloadTypes) -> bool {
    [Primary, Secondary]
        .into_iter()
        .all(|side| core.payload_type(side).declared() == Some(DeclaredType::Known(*types.of(side))))
}

#[test]
fn user_or_replacer_of_a_type_sees_the_other() {
    user_or_replacer("user_or_replacer_of_a_type_sees_the_other", named("new", "kept"));
}

/// As above, with another type of what the secondary side sends.
#[test]
fn user_or_replacer_of_a_type_of_requests_sees_the_other() {
    user_or_replacer("user_or_replacer_of_a_type_of_requests_sees_the_other", named("old", "new"));
}

fn user_or_replacer(name: &str, new: PayloadTypes) {
    explore(name, move || {
        let core = link(1, true, 1, 0);
        let old = named("old", "kept");
        let first = attach(&core, Primary);
        core.declare_types(&first.me, &old).unwrap();
        leave(&first);
        let (user, replacer) = (attach(&core, Primary), attach(&core, Secondary));
        let uses = {
            let core = core.clone();
            spawn(move || core.declare_types(&user.me, &named("old", "kept")).is_ok())
        };
        let replaces = core.declare_types(&replacer.me, &new).is_ok();
        let uses = uses.join().unwrap();
        assert!(!(uses && replaces), "each works with its own type");
        assert!(are_declared(&core, if replaces { &new } else { &old }));
    });
}

/// A sender with the declared type, which comes and leaves while another participant replaces the type.
#[test]
fn type_of_a_waiting_message_is_kept_when_its_sender_leaves() {
    explore("type_of_a_waiting_message_is_kept_when_its_sender_leaves", || {
        let core = link(1, true, 1, 0);
        let (sender, other) = (attach(&core, Primary), attach(&core, Secondary));
        core.declare_types(&other.me, &named("old", "kept")).unwrap();
        let sender = {
            let core = core.clone();
            spawn(move || {
                let uses = core.declare_types(&sender.me, &named("old", "kept")).is_ok();
                if uses {
                    send_inline(&sender, 1).unwrap();
                    sender.give_up_type();
                }
                uses
            })
        };
        let replaces = core.declare_types(&other.me, &named("new", "kept")).is_ok();
        let uses = sender.join().unwrap();
        // The message is of the old type if the type was not replaced before.
        assert!(!(uses && replaces), "the message is taken for one of the new type");
    });
}
