use shmesh::Link;

fn twice(link: &Link) -> shmesh::Result<()> {
    let mut loan = link.loan()?;
    let first = loan.msg_mut(1)?;
    let second = loan.msg_mut(1)?;
    first[0] = second[0];
    Ok(())
}

fn main() {
    let _ = twice;
}
