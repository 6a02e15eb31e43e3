//! Orders about requests and replies.

use std::time::Duration;

use shmesh::{ErrorKind, Link, PendingReply, Request};

use crate::HANGS;

/// Requests that are kept until the process ends, as are their links.
type HeldRequests<'a> = (Vec<PendingReply<'a>>, Vec<Request<'a>>);

/// Executes an order about requests. `None` if it is about something else.
pub(crate) fn obey(link: &Link, order: &str, words: &[&str]) -> Option<shmesh::Result<String>> {
    let number = |i: usize| words[i].parse::<usize>().expect("a number");
    Some(match order {
        "ask" => ask(link, number(0)),
        "answer" => answer(link, number(0)),
        "hold-requests" => hold_requests(link, number(0), number(1)),
        "leave-requests" => leave_requests(link, number(0)),
        _ => return None,
    })
}

/// Makes `count` requests, with two pending at a time, and counts those whose replies are their own.
fn ask(link: &Link, count: usize) -> shmesh::Result<String> {
    let text = |i: usize| format!("{} asks {i}", link.seat());
    let make = |i: usize| -> shmesh::Result<PendingReply<'_>> {
        if i.is_multiple_of(2) {
            return link.request_inline(1, 0, text(i).as_bytes());
        }
        let mut loan = link.loan()?;
        loan.resize_msg(text(i).len())?.copy_from_slice(text(i).as_bytes());
        Ok(link.request(loan)?)
    };
    let mut right = 0;
    let mut take = |i: usize, mut pending: PendingReply<'_>| -> shmesh::Result<()> {
        let reply = pending.wait(Some(HANGS))?;
        right +=
            usize::from(reply.is_some_and(|reply| reply.msg() == text(i).as_bytes()) && pending.is_over());
        Ok(())
    };
    let mut before = None;
    for i in 0..count {
        let pending = make(i)?;
        if let Some((i, pending)) = before.replace((i, pending)) {
            take(i, pending)?;
        }
    }
    if let Some((i, pending)) = before {
        take(i, pending)?;
    }
    Ok(right.to_string())
}

/// Answers `count` requests with their own bytes.
fn answer(link: &Link, count: usize) -> shmesh::Result<String> {
    let mut answered = 0;
    while answered < count {
        if !link.wait_request(Some(HANGS))? {
            break;
        }
        let Some(request) = link.receive_request()? else { continue };
        echo(link, request)?;
        answered += 1;
    }
    Ok(answered.to_string())
}

fn echo<'a>(link: &'a Link, mut request: Request<'a>) -> shmesh::Result<()> {
    let bytes = request.msg().to_vec();
    if request.is_inline() {
        request.reply_inline(request.msg_id(), 0, &bytes)?;
        return Ok(());
    }
    let mut loan = loop {
        match link.loan() {
            Ok(loan) => break loan,
            Err(error) if matches!(error.kind(), ErrorKind::Exhausted { .. }) => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error),
        }
    };
    loan.resize_msg(bytes.len())?.copy_from_slice(&bytes);
    request.reply(loan)?;
    Ok(())
}

/// Takes `count` requests, sends `replies` replies of a stream to each, and keeps them until the process is killed.
fn hold_requests(link: &Link, count: usize, replies: usize) -> shmesh::Result<String> {
    let mut kept: HeldRequests<'_> = (Vec::new(), Vec::new());
    while kept.1.len() < count && link.wait_request(Some(HANGS))? {
        let Some(mut request) = link.receive_request()? else { continue };
        for i in 0..replies {
            let id = i32::try_from(i).expect("few");
            if i.is_multiple_of(2) {
                request.stream_inline(id, 0, b"")?
            } else {
                request.stream(link.loan()?.with_msg_id(id))?
            };
        }
        kept.1.push(request);
    }
    let held = kept.1.len();
    std::mem::forget(kept);
    Ok(held.to_string())
}

/// Makes `count` requests and keeps them pending until the process is killed.
fn leave_requests(link: &Link, count: usize) -> shmesh::Result<String> {
    let mut kept: HeldRequests<'_> = (Vec::new(), Vec::new());
    for i in 0..count {
        let id = i32::try_from(i).expect("few");
        kept.0.push(if i.is_multiple_of(2) {
            link.request_inline(id, 0, b"left")?
        } else {
            link.request(link.loan_with(shmesh::config::PoolId::CpuData)?.with_msg_id(id))?
        });
    }
    std::mem::forget(kept);
    Ok("ok".to_owned())
}
