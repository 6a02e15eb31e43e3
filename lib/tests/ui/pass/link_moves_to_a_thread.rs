use shmesh::{Error, Link, LinkOptions};

fn needs_send<T: Send + 'static>() {}
fn needs_sync<T: Sync>() {}

fn work(link: Link) -> std::thread::JoinHandle<shmesh::Result<bool>> {
    std::thread::spawn(move || link.wait(None))
}

/// A handle per thread, and several messages and loans at once in one.
fn many_at_once(link: &Link) -> shmesh::Result<()> {
    let (mut first, mut second) = (link.loan()?, link.loan()?);
    let message = link.receive()?;
    first.msg_mut(1)?[0] = second.msg_mut(1)?[0];
    second.send()?;
    first.send()?;
    drop(message);
    Ok(())
}

fn main() {
    needs_send::<Link>();
    needs_send::<Error>();
    needs_sync::<Error>();
    needs_send::<LinkOptions>();
    needs_sync::<LinkOptions>();
    let _ = (work, many_at_once);
}
