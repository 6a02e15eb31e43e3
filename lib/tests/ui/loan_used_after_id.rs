use shmesh::Link;

fn send_the_old_one(link: &Link) -> shmesh::Result<()> {
    let loan = link.loan()?;
    let named = loan.with_msg_id(1);
    named.send()?;
    Ok(loan.send()?)
}

fn main() {
    let _ = send_the_old_one;
}
