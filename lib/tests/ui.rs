//! What must not compile: ownership is in the types, so these mistakes are found before a program runs.

use shmesh::{Link, Loan, Message};

/// What the compiler says when a loan, a message or a link is used after its end is part of the library.
///
/// After a change of the compiler: `TRYBUILD=overwrite cargo test -p shmesh --test ui`, and read the difference.
#[test]
fn mistakes_do_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/ui/*.rs");
    cases.pass("tests/ui/pass/*.rs");
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
// Who could copy one could send or release it twice.
is_not!(Clone: Link, Loan<'static>, Message<'static>);
