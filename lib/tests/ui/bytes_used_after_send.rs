use shmesh::Link;

fn write_after_send(link: &Link) -> shmesh::Result<()> {
    let mut loan = link.loan()?;
    let bytes = loan.resize_msg(1)?;
    loan.send()?;
    bytes[0] = 1;
    Ok(())
}

fn main() {
    let _ = write_after_send;
}
