//! Typed messages: values and slices in each ring mode and part of a message, and what is refused.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Barrier;

use shmesh::config::PoolId;
use shmesh::inspect::View;
use shmesh::{Error, INLINE_MAX_BYTES, Link, LinkOptions, Side, TypedLink};
use shmesh_testing::{Peer, config, ipc_dir, kind_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MODES: [&str; 3] = ["mode=spsc", "mode=mpmc", "mode=broadcast"];
/// The line of the link's own segment that has the type.
const LINE: u64 = 192;

#[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Slot {
    time: u64,
    frame: u32,
    slot: u16,
    cell: u16,
}

/// As large as `Slot`.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Report([u64; 2]);

/// A value in a module of its own, as another version of a program has it.
mod next {
    #[derive(Debug, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)]
    #[repr(C)]
    pub(super) struct Slot([u64; 3]);
}

macro_rules! aligned {
    ($name:ident: $align:literal) => {
        #[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C, align($align))]
        struct $name([u8; $align]);
    };
}

aligned!(Line: 64);
aligned!(TwoLines: 128);

fn slot(time: u64) -> Slot {
    Slot { time, frame: 7, slot: 3, cell: 1 }
}

struct World {
    options: LinkOptions,
    primary: Link,
    dir: tempfile::TempDir,
}

impl World {
    fn new(changes: &str) -> Self {
        let dir = ipc_dir();
        let options = LinkOptions::new().dir(dir.path());
        let primary = options.create(&config("link", changes)).unwrap();
        Self { options, primary, dir }
    }

    fn primary(&self) -> Link {
        self.primary.try_clone().unwrap()
    }

    fn secondary(&self) -> Link {
        self.options.attach("link", Side::Secondary).unwrap()
    }

    /// The words of the type, from word `first` on.
    fn write(&self, first: u64, words: &[u64]) {
        write(self.dir.path(), first, words);
    }

    fn shown(&self) -> Option<String> {
        View::open(self.dir.path(), &"link".parse().unwrap()).unwrap().payload_type()
    }
}

fn write(dir: &Path, first: u64, words: &[u64]) {
    let file = std::fs::File::options().write(true).open(dir.join("link_shm")).unwrap();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    file.write_all_at(&bytes, LINE + first * 8).unwrap();
}

#[track_caller]
fn says<T>(result: shmesh::Result<T>, kind: &str, parts: &[&str]) {
    let error: Error = result.err().expect("it is refused");
    let text = error.to_string();
    assert_eq!(kind_of(&error), kind, "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing in: {text}");
    }
}

#[test]
fn values_cross_in_each_ring_mode() {
    for mode in MODES {
        let world = World::new(mode);
        let primary = world.primary().typed::<Slot>().unwrap();
        let secondary = world.secondary().typed::<Slot>().unwrap();
        assert!(secondary.receive().unwrap().is_none());
        for time in 0..100 {
            for (from, to) in [(&primary, &secondary), (&secondary, &primary)] {
                from.send(&slot(time)).unwrap();
                let mut loan = from.loan().unwrap().with_msg_id(5);
                *loan.value_mut().unwrap() = slot(time + 1);
                loan.send().unwrap();

                let first = to.receive().unwrap().expect("it was just sent");
                assert!(first.message().is_inline(), "{mode}");
                assert_eq!((first.value(), first.copied()), (&slot(time), slot(time)), "{mode}");
                drop(first);
                let second = to.receive().unwrap().expect("it was just sent");
                assert_eq!((second.message().msg_id(), second.message().is_inline()), (5, false), "{mode}");
                assert_eq!((second.value(), second.copied()), (&slot(time + 1), slot(time + 1)), "{mode}");
                assert_eq!(second.into_message().into_owned().msg(), slot(time + 1).as_bytes(), "{mode}");
            }
        }
    }
}

#[test]
fn slices_are_in_the_part_where_they_fit() {
    for mode in MODES {
        let world = World::new(&format!("{mode} large=100000x4"));
        let primary = world.primary().typed::<[f32]>().unwrap();
        let secondary = world.secondary().typed::<[f32]>().unwrap();
        // Inline, MSG, and the smallest buffers for DATA.
        for (len, inline, pool) in [
            (0, true, None),
            (1, true, None),
            (INLINE_MAX_BYTES / 4, true, None),
            (INLINE_MAX_BYTES / 4 + 1, false, None),
            (64, false, None),
            (65, false, Some(PoolId::CpuData)),
            (1024, false, Some(PoolId::CpuData)),
            (1025, false, Some(PoolId::CpuLarge)),
            (25_000, false, Some(PoolId::CpuLarge)),
        ] {
            let values: Vec<f32> = (0_u16..).map(f32::from).take(len).collect();
            primary.send(&values).unwrap();
            let mut loan = primary.loan_slice(len).unwrap();
            assert_eq!(loan.value_mut().unwrap().len(), len);
            loan.value_mut().unwrap().copy_from_slice(&values);
            loan.send().unwrap();
            for inline in [inline, false] {
                let received = secondary.receive().unwrap().expect("it was just sent");
                let message = received.message();
                assert_eq!((message.is_inline(), message.data_pool()), (inline, pool), "{mode} {len}");
                assert!(received.value() == values && received.to_vec() == values, "{mode} {len}");
            }
        }
        says(primary.loan_slice(25_001), "TypeTooLarge", &["of f32 has 100004 bytes", "100000"]);
        says(primary.send(&[0.0; 25_001]), "TypeTooLarge", &["link link: ", "buf_size_bytes"]);
        says(primary.loan_slice(usize::MAX), "TypeTooLarge", &[]);
        assert!(secondary.receive().unwrap().is_none());
    }
}

#[test]
fn unsent_value_comes_back_with_the_error() {
    let world = World::new("ring=1");
    let secondary = world.secondary().typed::<Slot>().unwrap();
    let primary = world.primary().typed::<Slot>().unwrap();
    primary.send(&slot(1)).unwrap();
    assert_eq!(kind_of(&primary.send(&slot(2)).unwrap_err()), "Full");
    let mut loan = primary.loan().unwrap();
    *loan.value_mut().unwrap() = slot(2);
    let mut failed = loan.send().unwrap_err();
    assert!(failed.error.is_retryable());
    assert_eq!(failed.loan.value_mut().unwrap(), &slot(2));
    assert_eq!(secondary.receive().unwrap().unwrap().value(), &slot(1));
    failed.loan.send().unwrap();
    assert_eq!(secondary.receive().unwrap().unwrap().value(), &slot(2));
}

#[test]
fn values_are_aligned_wherever_they_are() {
    for mode in MODES {
        let world = World::new(mode);
        let primary = world.primary().typed::<Line>().unwrap();
        let secondary = world.secondary().typed::<Line>().unwrap();
        let mut held = Vec::new();
        for byte in 0..8 {
            primary.send(&Line([byte; 64])).unwrap();
            let mut loan = primary.loan().unwrap();
            *loan.value_mut().unwrap() = Line([byte; 64]);
            loan.send().unwrap();
            for _ in 0..2 {
                let received = secondary.receive().unwrap().expect("it was just sent");
                assert_eq!(received.value(), &Line([byte; 64]));
                held.push(received);
            }
        }
    }
    let world = World::new("");
    let refused = world.primary().typed::<TwoLines>();
    says(refused, "TypeAlignment", &["link link: ", "TwoLines is aligned to 128 bytes", "aligned to 64"]);
    assert_eq!(world.shown(), None, "nothing was declared");
}

#[test]
fn type_larger_than_all_buffers_is_refused() {
    let world = World::new("msg=64x4 data=4096x4");
    let primary = world.primary();
    let typed = primary.try_clone().unwrap().typed::<[u8; 4097]>();
    says(typed, "TypeTooLarge", &["link link: ", "[u8; 4097] has 4097 bytes", "4096", "buf_size_bytes"]);
    assert!(primary.typed::<[u8; 4096]>().unwrap().loan().is_ok());
}

#[test]
fn other_type_is_refused_with_both_names() {
    for mode in MODES {
        let world = World::new(mode);
        let primary = world.primary().typed::<Slot>().unwrap();
        let refused = [
            world.secondary().typed::<Report>().err().unwrap(),
            world.secondary().typed::<next::Slot>().err().unwrap(),
            world.secondary().typed::<[Slot]>().err().unwrap(),
            world.secondary().typed_as::<Slot>("Slot/2").err().unwrap(),
        ];
        let user = format!("seat {} (process {})", primary.seat(), std::process::id());
        let asked = [
            "not Report (16 bytes, aligned to 8)",
            "not Slot (24 bytes, aligned to 8)",
            "not [Slot] (16 bytes each, aligned to 8)",
            "not Slot/2 (16 bytes, aligned to 8)",
        ];
        for (error, asked) in refused.into_iter().zip(asked) {
            says(
                Err::<(), _>(error),
                "OtherType",
                &["link link: it carries Slot (16 bytes, aligned to 8)", asked, &user],
            );
        }
        // A refused handle is detached, and the link works.
        let secondary = world.secondary().typed::<Slot>().unwrap();
        primary.send(&slot(1)).unwrap();
        assert_eq!(secondary.receive().unwrap().unwrap().value(), &slot(1));
        assert_eq!(world.shown().as_deref(), Some("Slot (16 bytes, aligned to 8)"));
    }
}

#[test]
fn names_that_cannot_be_declared_are_refused() {
    let world = World::new("");
    let primary = world.primary();
    for name in ["", "two\nlines", "Größe", &"x".repeat(49)] {
        says(
            primary.try_clone().unwrap().typed_as::<u32>(name),
            "TypeName",
            &["link link: ", "48", "typed_as"],
        );
    }
    let longest = "x".repeat(48);
    primary.typed_as::<u32>(&longest).unwrap();
    assert_eq!(world.shown(), Some(format!("{longest} (4 bytes, aligned to 4)")));
}

#[test]
fn message_of_another_length_is_refused_and_freed() {
    for mode in MODES {
        let world = World::new(&format!("{mode} msg=256x2 data=4096x2"));
        let untyped = world.primary();
        let secondary = world.secondary();
        let values = |typed: TypedLink<Slot>| {
            for round in 0..10 {
                untyped.send_inline(1, 0, &[0; 15]).unwrap();
                let refused = typed.receive();
                says(refused, "NotOfType", &["a message of 15 bytes", "Slot (16 bytes, aligned to 8)"]);
                let mut loan = untyped.loan().unwrap();
                loan.resize_msg(17).unwrap();
                loan.send().unwrap();
                says(typed.receive(), "NotOfType", &["a message of 17 bytes"]);
                // The value is in the DATA part, if there is one.
                let mut loan = untyped.loan_with(PoolId::CpuData).unwrap();
                loan.resize_msg(16).unwrap();
                loan.resize_data(32).unwrap();
                loan.send().unwrap();
                says(typed.receive(), "NotOfType", &["a message of 32 bytes"]);
                let mut loan = untyped.loan_with(PoolId::CpuData).unwrap();
                loan.resize_msg(3).unwrap();
                loan.resize_data(16).unwrap().copy_from_slice(slot(round).as_bytes());
                loan.send().unwrap();
                assert_eq!(typed.receive().unwrap().unwrap().value(), &slot(round));
            }
        };
        values(secondary.typed::<Slot>().unwrap());

        let slices = world.options.attach("link", Side::Secondary).unwrap();
        world.write(0, &[0]);
        let slices = slices.typed::<[u32]>().unwrap();
        untyped.send_inline(1, 0, &[0; 6]).unwrap();
        says(slices.receive(), "NotOfType", &["a message of 6 bytes", "[u32] (4 bytes each, aligned to 4)"]);
    }
}

#[test]
fn any_words_in_the_header_are_survived() {
    let world = World::new("");
    // Otherwise the type is replaced, as no participant uses it.
    world.secondary().send_inline(1, 0, b"").unwrap();
    for pattern in [u64::MAX, 0x0a0a_0a0a_0a0a_0a0a, 0x1b5b_324a_1b5b_324a, 1 << 63] {
        world.write(0, &[pattern; 8]);
        let shown = world.shown().expect("a fingerprint is there");
        assert!(shown.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()), "{shown:?}");
        says(
            world.secondary().typed::<Slot>(),
            "OtherType",
            &["it carries a type without a name (fingerprint 0x", "not Slot (16 bytes"],
        );
    }
    // A name without a fingerprint is none.
    world.write(0, &[0]);
    assert_eq!(world.shown(), None);
    let typed = world.secondary().typed::<Slot>().unwrap();
    assert_eq!(world.shown().as_deref(), Some("Slot (16 bytes, aligned to 8)"));
    // A name that is torn later is repaired by the next participant with the type.
    world.write(2, &[u64::MAX]);
    assert!(world.shown().unwrap().contains("without a name"));
    drop(world.secondary().typed::<Slot>().unwrap());
    assert_eq!(world.shown().as_deref(), Some("Slot (16 bytes, aligned to 8)"));
    drop(typed);
}

#[test]
fn of_different_types_at_once_one_is_declared() {
    for _ in 0..20 {
        let world = World::new("");
        let barrier = Barrier::new(4);
        let names: [Option<String>; 4] = std::thread::scope(|scope| {
            let threads = [0, 1, 2, 3].map(|i| {
                let (link, barrier) = (world.secondary(), &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    let name = ["first", "second"][i % 2];
                    match link.typed_as::<u64>(name) {
                        Ok(typed) => {
                            // While another participant takes its share of the inline cells, none may be found.
                            while let Err(error) = typed.send(&7) {
                                says(Err::<(), _>(error), "InlineExhausted", &[]);
                                std::thread::yield_now();
                            }
                            Some(name.to_owned())
                        }
                        Err(error) => {
                            // The other's name comes after its fingerprint, and is not waited for without end.
                            let carried = format!("carries {} ", ["second", "first"][i % 2]);
                            let text = error.to_string();
                            assert!(
                                text.contains(&carried) || text.contains("carries a type without a name"),
                                "{text}"
                            );
                            says(Err::<(), _>(error), "OtherType", &[&format!("not {name} ")]);
                            None
                        }
                    }
                })
            });
            threads.map(|thread| thread.join().unwrap())
        });
        let winners: Vec<String> = names.into_iter().flatten().collect();
        assert!(winners.len() == 2 && winners[0] == winners[1], "{winners:?}");
        assert!(world.shown().unwrap().starts_with(&winners[0]));
    }
}

#[test]
fn type_belongs_to_the_link_and_not_to_a_process() {
    let World { options, primary, dir } = World::new("");
    let create = |fresh| options.clone().fresh(fresh).create(&config("link", "")).unwrap();
    let mut peer = Peer::start(dir.path());
    peer.tell("attach link secondary 0");
    peer.tell("typed numbers");
    let refused = primary.try_clone().unwrap().typed::<Slot>();
    says(refused, "OtherType", &["it carries [numbers] (8 bytes each, aligned to 8)", "not Slot"]);
    let answer = peer.ask("typed others");
    assert!(answer.starts_with("err OtherType") && answer.contains("[numbers]"), "{answer}");
    // Another run of the primary finds the link as it was.
    drop(primary);
    says(create(false).typed::<Slot>(), "OtherType", &["[numbers]"]);
    let primary = create(false).typed_as::<[u64]>("numbers").unwrap();
    assert_eq!(primary.receive().unwrap().expect("it waits").value(), [1, 2, 3]);
    drop(primary);
    peer.tell("typed numbers");
    // One that starts empty has no type.
    peer.kill();
    let fresh = create(true);
    assert!(!fresh.was_created());
    drop(fresh.typed::<Slot>().unwrap());
}

#[test]
fn type_is_replaced_when_its_participants_have_left_and_nothing_waits() {
    for mode in MODES {
        let world = World::new(mode);
        let wrong = world.secondary().typed::<Report>().unwrap();
        wrong.send(&Report([1, 2])).unwrap();
        says(world.primary().typed::<Slot>(), "OtherType", &[&format!("seat {} ", wrong.seat())]);
        drop(wrong);
        says(
            world.primary().typed::<Slot>(),
            "OtherType",
            &["carries Report", "messages of that type are queued", "`fresh`", "shmesh rm link"],
        );
        drop(world.primary.receive().unwrap().expect("what the wrong one sent"));
        let primary = world.primary().typed::<Slot>().unwrap();
        let secondary = world.secondary().typed::<Slot>().unwrap();
        primary.send(&slot(1)).unwrap();
        assert_eq!(secondary.receive().unwrap().unwrap().value(), &slot(1));
        says(world.secondary().typed::<Report>(), "OtherType", &["carries Slot", "not Report"]);
    }
}

#[test]
fn history_of_a_broadcast_ring_keeps_its_type() {
    let world = World::new("mode=broadcast history=1");
    world.primary().typed::<Slot>().unwrap().send(&slot(1)).unwrap();
    says(
        world.secondary().typed::<Report>(),
        "OtherType",
        &["carries Slot", "messages of that type are queued"],
    );
    assert_eq!(world.secondary().typed::<Slot>().unwrap().receive().unwrap().unwrap().value(), &slot(1));
}

#[test]
fn message_that_only_a_killed_reader_did_not_receive_keeps_no_type() {
    let dir = ipc_dir();
    // Without a monitor, nothing recovers the reader before.
    let options = LinkOptions::new().dir(dir.path()).monitor(false);
    let writer = options.create(&config("link", "mode=broadcast")).unwrap();
    let mut peer = Peer::start(dir.path());
    peer.tell("attach link secondary 0");
    writer.try_clone().unwrap().typed::<Slot>().unwrap().send(&slot(1)).unwrap();
    peer.kill();
    writer.typed::<Report>().unwrap();
}

#[test]
fn type_of_a_killed_process_is_replaced() {
    let world = World::new("");
    let mut peer = Peer::start(world.dir.path());
    peer.tell("attach link secondary 0");
    peer.tell("hold-typed wrong");
    let process = format!("(process {})", peer.pid());
    says(world.primary().typed::<Slot>(), "OtherType", &["carries [wrong]", &process]);
    peer.kill();
    drop(world.primary().typed::<Slot>().unwrap());
    // Its seat is taken by a participant without a type.
    let _untyped = world.secondary();
    world.primary().typed::<Report>().unwrap();
}

#[test]
fn owned_values_are_aligned_wherever_they_are() {
    for mode in [&MODES[..], &["mode=broadcast slow=skip ring=16"]].concat() {
        let world = World::new(mode);
        let primary = world.primary().typed::<[Line]>().unwrap();
        let secondary = world.secondary().typed::<[Line]>().unwrap();
        let mut kept = Vec::new();
        // More than a reader of a ring with `skip` can hold in buffers; in MSG and in DATA.
        for byte in 0..10 {
            primary.send(&[Line([byte; 64]); 8]).unwrap();
            kept.push(secondary.receive().unwrap().expect("it was just sent").into_owned());
        }
        drop(secondary);
        for (value, byte) in kept.iter().zip(0..) {
            assert_eq!(
                (value.value(), value.to_vec()),
                (&[Line([byte; 64]); 8][..], vec![Line([byte; 64]); 8])
            );
        }
    }
}
