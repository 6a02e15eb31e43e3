//! Two shapes of request and reply between processes: one link with requests, whose replies are addressed to the seats of its
//! clients, and a link for each client, with rings of its own: `cargo bench -p shmesh --bench replies`.
//!
//! Prints medians of five runs in turns, with the lowest and the highest: a round trip of one client while the others wait, and
//! the rate while all have up to eight requests pending.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a benchmark may panic, and rounds")]

use std::collections::VecDeque;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use shmesh::config::{LinkConfig, RingMode};
use shmesh::{Link, LinkOptions, Side};

/// In the environment of a client: whether it has a link of its own, its number, requests, requests pending, and the directory.
const CLIENT: &str = "SHMESH_BENCH_CLIENT";
const RUNS: usize = 5;
const CLIENTS: [usize; 3] = [1, 4, 16];
const ROUND_TRIPS: usize = 10_000;
const REQUESTS: usize = 80_000;
const WINDOW: usize = 8;
const BYTES: [u8; 48] = [7; 48];
const SPIN_US: u32 = 50;

fn main() {
    if let Ok(arguments) = std::env::var(CLIENT) {
        return client(&arguments);
    }
    println!("clients | round trip, us: one link | a link each | requests/s: one link | a link each");
    for clients in CLIENTS {
        let mut measured = [const { Vec::new() }; 4];
        for _ in 0..RUNS {
            for own_links in [false, true] {
                let shape = usize::from(own_links);
                let time = measure(own_links, clients, &[ROUND_TRIPS], 1);
                measured[shape].push(time.as_secs_f64() * 1e6 / ROUND_TRIPS as f64);
                let time = measure(own_links, clients, &vec![REQUESTS / clients; clients], WINDOW);
                measured[2 + shape].push(REQUESTS as f64 / time.as_secs_f64());
            }
        }
        let columns = measured.map(|mut runs| {
            runs.sort_by(f64::total_cmp);
            format!("{:.1} ({:.1} to {:.1})", runs[RUNS / 2], runs[0], runs[RUNS - 1])
        });
        println!("{clients} | {}", columns.join(" | "));
    }
}

fn name(number: usize) -> String {
    format!("link{number}")
}

fn config(number: usize, own_links: bool) -> LinkConfig {
    let mut config = LinkConfig::new(name(number).parse().unwrap());
    config.spin_us = SPIN_US;
    if own_links {
        config.ring_mode = RingMode::Spsc;
    } else {
        config.request_window = u32::try_from(WINDOW).unwrap();
    }
    config
}

/// The time in which a server answers all requests: the first clients make so many, with up to `window` pending; the others wait.
fn measure(own_links: bool, clients: usize, requests: &[usize], window: usize) -> Duration {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = LinkOptions::new().dir(dir.path());
    let count = if own_links { clients } else { 1 };
    let links: Vec<_> = (0..count).map(|i| options.create(&config(i, own_links)).unwrap()).collect();
    let mut processes: Vec<_> = (0..clients)
        .map(|i| {
            let count = requests.get(i).copied().unwrap_or(0);
            start(dir.path(), own_links, i, count, window)
        })
        .collect();
    let total = requests.iter().sum();
    let time = if own_links { serve_links(&links, total) } else { serve_requests(&links[0], clients, total) };
    for process in &mut processes {
        process.kill().unwrap();
        process.wait().unwrap();
    }
    time
}

fn start(dir: &Path, own_links: bool, number: usize, requests: usize, window: usize) -> Child {
    let arguments = format!("{} {number} {requests} {window} {}", u8::from(own_links), dir.display());
    Command::new(std::env::current_exe().unwrap()).env(CLIENT, arguments).spawn().unwrap()
}

fn serve_requests(link: &Link, clients: usize, total: usize) -> Duration {
    // Each client asks once when it is attached, and gets its reply when all are.
    let mut ready = Vec::new();
    while ready.len() < clients {
        link.wait_request(None).unwrap();
        ready.extend(link.receive_request().unwrap());
    }
    let start = Instant::now();
    for mut request in ready {
        request.reply_inline(1, 0, &BYTES).unwrap();
    }
    let mut answered = 0;
    while answered < total {
        link.wait_request(None).unwrap();
        while let Some(mut request) = link.receive_request().unwrap() {
            request.reply_inline(1, 0, &BYTES).unwrap();
            answered += 1;
        }
    }
    start.elapsed()
}

fn serve_links(links: &[Link], total: usize) -> Duration {
    for link in links {
        link.wait(None).unwrap();
        drop(link.receive().unwrap().unwrap());
    }
    let start = Instant::now();
    for link in links {
        link.send_inline(1, 0, &BYTES).unwrap();
        link.notify().unwrap();
    }
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    if links.len() > 1 {
        for link in links {
            epoll.add(link.fd().unwrap(), EpollEvent::new(EpollFlags::EPOLLIN, 0)).unwrap();
        }
    }
    let mut answered = 0;
    let mut idle_since = Instant::now();
    while answered < total {
        let before = answered;
        for link in links {
            while let Some(request) = link.receive().unwrap() {
                drop(request);
                link.send_inline(1, 0, &BYTES).unwrap();
                link.notify().unwrap();
                answered += 1;
            }
        }
        if let [link] = links {
            if answered < total {
                link.wait(None).unwrap();
            }
        } else if answered > before {
            idle_since = Instant::now();
        } else if idle_since.elapsed() >= Duration::from_micros(SPIN_US.into()) {
            epoll.wait(&mut [EpollEvent::empty(); 16], EpollTimeout::NONE).unwrap();
            for link in links {
                while link.take_signal().unwrap().is_some() {}
            }
            idle_since = Instant::now();
        }
    }
    start.elapsed()
}

fn client(arguments: &str) {
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).unwrap();
    let mut parts = arguments.splitn(5, ' ');
    let [own_links, number, requests, window] =
        std::array::from_fn(|_| parts.next().unwrap().parse::<usize>().unwrap());
    let options = LinkOptions::new().dir(parts.next().unwrap()).timeout(Duration::from_secs(60));
    let link = options.attach(&name(if own_links == 1 { number } else { 0 }), Side::Secondary).unwrap();
    let ask = if own_links == 1 { ask_by_link } else { ask_by_request };
    ask(&link, 1, 1);
    ask(&link, requests, window);
    loop {
        link.wait(None).unwrap();
    }
}

fn ask_by_request(link: &Link, requests: usize, window: usize) {
    let mut pending = VecDeque::new();
    for _ in 0..requests {
        if pending.len() == window {
            take(pending.pop_front().unwrap());
        }
        pending.push_back(link.request_inline(1, 0, &BYTES).unwrap());
    }
    pending.into_iter().for_each(take);
}

fn take(mut pending: shmesh::PendingReply<'_>) {
    assert_eq!(pending.wait(None).unwrap().unwrap().msg(), BYTES);
}

fn ask_by_link(link: &Link, requests: usize, window: usize) {
    let take = || {
        link.wait(None).unwrap();
        assert_eq!(link.receive().unwrap().unwrap().msg(), BYTES);
    };
    for made in 0..requests {
        if made >= window {
            take();
        }
        link.send_inline(1, 0, &BYTES).unwrap();
        link.notify().unwrap();
    }
    (0..requests.min(window)).for_each(|_| take());
}
