use shmesh::Link;

fn twice(link: &Link) -> shmesh::Result<()> {
    let mut loan = link.loan()?;
    let first = loan.resize_msg(1)?;
    let second = loan.resize_msg(1)?;
    first[0] = second[0];
    Ok(())
}

fn main() {
    let _ = twice;
}
