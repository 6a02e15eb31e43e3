//! How long an admission takes: the answer alone, and over TLS on a connection that stays, as an API server asks.
//!
//! `cargo bench -p shmesh-injector --bench admission`. On a machine that does other things, too, wall time shows those: so the
//! answer is also measured in CPU time, and that fails when its 99th percentile passes 5 ms.

#![allow(clippy::unwrap_used, reason = "a bench may panic")]

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use hdrhistogram::Histogram;
use nix::time::{ClockId, clock_gettime};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use shmesh_injector::certificate::{CertResolver, make};
use shmesh_injector::webhook::{Metrics, serve};
use shmesh_injector::{Config, review};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

const NAME: &str = "injector.shmesh.svc";
const PROMISE: Duration = Duration::from_millis(5);
const ROUNDS: usize = 5000;

fn question(links: usize, padding: usize) -> Vec<u8> {
    let link = |i| {
        format!(
            "- name: link-{i}\n  ring: {{ len: 64 }}\n  pools:\n    cpu_msg: {{ pool_len: 16 }}\n    cpu_data: {{ pool_len: 4 }}\n"
        )
    };
    let text: String = (0..links).map(link).collect();
    let containers: Vec<_> = (0..5)
        .map(|i| json!({"name": format!("c{i}"), "image": "i", "env": [{"name": "A", "value": "b"}], "resources": {"limits": {"memory": "1Gi"}}}))
        .collect();
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "operation": "CREATE", "namespace": "radio",
            "object": {
                "metadata": {"annotations": {"shmesh.io/links": text, "other": "x".repeat(padding)}},
                "spec": {"securityContext": {"runAsUser": 1}, "containers": containers},
            },
        },
    })
    .to_string()
    .into_bytes()
}

fn show(name: &str, times: &Histogram<u64>) {
    let us = |quantile| Duration::from_nanos(times.value_at_quantile(quantile)).as_secs_f64() * 1e6;
    println!("{name:<40} p50 {:>8.1} us   p99 {:>8.1} us   max {:>8.1} us", us(0.5), us(0.99), us(1.0));
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap()
}

/// The processor time that this thread has used.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

async fn over_tls(question: &[u8]) -> Histogram<u64> {
    let bundle = make(&[NAME.to_owned()], Duration::from_secs(86_400), SystemTime::now(), None).unwrap();
    let served = CertResolver::default();
    served.present(&bundle).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let tls = served.server_config().unwrap();
    let (config, stop) = (Arc::new(Config::default()), CancellationToken::new());
    tokio::spawn(serve(listener, tls, config, Metrics::default(), stop, Duration::ZERO));

    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(bundle.authorities.as_bytes()).unwrap()).unwrap();
    let client = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let name = ServerName::try_from(NAME).unwrap();
    let mut stream = TlsConnector::from(Arc::new(client)).connect(name, stream).await.unwrap();

    let head = format!("POST /inject HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: {}\r\n\r\n", question.len());
    let request = [head.as_bytes(), question].concat();
    let mut times = Histogram::<u64>::new(3).unwrap();
    let mut answer = vec![0; 1 << 20];
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        stream.write_all(&request).await.unwrap();
        let mut read = 0;
        loop {
            read += stream.read(&mut answer[read..]).await.unwrap();
            let text = std::str::from_utf8(&answer[..read]).unwrap();
            let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
            if body.len() == length.parse::<usize>().unwrap() {
                assert!(head.starts_with("HTTP/1.1 200"));
                break;
            }
        }
        times.record(nanos(begun.elapsed())).unwrap();
    }
    times
}

fn main() {
    // `cargo test` runs benches to see that they start.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let config = Config::default();
    for (name, question) in [
        ("one link", question(1, 0)),
        ("16 links", question(16, 0)),
        ("64 links, 200 kB of annotations", question(64, 200_000)),
    ] {
        let (mut wall, mut cpu) = (Histogram::<u64>::new(3).unwrap(), Histogram::<u64>::new(3).unwrap());
        for _ in 0..ROUNDS {
            let (begun, spent) = (Instant::now(), cpu_time());
            review::answer(&question, &config).unwrap();
            cpu.record(nanos(cpu_time() - spent)).unwrap();
            wall.record(nanos(begun.elapsed())).unwrap();
        }
        show(&format!("answer, wall: {name}"), &wall);
        show(&format!("answer, CPU:  {name}"), &cpu);
        assert!(cpu.value_at_quantile(0.99) < nanos(PROMISE), "{name}: p99 passes {PROMISE:?}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for (name, question) in [("one link", question(1, 0)), ("16 links", question(16, 0))] {
        show(&format!("over TLS: {name}"), &runtime.block_on(over_tls(&question)));
    }
}
