//! Tests of the form of shmesh.

use super::*;

/// A link `a` with one more line; the mark stands inside.
fn link(line: &str) -> String {
    format!("links:\n  - name: a\n    {line}\n")
}

#[track_caller]
fn loaded(line: &str) -> LinkConfig {
    from_yaml(&link(line)).unwrap_or_else(|error| panic!("{line}: {error}")).links.remove(0)
}

#[test]
fn complete_file_is_parsed() {
    let loaded = from_file(&examples().join("shmesh_two_links.yaml")).unwrap();
    assert_eq!(loaded.form, ConfigForm::Shmesh);
    assert_eq!(loaded.ignored, []);
    let [fronthaul, kv] = &loaded.links[..] else { panic!("{loaded:?}") };
    let mut expected = LinkConfig::new("fronthaul".parse().unwrap());
    expected.ring_mode = RingMode::Spsc;
    expected.pools[0].pool_len = 4096;
    expected.pools[1] = PoolConfig { buf_size_bytes: 576_000, pool_len: 1024 };
    assert_eq!(fronthaul, &expected);
    let mut expected = LinkConfig::new("kv-cache".parse().unwrap());
    expected.ring_len = 64;
    expected.receivers = Receivers::One;
    expected.pools[1] = PoolConfig::DISABLED;
    expected.pools[2] = PoolConfig { buf_size_bytes: 4 << 20, pool_len: 32 };
    (expected.backing, expected.huge_pages) = (Backing::Memfd, HugePages::Hugetlb);
    (expected.prefault, expected.lock_memory, expected.file_mode) = (false, true, 0o660);
    (expected.notify, expected.spin_us) = (false, 0);
    assert_eq!(kv, &expected);
}

#[test]
fn annotation_may_ask_for_one_receiver() {
    let links = pod_links("- { name: a, receivers: one }\n- { name: b, receivers: many }\n- name: c\n");
    let receivers: Vec<_> = links.unwrap().iter().map(|link| link.config.receivers).collect();
    assert_eq!(receivers, [Receivers::One, Receivers::Many, Receivers::Many]);
    assert_refused!(link("receivers: @2"), ConfigError::WrongType { .. }, "many or one");
}

#[test]
fn broadcast_rings_are_read_and_their_rules_kept() {
    let rules = loaded("ring: { mode: broadcast, slow: skip, len: 2, history: 1 }");
    assert_eq!((rules.ring_mode, rules.ring_len), (RingMode::Broadcast, 2));
    assert_eq!((rules.broadcast.slow, rules.broadcast.history), (SlowReaders::Skip, 1));
    let rules = loaded("ring: { evict_after_ms: 250, slow: evict, mode: broadcast }").broadcast;
    assert_eq!(rules, BroadcastConfig { slow: SlowReaders::Evict, history: 0, evict_after_ms: 250 });
    assert_eq!(loaded("ring: { mode: broadcast }").broadcast, BroadcastConfig::default());
    let links = pod_links("- { name: a, ring: { mode: broadcast, history: 8 } }\n").unwrap();
    assert_eq!(links[0].config.broadcast.history, 8);

    for key in ["slow: @wait", "history: @0", "evict_after_ms: @1"] {
        let text = link(&format!("ring: {{ {key} }}"));
        assert_refused!(text, ConfigError::NeedsBroadcast { .. }, "needs ring.mode broadcast");
    }
    let text = link("ring: { mode: broadcast, slow: @fast }");
    assert_refused!(text, ConfigError::WrongType { .. }, "ring.slow", "wait, skip or evict", "fast");
    let text = link("ring: { mode: broadcast, evict_after_ms: @5 }");
    assert_refused!(text, ConfigError::NeedsEvict { .. }, "needs ring.slow evict");
    let text = link("ring: { mode: broadcast, slow: evict, evict_after_ms: @3600001 }");
    assert_refused!(text, ConfigError::EvictAfterOutOfRange { .. }, "3600001", "give 1 to 3600000");
    for history in ["1024", "4294967296"] {
        let text = link(&format!("ring: {{ mode: broadcast, history: @{history} }}"));
        assert_refused!(text, ConfigError::HistoryTooLong { .. }, history, "ring.len");
    }
    let text = link("ring: { mode: broadcast, history: @256 }");
    assert_refused!(text, ConfigError::HistoryTooLong { .. }, "the limit is 255", "pools.cpu_data.pool_len");
    let text = link("ring: { mode: broadcast, slow: skip, len: @1 }");
    assert_refused!(text, ConfigError::SkipNeedsSlots { .. }, "2 or more");
    let text = "links:\n  - @{ name: a, receivers: one, ring: { mode: broadcast } }\n";
    assert_refused!(text, ConfigError::BroadcastReceivers { .. }, "set receivers to many");
}

#[test]
fn latency_is_sampled_at_powers_of_two() {
    let sample = |text: &str| loaded(text).latency_sample;
    assert_eq!((sample(""), sample("latency: {}"), sample("latency: { sample: 0 }")), (0, 64, 0));
    assert_eq!((sample("latency: { sample: 1 }"), sample("latency: { sample: 65536 }")), (1, 65_536));
    for wrong in ["3", "131072", "4294967296"] {
        let text = link(&format!("latency: {{ sample: @{wrong} }}"));
        assert_refused!(
            text,
            ConfigError::BadLatencySample { .. },
            "latency.sample",
            wrong,
            "a power of two up to 65536"
        );
    }
    assert_refused!(link("latency: { sample: @fast }"), ConfigError::WrongType { .. }, "latency.sample");
}

#[test]
fn everything_but_the_name_has_a_default() {
    let expected = LinkConfig::new("a".parse().unwrap());
    for empty in ["", "ring:", "pools: {}", "pools: { cpu_msg: }", "memory: {}", "notify:", "ring: {}"] {
        assert_eq!(loaded(empty), expected, "{empty}");
    }
    assert_refused!("links:\n  - @ring: {}\n", ConfigError::MissingKey { .. }, "name", "add it");
}

#[test]
fn yaml_1_1_booleans_stay_strings() {
    for off in ["off", "\"off\"", "'off'"] {
        assert_eq!(loaded(&format!("memory: {{ huge_pages: {off} }}")).huge_pages, HugePages::Off);
    }
    assert_eq!(from_yaml("links: [{ name: no }, { name: 1.10 }]").unwrap().links[1].name.as_str(), "1.10");
    for wrong in ["false", "no", "Off", "0", "[]"] {
        let text = link(&format!("memory: {{ huge_pages: @{wrong} }}"));
        assert_refused!(
            text,
            ConfigError::WrongType { .. },
            "memory.huge_pages",
            "off, transparent or hugetlb"
        );
    }
    for wrong in ["yes", "on", "1", "\"true\"", "{}"] {
        let text = link(&format!("memory: {{ prefault: @{wrong} }}"));
        assert_refused!(text, ConfigError::WrongType { .. }, "memory.prefault is ", "; write true or false");
    }
}

#[test]
fn unknown_missing_and_repeated_keys_are_refused() {
    assert_refused!(link("@rings: {}"), ConfigError::UnknownKey { .. }, "\"rings\"", "ring, pools");
    assert_refused!(link("ring: { @size: 1 }"), ConfigError::UnknownKey { .. }, "\"size\"", "len, mode");
    assert_refused!(link("pools: { @msg: {} }"), ConfigError::UnknownKey { .. }, "\"msg\"", "cpu_msg");
    let text = link("pools: { cpu_msg: { @buf_size: 1 } }");
    assert_refused!(text, ConfigError::UnknownKey { .. }, "buf_size_bytes, pool_len");
    assert_refused!(link("memory: { @mode: 1 }"), ConfigError::UnknownKey { .. }, "file_mode");
    assert_refused!(link("notify: { @spin: 1 }"), ConfigError::UnknownKey { .. }, "spin_us");
    assert_refused!(
        "links: [{ name: a }]\n@extra: 1",
        ConfigError::UnknownKey { .. },
        "\"extra\"",
        "version, links"
    );
    assert_refused!(link("@name: b"), ConfigError::DuplicateKey { .. }, "\"name\"", "remove one");
    let text = link("pools: { cpu_msg: { pool_len: 1, @pool_len: 1 } }");
    assert_refused!(text, ConfigError::DuplicateKey { .. }, "pool_len");
}

#[test]
fn numbers_are_whole_positive_and_bounded() {
    for (leaf, field) in [
        ("ring: { len: % }", "ring.len"),
        ("pools: { cpu_data: { pool_len: % } }", "pools.cpu_data.pool_len"),
        ("notify: { spin_us: % }", "notify.spin_us"),
    ] {
        let text = |value: &str| link(&leaf.replace('%', &format!("@{value}")));
        assert_refused!(text("-1"), ConfigError::Negative { value: -1, .. }, field, "is -1");
        let negative = i64::MIN.to_string();
        assert_refused!(text(&negative), ConfigError::Negative { .. }, field, negative.as_str());
        for wrong in ["\"8\"", "8.5", "8192.0", "1e3", "010", "many", "true", "~", "[1]", "{ a: 1 }"] {
            assert_refused!(text(wrong), ConfigError::WrongType { .. }, field, "; write a whole number");
        }
        for huge in ["18446744073709551616", "-9223372036854775809", "99999999999999999999999999"] {
            assert_refused!(text(huge), ConfigError::NumberTooLarge { .. }, field, "64 bits");
        }
        for too_much in [u64::MAX.to_string(), (u64::from(u32::MAX) + 1).to_string()] {
            let (error, message) = refused(&text(&too_much));
            assert!(message.contains(&too_much), "{message}");
            assert!(!matches!(error, ConfigError::WrongType { .. } | ConfigError::NumberTooLarge { .. }));
        }
    }
    assert_eq!(loaded("ring: { len: 0x10 }").ring_len, 16);
}

#[test]
fn bytes_are_kubernetes_quantities() {
    let field = "pools.cpu_data.buf_size_bytes";
    let text = |value: &str| link(&format!("pools: {{ cpu_data: {{ buf_size_bytes: @{value} }} }}"));
    for (written, bytes) in [
        ("64Ki", 65_536),
        ("64k", 64_000),
        ("1.5Mi", 3 << 19),
        ("\"1e3\"", 1000),
        ("\"8.5\"", 9),
        ("\"8\"", 8),
        ("0x10", 16),
    ] {
        let config = loaded(&format!("pools: {{ cpu_data: {{ buf_size_bytes: {written}, pool_len: 1 }} }}"));
        assert_eq!(config.pool(PoolId::CpuData).buf_size_bytes, bytes, "{written}");
    }
    assert_refused!(text("-1"), ConfigError::Negative { value: -1, .. }, field, "is -1");
    for wrong in ["64KB", "64 Ki", "-1Ki", "-1.5", "010", "1e3", "8.5", "many"] {
        assert_refused!(text(wrong), ConfigError::WrongType { .. }, field, "; write a number of bytes");
    }
    for wrong in ["true", "~", "[1]", "{ a: 1 }"] {
        assert_refused!(text(wrong), ConfigError::WrongType { .. }, field, "; write a whole number");
    }
    for huge in ["18446744073709551616", "-9223372036854775809", "99Ei"] {
        assert_refused!(text(huge), ConfigError::NumberTooLarge { .. }, field, "64 bits");
    }
    for too_much in ["18446744073709551615", "4294967296", "4Gi"] {
        assert_refused!(text(too_much), ConfigError::BufSizeTooLarge { .. }, "cpu_data", "2147483647");
    }
}

#[test]
fn limit_errors_state_value_limit_and_position() {
    let text = link("ring: { len: @0 }");
    assert_refused!(text, ConfigError::RingLenOutOfRange { value: 0, .. }, "link a", "give 1 to 1048576");
    let text = link("ring: { len: @1048577 }");
    assert_refused!(text, ConfigError::RingLenOutOfRange { value: 1_048_577, .. }, "1048577", "1048576");
    let text = link("notify: { spin_us: @1000001 }");
    assert_refused!(text, ConfigError::SpinTooLong { .. }, "1000001", "1000000");
    let text = link("pools: { cpu_data: { buf_size_bytes: @2147483648 } }");
    assert_refused!(text, ConfigError::BufSizeTooLarge { .. }, "cpu_data", "2147483648", "2147483647");
    let text = link("pools: { cpu_msg: { pool_len: @524289 } }");
    assert_refused!(text, ConfigError::PoolLenTooLarge { .. }, "cpu_msg", "524289", "524288");
    let text = link("pools: { cpu_large: { buf_size_bytes: 1073741824, pool_len: @1025 } }");
    assert_refused!(text, ConfigError::SegmentTooLarge { .. }, "cpu_large", "would have 1.01Ti", "is 1Ti;");
    let text =
        "links:\n  - @name: a\n    pools: { cpu_large: { buf_size_bytes: 1073741824, pool_len: 1024 } }\n";
    assert_refused!(text, ConfigError::LinkTooLarge { .. }, "would have 1.01Ti", "is 1Ti;");
    for mode in ["0644", "\"0666\"", "384", "rw", "\"\""] {
        let text = link(&format!("memory: {{ file_mode: @{mode} }}"));
        assert_refused!(
            text,
            ConfigError::FileModeRefused { .. },
            mode.trim_matches('"'),
            "\"0600\"",
            "\"0660\""
        );
    }
    assert_eq!(loaded("memory: { file_mode: 0600 }").file_mode, 0o600);
    assert_eq!(loaded("memory: { file_mode: \"0o660\" }").file_mode, 0o660);
}

#[test]
fn pools_follow_their_rules() {
    for off in ["pool_len: @0", "buf_size_bytes: @0", "pool_len: @0, buf_size_bytes: 0"] {
        let text = link(&format!("pools: {{ cpu_msg: {{ {off} }} }}"));
        assert_refused!(text, ConfigError::CpuMsgMissing { .. }, "cpu_msg is mandatory");
    }
    assert!(!loaded("pools: { cpu_data: { pool_len: 0 } }").pool(PoolId::CpuData).is_enabled());
    assert!(
        !loaded("pools: { gpu_data: { buf_size_bytes: 8, pool_len: 0 } }").pool(PoolId::GpuData).is_enabled()
    );
    assert!(!loaded("pools: { gpu_data: { pool_len: 0 } }").pool(PoolId::GpuData).is_enabled());
    assert_eq!(loaded("pools: { cpu_msg: { pool_len: 9 } }").pool(PoolId::CpuMsg).buf_size_bytes, 8192);

    let text = link("pools: { cpu_large: @{ pool_len: 8 } }");
    assert_refused!(text, ConfigError::PoolIncomplete { .. }, "cpu_large has no buf_size_bytes");
    let text = link("pools: { cpu_large: @{ buf_size_bytes: 8 } }");
    assert_refused!(text, ConfigError::PoolIncomplete { .. }, "cpu_large has no pool_len");
    for pool in ["cuda_data", "gpu_data"] {
        let text =
            link(&format!("pools:\n      {pool}:\n        buf_size_bytes: 1\n        pool_len: @524289"));
        assert_refused!(text, ConfigError::PoolLenTooLarge { .. }, pool, "the limit is 524288");
    }
    let both = loaded("pools: { cuda_data: { buf_size_bytes: 1, pool_len: 2 } }");
    assert_eq!(both.pool(PoolId::CudaData), PoolConfig { buf_size_bytes: 1, pool_len: 2 });
    let text = link("memory: { huge_pages: @hugetlb }");
    assert_refused!(text, ConfigError::HugetlbNeedsMemfd { .. }, "set backing to memfd");
}

#[test]
fn lists_names_and_versions_are_checked() {
    assert_refused!("version: @2\nlinks: []", ConfigError::VersionUnsupported { .. }, "is 2", "set it to 1");
    assert_refused!("version: @\"1\"\nlinks: []", ConfigError::VersionUnsupported { .. }, "\"1\"");
    assert_refused!("version: @1", ConfigError::NoLinks { .. }, "at least one");
    assert_refused!("links: @[]", ConfigError::NoLinks { .. }, "at least one");
    assert_refused!("links: @{}", ConfigError::Yaml { .. }, "sequence");
    assert_refused!("links: [{ name: @a/b }]", ConfigError::BadName { .. }, "0x2f", "use only");
    assert_refused!("links: [{ name: @\"\" }]", ConfigError::BadName { .. }, "empty");
    assert_refused!("links: [{ name: @~ }]", ConfigError::Yaml { .. }, "null");
    let text = "links:\n  - name: a\n  - name: b\n  - name: @a\n";
    assert_refused!(text, ConfigError::DuplicateLink { .. }, "link a is already defined (line 2, column 11)");

    let many = |count| (0..count).map(|i| format!("  - name: l{i}\n")).collect::<String>();
    assert_eq!(from_yaml(&format!("links:\n{}", many(MAX_LINKS))).unwrap().links.len(), MAX_LINKS);
    let text = format!("links:\n{}  - @name: x\n", many(MAX_LINKS));
    assert_refused!(text, ConfigError::TooManyLinks { count: 1025, .. }, "1025", "1024");
}

#[test]
fn anchors_share_and_errors_point_at_the_definition() {
    let text = "links:\n  - name: a\n    pools: &p { cpu_msg: { pool_len: 7 } }\n  - &b { name: b, pools: *p }\n  - { <<: *b, name: c }\n";
    let loaded = from_yaml(text).unwrap();
    assert!(loaded.links.iter().all(|link| link.pool(PoolId::CpuMsg).pool_len == 7));
    let text = "links:\n  - &a { name: a }\n  - { <<: *a, name: b, ring: &r { len: @0 } }\n  - { name: c, ring: *r }\n";
    assert_refused!(text, ConfigError::RingLenOutOfRange { .. }, "link b");
    let every_link: String = (0..1000).map(|i| format!("  - {{ name: l{i}, pools: *p }}\n")).collect();
    from_yaml(&format!("links:\n  - name: a\n    pools: &p {{ cpu_msg: {{ pool_len: 7 }} }}\n{every_link}"))
        .unwrap();
}

#[test]
fn yaml_bombs_are_refused() {
    let bomb: String = ('b'..='z')
        .zip('a'..)
        .map(|(next, last)| format!("{next}: &{next} [{}]\n", vec![format!("*{last}"); 9].join(", ")))
        .collect();
    let error = from_yaml(&format!("a: &a [x, x]\n{bomb}links: []\n")).unwrap_err();
    assert!(matches!(error, ConfigError::TooComplex { .. }), "{error}");
    assert!(error.location().is_some());
    let error = from_yaml("links: &l [{ name: a, pools: *l }]").unwrap_err();
    assert!(matches!(error, ConfigError::TooComplex { .. }), "{error}");
    for (open, close) in [("[", "]"), ("{ a: ", "}"), ("- ", ""), ("? ", "")] {
        for depth in [33, 10_000] {
            for lead in ["", "x:\n  ", "x: "] {
                let error =
                    from_yaml(&format!("{lead}{}{}", open.repeat(depth), close.repeat(depth))).unwrap_err();
                assert!(!matches!(error, ConfigError::UnknownForm), "depth {depth} of {open:?}: {error}");
            }
        }
    }
    from_yaml(&link(&"# a comment\n    ".repeat(200))).unwrap();
}

#[test]
fn control_characters_are_escaped_in_errors() {
    for text in [
        "links: [{ name: \"a\\e[31m\" }]",
        "links: [{ name: a, \"b\\e[31m\": 1 }]",
        "links: [{ name: a, backing: \"\\e[31m\" }]",
    ] {
        let message = from_yaml(text).unwrap_err().to_string();
        assert!(message.contains(r"\u{1b}[31m"), "{message}");
    }
    let message =
        from_yaml(&format!("links: [{{ name: a, backing: {} }}]", "x".repeat(100_000))).unwrap_err();
    assert!(message.to_string().len() < 200);
    assert_refused!(link("backing: !thing @memfd"), ConfigError::Yaml { .. }, "tag");
}

/// docs/configuration.md shows the defaults, and describes every key.
#[test]
fn documented_configuration_is_the_default_and_complete() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let page = std::fs::read_to_string(format!("{root}/docs/configuration.md")).unwrap();
    let (_, example) = page.split_once("```yaml\n").unwrap();
    let (example, _) = example.split_once("```").unwrap();
    let loaded = from_yaml(example).unwrap();
    assert_eq!(loaded.links, [LinkConfig::new("fronthaul".parse().unwrap())]);
    let source = include_str!("../yaml.rs");
    let field = |line: &'static str| {
        line.trim_start_matches("    ").trim_start_matches("pub(super) ").split_once(": ")
    };
    let keys: Vec<_> = source
        .split("struct ")
        .filter_map(|part| {
            part.split_once("Yaml {\n").filter(|(name, _)| !name.contains(' '))?.1.split_once("\n}")
        })
        .flat_map(|(fields, _)| fields.lines().filter(|line| !line.contains("#[")).filter_map(field))
        .map(|(key, _)| key)
        .collect();
    assert!(keys.len() > 20, "{keys:?}");
    // In a block or between backticks.
    let code = page.split('`').skip(1).step_by(2);
    let words: Vec<_> =
        code.flat_map(|code| code.split(|c: char| !c.is_alphanumeric() && c != '_')).collect();
    let missing: Vec<_> = keys.into_iter().filter(|key| !words.contains(key)).collect();
    assert!(missing.is_empty(), "docs/configuration.md does not describe {missing:?}");
}
