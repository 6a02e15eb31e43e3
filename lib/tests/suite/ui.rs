//! Programs that must not compile: ownership is in the types, so these mistakes are found before a program runs.

use std::thread::JoinHandle;

use shmesh::{Error, Link, LinkOptions, Loan, Message, OwnedLoan, OwnedMessage};

/// The compiler's message for a loan, message or link that is used after its end is part of the library.
///
/// After a change of the compiler: `TRYBUILD=overwrite cargo test -p shmesh --test suite ui -- --ignored`, and read the difference.
#[test]
#[ignore = "long: builds the dependencies once more"]
fn mistakes_do_not_compile() {
    // Nothing that compiles is among them, so that they are checked and never linked.
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}

/// Fails to compile when a type has an auto trait that it must not have: then both implementations fit, and `_` can be
/// either. (The compiler's own error would list every private field on the way, and change with each.)
macro_rules! is_not {
    ($trait:ident: $($type:ty),+) => {
        const _: () = {
            trait Ambiguous<T> {
                fn check() {}
            }
            impl<T> Ambiguous<()> for T {}
            impl<T: $trait> Ambiguous<u8> for T {}
            $(let _: fn() = <$type as Ambiguous<_>>::check;)+
        };
    };
}

// One handle, one thread: another takes its own with `try_clone`.
is_not!(Sync: Link, Loan<'static>, Message<'static>);
// They are used through their handle, which is in one thread.
is_not!(Send: Loan<'static>, Message<'static>, &'static Link);
// A copy could be sent or released twice.
is_not!(Clone: Link, Loan<'static>, Message<'static>, OwnedLoan, OwnedMessage);

// What must compile: a handle moves to a thread, and has several messages and loans at once there.
fn needs_send<T: Send + 'static>() {}
fn needs_sync<T: Sync>() {}
const _: [fn(); 9] = [
    needs_send::<Link>,
    needs_send::<OwnedMessage>,
    needs_sync::<OwnedMessage>,
    needs_send::<OwnedLoan>,
    needs_sync::<OwnedLoan>,
    needs_send::<Error>,
    needs_sync::<Error>,
    needs_send::<LinkOptions>,
    needs_sync::<LinkOptions>,
];
const _: fn(Link) -> JoinHandle<shmesh::Result<bool>> = |link| std::thread::spawn(move || link.wait(None));
const _: fn(&Link) -> shmesh::Result<()> = |link| {
    let (mut first, mut second) = (link.loan()?, link.loan()?);
    let message = link.receive()?;
    first.resize_msg(1)?[0] = second.resize_msg(1)?[0];
    second.send()?;
    first.send()?;
    drop(message);
    Ok(())
};

// `?` takes the error out of a `SendError`, also in functions that return a box of any error.
const _: fn(Loan<'_>) -> Result<(), Box<dyn std::error::Error>> = |loan| Ok(loan.send()?);
const _: fn(Loan<'_>) -> Result<(), Box<dyn std::error::Error + Send + Sync>> = |loan| Ok(loan.send()?);
