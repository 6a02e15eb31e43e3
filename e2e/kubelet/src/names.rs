//! The rules of the kubelet for names of resources.

/// Whether the kubelet accepts `name` as the name of an extended resource: `domain/name`, not of `kubernetes.io`, within the
/// bounds that a quota for it would have.
pub fn is_extended_resource_name(name: &str) -> bool {
    if !name.contains('/') || name.contains("kubernetes.io/") || name.starts_with("requests.") {
        return false;
    }
    match format!("requests.{name}").split('/').collect::<Vec<_>>()[..] {
        [domain, name] => is_subdomain(domain) && is_label_name(name),
        _ => false,
    }
}

fn is_subdomain(domain: &str) -> bool {
    domain.len() <= 253 && domain.split('.').all(is_dns_label)
}

fn is_dns_label(label: &str) -> bool {
    let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    bounded(label, |c| c.is_ascii_lowercase() || c.is_ascii_digit()) && label.bytes().all(inner)
}

fn is_label_name(name: &str) -> bool {
    let inner = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.');
    name.len() <= 63 && bounded(name, |c| c.is_ascii_alphanumeric()) && name.bytes().all(inner)
}

fn bounded(text: &str, edge: impl Fn(u8) -> bool) -> bool {
    matches!((text.bytes().next(), text.bytes().last()), (Some(first), Some(last)) if edge(first) && edge(last))
}

#[cfg(test)]
mod tests {
    use super::is_extended_resource_name as ok;

    #[test]
    fn bounds_are_those_of_a_quota() {
        assert!(ok(&format!("a.b/{}", "x".repeat(63))));
        assert!(!ok(&format!("a.b/{}", "x".repeat(64))));
        assert!(ok(&format!("{}/x", vec!["a".repeat(60); 4].join("."))), "requests. + 243 characters");
        assert!(!ok(&format!("{}/x", vec!["a".repeat(61); 4].join("."))));
        for bad in [
            "a.b/",
            "/x",
            "a.b/c/d",
            "a..b/x",
            "-a/x",
            "a-/x",
            "a.b/-x",
            "a.b/x-",
            "requests.a/x",
            "a b/x",
            "ä/x",
        ] {
            assert!(!ok(bad), "{bad}");
        }
        assert!(!ok("x.kubernetes.io/shm") && ok("a.b/X_y.z-1"));
    }
}
