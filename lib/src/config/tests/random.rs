//! Whatever the text is: no panic, and what comes out keeps its promises.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::sample::select;

use super::*;

const VALID: [&str; 5] = [
    include_str!("../../../tests/config_files/shmesh_two_links.yaml"),
    include_str!("../../../tests/config_files/nvipc_single.yaml"),
    include_str!("../../../tests/config_files/nvipc_multi.yaml"),
    include_str!("../../../tests/config_files/nvipc_full.yaml"),
    include_str!("../../../tests/config_files/nvipc_cuda.yaml"),
];

/// Pieces that a YAML parser and our own rules find interesting.
const PIECES: [&str; 40] = [
    "links",
    "version",
    "transport",
    "name",
    "ring",
    "pools",
    "cpu_msg",
    "pool_len",
    "buf_size",
    "shm_config",
    "prefix",
    "mempool_size",
    ":",
    ": ",
    "-",
    "- ",
    "\n",
    "\n  ",
    "\n    - ",
    "{",
    "}",
    "[",
    "]",
    ",",
    "\"",
    "'",
    "&a ",
    "*a",
    "<<: ",
    "!!int ",
    "? ",
    "|\n",
    "---\n",
    "# ",
    "0",
    "-1",
    "4294967296",
    "1e999",
    "\u{feff}",
    "\t",
];

fn keeps_promises(text: &str) {
    match from_yaml(text) {
        Ok(loaded) => {
            assert!((1..=MAX_LINKS).contains(&loaded.links.len()));
            for link in &loaded.links {
                link.validate().unwrap();
            }
            let names: BTreeSet<_> = loaded.links.iter().map(|link| &link.name).collect();
            assert_eq!(names.len(), loaded.links.len());
            let paths: BTreeSet<_> = loaded.ignored.iter().map(|key| &key.path).collect();
            assert_eq!(paths.len(), loaded.ignored.len());
            assert!(paths.iter().all(|path| !path.contains(char::is_control)));
            assert!(loaded.form == ConfigForm::Nvipc || loaded.ignored.is_empty());
        }
        Err(error) => {
            let message = error.to_string();
            assert!(!message.is_empty() && message.len() < 4096, "{message}");
            assert!(!message.contains(char::is_control), "{message:?}");
            if let Some((line, column)) = error.location() {
                assert!(line >= 1 && column >= 1, "{message}");
                // YAML also breaks lines at a lone carriage return.
                let lines = text.matches(['\n', '\r']).count() + 1;
                assert!(usize::try_from(line).unwrap() <= lines + 1, "{message} in {lines} lines");
            }
        }
    }
}

fn annotation_keeps_promises(text: &str) {
    match pod_links(text) {
        Ok(links) => {
            for link in &links {
                link.config.validate().unwrap();
            }
            let kept = links.iter().filter(|link| link.is_kept_here()).count();
            match from_annotation(text) {
                Ok(loaded) => assert_eq!(loaded.links.len(), kept),
                Err(error) => assert!(kept == 0 && matches!(error, ConfigError::NothingKept)),
            }
        }
        Err(error) => assert!(!error.to_string().contains(char::is_control), "{error}"),
    }
}

/// A valid text, cut, doubled, and with pieces put in.
fn mutated() -> impl Strategy<Value = String> {
    let edit = (any::<prop::sample::Index>(), 0..40usize, select(&PIECES[..]), 0..3u8);
    (select(&VALID[..]), prop::collection::vec(edit, 1..4)).prop_map(|(text, edits)| {
        let mut chars: Vec<char> = text.chars().collect();
        for (at, len, piece, kind) in edits {
            let start = at.index(chars.len() + 1);
            let end = (start + len).min(chars.len());
            let new: Vec<char> = match kind {
                0 => Vec::new(),
                1 => chars[start..end].repeat(2),
                _ => piece.chars().collect(),
            };
            let end = if kind == 2 { start } else { end };
            chars.splice(start..end, new);
        }
        chars.into_iter().collect()
    })
}

proptest! {
    #[test]
    fn any_annotation(pieces in prop::collection::vec(select(&PIECES[..]), 0..30)) {
        annotation_keeps_promises(&pieces.concat());
        annotation_keeps_promises(&format!("- name: a\n  scope: {}", pieces.concat()));
    }

    #[test]
    fn any_text(text in any::<String>()) {
        keeps_promises(&text);
    }

    #[test]
    fn any_bytes_made_text(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        keeps_promises(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn any_pieces(pieces in prop::collection::vec(select(&PIECES[..]), 0..60)) {
        keeps_promises(&pieces.concat());
    }

    #[test]
    fn any_valid_text_mutated(text in mutated()) {
        keeps_promises(&text);
    }

    #[test]
    fn any_name(text in any::<String>()) {
        if let Ok(name) = text.parse::<LinkName>() {
            prop_assert_eq!(name.as_str(), text);
            prop_assert!(name.as_str().len() <= MAX_LINK_NAME_BYTES && !name.as_str().contains(['/', '\0']));
        }
    }
}
