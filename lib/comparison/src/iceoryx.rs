//! iceoryx2, publish-subscribe and events: the peer that is closest to us.
//!
//! Set up as its users would for a stream that loses nothing: no overflow, retry until delivered, one publisher and
//! one subscriber per direction. Its subscriber attaches to a publisher in its first receive, and until then a "reliable"
//! send goes nowhere, so both ends update their connections before the first message.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, anyhow};
use iceoryx2::node::{Node, NodeBuilder};
use iceoryx2::port::listener::Listener;
use iceoryx2::port::notifier::Notifier;
use iceoryx2::port::publisher::Publisher;
use iceoryx2::port::subscriber::Subscriber;
use iceoryx2::port::update_connections::UpdateConnections;
use iceoryx2::prelude::{
    BackpressureStrategy, Config, FileName, LogLevel, SemanticString, SignalHandlingMode, ipc, set_log_level,
};

use crate::harness::{self, Meet, Shared};
use crate::leftovers::Names;
use crate::measure::{Ctx, Dist, Rx, Tx};
use crate::payload::{BULK, SMALL, fill, read};
use crate::report::{Case, Kind};

/// An end attaches to what it finds, and may find the other end half made the first time.
const ATTACH_ROUNDS: u32 = 2;

pub(crate) const CASES: &[Case] = &[
    Case::peer("iceoryx2-rtt", Kind::RoundTrip, 64, rtt::<SMALL>).note("0.10, buffer 16, polled"),
    Case::peer("iceoryx2-oneway", Kind::OneWay, 64, |ctx| oneway::<SMALL>(ctx, 1024, 1024))
        .note("0.10, buffer 1024, retry until delivered"),
    Case::peer("iceoryx2-op", Kind::Op, 64, alone)
        .note("0.10, one thread: loan, write, send, receive, read, drop")
        .one_process(),
    Case::peer("iceoryx2-rtt-64k", Kind::RoundTrip, 65536, rtt::<BULK>)
        .note("0.10, filled and read on both sides"),
    Case::peer("iceoryx2-oneway-64k", Kind::Bulk, 65536, |ctx| oneway::<BULK>(ctx, 16, 16))
        .note("0.10, buffer 16, filled and read"),
    Case::peer("iceoryx2-event-rtt", Kind::RoundTrip, 8, events)
        .note("0.10, both sides sleep in blocking_wait"),
];

fn config(names: &Names) -> Result<Config> {
    let mut config = Config::default();
    let root = format!("/tmp/{}", names.prefix());
    config
        .global
        .set_root_path(&iceoryx2::prelude::Path::new(root.as_bytes()).map_err(|e| anyhow!("{e:?}"))?);
    config.global.prefix =
        FileName::new(format!("{}_", names.prefix()).as_bytes()).map_err(|e| anyhow!("{e:?}"))?;
    Ok(config)
}

/// A node that lives as long as the worker, whose ports need it; its files are swept with the names.
fn node(names: &Names) -> Result<&'static Node<ipc::Service>> {
    set_log_level(LogLevel::Error);
    let builder =
        NodeBuilder::new().signal_handling_mode(SignalHandlingMode::Disabled).config(&config(names)?);
    Ok(Box::leak(Box::new(builder.create().map_err(|e| anyhow!("creating a node: {e:?}"))?)))
}

type Service<const W: usize> =
    iceoryx2::service::port_factory::publish_subscribe::PortFactory<ipc::Service, [u64; W], ()>;

fn service<const W: usize>(node: &Node<ipc::Service>, name: &str, depth: usize) -> Result<Service<W>> {
    let name = name.try_into().map_err(|e| anyhow!("{e:?}"))?;
    node.service_builder(&name)
        .publish_subscribe::<[u64; W]>()
        .enable_safe_overflow(false)
        .subscriber_max_buffer_size(depth)
        .subscriber_max_borrowed_samples(2)
        .history_size(0)
        .max_publishers(1)
        .max_subscribers(1)
        .max_nodes(4)
        .open_or_create()
        .map_err(|e| anyhow!("opening a service: {e:?}"))
}

struct Publish<const W: usize>(Publisher<ipc::Service, [u64; W], ()>);

impl<const W: usize> Publish<W> {
    fn new(service: &Service<W>) -> Result<Self> {
        let builder =
            service.publisher_builder().backpressure_strategy(BackpressureStrategy::RetryUntilDelivered);
        Ok(Self(builder.create().map_err(|e| anyhow!("creating a publisher: {e:?}"))?))
    }
}

impl<const W: usize> Tx for Publish<W> {
    #[inline(always)]
    fn send(&mut self, word: u64) {
        let mut sample = self.0.loan_uninit().expect("loaning a sample");
        let payload = sample.payload_mut().as_mut_ptr();
        // SAFETY: the loan is ours alone until it is sent.
        unsafe { fill(payload.cast(), W, word) };
        // SAFETY: all W words have just been written.
        let sample = unsafe { sample.assume_init() };
        let receivers = sample.send().expect("sending a sample");
        assert!(receivers == 1, "a sample reached {receivers} subscribers");
    }
}

struct Subscribe<const W: usize>(Subscriber<ipc::Service, [u64; W], ()>);

impl<const W: usize> Subscribe<W> {
    fn new(service: &Service<W>) -> Result<Self> {
        let builder = service.subscriber_builder();
        Ok(Self(builder.create().map_err(|e| anyhow!("creating a subscriber: {e:?}"))?))
    }

    fn attach(&self) {
        self.0.has_samples().expect("attaching the subscriber");
    }
}

impl<const W: usize> Rx for Subscribe<W> {
    #[inline(always)]
    fn recv(&mut self) -> u64 {
        loop {
            if let Some(sample) = self.0.receive().expect("receiving a sample") {
                // SAFETY: the sample is initialised and stays unchanged until it is dropped.
                return unsafe { read(sample.payload().as_ptr(), W) };
            }
        }
    }
}

fn update<const W: usize>(publish: &Publish<W>) {
    publish.0.update_connections().expect("attaching the publisher");
}

/// The two ends of a round trip. `first` creates both services, so that the ends do not race for them.
fn ends<const W: usize>(
    names: &Names,
    meet: &Meet<'_>,
    (to, from): (&str, &str),
    first: bool,
) -> Result<(Publish<W>, Subscribe<W>)> {
    let node = node(names)?;
    if !first {
        meet.wait();
    }
    let (to, from) = (service(node, to, 16)?, service(node, from, 16)?);
    if first {
        meet.wait();
    }
    let (tx, rx) = (Publish::new(&to)?, Subscribe::new(&from)?);
    for _ in 0..ATTACH_ROUNDS {
        meet.wait();
        rx.attach();
        update(&tx);
    }
    Ok((tx, rx))
}

fn rtt<const W: usize>(ctx: &Ctx) -> Result<Dist> {
    let names = Names::new();
    harness::round_trips(
        ctx,
        |meet| ends::<W>(&names, meet, ("there", "back"), true),
        |meet| ends::<W>(&names, meet, ("back", "there"), false),
    )
}

fn oneway<const W: usize>(ctx: &Ctx, depth: usize, batch: u64) -> Result<Dist> {
    let names = Names::new();
    harness::stream(
        ctx,
        batch,
        |meet| {
            let tx = Publish::new(&service::<W>(node(&names)?, "there", depth)?)?;
            meet.wait();
            for _ in 0..ATTACH_ROUNDS {
                meet.wait();
                update(&tx);
            }
            Ok(tx)
        },
        |meet| {
            let node = node(&names)?;
            meet.wait();
            let rx = Subscribe::new(&service::<W>(node, "there", depth)?)?;
            for _ in 0..ATTACH_ROUNDS {
                meet.wait();
                rx.attach();
            }
            Ok(rx)
        },
    )
}

fn alone(ctx: &Ctx) -> Result<Dist> {
    let names = Names::new();
    harness::solo(ctx, || {
        let node = node(&names).expect("setting up");
        let service = service::<SMALL>(node, "self", 16).expect("setting up");
        let mut tx = Publish::new(&service).expect("setting up");
        let mut rx = Subscribe::new(&service).expect("setting up");
        rx.attach();
        update(&tx);
        ctx.alone(&mut tx, &mut rx)
    })
}

/// An event carries only an id, so the message lies beside it.
struct Notify<'a>(Notifier<ipc::Service>, &'a AtomicU64);

impl Tx for Notify<'_> {
    fn send(&mut self, word: u64) {
        self.1.store(word, Ordering::Release);
        let woken = self.0.notify().expect("notifying");
        assert!(woken == 1, "an event reached {woken} listeners");
    }
}

struct Listen<'a>(Listener<ipc::Service>, &'a AtomicU64);

impl Rx for Listen<'_> {
    fn recv(&mut self) -> u64 {
        while self.0.blocking_wait(|_| ()).expect("waiting for an event") == 0 {}
        self.1.load(Ordering::Acquire)
    }
}

fn events(ctx: &Ctx) -> Result<Dist> {
    let names = Names::new();
    let shared = Shared::new(4096)?;
    // SAFETY: zeroed, aligned, and mapped for as long as `shared` lives.
    let words = unsafe { (&*shared.at::<AtomicU64>(0, 1), &*shared.at::<AtomicU64>(128, 1)) };
    let ends = |meet: &Meet<'_>, to: &str, from: &str, first: bool| -> Result<(Notifier<_>, Listener<_>)> {
        let node = node(&names)?;
        let open = |name: &str| {
            let name = name.try_into().map_err(|e| anyhow!("{e:?}"))?;
            let builder = node.service_builder(&name).event().max_notifiers(1).max_listeners(1).max_nodes(4);
            builder
                .disable_notifier_created_event()
                .disable_notifier_dropped_event()
                .open_or_create()
                .context("an event service")
        };
        if !first {
            meet.wait();
        }
        let (to, from) = (open(to)?, open(from)?);
        if first {
            meet.wait();
        }
        let listener = from.listener_builder().create().context("a listener")?;
        meet.wait();
        let notifier = to.notifier_builder().create().context("a notifier")?;
        Ok((notifier, listener))
    };
    harness::round_trips(
        ctx,
        |meet| {
            let (notifier, listener) = ends(meet, "there", "back", true)?;
            Ok((Notify(notifier, words.0), Listen(listener, words.1)))
        },
        |meet| {
            let (notifier, listener) = ends(meet, "back", "there", false)?;
            Ok((Notify(notifier, words.1), Listen(listener, words.0)))
        },
    )
}
