//! Compiles the C++ side of the peer `boost`.

fn main() {
    println!("cargo::rerun-if-changed=src/boost.cpp");
    #[cfg(feature = "boost")]
    cc::Build::new().cpp(true).std("c++17").opt_level(3).file("src/boost.cpp").compile("comparison_boost");
}
