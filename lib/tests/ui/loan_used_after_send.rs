use shmesh::Link;

fn send_twice(link: &Link) -> shmesh::Result<()> {
    let mut loan = link.loan()?;
    loan.send()?;
    loan.resize_msg(1)?[0] = 1;
    Ok(())
}

fn main() {
    let _ = send_twice;
}
