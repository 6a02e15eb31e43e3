//! The peers that are compiled in only on request, because their builds need more than Rust.

use crate::report::Case;

/// A peer behind a feature of this crate.
pub(crate) struct Optional {
    /// The feature, with which the names of its tests begin.
    pub(crate) feature: &'static str,
    /// The tools and libraries that its build needs, beside cargo.
    pub(crate) needs: &'static str,
    /// Its tests, or `None` where it was not compiled in.
    pub(crate) cases: Option<&'static [Case]>,
}

macro_rules! optional {
    ($feature:literal, $module:ident, $needs:literal) => {{
        #[cfg(feature = $feature)]
        let cases = Some(crate::$module::CASES);
        #[cfg(not(feature = $feature))]
        let cases = None;
        Optional { feature: $feature, needs: $needs, cases }
    }};
}

pub(crate) const PEERS: &[Optional] = &[
    optional!("boost", boost, "a C++17 compiler and Boost's headers (Debian: g++ libboost-dev)"),
    optional!("zenoh", zenoh, "nothing more, but three minutes of processor time"),
    optional!(
        "tachyon",
        tachyon,
        "Clang 17 or GCC 14, and libclang (Debian 12: clang-19, with CXX=clang++-19)"
    ),
    optional!(
        "aeron",
        aeron,
        "CMake 3.30, libclang, libuuid and libbsd (PyPI: cmake; Debian 12: clang-19 uuid-dev libbsd-dev)"
    ),
];

/// The tests of the peers that were compiled in.
pub(crate) fn cases() -> impl Iterator<Item = &'static Case> {
    PEERS.iter().filter_map(|peer| peer.cases).flatten()
}

/// A line for each peer that was not compiled in: how to get it.
pub(crate) fn missing() -> impl Iterator<Item = String> {
    PEERS.iter().filter(|peer| peer.cases.is_none()).map(Optional::remedy)
}

/// How to get the peer to which `name` belongs, if that was not compiled in.
pub(crate) fn remedy_for(name: &str) -> Option<String> {
    let belongs = |peer: &&Optional| peer.cases.is_none() && name.starts_with(peer.feature);
    PEERS.iter().find(belongs).map(Optional::remedy)
}

impl Optional {
    fn remedy(&self) -> String {
        let Self { feature, needs, .. } = self;
        format!("{feature} is not compiled in: build with --features {feature}; needs {needs}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_optional_peer_has_tests_or_a_remedy() {
        for peer in PEERS {
            match peer.cases {
                Some(cases) => {
                    assert!(!cases.is_empty());
                    let begin = format!("{}-", peer.feature);
                    assert!(cases.iter().all(|case| case.name.starts_with(&begin)), "{begin}");
                    assert_eq!(remedy_for(peer.feature), None);
                }
                None => {
                    let remedy = format!("--features {}", peer.feature);
                    assert!(missing().any(|line| line.contains(&remedy)), "{remedy}");
                    assert!(remedy_for(peer.feature).is_some_and(|line| line.contains(&remedy)), "{remedy}");
                }
            }
        }
    }
}
