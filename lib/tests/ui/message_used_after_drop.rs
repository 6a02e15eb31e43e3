use shmesh::Link;

fn read_after_release(link: &Link) -> shmesh::Result<u8> {
    let message = link.receive()?.expect("a message");
    let bytes = message.msg();
    drop(message);
    Ok(bytes[0])
}

fn main() {
    let _ = read_after_release;
}
