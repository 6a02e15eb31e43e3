use shmesh::Link;

fn close(link: Link) -> shmesh::Result<usize> {
    let message = link.receive()?.expect("a message");
    drop(link);
    Ok(message.msg().len())
}

fn main() {
    let _ = close;
}
