//! Tests of the form of NVIPC.

use super::*;

fn load(file: &str) -> LoadedConfig {
    let loaded = from_file(&examples().join(file)).unwrap();
    assert_eq!(loaded.form, ConfigForm::Nvipc);
    loaded
}

fn paths(loaded: &LoadedConfig) -> Vec<(u64, &str)> {
    loaded.ignored.iter().map(|key| (key.line, key.path.as_str())).collect()
}

fn nvipc() -> LinkConfig {
    LinkConfig::nvipc_defaults("nvipc".parse().unwrap())
}

#[test]
fn single_instance_is_parsed() {
    let loaded = load("nvipc_single.yaml");
    let mut expected = nvipc();
    expected.pools[0].buf_size_bytes = 15_000;
    assert_eq!(loaded.links, [expected]);
    assert_eq!(paths(&loaded), [(5, "transport.shm_config.cuda_device_id")]);
}

#[test]
fn secondary_with_only_a_prefix_gets_the_defaults_of_nvipc() {
    let loaded = load("nvipc_secondary.yaml");
    assert_eq!(loaded.links, [LinkConfig::nvipc_defaults("l2a.0".parse().unwrap())]);
    assert_eq!(loaded.ignored, []);
    assert_eq!(from_yaml("transport: {}").unwrap().links, [nvipc()]);
    assert_eq!(from_yaml("transport: { type: SHM, shm_config: }").unwrap().links, [nvipc()]);
}

#[test]
fn several_instances_are_several_links_and_ignored_keys_are_reported_once() {
    let loaded = load("nvipc_multi.yaml");
    let names: Vec<_> = loaded.links.iter().map(|link| link.name.as_str()).collect();
    assert_eq!(names, ["cell_a", "cell_b", "cell_c"]);
    assert_eq!(
        loaded.links[1].pool(PoolId::CpuData),
        PoolConfig { buf_size_bytes: 4_096_000, pool_len: 512 }
    );
    assert!(!loaded.links[2].pool(PoolId::CpuLarge).is_enabled());
    let expected = [
        (3, "transport.transport_id"),
        (4, "transport.phy_cells"),
        (8, "transport.shm_config.cuda_device_id"),
        (32, "transport.comment"),
    ];
    assert_eq!(paths(&loaded), expected);
}

#[test]
fn duplicate_keys_outside_the_transport_are_reported() {
    let text = "transport:\n  shm_config: { prefix: a }\n  app_config: { x: 1, x: 2 }\ncells:\n  - { id: 1, id: 2 }\n";
    let loaded = from_yaml(text).unwrap();
    assert_eq!(loaded.links[0].name.as_str(), "a");
    let told = paths(&loaded);
    assert!(told.contains(&(4, "cells")), "{told:?}");
    assert!(told.iter().any(|(line, path)| *line == 3 && path.contains("given twice")), "{told:?}");
    for ours in ["prefix: a, @prefix: b", "prefix: a, ring_len: 8, @ring_len: 16"] {
        let text = format!("transport:\n  shm_config: {{ {ours} }}\ncells: {{ id: 1, id: 2 }}\n");
        assert_refused!(text, ConfigError::DuplicateKey { .. }, "remove one");
    }
    assert_refused!("links: [{ name: a, @name: b }]", ConfigError::DuplicateKey { .. }, "remove one");
}

#[test]
fn keys_without_meaning_are_reported_and_accepted() {
    let loaded = load("nvipc_full.yaml");
    assert_eq!(loaded.links.len(), 1);
    assert_eq!(loaded.links[0].ring_len, 16_384);
    let expected = [
        (2, "some_application"),
        (5, "transport.udp_config"),
        (14, "transport.shm_config.cuda_device_id"),
        (23, "transport.shm_config.mempool_size.cpu_data.note"),
        (33, "transport.shm_config.mempool_size.cpu_huge"),
        (36, "transport.dpdk_config"),
        (45, "transport.doca_config"),
        (49, "transport.app_config"),
        (50, "transport.app_config.grpc_forward"),
        (51, "transport.app_config.debug_timing"),
        (52, "transport.app_config.pcap_enable"),
        (53, "transport.app_config.msg_filter"),
        (55, "nvipc_log"),
    ];
    assert_eq!(paths(&loaded), expected);
    for odd in ["5", "[1, { a: b }]", "~", "text", "1.5", "{ 1: 2 }"] {
        let text = format!("transport: {{ app_config: {odd}, udp_config: {odd}, phy_cells: {odd} }}");
        let loaded = from_yaml(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert!(loaded.ignored.len() >= 3, "{text}");
    }
}

#[test]
fn ring_is_at_least_as_long_as_cpu_msg() {
    let ring_len = |ring: &str, pool_len: u32| {
        let text = format!(
            "transport: {{ shm_config: {{ {ring} mempool_size: {{ cpu_msg: {{ pool_len: {pool_len} }} }} }} }}"
        );
        from_yaml(&text).unwrap().links[0].ring_len
    };
    assert_eq!(ring_len("ring_len: 100,", 4096), 4096);
    assert_eq!(ring_len("ring_len: 9000,", 4096), 9000);
    assert_eq!(ring_len("ring_len: 0,", 10), 10);
    assert_eq!(ring_len("", 10), 8192);
    assert_eq!(ring_len("", MAX_POOL_LEN), MAX_POOL_LEN);
}

#[test]
fn other_transports_are_refused_by_name() {
    for kind in ["udp", "DPDK", "Doca"] {
        let text = format!("transport:\n  type: @{kind}\n");
        assert_refused!(
            text,
            ConfigError::TransportUnsupported { .. },
            kind,
            "not supported",
            "set it to shm"
        );
    }
    let text = "transport:\n  - type: shm\n  - type: @smh\n";
    assert_refused!(text, ConfigError::TransportUnknown { .. }, "\"smh\"", "set it to shm");
    assert_refused!("transport: { type: @[shm] }", ConfigError::Yaml { .. }, "string");
}

#[test]
fn device_pools_have_the_same_limits_as_others() {
    let loaded = from_file(&examples().join("nvipc_cuda.yaml")).unwrap();
    let expected = PoolConfig { buf_size_bytes: 307_200, pool_len: 1024 };
    assert_eq!(loaded.links[0].pool(PoolId::CudaData), expected);
    let of = |text: &str| {
        let text = format!("transport: {{ shm_config: {{ mempool_size: {{ gpu_data: {{ {text} }} }} }} }}");
        from_yaml(&text).unwrap().links[0].pool(PoolId::GpuData)
    };
    assert_eq!(of("pool_len: 1"), PoolConfig { buf_size_bytes: 576_000, pool_len: 1 });
    assert!(!of("buf_size: 0, pool_len: 1").is_enabled());
    let text = "transport: { shm_config: { mempool_size: { gpu_data: { pool_len: @524289 } } } }";
    assert_refused!(text, ConfigError::PoolLenTooLarge { .. }, "gpu_data", "the limit is 524288");
}

#[test]
fn bad_values_are_refused_with_position() {
    for (leaf, field) in [
        ("ring_len: %", "shm_config.ring_len"),
        ("mempool_size: { cpu_msg: { buf_size: % } }", "shm_config.mempool_size.cpu_msg.buf_size"),
        ("mempool_size: { cuda_data: { pool_len: % } }", "shm_config.mempool_size.cuda_data.pool_len"),
    ] {
        let text = |value: &str| {
            format!("transport:\n  shm_config:\n    {}\n", leaf.replace('%', &format!("@{value}")))
        };
        assert_refused!(text("-1"), ConfigError::Negative { value: -1, .. }, field);
        assert_refused!(text("abc"), ConfigError::WrongType { .. }, field, "\"abc\"");
        assert_refused!(text("1.5"), ConfigError::WrongType { .. }, field, "1.5");
        assert_refused!(text("99999999999999999999"), ConfigError::NumberTooLarge { .. }, field);
        refused(&text("4294967296"));
    }
    let shm = |inner: &str| format!("transport: {{ shm_config: {{ {inner} }} }}");
    assert_refused!(shm("prefix: @../x"), ConfigError::BadName { .. }, "starts with '.'");
    let long = "p".repeat(32);
    assert_refused!(shm(&format!("prefix: @{long}")), ConfigError::BadName { .. }, "32 bytes", "31");
    assert_refused!(shm("ring_len: @1048577"), ConfigError::RingLenOutOfRange { .. }, "1048577");
    let text = shm("mempool_size: { cpu_msg: { pool_len: @4294967295 } }");
    assert_refused!(text, ConfigError::PoolLenTooLarge { .. }, "4294967295", "524288");
    let text = shm("mempool_size: { cpu_msg: { pool_len: @0 } }");
    assert_refused!(text, ConfigError::CpuMsgMissing { .. }, "cpu_msg");
    let text = shm("mempool_size: { cpu_msg: { pool_len: 1, @pool_len: 1 } }");
    assert_refused!(text, ConfigError::DuplicateKey { .. }, "pool_len");
    assert_refused!(shm("mempool_size: @5"), ConfigError::Yaml { .. }, "mapping");
    assert_refused!("transport: @[]", ConfigError::NoLinks { .. }, "at least one");
    assert_refused!("transport: [{}, @{}]", ConfigError::DuplicateLink { .. }, "nvipc");
    assert_refused!("@transport: 5", ConfigError::Yaml { .. }, "a transport map or a list");
    let many = format!("transport:\n{}  - @type: shm\n", "  - {}\n".repeat(MAX_LINKS));
    assert_refused!(many, ConfigError::TooManyLinks { .. }, "1025");
}
