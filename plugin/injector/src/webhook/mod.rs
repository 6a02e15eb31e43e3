//! The HTTPS server for `POST /inject`.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | connections: limits and graceful shutdown |
//! | `slots.rs` | limits of connections and of memory for requests, and which connection is evicted |
//! | `metrics.rs` | metrics |
//! | `run.rs` | lifecycle of the webhook |

mod metrics;
mod run;
mod slots;

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Router};
use hyper::body::Body as _;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::review;
use slots::{ConnectionSlot, ConnectionSlots, ConnectionStage, Limit};

pub use metrics::Metrics;
pub use run::{CertSource, Settings, run};

/// Maximum size of a request: the API server accepts objects of 3 MiB, and a request can contain one twice.
const MAX_QUESTION_BYTES: usize = 8 << 20;
/// Read buffer of a connection, and so the maximum size of a request's head.
const READ_BUFFER_BYTES: usize = 16 << 10;
/// A request that takes more memory while it is answered is answered alone.
const LARGE_BYTES: usize = 1 << 20;
/// Timeout of a TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// Timeout of a new connection for the head of its first request.
const FIRST_QUESTION: Duration = Duration::from_secs(5);
/// Timeout for receiving a request.
const QUESTION: Duration = Duration::from_secs(10);
/// Idle limit of a connection that has sent a request, longer than in the API server.
const IDLE: Duration = Duration::from_secs(120);

/// State of the request handler.
#[derive(Clone, Debug)]
struct Injector {
    config: Arc<Config>,
    metrics: Metrics,
    /// The right to answer a large request.
    large: Arc<Semaphore>,
}

/// Serves until `stop`, then completes pending requests for up to `grace`.
pub async fn serve(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    config: Arc<Config>,
    metrics: Metrics,
    stop: CancellationToken,
    grace: Duration,
) {
    let routes = Router::new().route("/inject", post(inject)).with_state(Injector {
        config,
        metrics: metrics.clone(),
        large: Arc::new(Semaphore::new(1)),
    });
    let acceptor = TlsAcceptor::from(tls);
    let slots = ConnectionSlots::default();
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some((slot, limit)) = slots.enter(address.ip()) else {
            metrics.refused_connections();
            continue;
        };
        if let Some(limit) = limit {
            metrics.evicted(limit);
        }
        let (acceptor, routes, metrics, stop) =
            (acceptor.clone(), routes.clone(), metrics.clone(), stop.clone());
        connections.spawn(async move {
            let slot = Arc::new(slot);
            let ended = tokio::select! {
                ended = connection(stream, &acceptor, routes, &slot, &stop) => ended,
                // Counted when the newer connection was accepted.
                () = slot.evicted.cancelled() => return,
            };
            if let Err(error) = ended {
                metrics.failed_connections();
                tracing::debug!(%error, "a connection failed");
            }
        });
    }
    drop(listener);
    connections.close();
    if timeout(grace, connections.wait()).await.is_err() {
        tracing::warn!(connections = connections.len(), "connections did not finish in time");
    }
}

async fn connection(
    stream: TcpStream,
    acceptor: &TlsAcceptor,
    routes: Router,
    slot: &Arc<ConnectionSlot>,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let stream = timeout(HANDSHAKE, acceptor.accept(stream)).await??;
    let routes = routes.layer(Extension(Arc::clone(slot)));
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(READ_BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    let mut served = std::pin::pin!(served);
    let silent = async {
        tokio::time::sleep(FIRST_QUESTION).await;
        if slot.has_sent_request() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        ended = served.as_mut() => return Ok(ended?),
        () = silent => anyhow::bail!("no request was received in time"),
        () = stop.cancelled() => served.as_mut().graceful_shutdown(),
    }
    Ok(served.await?)
}

async fn inject(
    State(injector): State<Injector>,
    Extension(slot): Extension<Arc<ConnectionSlot>>,
    request: Request,
) -> Response {
    slot.set_stage(ConnectionStage::Receiving);
    let response = answer(&injector, &slot, request).await;
    slot.give_body_memory_back();
    slot.set_stage(ConnectionStage::Idle);
    response
}

async fn answer(injector: &Injector, slot: &ConnectionSlot, request: Request) -> Response {
    let length =
        request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    if length.is_some_and(|length: usize| length > MAX_QUESTION_BYTES) {
        injector.metrics.malformed();
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    }
    // A client that announces a body and does not send it must not hold a connection.
    let received = timeout(QUESTION, receive(request.into_body(), slot, &injector.metrics)).await;
    let question = match received.unwrap_or(Err(StatusCode::REQUEST_TIMEOUT)) {
        Ok(question) => question,
        Err(status) => {
            injector.metrics.malformed();
            return status.into_response();
        }
    };
    let needed = review::memory_bytes(&question);
    if needed > review::MAX_MEMORY_BYTES {
        injector.metrics.malformed();
        let text = format!(
            "the request has so many values that reading it takes {} MiB of memory; the limit is {} MiB",
            needed >> 20,
            review::MAX_MEMORY_BYTES >> 20
        );
        return (StatusCode::PAYLOAD_TOO_LARGE, text).into_response();
    }
    // Until then the connection may be evicted.
    let _large = if needed > LARGE_BYTES { injector.large.acquire().await.ok() } else { None };
    slot.set_stage(ConnectionStage::Answering);
    let begun = Instant::now();
    match review::answer(&question, &injector.config) {
        Ok((outcome, answer)) => {
            injector.metrics.answered(outcome, begun.elapsed());
            ([(header::CONTENT_TYPE, "application/json")], answer).into_response()
        }
        Err(why) => {
            injector.metrics.malformed();
            (StatusCode::BAD_REQUEST, why).into_response()
        }
    }
}

/// Receives the body of a request, within the limits of one request and of all.
async fn receive(mut body: Body, slot: &ConnectionSlot, metrics: &Metrics) -> Result<Vec<u8>, StatusCode> {
    let mut received = Vec::new();
    while let Some(frame) = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let Ok(part) = frame.map_err(|_| StatusCode::REQUEST_TIMEOUT)?.into_data() else { continue };
        if received.len() + part.len() > MAX_QUESTION_BYTES {
            return Err(StatusCode::PAYLOAD_TOO_LARGE);
        }
        let evicted = slot.take_body_memory(part.len()).ok_or(StatusCode::SERVICE_UNAVAILABLE)?;
        (0..evicted).for_each(|_| metrics.evicted(Limit::BodyMemory));
        received.extend_from_slice(&part);
    }
    Ok(received)
}
