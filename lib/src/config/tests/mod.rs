//! Names, limits and files; the two forms have their own files.

mod nvipc;
mod pod;
mod random;
mod shmesh;

use std::io::Write;
use std::path::PathBuf;

use super::*;

/// The directory with example files.
fn examples() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "config_files"].iter().collect()
}

/// Loads a text in which one `@` marks the place that the error has to name, and gives back error and message.
#[track_caller]
fn refused(marked: &str) -> (ConfigError, String) {
    let at = marked.find('@').expect("a mark");
    let (text, expected) = (marked.replacen('@', "", 1), read::place_after(&marked.as_bytes()[..at]));
    let error = from_yaml(&text).expect_err(&text);
    let message = error.to_string();
    assert_eq!(error.location(), expected.line_column(), "{text}\n{message}");
    let (line, column) = expected.line_column().unwrap();
    assert!(message.contains(&format!("line {line}, column {column}")), "{message}");
    assert!(std::error::Error::source(&error).is_none(), "all is in the message: {message}");
    (error, message)
}

/// Asserts that the marked text is refused with the given variant, and that the message has the given words.
macro_rules! assert_refused {
    ($text:expr, $variant:pat, $($word:expr),* $(,)?) => {{
        let (error, message) = $crate::config::tests::refused(&$text);
        assert!(matches!(error, $variant), "{error:?}");
        $(assert!(message.contains($word), "no {:?} in: {message}", $word);)*
    }};
}
use assert_refused;

#[test]
fn names_are_checked() {
    for good in ["a", "nvipc", "fronthaul-0_x.y", "-", "_", "0", "a..b", &"x".repeat(31)] {
        assert_eq!(good.parse::<LinkName>().unwrap().to_string(), good);
    }
    assert_eq!("".parse::<LinkName>(), Err(NameError::Empty));
    let long = "x".repeat(32);
    assert_eq!(long.parse::<LinkName>(), Err(NameError::TooLong { name: format!("{long:?}"), len: 32 }));
    for (bad, byte, at) in
        [("a/b", b'/', 1), ("a\0", 0, 1), ("a b", b' ', 1), ("\u{e9}", 0xc3, 0), ("/", b'/', 0)]
    {
        assert_eq!(bad.parse::<LinkName>(), Err(NameError::BadByte { name: format!("{bad:?}"), byte, at }));
    }
    for dotted in [".", "..", ".hidden"] {
        assert!(matches!(dotted.parse::<LinkName>(), Err(NameError::LeadingDot { .. })));
    }
}

#[test]
fn name_errors_state_value_limit_and_remedy() {
    let message = |text: &str| text.parse::<LinkName>().unwrap_err().to_string();
    assert_eq!(
        message(&"x".repeat(32)),
        format!("link name {:?} has 32 bytes, the limit is 31; shorten it", "x".repeat(32))
    );
    assert!(message("a\u{1b}[31m").contains(r#""a\u{1b}[31m" has byte 0x1b at position 1; use only"#));
    assert!(message(&"\u{1b}".repeat(1 << 20)).len() < 600);
}

#[test]
fn pool_ids_have_nvipc_numbers_and_names() {
    let names: Vec<_> = PoolId::ALL.iter().map(|pool| pool.name()).collect();
    assert_eq!(names, ["cpu_msg", "cpu_data", "cpu_large", "cuda_data", "gpu_data"]);
    for (index, pool) in PoolId::ALL.into_iter().enumerate() {
        assert_eq!(pool.index(), index);
        assert_eq!(PoolId::from_index(index.try_into().unwrap()), Some(pool));
        assert_eq!(pool.is_device(), index >= 3);
    }
    assert_eq!(PoolId::from_index(u32::MAX), None);
}

#[test]
fn defaults_are_valid() {
    let name = || LinkName::try_from("a").unwrap();
    LinkConfig::new(name()).validate().unwrap();
    LinkConfig::nvipc_defaults(name()).validate().unwrap();
}

#[test]
fn limits_are_inclusive() {
    let mut link = LinkConfig::new(LinkName::try_from("a").unwrap());
    link.ring_len = MAX_RING_LEN;
    link.spin_us = MAX_SPIN_US;
    link.pools = [PoolConfig::DISABLED; 5];
    link.pools[0] = PoolConfig { buf_size_bytes: 1 << 20, pool_len: MAX_POOL_LEN };
    link.pools[1] = PoolConfig { buf_size_bytes: 1 << 30, pool_len: 1 << 9 };
    assert_eq!(link.payload_bytes(), MAX_SEGMENT_BYTES);
    link.validate().unwrap();
    link.pools[2] = PoolConfig { buf_size_bytes: 1, pool_len: 1 };
    assert!(
        matches!(link.validate(), Err(ConfigError::LinkTooLarge { bytes, .. }) if bytes == MAX_SEGMENT_BYTES + 1)
    );
    link.pools = [PoolConfig { buf_size_bytes: u32::MAX, pool_len: u32::MAX }; 5];
    assert_eq!(link.payload_bytes(), u64::MAX);
    let error = link.validate().unwrap_err();
    assert_eq!(error.location(), None);
    let expected = "link a: pool cpu_msg has buffers of 4294967295 bytes, the limit is 2147483647; lower it";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn value_beyond_each_limit_is_refused() {
    let refused = |set: fn(&mut LinkConfig)| {
        let mut link = LinkConfig::new(LinkName::try_from("a").unwrap());
        set(&mut link);
        link.validate().map_err(|error| error.to_string()).unwrap_err()
    };
    let evicts = |link: &mut LinkConfig| {
        link.ring_mode = RingMode::Broadcast;
        (link.broadcast.slow, link.broadcast.evict_after_ms) = (SlowReaders::Evict, MAX_EVICT_AFTER_MS);
    };
    let mut link = LinkConfig::new(LinkName::try_from("a").unwrap());
    (link.request_window, link.latency_sample) = (MAX_REQUEST_WINDOW, MAX_LATENCY_SAMPLE);
    link.validate().unwrap();
    link.request_window = 0;
    evicts(&mut link);
    link.validate().unwrap();

    assert!(refused(|link| link.ring_len = MIN_RING_LEN - 1).contains("ring length is 0"));
    assert!(refused(|link| link.ring_len = MAX_RING_LEN + 1).contains("1048576"));
    assert!(refused(|link| link.spin_us = MAX_SPIN_US + 1).contains("the limit is 1000000"));
    assert!(refused(|link| link.request_window = MAX_REQUEST_WINDOW + 1).contains("the limit is 64"));
    assert!(
        refused(|link| link.latency_sample = MAX_LATENCY_SAMPLE - 1).contains("a power of two up to 65536")
    );
    let late = |link: &mut LinkConfig| {
        link.ring_mode = RingMode::Broadcast;
        (link.broadcast.slow, link.broadcast.evict_after_ms) = (SlowReaders::Evict, MAX_EVICT_AFTER_MS + 1);
    };
    assert!(refused(late).contains("give 1 to 3600000"));
}

#[test]
fn file_error_has_path_and_line() {
    let path = examples().join("shmesh_bad.yaml");
    let error = from_file(&path).unwrap_err();
    assert_eq!(error.location(), Some((6, 15)));
    let text = error.to_string();
    let start = format!(
        "cannot use the configuration file {path:?}: link midhaul: spin_us is 5000000, the limit is 1000000; lower it\n \
         --> {}:6:15\n  |\n6 | ",
        path.display()
    );
    assert!(text.starts_with(&start) && text.ends_with(&format!("\n  | {}^", " ".repeat(14))), "{text}");
    assert!(std::error::Error::source(&error).is_none(), "it would say the same once more");

    let error = from_file("/nowhere/x.yaml".as_ref()).unwrap_err();
    assert_eq!(error.to_string(), r#"cannot read the configuration file "/nowhere/x.yaml""#);
    assert!(matches!(from_file("/".as_ref()), Err(ConfigError::Read { .. })));
}

#[test]
fn large_and_non_utf8_files_are_refused() {
    // It never ends; only the limit stops the reading.
    let inner = |error: ConfigError| match error {
        ConfigError::File { error, .. } => *error,
        other => panic!("{other:?}"),
    };
    assert!(matches!(inner(from_file("/dev/zero".as_ref()).unwrap_err()), ConfigError::TextTooLarge));
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all("links:\n  # \u{e9}\n  - \u{e9}".as_bytes()).unwrap();
    file.write_all(b"\xff\n").unwrap();
    let error = inner(from_file(file.path()).unwrap_err());
    assert!(matches!(error, ConfigError::NotUtf8 { .. }));
    assert_eq!(error.location(), Some((3, 6)));

    let padded = |len: usize| format!("links: [{{ name: a }}]\n#{}", "x".repeat(len - 22));
    assert_eq!(padded(MAX_FILE_BYTES).len(), MAX_FILE_BYTES);
    from_yaml(&padded(MAX_FILE_BYTES)).unwrap();
    assert!(matches!(from_yaml(&padded(MAX_FILE_BYTES + 1)), Err(ConfigError::TextTooLarge)));
}

#[test]
fn form_is_recognised_by_top_level_keys() {
    for text in ["", "a: 1", "{}", "# nothing\n", "nvipc_log: {}"] {
        let error = from_yaml(text).unwrap_err();
        assert!(matches!(error, ConfigError::UnknownForm), "{text}: {error}");
    }
    assert_refused!(
        "links: @[{ name: a }]\ntransport: { type: shm }",
        ConfigError::MixedForms { .. },
        "keep one"
    );
    assert_refused!("transport: { type: shm }\nversion: @1", ConfigError::MixedForms { .. }, "transport");
    assert_refused!("transport: {}\n@transport: {}", ConfigError::DuplicateKey { .. }, "transport");
    assert_refused!("@hello", ConfigError::Yaml { .. }, "mapping");
    assert_refused!("links: @[\n", ConfigError::Yaml { .. }, "unclosed");
    assert_refused!("links: [{ name: a }]\n---\n@links: []", ConfigError::Yaml { .. }, "document");
}
