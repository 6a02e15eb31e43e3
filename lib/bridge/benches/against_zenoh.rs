//! The cost of the bridge over Zenoh alone: round trips and throughput of both in one run, over TCP on this machine.
//!
//! `cargo bench --bench against_zenoh`

use std::net::TcpListener;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use shmesh::config::{LinkConfig, PoolId};
use shmesh::{Link, LinkOptions, MAX_SEATS, Side};
use shmesh_bridge::bridge::{Bridge, BridgeConfig, Metrics};
use shmesh_bridge::certificates::CertificateCounts;
use shmesh_bridge::engine::Engine;
use shmesh_bridge::frame::VERSIONS;
use shmesh_bridge::session::BridgeEnd;
use shmesh_bridge::zenoh_engine::{NetworkPlace, ZenohEngine};

const ROUNDS: usize = 2000;
const LARGE: usize = 64 << 10;
const LARGE_COUNT: usize = 4000;

fn engines() -> Result<(ZenohEngine, ZenohEngine)> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let address = vec![format!("tcp/127.0.0.1:{port}")];
    let place = |listen: &[String], connect: &[String]| NetworkPlace {
        listen: listen.to_vec(),
        connect: connect.to_vec(),
        group: "bench".to_owned(),
        ..NetworkPlace::default()
    };
    let home = ZenohEngine::new(place(&address, &[]), CertificateCounts::default());
    let far = ZenohEngine::new(place(&[], &address), CertificateCounts::default());
    Ok((home, far))
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}

/// The median round trip of 64 bytes in microseconds, and the throughput of 64 KiB in MB/s, of Zenoh alone.
fn zenoh() -> Result<(f64, f64)> {
    let (home, far) = engines()?;
    let (to_home, at_home) = mpsc::channel::<usize>();
    let (to_far, at_far) = mpsc::channel::<usize>();
    let home_out = home.open_home(
        "ping",
        Arc::new(move |_, pieces| {
            let _ = to_home.send(pieces.iter().map(|piece| piece.len()).sum());
        }),
    )?;
    let far_out = far.open_far(
        "ping",
        "edge",
        Arc::new(move |_, pieces| {
            let _ = to_far.send(pieces.iter().map(|piece| piece.len()).sum());
        }),
    )?;
    let echo = std::thread::spawn(move || {
        let mut large = 0;
        while let Ok(len) = at_far.recv_timeout(Duration::from_secs(10)) {
            large += usize::from(len == LARGE);
            if len != LARGE || large == LARGE_COUNT {
                let _ = far_out.put("edge", &Arc::new(vec![0; 64]));
            }
            if large == LARGE_COUNT {
                break;
            }
        }
    });
    let (started, small) = (Instant::now(), Arc::new(vec![0; 64]));
    while at_home.recv_timeout(Duration::from_millis(50)).is_err() {
        home_out.put("edge", &small)?;
        (started.elapsed() < Duration::from_secs(20)).then_some(()).context("no connection")?;
    }
    std::thread::sleep(Duration::from_millis(200));
    while at_home.try_recv().is_ok() {}
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        home_out.put("edge", &small)?;
        at_home.recv()?;
        times.push(start.elapsed());
    }
    let start = Instant::now();
    let large = Arc::new(vec![1; LARGE]);
    for _ in 0..LARGE_COUNT {
        home_out.put("edge", &large)?;
    }
    at_home.recv()?;
    let took = start.elapsed();
    echo.join().map_err(|_| anyhow!("the echo panicked"))?;
    Ok((median(times), (LARGE * LARGE_COUNT) as f64 / took.as_secs_f64() / 1e6))
}

fn send(link: &Link, bytes: usize) -> Result<()> {
    loop {
        let sent = if bytes == LARGE {
            link.loan_with(PoolId::CpuData).and_then(|mut loan| {
                loan.resize_data(bytes)?.fill(1);
                loan.send().map_err(Into::into)
            })
        } else {
            link.loan().and_then(|mut loan| {
                loan.resize_msg(bytes)?.fill(1);
                loan.send().map_err(Into::into)
            })
        };
        match sent {
            Ok(()) => return Ok(link.notify()?),
            Err(error) if error.is_retryable() => std::thread::sleep(Duration::from_micros(50)),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The size of the next message.
fn receive(link: &Link) -> Result<usize> {
    let started = Instant::now();
    loop {
        if let Some(message) = link.receive()? {
            return Ok(message.msg_shared().len() + message.data_shared().len());
        }
        link.wait(Some(Duration::from_secs(1)))?;
        (started.elapsed() < Duration::from_secs(20)).then_some(()).context("no message")?;
    }
}

/// The same of two bridges and their links, between programs that call the library.
fn bridged() -> Result<(f64, f64)> {
    let (home_dir, far_dir) = (tempfile::tempdir_in("/dev/shm")?, tempfile::tempdir_in("/dev/shm")?);
    let (home, far) = engines()?;
    let config = |end, dir: &tempfile::TempDir, node: &str| {
        Ok::<_, anyhow::Error>(BridgeConfig {
            end,
            dir: dir.path().to_path_buf(),
            links: vec!["fronthaul".parse()?],
            node: node.to_owned(),
            peers: MAX_SEATS,
            peer_timeout: Duration::from_secs(10),
            cluster: None,
            versions: VERSIONS,
        })
    };
    let phy = LinkOptions::new().dir(home_dir.path()).create(&LinkConfig::new("fronthaul".parse()?))?;
    let bridges = [
        Bridge::start(&config(BridgeEnd::Home, &home_dir, "")?, &home, &Metrics::default())?,
        Bridge::start(&config(BridgeEnd::Far, &far_dir, "edge")?, &far, &Metrics::default())?,
    ];
    let options = LinkOptions::new().dir(far_dir.path()).timeout(Duration::from_secs(20));
    let mac = options.attach("fronthaul", Side::Secondary)?;
    let echo = std::thread::spawn(move || -> Result<()> {
        let mut large = 0;
        while large < LARGE_COUNT {
            let len = receive(&mac)?;
            large += usize::from(len == LARGE);
            if len != LARGE || large == LARGE_COUNT {
                send(&mac, 64)?;
            }
        }
        Ok(())
    });
    send(&phy, 64)?;
    receive(&phy)?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        send(&phy, 64)?;
        receive(&phy)?;
        times.push(start.elapsed());
    }
    let start = Instant::now();
    for _ in 0..LARGE_COUNT {
        send(&phy, LARGE)?;
    }
    receive(&phy)?;
    let took = start.elapsed();
    echo.join().map_err(|_| anyhow!("the echo panicked"))??;
    bridges.into_iter().for_each(Bridge::stop);
    Ok((median(times), (LARGE * LARGE_COUNT) as f64 / took.as_secs_f64() / 1e6))
}

fn main() -> Result<()> {
    println!("medians of {ROUNDS} round trips of 64 bytes; {LARGE_COUNT} messages of 64 KiB one way");
    for _ in 0..3 {
        let ((zenoh_trip, zenoh_rate), (trip, rate)) = (zenoh()?, bridged()?);
        println!(
            "round trip: Zenoh {zenoh_trip:.1} us, bridge {trip:.1} us ({:.2}x); 64 KiB: Zenoh {zenoh_rate:.0} MB/s, bridge {rate:.0} MB/s \
             ({:.2}x)",
            trip / zenoh_trip,
            rate / zenoh_rate
        );
    }
    Ok(())
}
