//! Generates the bindings from the files in `proto`, without `protoc`.

use std::path::Path;

const SOURCES: [&str; 6] = [
    "deviceplugin/v1beta1/api.proto",
    "dra/v1/api.proto",
    "dra/v1beta1/api.proto",
    "drahealth/v1alpha1/api.proto",
    "pluginregistration/v1/api.proto",
    "podresources/v1/api.proto",
];

fn main() {
    let root = Path::new("proto");
    for source in SOURCES {
        let file = root.join(source);
        println!("cargo::rerun-if-changed={}", file.display());
        let descriptors =
            protox::compile([&file], [root]).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        tonic_prost_build::configure()
            .build_transport(false)
            .btree_map(".")
            .compile_fds(descriptors)
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
}
