//! A vendor's library, loaded at its first use. A missing function is an error with its name, never a panic.

use std::io;
use std::mem::ManuallyDrop;
use std::path::Path;

/// A loaded library. It stays loaded for the life of the process, because vendors' libraries start threads and do not
/// support unloading.
#[derive(Debug)]
pub(super) struct Library {
    /// The name under which it was found.
    name: String,
    library: ManuallyDrop<libloading::Library>,
}

impl Library {
    /// Loads the first of `candidates` that exists, or only the path in `variable` if that is set.
    pub(super) fn open(what: &str, variable: &str, candidates: &[String]) -> io::Result<Self> {
        let configured = std::env::var(variable).ok().filter(|path| !path.is_empty());
        let candidates = configured.as_ref().map_or(candidates, std::slice::from_ref);
        let mut refused = Vec::new();
        for name in candidates {
            match load(name) {
                Ok(library) => return Ok(Self { name: name.clone(), library: ManuallyDrop::new(library) }),
                Err(error) => refused.push(linker_message(&error)),
            }
        }
        let text = format!(
            "{what} was not found: {}; install its driver, mount it into the container, or name the library with {variable}",
            refused.join("; ")
        );
        Err(io::Error::new(io::ErrorKind::NotFound, text))
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The function of this name, if the library has it.
    ///
    /// # Safety
    /// `F` is a function pointer of that function's C signature.
    #[expect(unsafe_code, reason = "a library's symbols have no types")]
    pub(super) unsafe fn function<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller's promise; the library is never unloaded, so the pointer stays valid.
        unsafe { self.library.get::<F>(name) }.ok().map(|symbol| *symbol)
    }
}

#[expect(unsafe_code, reason = "loading a library runs its constructors")]
fn load(name: &str) -> Result<libloading::Library, libloading::Error> {
    // SAFETY: this is the vendor's library, by the name that every program of that vendor uses, or by the path that the
    // operator has named instead; its constructors are meant to run in any process.
    unsafe { libloading::Library::new(Path::new(name)) }
}

/// The linker's error message: the file and the problem.
fn linker_message(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Defines a table of a library's functions. Calling a missing one is an error with its name and the version that
/// introduced it.
macro_rules! functions {
    ($(#[$meta:meta])* $vis:vis struct $table:ident { $($name:ident($($argument:ty),*) since $since:literal;)* }) => {
        $(#[$meta])*
        #[allow(non_snake_case, reason = "the names are the vendor's")]
        #[derive(Debug)]
        $vis struct $table {
            library: $crate::device::library::Library,
            $($name: Option<unsafe extern "C" fn($($argument),*) -> std::ffi::c_int>,)*
        }

        #[allow(non_snake_case, unsafe_code, reason = "the names are the vendor's; symbols have no types")]
        #[allow(dead_code, reason = "one for each function")]
        impl $table {
            $vis fn of(library: $crate::device::library::Library) -> Self {
                Self {
                    // SAFETY: these are the signatures that the vendor publishes.
                    $($name: unsafe { library.function(stringify!($name)) },)*
                    library,
                }
            }

            $($vis fn $name(
                &self,
            ) -> std::io::Result<unsafe extern "C" fn($($argument),*) -> std::ffi::c_int> {
                self.$name.ok_or_else(|| {
                    let text = format!(
                        "{} has no {}, which came with {}: update the driver or its toolkit",
                        self.library.name(), stringify!($name), $since,
                    );
                    std::io::Error::new(std::io::ErrorKind::Unsupported, text)
                })
            })*

            /// The functions that the library lacks.
            $vis fn missing(&self) -> Vec<&'static str> {
                let mut missing = Vec::new();
                $(if self.$name.is_none() { missing.push(stringify!($name)); })*
                missing
            }
        }
    };
}
pub(super) use functions;
