//! Typed requests: values and slices in each part of a message, what is refused, and when types are replaced.

use std::os::unix::fs::FileExt;

use shmesh::config::PoolId;
use shmesh::inspect::View;
use shmesh::{AsyncLink, Error, ErrorKind, INLINE_MAX_BYTES, Link, LinkOptions, Side};
use shmesh_testing::{HANGS, Peer, config, ipc_dir, kind_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The lines of the link's own segment that have the types of what the primary and the secondary side send.
const LINES: [u64; 2] = [192, 4416];

#[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Query {
    cell: u32,
    count: u32,
}

const QUERY: Query = Query { cell: 3, count: 7 };

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

    fn shown(&self) -> Option<String> {
        View::open(self.dir.path(), &"link".parse().unwrap()).unwrap().payload_type()
    }

    fn write(&self, line: u64, words: &[u64]) {
        let file = std::fs::File::options().write(true).open(self.dir.path().join("link_shm")).unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        file.write_all_at(&bytes, line).unwrap();
    }
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

/// Lengths of slices of `u32` that are inline in a request, inline in a reply, in MSG, and in DATA.
const LENGTHS: [usize; 7] = [0, 1, 26, 28, 29, 64, 1_000];

fn values(len: usize) -> Vec<u32> {
    (0..).map(|i: u32| i * 7 + 1).take(len).collect()
}

#[test]
fn requests_and_replies_are_in_the_part_where_they_fit() {
    let world = World::new("requests=2 large=16384x32");
    let server = world.primary().typed_requests::<[u32], [u64]>().unwrap();
    let client = world.secondary().typed_requests::<[u32], [u64]>().unwrap();
    assert!(server.receive_request().unwrap().is_none());
    for len in LENGTHS {
        let sent = values(len);
        let answer: Vec<u64> = sent.iter().map(|&value| u64::from(value) << 32).collect();
        for (is_owned, in_place) in [(false, false), (false, true), (true, false), (true, true)] {
            let pending = if in_place {
                let mut loan = client.loan_slice(len).unwrap();
                loan.value_mut().unwrap().copy_from_slice(&sent);
                client.request_loan(loan).unwrap()
            } else {
                client.request(&sent).unwrap()
            };
            let mut request = server.receive_request().unwrap().expect("it was just made");
            assert_eq!((request.value(), request.to_vec()), (&sent[..], sent.clone()), "{len}");
            assert_eq!(request.request().is_inline(), !in_place && len <= 26, "{len}");
            assert_eq!(request.request().client(), client.seat());
            let mut replies = if is_owned {
                let mut request = request.into_owned();
                assert_eq!((request.value(), request.to_vec()), (&sent[..], sent.clone()), "{len}");
                for _ in 0..3 {
                    assert!(request.stream(&answer).unwrap());
                }
                assert!(request.wait_room(Some(HANGS)).unwrap());
                assert!(request.reply(&answer).unwrap());
                says(request.reply(&answer), "RequestOver", &["link link: "]);
                let replies = pending.into_owned();
                replies.map(|reply| reply.unwrap().to_vec()).collect::<Vec<_>>()
            } else {
                for _ in 0..2 {
                    assert!(request.stream(&answer).unwrap());
                }
                let mut loan = request.loan_slice(len).unwrap();
                loan.value_mut().unwrap().copy_from_slice(&answer);
                assert!(request.stream_loan(loan).unwrap());
                assert!(request.wait_room(Some(HANGS)).unwrap());
                let mut loan = request.loan_slice(len).unwrap();
                loan.value_mut().unwrap().copy_from_slice(&answer);
                assert!(request.reply_loan(loan).unwrap());
                pending.map(|reply| reply.unwrap().value().to_vec()).collect()
            };
            assert_eq!(replies.pop().as_ref(), Some(&answer), "{len}");
            assert_eq!(replies, [&answer[..], &answer, &answer], "{len}");
        }
    }
    says(client.request(&values(4_097)), "TypeTooLarge", &["of u32 has 16388 bytes", "16384"]);
    let _pending = client.request(&[]).unwrap();
    let mut request = server.receive_request().unwrap().unwrap().into_owned();
    says(request.reply(&[0; 2_049]), "TypeTooLarge", &["of u64 has 16392 bytes", "16384"]);
    drop(request);
    // All buffers are free.
    for pool in [PoolId::CpuData, PoolId::CpuLarge] {
        let (_, all) = world.primary.pool(pool).unwrap();
        let loans: Vec<_> = std::iter::from_fn(|| world.primary.loan_with(pool).ok()).collect();
        assert_eq!(loans.len(), all as usize, "{pool:?}");
    }
}

#[test]
fn iterator_of_replies_goes_on_after_a_reply_that_is_not_a_value() {
    let world = World::new("requests=1");
    let server = world.primary();
    let client = world.secondary().typed_requests::<Query, u64>().unwrap();
    let pending = client.request(&QUERY).unwrap();
    let mut request = server.receive_request().unwrap().unwrap();
    request.stream_inline(0, 0, b"odd").unwrap();
    request.reply_inline(0, 0, &7_u64.to_ne_bytes()).unwrap();
    let results: Vec<Result<u64, String>> =
        pending.map(|reply| reply.map(|reply| *reply.value()).map_err(|error| kind_of(&error))).collect();
    assert_eq!(results, [Err("NotOfType".to_owned()), Ok(7)]);
}

#[test]
fn iterator_of_replies_ends_after_the_last_reply_or_an_error() {
    let world = World::new("requests=2");
    let server = world.primary().typed_requests::<Query, u64>().unwrap();
    let client = world.secondary().typed_requests::<Query, u64>().unwrap();
    for is_owned in [false, true] {
        let pending = client.request(&QUERY).unwrap();
        let mut request = server.receive_request().unwrap().unwrap();
        assert_eq!((request.value(), request.copied()), (&QUERY, QUERY));
        request.stream(&1).unwrap();
        let mut loan = request.loan().unwrap();
        *loan.value_mut().unwrap() = 2;
        request.stream_loan(loan).unwrap();
        drop(request);
        let results: Vec<Result<u64, String>> = if is_owned {
            let typed = |reply: shmesh::Result<shmesh::OwnedTypedMessage<u64>>| {
                reply.map(|reply| reply.copied()).map_err(|error| kind_of(&error))
            };
            pending.into_owned().map(typed).collect()
        } else {
            pending.map(|reply| reply.map(|reply| *reply.value()).map_err(|error| kind_of(&error))).collect()
        };
        assert_eq!(results, [Ok(1), Ok(2), Err("Unanswered".to_owned())]);
    }
}

#[test]
fn other_types_are_refused_with_all_names() {
    let world = World::new("requests=2");
    let server = world.primary().typed_requests_as::<Query, [f32]>("Query/1", "Samples/1").unwrap();
    let declared = "[Samples/1] (4 bytes each, aligned to 4) from the primary side and Query/1 (8 bytes, aligned to 4) from the \
                    secondary side";
    assert_eq!(world.shown().as_deref(), Some(declared));
    let user = format!("seat {} (process {})", server.seat(), std::process::id());
    let refused = [
        (
            world.secondary().typed_requests_as::<Query, [f32]>("Query/2", "Samples/1").err(),
            "not [Samples/1] (4 bytes each, aligned to 4) from the primary side and Query/2 (8 bytes, aligned to 4) from the \
             secondary side",
        ),
        (
            world.secondary().typed_requests_as::<Query, f32>("Query/1", "Samples/1").err(),
            "not Samples/1 (4 bytes, aligned to 4) from the primary side and Query/1 (8 bytes, aligned to 4) from",
        ),
        (
            // The types of the two directions, exchanged.
            world.secondary().typed_requests_as::<[f32], Query>("Samples/1", "Query/1").err(),
            "not Query/1 (8 bytes, aligned to 4) from the primary side and [Samples/1]",
        ),
        (
            world.secondary().typed_as::<Query>("Query/1").map(drop).err(),
            "not Query/1 (8 bytes, aligned to 4); ",
        ),
    ];
    for (error, asked) in refused {
        let carried = format!("link link: it carries {declared}, ");
        says(Err::<(), _>(error.expect("it is refused")), "OtherType", &[&carried, asked, &user]);
    }
    // A refused handle is detached, and the link works.
    let client = world.secondary().typed_requests_as::<Query, [f32]>("Query/1", "Samples/1").unwrap();
    let mut pending = client.request(&QUERY).unwrap();
    server.receive_request().unwrap().unwrap().reply(&[1.0, 2.0]).unwrap();
    assert_eq!(pending.try_take().unwrap().unwrap().value(), &[1.0, 2.0]);
}

#[test]
fn one_type_for_both_sides_is_that_of_typed_messages() {
    let world = World::new("requests=2");
    let messages = world.primary().typed::<Query>().unwrap();
    let requests = world.secondary().typed_requests::<Query, Query>().unwrap();
    assert_eq!(world.shown().as_deref(), Some("Query (8 bytes, aligned to 4)"));
    messages.send(&QUERY).unwrap();
    assert_eq!(requests.receive().unwrap().unwrap().msg(), QUERY.as_bytes());
}

#[test]
fn link_without_requests_has_no_typed_ones() {
    for mode in ["mode=spsc", "mode=mpmc", "mode=broadcast"] {
        let world = World::new(mode);
        says(world.primary().typed_requests::<Query, u64>(), "NoRequests", &["link link: "]);
        assert_eq!(world.shown(), None, "nothing was declared");
    }
}

#[test]
fn types_are_replaced_when_no_participant_uses_them_and_nothing_waits() {
    let world = World::new("requests=2");
    let replaces = || world.primary().typed_requests::<Query, u64>().map(drop);
    let waits = [
        "carries u16 (2 bytes, aligned to 2) from the primary side and u8",
        "messages of that type are queued",
    ];
    let client = world.secondary().typed_requests::<u8, u16>().unwrap();
    says(replaces(), "OtherType", &["carries u16", &format!("seat {} ", client.seat())]);
    // A request waits, and then its reply.
    let mut pending = client.request(&1).unwrap().into_owned();
    drop(client.into_link());
    says(replaces(), "OtherType", &waits);
    let server = world.primary().typed_requests::<u8, u16>().unwrap();
    server.receive_request().unwrap().unwrap().reply(&2).unwrap();
    drop(server);
    says(replaces(), "OtherType", &waits);
    assert_eq!(pending.try_take().unwrap().unwrap().value(), &2);
    replaces().unwrap();
    assert!(world.shown().unwrap().starts_with("u64 "));
    // One of the two types.
    drop(world.primary().typed_requests::<Query, u32>().unwrap());
    drop(world.primary().typed_requests::<u8, u32>().unwrap());
    drop(world.primary().typed::<u32>().unwrap());
}

#[test]
fn types_of_a_killed_process_are_replaced() {
    let world = World::new("requests=2");
    let mut peer = Peer::start(world.dir.path());
    peer.tell("attach link secondary 0");
    peer.tell("hold-typed wrong");
    let process = format!("(process {})", peer.pid());
    says(world.primary().typed_requests::<Query, u64>(), "OtherType", &["carries [wrong]", &process]);
    peer.kill();
    drop(world.primary().typed_requests::<Query, u64>().unwrap());
}

#[test]
fn value_of_another_length_is_refused_and_freed() {
    let world = World::new("requests=2 msg=256x4 data=4096x2");
    let untyped = (world.primary(), world.secondary());
    let server = world.primary().typed_requests::<Query, u64>().unwrap();
    let client = world.secondary().typed_requests::<Query, u64>().unwrap();
    for len in [0, 7, 9, 100] {
        // More often than there are buffers.
        for _ in 0..6 {
            let mut inline = untyped.1.request_inline(1, 0, &vec![0; len]).unwrap();
            let mut loan = untyped.1.loan_with(PoolId::CpuData).unwrap();
            loan.resize_data(len).unwrap();
            let mut pooled = untyped.1.request(loan).unwrap();
            for pending in [&mut inline, &mut pooled] {
                let text = format!("a message of {len} bytes");
                says(server.receive_request(), "NotOfType", &[&text, "Query (8 bytes, aligned to 4)"]);
                says(pending.try_take(), "Unanswered", &[]);
            }
            drop((inline, pooled));

            let mut pending = client.request(&QUERY).unwrap();
            let mut request = untyped.0.receive_request().unwrap().unwrap();
            let mut loan = untyped.0.loan().unwrap();
            loan.resize_msg(len).unwrap();
            request.stream(loan).unwrap();
            request.stream_inline(1, 0, &vec![0; len]).unwrap();
            request.reply_inline(1, 0, 5_u64.as_bytes()).unwrap();
            for _ in 0..2 {
                says(pending.try_take(), "NotOfType", &["u64 (8 bytes, aligned to 8)"]);
            }
            assert_eq!(pending.try_take().unwrap().unwrap().copied(), 5);
        }
    }
}

#[test]
fn any_words_in_both_lines_are_survived() {
    let world = World::new("requests=2");
    // Otherwise the types are replaced, as no participant uses them.
    world.secondary().send_inline(1, 0, b"").unwrap();
    for pattern in [u64::MAX, 0x1b5b_324a_1b5b_324a] {
        for lines in [&LINES[..1], &LINES[1..], &LINES] {
            for line in LINES {
                world.write(line, &[if lines.contains(&line) { pattern } else { 0 }; 8]);
            }
            let shown = world.shown().expect("a fingerprint is there");
            assert!(shown.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()), "{shown:?}");
            says(
                world.secondary().typed_requests::<Query, u64>(),
                "OtherType",
                &["a type without a name (fingerprint 0x", "not u64 (8 bytes, aligned to 8) from"],
            );
        }
    }
    // A participant died between its two declarations, or while it replaced both types: no participant uses them.
    for line in LINES {
        LINES.iter().for_each(|&line| world.write(line, &[0; 8]));
        drop(world.secondary().typed_requests::<Query, u64>().unwrap());
        world.write(line, &[0]);
        assert!(world.shown().unwrap().contains("no type yet"));
        drop(world.secondary().typed_requests::<Query, u64>().unwrap());
    }
}

#[test]
fn tasks_request_and_reply_values_of_any_size() {
    let world = World::new("requests=2 msg=256x4 data=4096x4");
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let server = AsyncLink::new(world.primary()).unwrap();
        let mut server = server.typed_requests::<Query, [u32]>().unwrap();
        let client = AsyncLink::new(world.secondary()).unwrap();
        let mut client = client.typed_requests::<Query, [u32]>().unwrap();
        let refused = AsyncLink::new(world.secondary()).unwrap().typed_requests::<Query, u32>();
        says(refused, "OtherType", &["carries [u32]", "not u32"]);
        // More and larger replies than there is room for.
        let serving = tokio::spawn(async move {
            let mut request = server.receive_request().await.unwrap();
            assert_eq!((request.value(), request.copied()), (&QUERY, QUERY));
            for _ in 0..20 {
                for len in LENGTHS {
                    assert!(request.stream(&values(len)).await.unwrap());
                }
            }
            assert!(request.reply(&[]).await.unwrap());
            let request = server.receive_request().await.unwrap();
            assert_eq!(request.request().client(), request.request().client());
            server
        });
        let mut pending = client.request(&QUERY).await.unwrap();
        for _ in 0..20 {
            for len in LENGTHS {
                assert_eq!(pending.recv().await.unwrap().to_vec(), values(len));
            }
        }
        assert!(!pending.is_over());
        assert!(pending.recv().await.unwrap().value().is_empty());
        assert!(pending.is_over());
        let mut dropped = client.request(&QUERY).await.unwrap();
        let server = serving.await.unwrap();
        let error = dropped.recv().await.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Unanswered { .. }), "{error}");
        drop((client.into_link(), server.into_link()));
        assert!(world.primary().typed::<u8>().is_ok(), "neither uses its types any more");
    });
}

#[test]
fn largest_inline_values_need_no_buffer() {
    let world = World::new("requests=1 msg=256x1");
    let server = world.primary().typed_requests::<[u8; 104], [u8; INLINE_MAX_BYTES]>().unwrap();
    let client = world.secondary().typed_requests::<[u8; 104], [u8; INLINE_MAX_BYTES]>().unwrap();
    let _taken = world.primary.loan().unwrap();
    let mut pending = client.request(&[7; 104]).unwrap();
    server.receive_request().unwrap().unwrap().reply(&[8; INLINE_MAX_BYTES]).unwrap();
    assert_eq!(pending.try_take().unwrap().unwrap().value(), &[8; INLINE_MAX_BYTES]);
}

#[test]
fn request_type_that_no_request_can_carry_is_refused_at_once() {
    let world = World::new("requests=1 msg=64x4 data=64x4");
    let declared = world.primary().typed_requests::<[u8; 105], u32>();
    says(declared, "TypeTooLarge", &["105", "104"]);
    world.primary().typed_requests::<[u8; 104], [u8; INLINE_MAX_BYTES]>().unwrap();
}
