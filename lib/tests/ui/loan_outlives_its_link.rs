use shmesh::{Link, Loan};

fn keep<'a>(link: Link) -> shmesh::Result<Loan<'a>> {
    link.loan()
}

fn close(link: Link) -> shmesh::Result<()> {
    let loan = link.loan()?;
    drop(link);
    Ok(loan.send()?)
}

fn main() {
    let _ = (keep, close);
}
