//! The server over TLS, as an API server asks it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use shmesh_injector::Config;
use shmesh_injector::certificate::{Bundle, CertResolver, CertRotator, MemoryStore, make};
use shmesh_injector::webhook::{Metrics, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

const NAME: &str = "shmesh-injector.shmesh.svc";
const LIFE: Duration = Duration::from_secs(86_400);

struct Server {
    address: SocketAddr,
    served: CertResolver,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Server {
    async fn start() -> Self {
        let served = CertResolver::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        let (tls, config) = (served.server_config().unwrap(), Arc::new(Config::default()));
        let task = tokio::spawn(serve(listener, tls, config, Metrics::default(), stop.clone(), LIFE));
        Self { address, served, stop, task }
    }

    /// Connects as a client that trusts only these authorities.
    async fn connect(&self, authorities: &str) -> std::io::Result<TlsStream<TcpStream>> {
        self.connect_from("127.0.0.1", authorities).await
    }

    async fn connect_from(&self, from: &str, authorities: &str) -> std::io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(authorities.as_bytes()) {
            roots.add(certificate.unwrap()).unwrap();
        }
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = self.open(from).await?;
        TlsConnector::from(Arc::new(config)).connect(ServerName::try_from(NAME).unwrap(), stream).await
    }

    /// A connection without a handshake.
    async fn open(&self, from: &str) -> std::io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(from.parse().unwrap(), 0))?;
        socket.connect(self.address).await
    }
}

fn made() -> Bundle {
    make(&[NAME.to_owned()], LIFE, SystemTime::now(), None).unwrap()
}

fn question(links: &str) -> String {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "operation": "CREATE",
            "namespace": "radio",
            "object": {
                "metadata": {"annotations": {"shmesh.io/links": links}},
                "spec": {"securityContext": {"runAsUser": 1}, "containers": [{"name": "a"}]},
            },
        },
    })
    .to_string()
}

/// Asks on a connection that stays. The status, and the body.
async fn ask(stream: &mut TlsStream<TcpStream>, method: &str, body: &str) -> (u16, String) {
    let head = format!("{method} /inject HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all((head + body).as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    loop {
        let mut part = [0; 4096];
        let read = stream.read(&mut part).await.unwrap();
        answer.extend_from_slice(&part[..read]);
        let text = String::from_utf8_lossy(&answer).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            assert!(read > 0, "closed in the middle: {text}");
            continue;
        };
        let length =
            head.to_lowercase().lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        if body.len() == length.unwrap_or(0) || read == 0 {
            return (head[9..12].parse().unwrap(), body.to_owned());
        }
    }
}

#[tokio::test]
async fn webhook_answers_over_tls() {
    let server = Server::start().await;
    server.connect(&made().authorities).await.expect_err("there is no certificate yet");
    let bundle = made();
    server.served.present(&bundle).unwrap();
    let mut stream = server.connect(&bundle.authorities).await.unwrap();
    let (status, body) = ask(&mut stream, "POST", &question("- name: a")).await;
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &answer["response"]["patchType"]), (200, &json!("JSONPatch")));
    let (status, body) = ask(&mut stream, "POST", &question("- name: a/b")).await;
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &answer["response"]["allowed"]), (200, &json!(false)), "on the same connection");
    assert_eq!(ask(&mut stream, "POST", "{}").await.0, 400);
    assert_eq!(ask(&mut stream, "GET", "").await.0, 405);
    server.connect(&made().authorities).await.expect_err("signed by another authority");
}

#[tokio::test]
async fn oversized_request_is_refused() {
    let server = Server::start().await;
    let bundle = made();
    server.served.present(&bundle).unwrap();
    let mut stream = server.connect(&bundle.authorities).await.unwrap();
    let head = "POST /inject HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
    // One client does not speak TLS, another one sends nothing.
    let mut garbage = TcpStream::connect(server.address).await.unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let _silent = TcpStream::connect(server.address).await.unwrap();
    let mut stream = server.connect(&bundle.authorities).await.unwrap();
    assert_eq!(ask(&mut stream, "POST", &question("- name: a")).await.0, 200);
}

#[tokio::test]
async fn shutdown_completes_pending_requests() {
    let server = Server::start().await;
    let bundle = made();
    server.served.present(&bundle).unwrap();
    let mut idle = server.connect(&bundle.authorities).await.unwrap();
    assert_eq!(ask(&mut idle, "POST", &question("- name: a")).await.0, 200);
    let mut asking = server.connect(&bundle.authorities).await.unwrap();
    let body = question("- name: a");
    let head = format!(
        "POST /inject HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\nExpect: 100-continue\r\n\r\n",
        body.len()
    );
    asking.write_all(head.as_bytes()).await.unwrap();
    let mut go_on = [0; 12];
    asking.read_exact(&mut go_on).await.unwrap();
    assert_eq!(&go_on, b"HTTP/1.1 100", "the question is being read");
    server.stop.cancel();
    assert_eq!(idle.read(&mut [0; 64]).await.unwrap_or(0), 0, "who asks nothing is let go");
    asking.write_all(body.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let _ = asking.read_to_string(&mut answer).await;
    assert!(answer.contains("HTTP/1.1 200"), "{answer}");
    server.task.await.unwrap();
    TcpStream::connect(server.address).await.unwrap_err();
}

#[tokio::test]
async fn certificate_rotation_loses_no_client() {
    let (store, server) = (MemoryStore::default(), Server::start().await);
    let mut rotator = CertRotator::new(store.clone(), server.served.clone(), vec![NAME.to_owned()], LIFE);
    rotator.step(SystemTime::now()).await.unwrap();
    let before = store.published();
    let mut kept = server.connect(&before).await.unwrap();
    // Two thirds of its life later, but the client's clock, which this machine's is, has not moved.
    let due = SystemTime::now() + LIFE * 2 / 3;
    assert!(rotator.step(due).await.unwrap().published);
    let between = store.published();
    server.connect(&before).await.expect("an API server that does not know yet");
    server.connect(&between).await.expect("one that knows");
    assert!(rotator.step(due).await.unwrap().presented);
    server.connect(&before).await.expect_err("by now all know");
    // The new one begins later than now; that it is presented is what counts.
    let error = server.connect(&between).await.expect_err("not valid yet").to_string();
    assert!(error.contains("NotValidYet") || error.contains("not valid yet"), "{error}");
    assert_eq!(ask(&mut kept, "POST", &question("- name: a")).await.0, 200, "connections stay");
}

/// One address opens more connections than there may be: most of them without a handshake, the others silent after it.
#[tokio::test]
async fn half_open_and_silent_connections_shut_out_no_client() {
    let server = Server::start().await;
    let bundle = made();
    server.served.present(&bundle).unwrap();
    let mut kept = server.connect_from("127.0.0.3", &bundle.authorities).await.unwrap();
    assert_eq!(ask(&mut kept, "POST", &question("- name: a")).await.0, 200);
    let mut half_open = Vec::new();
    for _ in 0..300 {
        half_open.push(server.open("127.0.0.1").await.unwrap());
    }
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(server.connect_from("127.0.0.1", &bundle.authorities).await.unwrap());
    }
    for from in ["127.0.0.2", "127.0.0.1"] {
        let begun = std::time::Instant::now();
        let mut stream = server.connect_from(from, &bundle.authorities).await.unwrap();
        assert_eq!(ask(&mut stream, "POST", &question("- name: a")).await.0, 200, "from {from}");
        // Before the silent connections are closed, after 5 s.
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?} from {from}", begun.elapsed());
    }
    assert_eq!(ask(&mut kept, "POST", &question("- name: a")).await.0, 200, "who was here before");
}

/// One address sends requests of almost the maximum size and does not finish them.
#[tokio::test]
async fn large_unfinished_requests_shut_out_no_client() {
    let server = Server::start().await;
    let bundle = made();
    server.served.present(&bundle).unwrap();
    let head = format!("POST /inject HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", 8 << 20);
    let body = vec![b' '; 7 << 20];
    let mut unfinished = Vec::new();
    for _ in 0..6 {
        let mut stream = server.connect(&bundle.authorities).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        // Fails when the server has closed the connection meanwhile.
        let _ = stream.write_all(&body).await;
        unfinished.push(stream);
        let mut stream = server.connect_from("127.0.0.2", &bundle.authorities).await.unwrap();
        assert_eq!(ask(&mut stream, "POST", &question("- name: a")).await.0, 200);
    }
    // Two of them are more than the memory for all.
    let last = unfinished.pop();
    for mut stream in unfinished {
        // On a busy machine the time limit of a request may come first, which is answered.
        let mut answer = Vec::new();
        let closed = tokio::time::timeout(Duration::from_secs(60), stream.read_to_end(&mut answer)).await;
        assert!(closed.is_ok(), "it stays open");
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 4") || answer.starts_with("HTTP/1.1 5"),
            "{answer}"
        );
    }
    drop(last);
}

/// Each value takes tens of bytes when it is read: this request would take some 50 MiB.
#[tokio::test]
async fn request_that_takes_too_much_memory_is_refused() {
    let server = Server::start().await;
    let bundle = made();
    server.served.present(&bundle).unwrap();
    let mut stream = server.connect(&bundle.authorities).await.unwrap();
    let many = format!("{{\"request\":{{\"object\":[{}0]}}}}", "[],".repeat(1 << 18));
    let (status, text) = ask(&mut stream, "POST", &many).await;
    assert_eq!(status, 413, "{text}");
    assert!(text.contains("the limit is 24 MiB"), "{text}");
    // As much text, even with the same characters, is read.
    let long = question(&format!("- name: a # {}", "[],".repeat(1 << 18)));
    assert_eq!(ask(&mut stream, "POST", &long).await.0, 200);
}

/// A finished handshake is worth a few seconds.
#[tokio::test]
async fn silent_connection_is_closed() {
    let server = Server::start().await;
    let bundle = made();
    server.served.present(&bundle).unwrap();
    let mut silent = server.connect(&bundle.authorities).await.unwrap();
    let mut asking = server.connect(&bundle.authorities).await.unwrap();
    assert_eq!(ask(&mut asking, "POST", &question("- name: a")).await.0, 200);
    // A clock that is paused for longer would overtake the sockets.
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(6)).await;
    tokio::time::resume();
    let read = tokio::time::timeout(Duration::from_secs(60), silent.read(&mut [0; 1])).await;
    assert!(matches!(read, Ok(Ok(0) | Err(_))), "closed: {read:?}");
    assert_eq!(ask(&mut asking, "POST", &question("- name: a")).await.0, 200, "who has asked may idle");
}
