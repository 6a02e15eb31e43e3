//! Links the part of GCC's library that unwinds into the library itself, so that images without `libgcc_s.so.1` can load it.

use std::path::Path;

fn main() -> std::io::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    let Some(folder) = std::env::var_os("OUT_DIR") else { return Ok(()) };
    // Rust's standard library links with `-lgcc_s`. The linker finds this script first, which names the static libraries.
    std::fs::write(Path::new(&folder).join("libgcc_s.so"), "INPUT(-lgcc_eh -lgcc)\n")?;
    println!("cargo:rustc-cdylib-link-arg=-L{}", folder.to_string_lossy());
    Ok(())
}
