//! The generated sources in the repository are those that `proto/` yields. Needs no `protoc`.

use std::fs;
use std::path::Path;

const SOURCES: [(&str, &str); 6] = [
    ("deviceplugin/v1beta1/api.proto", "v1beta1.rs"),
    ("dra/v1/api.proto", "k8s.io.kubelet.pkg.apis.dra.v1.rs"),
    ("dra/v1beta1/api.proto", "k8s.io.kubelet.pkg.apis.dra.v1beta1.rs"),
    ("drahealth/v1alpha1/api.proto", "v1alpha1.rs"),
    ("pluginregistration/v1/api.proto", "pluginregistration.rs"),
    ("podresources/v1/api.proto", "v1.rs"),
];

#[test]
fn bindings_match_the_proto_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut repaired = Vec::new();
    for (source, target) in SOURCES {
        let proto = root.join("proto").join(source);
        let descriptors = protox::compile([&proto], [root.join("proto")]).expect("proto files compile");
        let out = tempfile::tempdir().expect("a temporary directory");
        tonic_prost_build::configure()
            .build_transport(false)
            .btree_map(".")
            .out_dir(out.path())
            .compile_fds(descriptors)
            .expect("code is generated");
        let fresh = fs::read_to_string(out.path().join(target)).expect("generated file");
        let kept = root.join("src/generated").join(target);
        if fs::read_to_string(&kept).unwrap_or_default() != fresh {
            fs::create_dir_all(root.join("src/generated")).expect("source directory is writable");
            fs::write(&kept, fresh).expect("source directory is writable");
            repaired.push(target);
        }
    }
    assert!(repaired.is_empty(), "{repaired:?} differed from proto/ and are repaired: commit them");
}
