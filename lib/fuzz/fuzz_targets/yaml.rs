//! Any text as a configuration: it is accepted and valid, or refused with a reason.
#![no_main]

use shmesh::config;

libfuzzer_sys::fuzz_target!(|text: &str| {
    match config::from_yaml(text) {
        Ok(loaded) => {
            assert!(!loaded.links.is_empty() && loaded.links.len() <= config::MAX_LINKS);
            for link in &loaded.links {
                link.validate().expect("what was read is valid");
                assert!((1..=config::MAX_LINK_NAME_BYTES).contains(&link.name.as_str().len()));
            }
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            if let Some((line, column)) = error.location() {
                assert!(line >= 1 && column >= 1);
            }
        }
    }
});
