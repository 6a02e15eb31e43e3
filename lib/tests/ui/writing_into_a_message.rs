use shmesh::Link;

fn write(link: &Link) -> shmesh::Result<()> {
    let message = link.receive()?.expect("a message");
    message.msg()[0] = 1;
    message.data()[0] = 1;
    Ok(())
}

fn main() {
    let _ = write;
}
