//! Keeps one resource registered with the kubelet by executing the actions of the state machine.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use shmesh_daemon::log_limit::LogLimit;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::client;
use super::server::{Server, file_id, instance_part};
use super::service::{AllocationTimes, DevicePluginService, ResourceOffer};
use super::state_machine::{Action, Event, Mode, POLL_INTERVAL, StateMachine};
use crate::REPEATED_LOG;
use crate::events::Events;
use crate::handover::{HandoverRole, Ownership};
use crate::metrics::Metrics;
use crate::resource::allocate::AllocateSettings;

/// Indexes into the field `logs`.
const LISTEN_LOG: usize = 0;
const REGISTER_LOG: usize = 1;
const FAILURE_LOG: usize = 2;

/// Time limit of the last request to the kubelet.
const RETIRE_TIMEOUT: Duration = Duration::from_secs(3);

/// State shared by the registrars of all resources.
#[derive(Clone, Debug)]
pub(crate) struct NodeContext {
    pub(crate) mode: Mode,
    /// Directory of the plugin's sockets, as seen from here.
    pub(crate) sockets: PathBuf,
    /// The same directory, relative to the directory of device plugins.
    pub(crate) endpoints: PathBuf,
    /// Milliseconds since 1970, to make socket names of successive starts distinct.
    pub(crate) start: u64,
    pub(crate) ownership: Ownership,
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
    endpoint: String,
    retired: CancellationToken,
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
        // Differs between nodes and resources.
        let seed =
            name.bytes().fold(node.start, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
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
            endpoint: String::new(),
            retired: CancellationToken::new(),
            event_sender,
            events,
            attempts: JoinSet::new(),
            logs: [REPEATED_LOG; 3],
        }
    }

    /// Runs until `stop`, or until another instance of the plugin serves the resource. Then removes the socket.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let _service = self.node.ownership.service();
        let mut role = self.node.ownership.role();
        let mut polls = interval(POLL_INTERVAL);
        polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let now = self.began.elapsed();
            let wake = self.machine.wake(now).map(|wake| self.began + wake);
            let event = tokio::select! {
                biased;
                () = stop.cancelled() => {
                    // The end may come before the new role is noticed.
                    if matches!(*role.borrow(), HandoverRole::Released | HandoverRole::Retired) {
                        self.retire().await;
                    }
                    break;
                }
                Ok(()) = role.changed() => {
                    let now = *role.borrow_and_update();
                    match now {
                        HandoverRole::Successor => continue,
                        HandoverRole::Owner => Event::Owned,
                        HandoverRole::Released => Event::Released,
                        HandoverRole::Retired => {
                            self.retire().await;
                            break;
                        }
                    }
                }
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

    /// Makes kubelets up to 1.36 forget this instance, so that they do not disconnect the next one at the end of our streams:
    /// a registration that fails removes the client of the resource, and leaves its devices and their endpoint.
    async fn retire(&mut self) {
        self.retired.cancel();
        let call = client::register(self.node.kubelet.clone(), self.endpoint(), self.name.clone());
        let outcome = timeout(RETIRE_TIMEOUT, call).await;
        debug!(
            resource = self.name,
            ?outcome,
            "registered in vain, so that the kubelet forgets this instance"
        );
    }

    /// Returns the name of the socket for the kubelet.
    fn endpoint(&self) -> String {
        self.node.endpoints.join(&self.endpoint).display().to_string()
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
            Mode::Register => format!("{resource}{}{}.sock", instance_part(self.node.start), self.servers),
            // The path is the `:authority` of the kubelet's request; `@` makes it valid for an HTTP/2 server.
            Mode::Discovered => format!("{resource}{}@reg.sock", instance_part(self.node.start)),
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
            retired: self.retired.clone(),
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
        let call = client::register(self.node.kubelet.clone(), self.endpoint(), self.name.clone());
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
