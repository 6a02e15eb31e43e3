//! Keeps one resource registered with the kubelet by executing the actions of the state machine.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use shmesh_daemon::log_limit::LogLimit;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::client;
use super::server::{Server, file_id};
use super::service::{AllocationTimes, DevicePluginService, ResourceOffer};
use super::state_machine::{Action, Event, Mode, POLL_INTERVAL, StateMachine};
use crate::REPEATED_LOG;
use crate::events::Events;
use crate::metrics::Metrics;
use crate::resource::allocate::AllocateSettings;

/// Indexes into the field `logs`.
const LISTEN_LOG: usize = 0;
const REGISTER_LOG: usize = 1;
const FAILURE_LOG: usize = 2;

/// State shared by the registrars of all resources.
#[derive(Clone, Debug)]
pub(crate) struct NodeContext {
    pub(crate) mode: Mode,
    /// Directory of the plugin's sockets, as seen from here.
    pub(crate) sockets: PathBuf,
    /// The kubelet's socket, as seen from here.
    pub(crate) kubelet: PathBuf,
    pub(crate) form: Arc<AllocateSettings>,
    pub(crate) allocation_times: Arc<AllocationTimes>,
    pub(crate) metrics: Metrics,
    pub(crate) events: Events,
}

/// Keeps one resource registered with the kubelet.
#[derive(Debug)]
pub(crate) struct Registrar {
    node: NodeContext,
    name: String,
    offer: watch::Receiver<ResourceOffer>,
    /// Set while the kubelet has our device list.
    served: watch::Sender<bool>,
    machine: StateMachine,
    began: Instant,
    server: Option<Server>,
    servers: u64,
    /// Milliseconds since 1970, to make socket names of successive starts distinct.
    start: u64,
    endpoint: String,
    event_sender: mpsc::UnboundedSender<(u64, Event)>,
    events: mpsc::UnboundedReceiver<(u64, Event)>,
    attempts: JoinSet<(u64, Result<()>)>,
    /// Rate limits for repeated successes and failures.
    logs: [LogLimit; 3],
}

impl Registrar {
    pub(crate) fn new(
        node: NodeContext,
        offer: watch::Receiver<ResourceOffer>,
        served: watch::Sender<bool>,
    ) -> Self {
        let name = offer.borrow().now.name.clone();
        let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let start = start.as_secs() * 1000 + u64::from(start.subsec_millis());
        // Differs between nodes and resources.
        let seed = name.bytes().fold(start, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        let (event_sender, events) = mpsc::unbounded_channel();
        Self {
            machine: StateMachine::new(node.mode, seed),
            node,
            name,
            offer,
            served,
            began: Instant::now(),
            server: None,
            servers: 0,
            start,
            endpoint: String::new(),
            event_sender,
            events,
            attempts: JoinSet::new(),
            logs: [REPEATED_LOG; 3],
        }
    }

    /// Runs until `stop`, then removes the socket.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut polls = interval(POLL_INTERVAL);
        polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let now = self.began.elapsed();
            let wake = self.machine.wake(now).map(|wake| self.began + wake);
            let event = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some((server, event)) = self.events.recv() => {
                    if server != self.servers {
                        continue;
                    }
                    event
                }
                Some(ended) = self.attempts.join_next() => match ended {
                    Ok((number, outcome)) => self.registration_ended(number, outcome),
                    Err(_) => continue,
                },
                _ = polls.tick() => self.poll(),
                () = sleep_until(wake.unwrap_or(self.began)), if wake.is_some() => self.poll(),
            };
            self.handle(event);
            self.served.send_if_modified(|served| {
                let is_served = self.machine.is_served();
                std::mem::replace(served, is_served) != is_served
            });
        }
        if let Some(server) = self.server.take() {
            server.end().await;
        }
    }

    fn poll(&self) -> Event {
        let ours = self.server.as_ref().is_some_and(Server::is_there);
        Event::Polled { kubelet: file_id(&self.node.kubelet), ours }
    }

    fn handle(&mut self, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            debug!(resource = self.name, ?event, "event");
            match self.machine.step(self.began.elapsed(), event) {
                None => {}
                Some(Action::Listen) => next = Some(self.listen()),
                Some(Action::Register(number)) => self.register(number),
            }
        }
    }

    fn listen(&mut self) -> Event {
        // The old server's streams must end before another socket exists.
        self.server = None;
        self.servers += 1;
        let resource = self.name.replace('/', "_");
        self.endpoint = match self.node.mode {
            Mode::Register => format!("{resource}.{:x}.{}.sock", self.start, self.servers),
            // The path is the `:authority` of the kubelet's request; `@` makes it valid for an HTTP/2 server.
            Mode::Discovered => format!("{resource}@reg.sock"),
        };
        let service = DevicePluginService {
            offer: self.offer.clone(),
            form: Arc::clone(&self.node.form),
            allocation_times: Arc::clone(&self.node.allocation_times),
            metrics: self.node.metrics.clone(),
            log: Arc::new(Mutex::new(REPEATED_LOG)),
            events: self.event_sender.clone(),
            server: self.servers,
            stop: CancellationToken::new(),
        };
        let path = self.node.sockets.join(&self.endpoint);
        match Server::start(&path, self.node.mode, service) {
            Ok(server) => {
                if let Some(suppressed) = self.logs[LISTEN_LOG].allow(Instant::now().into_std()) {
                    info!(resource = self.name, socket = %path.display(), suppressed, "listening");
                }
                self.server = Some(server);
                Event::Listening
            }
            Err(error) => {
                if let Some(suppressed) = self.logs[FAILURE_LOG].allow(Instant::now().into_std()) {
                    warn!(resource = self.name, socket = %path.display(), %error, suppressed, "cannot listen");
                }
                Event::NotListening
            }
        }
    }

    fn register(&mut self, number: u64) {
        let call = client::register(self.node.kubelet.clone(), self.endpoint.clone(), self.name.clone());
        self.attempts.abort_all();
        self.attempts.spawn(async move { (number, call.await) });
    }

    fn registration_ended(&mut self, number: u64, outcome: Result<()>) -> Event {
        self.node.metrics.registered(&self.name, outcome.is_ok());
        match outcome {
            Ok(()) => {
                if let Some(suppressed) = self.logs[REGISTER_LOG].allow(Instant::now().into_std()) {
                    info!(resource = self.name, suppressed, "registered");
                }
                Event::Registered(number)
            }
            Err(error) => {
                if let Some(suppressed) = self.logs[FAILURE_LOG].allow(Instant::now().into_std()) {
                    let error = format!("{error:#}");
                    warn!(resource = self.name, error, suppressed, "registration failed; retrying");
                }
                Event::NotRegistered(number)
            }
        }
    }
}
