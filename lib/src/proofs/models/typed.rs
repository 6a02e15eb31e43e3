//! The type of the payload: it is not replaced while a participant uses it, or a message of that type waits.

use super::super::stage::{attach, leave, link, send_inline};
use super::{explore, spawn};
use crate::link::core::Core;
use crate::participant::Side::{Primary, Secondary};
use crate::segment::payload_type::{DeclaredType, PayloadType};

fn named(name: &str) -> PayloadType {
    PayloadType::new(name, 8, 8, false).unwrap()
}

fn is_declared(core: &Core, payload: &PayloadType) -> bool {
    core.payload_type().declared() == Some(DeclaredType::Known(*payload))
}

#[test]
fn user_or_replacer_of_a_type_sees_the_other() {
    explore("user_or_replacer_of_a_type_sees_the_other", Some(2), || {
        let core = link(1, true, 1, 0);
        let (old, new) = (named("old"), named("new"));
        let first = attach(&core, Primary);
        core.declare_type(&first.me, &old).unwrap();
        leave(&first);
        let (user, replacer) = (attach(&core, Primary), attach(&core, Secondary));
        let uses = {
            let core = core.clone();
            spawn(move || core.declare_type(&user.me, &named("old")).is_ok())
        };
        let replaces = core.declare_type(&replacer.me, &new).is_ok();
        let uses = uses.join().unwrap();
        assert!(!(uses && replaces), "each works with its own type");
        assert!(is_declared(&core, if replaces { &new } else { &old }));
    });
}

/// A sender with the declared type, which comes and leaves while another participant replaces the type.
#[test]
fn type_of_a_waiting_message_is_kept_when_its_sender_leaves() {
    explore("type_of_a_waiting_message_is_kept_when_its_sender_leaves", Some(2), || {
        let core = link(1, true, 1, 0);
        let (sender, other) = (attach(&core, Primary), attach(&core, Secondary));
        core.declare_type(&other.me, &named("old")).unwrap();
        let sender = {
            let core = core.clone();
            spawn(move || {
                let uses = core.declare_type(&sender.me, &named("old")).is_ok();
                if uses {
                    send_inline(&sender, 1).unwrap();
                    sender.give_up_type();
                }
                uses
            })
        };
        let replaces = core.declare_type(&other.me, &named("new")).is_ok();
        let uses = sender.join().unwrap();
        // The message is of the old type if the type was not replaced before.
        assert!(!(uses && replaces), "the message is taken for one of the new type");
    });
}
