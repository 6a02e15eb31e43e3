//! The annotation: links with the words that say who in the pod is on them.

use super::*;
use crate::participant::Side;

#[test]
fn annotation_keys_are_accepted_beside_file_keys() {
    let text = "
- name: a
  ring: { len: 64 }
- name: b
  scope: pod
  side: primary
  containers: [x, y]
- { name: c, scope: pool/radio-0.x, side: primary }
- { name: d, scope: 'pool/radio', side: secondary, memory: { file_mode: '0600' } }
- { name: e, scope: claim/du-0.cell, side: primary }
- { name: f, scope: claim/du, side: secondary }
";
    let links = pod_links(text).unwrap();
    assert_eq!(links[0].config, {
        let mut config = LinkConfig::new("a".parse().unwrap());
        config.ring_len = 64;
        config
    });
    let scopes: Vec<_> = links.iter().map(|link| link.scope.to_string()).collect();
    assert_eq!(scopes, ["pod", "pod", "pool/radio-0.x", "pool/radio", "claim/du-0.cell", "claim/du"]);
    let sides: Vec<_> = links.iter().map(|link| link.side).collect();
    assert_eq!(sides[2..], [Side::Primary, Side::Secondary, Side::Primary, Side::Secondary]);
    assert_eq!(links[1].containers, Some(vec!["x".to_owned(), "y".to_owned()]));
    let modes: Vec<_> = links.iter().map(|link| link.config.file_mode).collect();
    assert_eq!(modes, [0o600, 0o600, 0o660, 0o600, 0o660, 0o660], "a pool and a claim have a group");
    assert_eq!(links[3].places.side.line_column(), Some((9, 41)));

    let kept = from_annotation(text).unwrap().links;
    let kept: Vec<_> = kept.iter().map(|link| link.name.as_str()).collect();
    assert_eq!(kept, ["a", "b", "c", "e"], "the primaries of d and f have a sidecar elsewhere");
}

#[test]
fn keys_without_meaning_in_a_pod_are_refused_with_position() {
    for (text, place, remedy) in [
        ("- name: a\n  side: secondary\n", (2, 9), "give scope claim/<name> or pool/<name>"),
        ("- name: a\n  scope: node\n", (2, 10), "pod, pool/<name> or claim/<name>"),
        ("- name: a\n  scope: pool/\n", (2, 10), "pod, pool/<name> or claim/<name>"),
        ("- name: a\n  scope:\n", (1, 3), "pod, pool/<name> or claim/<name>"),
        ("- name: a\n  scope: claim/\n", (2, 10), "pod, pool/<name> or claim/<name>"),
        ("- name: a\n  scope: claim\n", (2, 10), "pod, pool/<name> or claim/<name>"),
        ("- name: a\n  scope: claim/c\n", (2, 10), "scope \"claim/c\" joins two pods"),
        ("- name: a\n  scope: pool/p\n  side: both\n", (3, 9), "primary or secondary"),
        (
            "- name: a\n  scope: pool/p\n",
            (2, 10),
            "write side: primary in one of them and side: secondary in the other",
        ),
        ("- name: a\n  containers: []\n", (2, 15), "name at least one"),
        ("- name: a\n  containers: x\n", (2, 15), ""),
        ("- name: a\n- name: a\n", (2, 9), "rename"),
        ("- name: a\n  nodes: []\n", (2, 3), "scope, side, far, containers"),
        ("- name: a\n  far: allow\n", (2, 8), "give scope claim/<name> or pool/<name>"),
        ("- { name: a, scope: pool/p, side: primary, far: maybe }\n", (1, 49), "never, allow or require"),
        ("- { name: a_b, scope: pool/p, side: primary, far: allow }\n", (1, 51), "lower-case letters"),
        ("- { name: A, scope: pool/p, side: primary, far: require }\n", (1, 49), "lower-case letters"),
        ("- { name: a-, scope: pool/p, side: primary, far: require }\n", (1, 50), "lower-case letters"),
        (
            "- { name: a, scope: pool/p, side: primary, far: allow, pools: { cuda_data: { buf_size_bytes: 64, pool_len: 2 } } }\n",
            (1, 49),
            "cuda_data in device memory",
        ),
        (
            "- { name: a, scope: pool/p, side: primary, far: allow, requests: { window: 4 } }\n",
            (1, 49),
            "two links with messages",
        ),
    ] {
        let error = pod_links(text).unwrap_err();
        assert!(error.to_string().contains(remedy), "{text}: {error}");
        if text.contains("scope:\n") {
            assert!(error.location().is_some(), "{error}");
            continue;
        }
        assert_eq!(error.location(), Some(place), "{text}: {error}");
        from_annotation(text).unwrap_err();
    }
    let all_elsewhere = "- { name: a, scope: pool/p, side: secondary }\n";
    assert_eq!(pod_links(all_elsewhere).unwrap().len(), 1);
    assert!(matches!(from_annotation(all_elsewhere), Err(ConfigError::NothingKept)));
    assert!(matches!(pod_links(" \n"), Err(ConfigError::NoLinks { .. })));
    assert!(matches!(pod_links(&" ".repeat(MAX_FILE_BYTES + 1)), Err(ConfigError::TextTooLarge)));
}

#[test]
fn links_are_near_unless_the_annotation_allows_more() {
    let far = |keys: &str| {
        let text = format!("- {{ name: a-1, scope: pool/p, side: secondary{keys} }}");
        pod_links(&text).unwrap()[0].far
    };
    assert_eq!([far(""), far(", far: never")], [Far::Never; 2]);
    assert_eq!([far(", far: allow"), far(", far: require")], [Far::Allow, Far::Require]);
    // A link that is never far may have any name, requests and scope pod.
    assert_eq!(pod_links("- { name: A_b, far: never, requests: { window: 4 } }").unwrap()[0].far, Far::Never);
}

#[test]
fn annotation_keys_are_refused_in_files() {
    for (line, column) in
        [("scope: pod", 12), ("side: primary", 11), ("far: allow", 10), ("containers: [x]", 17)]
    {
        let error = from_yaml(&format!("links:\n  - name: a\n    {line}\n")).unwrap_err();
        assert!(matches!(error, ConfigError::UnknownKey { .. }), "{error}");
        assert!(
            error.to_string().contains("known here: name, ring, receivers, pools, backing, memory, notify"),
            "{error}"
        );
        assert!(matches!(error.location(), Some((3, found)) if found <= column), "{error}");
    }
}
