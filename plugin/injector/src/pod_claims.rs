//! ResourceClaims in a pod: the entry that names the claim, and the containers that use it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::edit::{Edit, ShapeError};
use crate::pod::{self, Container, SHM_DIR};

/// The list of a pod that gives its claims names.
const LIST: &str = "/spec/resourceClaims";
/// Name of an entry that the injector adds; others get a number.
const ENTRY: &str = "shmesh";
/// Name of the request for the directory in claims that `shmesh-plugin claim` prints.
pub(crate) const REQUEST: &str = "domain";
/// Maximum length of the name of a ResourceClaim.
const MAX_NAME_BYTES: usize = 253;

/// The claims that the containers of a pod need, by the name in the annotation.
#[derive(Debug, Default)]
pub(crate) struct PodClaims {
    /// The pod's own name of each claim, and whether the pod has that entry already.
    entries: BTreeMap<String, (String, bool)>,
    /// All claims of the annotation, none of which may be the name of another's entry.
    asked: BTreeSet<String>,
}

impl PodClaims {
    /// Creates an empty set, for the claims that the annotation names.
    pub(crate) fn new(asked: impl IntoIterator<Item = String>) -> Self {
        Self { entries: BTreeMap::new(), asked: asked.into_iter().collect() }
    }

    /// Finds the pod's entry for a claim, or chooses a name for a new one; the error is the problem and the remedy.
    pub(crate) fn add(&mut self, pod: &Value, claim: &str) -> Result<(), (String, String)> {
        if self.entries.contains_key(claim) {
            return Ok(());
        }
        check_name(claim)?;
        // Containers refer to a claim by the pod's name of it, which is the only one that a template gives.
        let of_template = pod::named(pod, LIST, claim);
        if let Some(other) = of_template
            .and_then(|entry| pod::text(entry, "/resourceClaimName"))
            .filter(|other| *other != claim)
        {
            let what = format!(
                "spec.resourceClaims has the name {claim} for the claim {other}, so it is unclear which is meant"
            );
            return Err((what, format!("rename that entry, or write claim/{other}")));
        }
        let is_of_claim = |entry: &&Value| pod::text(entry, "/resourceClaimName") == Some(claim);
        let there = of_template.or_else(|| pod::list(pod, LIST).find(is_of_claim));
        let entry = match there.and_then(|entry| pod::text(entry, "/name")) {
            Some(name) => (name.to_owned(), true),
            None => (self.free_name(pod, claim), false),
        };
        self.entries.insert(claim.to_owned(), entry);
        Ok(())
    }

    /// An entry is looked up by its name first, so that one with the name of another claim would be taken for that.
    fn free_name(&self, pod: &Value, claim: &str) -> String {
        let is_taken = |name: &str| {
            pod::named(pod, LIST, name).is_some()
                || self.entries.values().any(|(entry, _)| entry == name)
                || (name != claim && self.asked.contains(name))
        };
        let numbered = (2..).map(|number: u32| format!("{ENTRY}-{number}"));
        std::iter::once(ENTRY.to_owned()).chain(numbered).find(|name| !is_taken(name)).unwrap_or_default()
    }

    /// Returns the pod's name of a claim that was added.
    pub(crate) fn entry(&self, claim: &str) -> &str {
        self.entries.get(claim).map_or(ENTRY, |(name, _)| name)
    }

    /// Returns what must hold of the claims, which are not looked up, for this pod.
    pub(crate) fn warnings(&self, pod: &Value) -> Vec<String> {
        let warning = |claim| {
            format!(
                "spec.hostUsers is false: claim {claim} must have userNamespaces: always in its DomainConfig, or its directory has \
                 no owner in this pod"
            )
        };
        self.entries.keys().filter(|_| has_own_users(pod)).map(warning).collect()
    }

    /// Returns a warning if the container uses other requests of the claim only, of which none may be the directory.
    pub(crate) fn warning_of(&self, claim: &str, container: &Container<'_>) -> Option<String> {
        let name = self.entry(claim);
        let uses: Vec<_> = pod::list(container.value, "/resources/claims")
            .filter(|each| pod::text(each, "/name") == Some(name))
            .map(|each| pod::text(each, "/request").unwrap_or(REQUEST))
            .collect();
        if uses.is_empty() || uses.contains(&REQUEST) {
            return None;
        }
        Some(format!(
            "container {} uses only {} of claim {claim}: unless that is its request for the directory, the container has no \
             directory; add {{name: {name}, request: {REQUEST}}} to its resources.claims",
            container.name(),
            uses.join(", ")
        ))
    }

    /// Adds the entries that the pod does not have.
    pub(crate) fn add_entries(&self, edit: &mut Edit) -> Result<(), ShapeError> {
        for (claim, (name, _)) in self.entries.iter().filter(|(_, (_, is_there))| !is_there) {
            edit.push(LIST, json!({ "name": name, "resourceClaimName": claim }))?;
        }
        Ok(())
    }

    /// Gives a container the claim. One that has the claim, or a request of it, is left alone.
    pub(crate) fn give(
        &self,
        claim: &str,
        container: &Container<'_>,
        edit: &mut Edit,
    ) -> Result<(), ShapeError> {
        let name = self.entry(claim);
        if pod::named(container.value, "/resources/claims", name).is_some() {
            return Ok(());
        }
        edit.push(&format!("{}/resources/claims", container.path()), json!({ "name": name }))
    }
}

/// Checks what the API server checks, where the annotation can be shown.
pub(crate) fn check_name(claim: &str) -> Result<(), (String, String)> {
    let is_label = |label: &str| {
        label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
            && !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if claim.len() <= MAX_NAME_BYTES && claim.split('.').all(is_label) {
        return Ok(());
    }
    let remedy = format!(
        "write the name of a ResourceClaim of the pod's namespace: lower-case letters, digits, '-' and '.', at most \
         {MAX_NAME_BYTES}"
    );
    let shown: String = claim.chars().take(64).collect();
    Err((format!("{shown:?} is not the name of a ResourceClaim"), remedy))
}

/// Returns where a container has the directory of its claim: the claim says, and the container's own variable repeats it if it
/// is another than the default.
pub(crate) fn directory<'a>(container: &Container<'a>) -> &'a str {
    let variable = pod::named(container.value, "/env", shmesh::DIR_VARIABLE);
    variable.and_then(|variable| pod::text(variable, "/value")).unwrap_or(SHM_DIR)
}

/// Whether the pod has a user namespace.
pub(crate) fn has_own_users(pod: &Value) -> bool {
    pod.pointer("/spec/hostUsers").and_then(Value::as_bool) == Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(entries: Value) -> Value {
        json!({ "spec": { "resourceClaims": entries } })
    }

    fn entry(entries: Value, claim: &str) -> Result<(String, bool), String> {
        let mut claims = PodClaims::default();
        claims.add(&pod(entries), claim).map_err(|(what, _)| what)?;
        Ok(claims.entries[claim].clone())
    }

    #[test]
    fn entries_of_the_pod_are_used() {
        let named = |name: &str, is_there| Ok((name.to_owned(), is_there));
        assert_eq!(entry(json!(null), "du"), named("shmesh", false));
        assert_eq!(entry(json!([{"name": "x", "resourceClaimName": "du"}]), "du"), named("x", true));
        assert_eq!(entry(json!([{"name": "du", "resourceClaimTemplateName": "t"}]), "du"), named("du", true));
        assert_eq!(entry(json!([{"name": "du", "resourceClaimName": "du"}]), "du"), named("du", true));
        let of_others = json!([
            {"name": "shmesh", "resourceClaimName": "gpu"}, {"name": "shmesh-2", "resourceClaimTemplateName": "du"},
        ]);
        assert_eq!(entry(of_others, "du"), named("shmesh-3", false));
        let unclear = entry(json!([{"name": "du", "resourceClaimName": "gpu"}]), "du").unwrap_err();
        assert!(unclear.contains("du for the claim gpu"), "{unclear}");
    }

    #[test]
    fn no_entry_has_the_name_of_another_claim() {
        for asked in [["du", "shmesh"], ["shmesh", "du"], ["du", "shmesh-2"]] {
            let mut claims = PodClaims::new(asked.map(str::to_owned));
            let mut edit = Edit::new(pod(json!([])));
            asked.iter().for_each(|claim| claims.add(&edit.pod, claim).unwrap());
            claims.add_entries(&mut edit).unwrap();
            let mut again = PodClaims::new(asked.map(str::to_owned));
            for claim in asked {
                again.add(&edit.pod, claim).unwrap();
                assert_eq!(again.entries[claim], (claims.entry(claim).to_owned(), true), "{asked:?}");
            }
        }
    }

    #[test]
    fn other_requests_alone_are_warned_of() {
        let warned = |uses: Value| {
            let mut claims = PodClaims::default();
            claims.add(&pod(json!([{"name": "x", "resourceClaimName": "du"}])), "du").unwrap();
            let value = json!({"name": "phy", "resources": {"claims": uses}});
            claims.warning_of("du", &Container { value: &value, is_init: false, index: 0 })
        };
        for fine in [
            json!([]),
            json!([{"name": "x"}]),
            json!([{"name": "x", "request": "gpu"}, {"name": "x", "request": "domain"}]),
            json!([{"name": "y", "request": "gpu"}]),
        ] {
            assert_eq!(warned(fine.clone()), None, "{fine}");
        }
        let warning =
            warned(json!([{"name": "x", "request": "gpu"}, {"name": "x", "request": "slot"}])).unwrap();
        assert!(
            warning.starts_with("container phy uses only gpu, slot of claim du: ")
                && warning.ends_with("add {name: x, request: domain} to its resources.claims"),
            "{warning}"
        );
    }

    #[test]
    fn two_new_claims_have_two_names() {
        let mut claims = PodClaims::default();
        for claim in ["b", "a", "b"] {
            claims.add(&pod(json!([])), claim).unwrap();
        }
        assert_eq!((claims.entry("b"), claims.entry("a")), ("shmesh", "shmesh-2"));
    }

    #[test]
    fn names_are_those_of_objects() {
        for name in ["a", "du-0.cell", "7", &"a".repeat(253)] {
            assert_eq!(check_name(name), Ok(()), "{name}");
        }
        for name in ["", "A", "a_b", "-a", "a-", "a..b", "a/b", "\u{e4}", &"a".repeat(254)] {
            let (what, remedy) = check_name(name).unwrap_err();
            assert!(
                what.contains("is not the name of a ResourceClaim") && remedy.contains("at most 253"),
                "{what}"
            );
        }
    }
}
