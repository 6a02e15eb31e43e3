//! HTTP endpoints for probes, metrics and the log filter.

use std::sync::Arc;

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use prometheus_client::encoding::prometheus_protobuf::encode_to_vec;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::limited::LimitedListener;
use crate::readiness::Readiness;
use crate::telemetry::LogFilter;

/// State served by [`serve`].
#[derive(Clone, Debug)]
pub struct Admin {
    /// Readiness shown by `/readyz`.
    pub readiness: Readiness,
    /// Metrics shown by `/metrics`.
    pub metrics: Arc<Registry>,
    /// Filter changed by `PUT /log-level`; `None` makes it fixed.
    pub log: Option<LogFilter>,
}

/// Serves these endpoints until `stop`:
///
/// | path | response |
/// |---|---|
/// | `GET /livez` | 200 while the event loop runs |
/// | `GET /startupz` | 200 when every latch has opened or failed once, else 503 with the others |
/// | `GET /readyz` | 200 when ready, else 503 with the missing parts and the reasons |
/// | `GET /metrics` | OpenMetrics text; to a client that prefers it, Prometheus's protobuf, which has native histograms |
/// | `PUT /log-level` | sets the filter in the body; 400 with the reason if it is invalid |
///
/// At most 32 connections, each for up to ten seconds, so that slow clients cannot block probes.
///
/// # Errors
/// The listener fails.
pub async fn serve(listener: TcpListener, admin: Admin, stop: CancellationToken) -> Result<()> {
    let routes = Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/startupz", get(started))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route("/log-level", put(set_log))
        .with_state(admin);
    axum::serve(LimitedListener::new(listener), routes)
        .with_graceful_shutdown(async move { stop.cancelled().await })
        .await
        .context("the admin server failed")
}

async fn ready(State(admin): State<Admin>) -> Response {
    waits_for(&admin.readiness.missing())
}

async fn started(State(admin): State<Admin>) -> Response {
    waits_for(&admin.readiness.starting())
}

fn waits_for(missing: &[String]) -> Response {
    if missing.is_empty() {
        return "ok\n".into_response();
    }
    let lines: String = missing.iter().map(|one| format!("waits for: {one}\n")).collect();
    (StatusCode::SERVICE_UNAVAILABLE, lines).into_response()
}

/// The only form of metrics that has native histograms.
const PROTOBUF: &str =
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited";

/// Whether a client accepts protobuf, and no other form more.
fn prefers_protobuf(accept: &str) -> bool {
    let has =
        |entry: &str, wanted: &str| entry.split(';').any(|part| part.trim().eq_ignore_ascii_case(wanted));
    let is_protobuf = |entry: &&str| {
        has(entry, "application/vnd.google.protobuf")
            && has(entry, "proto=io.prometheus.client.MetricFamily")
            && has(entry, "encoding=delimited")
    };
    let quality = |entry: &str| {
        let given = entry.split(';').find_map(|part| part.trim().strip_prefix("q=")?.parse::<f32>().ok());
        given.unwrap_or(1.0)
    };
    let best = accept.split(',').map(quality).fold(0.0, f32::max);
    accept.split(',').find(is_protobuf).is_some_and(|entry| best > 0.0 && quality(entry) >= best)
}

async fn metrics(State(admin): State<Admin>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    if prefers_protobuf(accept) {
        return match encode_to_vec(&admin.metrics) {
            Ok(bytes) => ([(header::CONTENT_TYPE, PROTOBUF)], bytes).into_response(),
            Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        };
    }
    let mut text = String::new();
    match encode(&mut text, &admin.metrics) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn set_log(State(admin): State<Admin>, filter: String) -> Response {
    match admin.log.map(|log| log.set(filter.trim())) {
        Some(Ok(())) => "ok\n".into_response(),
        Some(Err(error)) => (StatusCode::BAD_REQUEST, format!("{error:#}\n")).into_response(),
        None => (StatusCode::NOT_FOUND, "the log filter of this daemon cannot be changed\n").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn ask(address: std::net::SocketAddr, request: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[test]
    fn protobuf_only_for_clients_that_prefer_it() {
        let proto =
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
        let text = "application/openmetrics-text;version=1.0.0;q=0.5";
        assert!(prefers_protobuf(&format!("{proto};q=0.6,{text},*/*;q=0.1")) && prefers_protobuf(PROTOBUF));
        assert!(
            !prefers_protobuf(&format!("{text},{proto};q=0.4")) && !prefers_protobuf(&format!("{proto};q=0"))
        );
        assert!(!prefers_protobuf(&format!("{proto};q=0.1,{text}")));
        assert!(
            !prefers_protobuf("application/vnd.google.protobuf")
                && !prefers_protobuf("")
                && !prefers_protobuf("*/*")
        );
    }

    #[tokio::test]
    async fn probes_and_metrics() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let readiness = Readiness::default();
        let links = readiness.latch("links");
        let mut metrics = Registry::default();
        let counter = prometheus_client::metrics::counter::Counter::<u64>::default();
        metrics.register("shmesh_reaped", "Participants reaped", counter.clone());
        counter.inc_by(3);
        let stop = CancellationToken::new();
        let admin = Admin { readiness, metrics: Arc::new(metrics), log: None };
        let served = tokio::spawn(serve(listener, admin, stop.clone()));

        let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        assert!(ask(address, &get("/livez")).await.starts_with("HTTP/1.1 200"));
        let not_yet = ask(address, &get("/readyz")).await;
        assert!(not_yet.starts_with("HTTP/1.1 503") && not_yet.contains("waits for: links"), "{not_yet}");
        assert!(ask(address, &get("/startupz")).await.starts_with("HTTP/1.1 503"));
        links.fail("a file is missing");
        let failed = ask(address, &get("/readyz")).await;
        assert!(
            failed.starts_with("HTTP/1.1 503") && failed.contains("links (a file is missing)"),
            "{failed}"
        );
        assert!(ask(address, &get("/startupz")).await.starts_with("HTTP/1.1 200"));
        links.open();
        assert!(ask(address, &get("/readyz")).await.starts_with("HTTP/1.1 200"));
        assert!(ask(address, &get("/metrics")).await.contains("shmesh_reaped_total 3"));
        let put = "PUT /log-level HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 5\r\n\r\ndebug";
        assert!(ask(address, put).await.starts_with("HTTP/1.1 404"));

        stop.cancel();
        served.await.unwrap().unwrap();
    }
}
