//! Rules for names of extended resources, as in the kubelet and CDI.

/// Maximum length after the `/`.
const MAX_NAME: usize = 63;
/// Maximum length of the domain: the kubelet prepends `requests.`.
const MAX_DOMAIN: usize = 253 - "requests.".len();

/// Checks the part before the `/` by the rules of the kubelet and of CDI vendors.
pub(crate) fn check_domain(domain: &str) -> Result<(), String> {
    let is_label = |label: &str| {
        !label.is_empty()
            && label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if domain.len() > MAX_DOMAIN {
        return Err(format!("has {} bytes, more than the maximum of {MAX_DOMAIN}", domain.len()));
    }
    if !domain.split('.').all(is_label) {
        return Err(format!("{domain:?} is not a lower-case DNS name such as shmesh.io"));
    }
    if domain == "kubernetes.io" || domain.ends_with(".kubernetes.io") || domain.starts_with("requests.") {
        return Err(format!("{domain:?} is reserved by Kubernetes"));
    }
    if !domain.starts_with(|first: char| first.is_ascii_alphabetic()) {
        return Err(format!("{domain:?} must begin with a letter, as CDI vendors must"));
    }
    Ok(())
}

/// Checks the part after the `/` by the rules of the kubelet and of CDI devices.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let ends = |end: Option<u8>| end.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let bytes = name.as_bytes();
    let is_sound = ends(bytes.first().copied())
        && ends(bytes.last().copied())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte));
    if bytes.len() > MAX_NAME {
        return Err(format!("has {} bytes, more than the maximum of {MAX_NAME}", bytes.len()));
    }
    if !is_sound {
        return Err(format!(
            "{name:?} is not a valid resource name: use letters and digits, with -, _ and . between them"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_the_kubelet_has_it() {
        for good in ["shmesh.io", "a", "x-1.example.com", &format!("{}a", "a.".repeat(121))] {
            assert_eq!(check_domain(good), Ok(()), "{good}");
        }
        for wrong in [
            "",
            ".",
            "a..b",
            "Example.com",
            "a_b",
            "-a",
            "a-",
            "kubernetes.io",
            "x.kubernetes.io",
            "requests.a",
            "1a.io",
        ] {
            assert!(check_domain(wrong).is_err(), "{wrong}");
        }
        assert!(check_domain(&"a".repeat(245)).is_err());
        for good in ["fronthaul", "a", "A.b_c-9", &"a".repeat(63)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for wrong in ["", "-a", "a.", "a/b", "a b", "ä", ".", "..", &"a".repeat(64)] {
            assert!(check_name(wrong).is_err(), "{wrong}");
        }
    }
}
