//! ResourceClaims for the links of pods, to be applied by hand.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use shmesh::Side;
use shmesh::config::{PodLink, Position, Scope, pod_links, show_yaml_error};

use crate::config::Config;
use crate::manifest::{ManifestError, OutputFormat, PodName, visit_pods, written};
use crate::plan::{Plan, read};
use crate::pod_claims::{REQUEST, check_name, has_own_users};
use crate::refusal::Refusal;
use crate::share::ShareAnnotation;
use shmesh_sys::quantity::Bytes;

/// The DeviceClass of the chart whose devices are directories.
const CLASS: &str = "shmesh-domain";
/// API version of the parameters, whatever the driver is called.
const API_VERSION: &str = "shmesh.io/v1alpha1";
/// Step of the capacity of a directory.
const STEP: u64 = 2 << 20;
/// Limit of the API server for the parameters of a driver.
const MAX_PARAMETERS_BYTES: usize = 10 << 10;

/// Which objects are written.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ClaimKind {
    /// A ResourceClaim, for pods that name it.
    Claim,
    /// A ResourceClaimTemplate, from which each pod gets a claim of its own.
    Template,
}

/// Writes a claim for the links of each pod and pod template of a text: of those in scope `claim/<name>` under that name, of
/// all others under `name`, or else the name of the object. The pods are checked as [`inject`](crate::inject) checks them, with these
/// scopes. Pods of one claim share it; each pod of a template has its own, so that a template is for the largest of them.
///
/// # Errors
/// A document cannot be parsed, a pod is refused, or no pod asks for links or a claim.
pub fn claims(
    text: &str,
    namespace: &str,
    name: Option<&str>,
    config: &Config,
    kind: ClaimKind,
    form: OutputFormat,
) -> Result<(String, Vec<String>), ManifestError> {
    let mut needs =
        ClaimNeeds { config, name, kind, is_name_used: false, warnings: Vec::new(), claims: BTreeMap::new() };
    let mut refused = Vec::new();
    let mut warnings = visit_pods(text, namespace, config, |pod, named| {
        if let Err(refusal) = needs.add(pod, named) {
            refused.push((named.shown.to_owned(), refusal));
        }
    })?;
    if !refused.is_empty() {
        return Err(ManifestError::Refused(refused));
    }
    if needs.claims.is_empty() {
        return Err(ManifestError::NoClaim {
            links: config.annotation("links"),
            share: config.annotation("share"),
        });
    }
    if let (Some(name), false) = (name, needs.is_name_used) {
        return Err(ManifestError::UnusedClaimName { name: name.to_owned() });
    }
    warnings.append(&mut needs.warnings);
    if kind == ClaimKind::Claim {
        needs.claims.iter().for_each(|((_, claim), need)| warnings.extend(need.without_primary(claim)));
    }
    let objects = needs.claims.iter().map(|((namespace, name), need)| {
        object(namespace, name, need, config, kind)
            .map_err(|what| ManifestError::ClaimTooLarge { claim: name.clone(), what })
    });
    Ok((written(objects.collect::<Result<_, _>>()?, form)?, warnings))
}

/// The links of one claim that pods need.
#[derive(Debug)]
struct ClaimNeed {
    /// By name, as read and as written in the annotation.
    links: BTreeMap<String, (PodLink, Value)>,
    has_own_users: bool,
}

impl ClaimNeed {
    /// Returns what the links need.
    fn bytes(&self) -> u64 {
        self.links.values().map(|(link, _)| link.config.segment_bytes()).fold(0, u64::saturating_add)
    }

    /// Returns a warning for each link of which the pods have the secondary only.
    fn without_primary(&self, claim: &str) -> Vec<String> {
        let is_without = |link: &&PodLink| !link.is_kept_here();
        let warning = |link: &PodLink| {
            format!(
                "claim {claim}: link {} has no primary in these pods, so its bytes are those of the secondary; give the command \
                 the pods of both sides",
                link.config.name
            )
        };
        self.links.values().map(|(link, _)| link).filter(is_without).map(warning).collect()
    }
}

/// The needs of all pods in a text, by claim.
struct ClaimNeeds<'a> {
    config: &'a Config,
    /// Name of the claim for links in no claim.
    name: Option<&'a str>,
    kind: ClaimKind,
    is_name_used: bool,
    warnings: Vec<String>,
    /// By namespace and name of the claim.
    claims: BTreeMap<(String, String), ClaimNeed>,
}

impl ClaimNeeds<'_> {
    fn add(&mut self, pod: &Value, named: PodName<'_>) -> Result<(), Refusal> {
        let annotation = self.config.annotation("links");
        let text = read(pod, &annotation)?;
        let shared = read(pod, &self.config.annotation("share"))?;
        // A pool that is shared needs no claim, and its name may be known elsewhere only.
        if shared.is_some_and(|shared| shared.trim().starts_with("claim/") || text.is_some())
            && let Some(share) = ShareAnnotation::of(pod, self.config)?
        {
            share.check()?;
            if let Some(claim) = share.claim() {
                self.need(pod, named, claim).map_err(|(what, remedy)| {
                    Refusal::new(&share.annotation, Position::default(), "claim", what, remedy)
                })?;
            }
            return Ok(());
        }
        let Some(text) = text else { return Ok(()) };
        let mut links = pod_links(text).map_err(|error| Refusal::of_text(&annotation, &error))?;
        let is_named = |link: &PodLink| matches!(link.scope, Scope::Claim(_));
        let are_named = links.iter().all(is_named);
        for link in links.iter_mut().filter(|link| !is_named(link)) {
            let claim = self.name.unwrap_or(named.object);
            check_name(claim).map_err(|(what, remedy)| {
                let what = format!("link {}: {what}", link.config.name);
                let remedy = self.name.map_or("give the claim a name by -n NAME".to_owned(), |_| remedy);
                Refusal::new(&annotation, link.places.link, "claim", what, remedy)
            })?;
            link.scope = Scope::Claim(claim.to_owned());
            self.is_name_used = true;
        }
        // As the pod will be, with its links in claims.
        let mut plan = Plan::of_links(pod, named.namespace, self.config, links.clone())?;
        if are_named {
            plan.size()?;
        }
        plan.check()?;
        // The same text as it is written, for the parameters.
        let options = serde_saphyr::options! {
            budget: serde_saphyr::budget! { enforce_alias_anchor_ratio: false },
            strict_booleans: true,
            emit_comments: false,
            with_snippet: false,
        };
        let values: Vec<Map<String, Value>> =
            serde_saphyr::from_str_with_options(text, options).map_err(|error| {
                // The refusal has the position.
                let shown = show_yaml_error(&annotation, text, &error);
                let message = shown.lines().next().unwrap_or_default();
                let what = format!("the links cannot be copied into a claim: {message}");
                let remedy = "write each link as a map of keys and plain values";
                let mut refusal = Refusal::new(&annotation, Position::default(), "annotation", what, remedy);
                if let Some(at) = error.location() {
                    (refusal.line, refusal.column) = (at.line(), at.column());
                }
                refusal
            })?;
        let before = match self.kind {
            ClaimKind::Claim => BTreeMap::new(),
            ClaimKind::Template => std::mem::take(&mut self.claims),
        };
        for (link, mut value) in links.into_iter().zip(values) {
            let Scope::Claim(claim) = link.scope.clone() else { continue };
            let link_name = link.config.name.to_string();
            let at = link.places.link;
            let refuse = |(what, remedy): (String, String)| {
                Refusal::new(&annotation, at, "claim", format!("link {link_name}: {what}"), remedy)
            };
            let need = self.need(pod, named, &claim).map_err(refuse)?;
            for key in ["scope", "side", "containers"] {
                value.remove(key);
            }
            if let Some(mode) = value.get_mut("memory").and_then(|memory| memory.get_mut("file_mode")) {
                // YAML takes a mode without quotes for a number.
                *mode = format!("{:04o}", link.config.file_mode).into();
            }
            match need.links.get(&link_name) {
                Some((other, _)) if other.side == Side::Primary && link.side == Side::Primary => {
                    let what = format!("claim {claim} has two primaries of it, and one directory");
                    return Err(refuse((
                        what,
                        "make one of them the secondary, or give them two claims".to_owned(),
                    )));
                }
                // The configuration of the primary counts.
                Some((other, _)) if other.side == Side::Primary => {}
                _ => {
                    need.links.insert(link_name, (link, value.into()));
                }
            }
        }
        if self.kind == ClaimKind::Template {
            self.keep_larger(named, before).map_err(|(what, remedy)| {
                Refusal::new(&annotation, Position::default(), "claim", what, remedy)
            })?;
        }
        Ok(())
    }

    /// Keeps the larger of what this pod needs of each template and what those before it do: each has a claim of its own.
    fn keep_larger(
        &mut self,
        named: PodName<'_>,
        before: BTreeMap<(String, String), ClaimNeed>,
    ) -> Result<(), (String, String)> {
        for ((_, claim), need) in &self.claims {
            self.warnings.extend(
                need.without_primary(claim).iter().map(|warning| format!("{}: {warning}", named.shown)),
            );
        }
        for (key, need) in before {
            match self.claims.get(&key) {
                Some(here) if here.has_own_users != need.has_own_users => return Err(two_mounts(&key.1)),
                Some(here) if here.bytes() > need.bytes() => {}
                _ => drop(self.claims.insert(key, need)),
            }
        }
        Ok(())
    }

    /// Returns what is needed of a claim so far; the error is the problem and the remedy.
    fn need(
        &mut self,
        pod: &Value,
        named: PodName<'_>,
        claim: &str,
    ) -> Result<&mut ClaimNeed, (String, String)> {
        check_name(claim)?;
        let has_own_users = has_own_users(pod);
        let new = || ClaimNeed { links: BTreeMap::new(), has_own_users };
        let need = self.claims.entry((named.namespace.to_owned(), claim.to_owned())).or_insert_with(new);
        if need.has_own_users != has_own_users {
            return Err(two_mounts(claim));
        }
        Ok(need)
    }
}

fn two_mounts(claim: &str) -> (String, String) {
    let what = format!(
        "claim {claim} is for pods with hostUsers: false and for others, and it has one mount for all"
    );
    (what, "give all of its pods the same hostUsers, or two claims".to_owned())
}

fn object(
    namespace: &str,
    name: &str,
    need: &ClaimNeed,
    config: &Config,
    kind: ClaimKind,
) -> Result<Value, String> {
    let ClaimNeed { links, has_own_users } = need;
    let mut request = json!({ "deviceClassName": CLASS });
    let mut devices = json!({});
    let mut parameters = json!({ "apiVersion": API_VERSION, "kind": "DomainConfig" });
    if *has_own_users {
        parameters["userNamespaces"] = "always".into();
    }
    if !links.is_empty() {
        let bytes = need.bytes();
        let bytes = bytes.checked_next_multiple_of(STEP).unwrap_or(bytes);
        request["capacity"] = json!({ "requests": { "bytes": Bytes(bytes).to_string() } });
        parameters["links"] = links.values().map(|(_, value)| value.clone()).collect();
    }
    if *has_own_users || !links.is_empty() {
        let size = parameters.to_string().len();
        if size > MAX_PARAMETERS_BYTES {
            return Err(format!(
                "its {} links are {size} bytes as parameters of the driver, and the limit of Kubernetes is \
                 {MAX_PARAMETERS_BYTES}; give some of them another claim",
                links.len()
            ));
        }
        devices["config"] = json!([
            { "requests": [REQUEST], "opaque": { "driver": config.domain, "parameters": parameters } },
        ]);
    }
    devices["requests"] = json!([{ "name": REQUEST, "exactly": request }]);
    let spec = json!({ "devices": devices });
    let (kind, spec) = match kind {
        ClaimKind::Claim => ("ResourceClaim", spec),
        ClaimKind::Template => ("ResourceClaimTemplate", json!({ "spec": spec })),
    };
    Ok(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": kind,
        "metadata": { "name": name, "namespace": namespace },
        "spec": spec,
    }))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};

    use super::*;

    const PODS: &str = "
apiVersion: v1
kind: Pod
metadata:
  name: l1
  namespace: radio
  annotations:
    shmesh.io/links: |
      - name: a
        scope: claim/du
        side: primary
        containers: [phy]
        pools: {cpu_msg: {pool_len: 64}}
        memory: {file_mode: 0600, huge_pages: off}
      - {name: b, scope: claim/du, side: secondary}
spec: {containers: [{name: phy}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: l2, namespace: radio}
spec:
  template:
    metadata:
      annotations:
        shmesh.io/links: |
          - {name: a, scope: claim/du, side: secondary, pools: {cpu_msg: {pool_len: 8}}}
          - {name: b, scope: claim/du, side: primary, backing: memfd}
    spec: {containers: [{name: mac}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: l3, namespace: radio}
spec:
  template:
    metadata: {annotations: {shmesh.io/links: '- {name: inner}'}}
    spec: {containers: [{name: mac}]}
";

    fn made(text: &str, name: Option<&str>, kind: ClaimKind) -> Vec<Value> {
        let (all, warnings) = made_with_warnings(text, name, kind);
        assert_eq!(warnings, [""; 0]);
        all
    }

    fn made_with_warnings(text: &str, name: Option<&str>, kind: ClaimKind) -> (Vec<Value>, Vec<String>) {
        let (text, warnings) =
            claims(text, "default", name, &Config::default(), kind, OutputFormat::Json).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        let all = match value.get("items") {
            Some(items) => items.as_array().unwrap().clone(),
            None => vec![value],
        };
        (all, warnings)
    }

    fn pod(name: &str, links: &str, spec: &str) -> String {
        format!(
            "---\nkind: Pod\nmetadata: {{name: {name}, annotations: {{shmesh.io/links: '{links}'}}}}\n\
             spec: {{containers: [{{name: a}}]{spec}}}\n"
        )
    }

    fn refused(text: &str) -> String {
        claims(text, "default", None, &Config::default(), ClaimKind::Claim, OutputFormat::Yaml)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn claims_have_the_links_of_all_pods() {
        let all = made(PODS, Some("inside"), ClaimKind::Claim);
        let of = |claim: &Value| (claim["metadata"]["namespace"].clone(), claim["metadata"]["name"].clone());
        assert_eq!(
            all.iter().map(of).collect::<Vec<_>>(),
            [("radio".into(), "du".into()), ("radio".into(), "inside".into())]
        );
        let devices = &all[0]["spec"]["devices"];
        let [config] = &devices["config"].as_array().unwrap()[..] else { panic!("{devices}") };
        assert_eq!(
            (&config["requests"], &config["opaque"]["driver"]),
            (&json!(["domain"]), &json!("shmesh.io"))
        );
        let parameters = &config["opaque"]["parameters"];
        assert_eq!(parameters["apiVersion"], "shmesh.io/v1alpha1");
        assert_eq!(
            parameters["links"],
            json!([
                {"name": "a", "pools": {"cpu_msg": {"pool_len": 64}}, "memory": {"file_mode": "0600", "huge_pages": "off"}},
                {"name": "b", "backing": "memfd"},
            ]),
            "of the primaries"
        );
        // The claim has the links of the annotation.
        let again = pod_links(&parameters["links"].to_string()).unwrap();
        let bytes =
            again.iter().map(|link| link.config.segment_bytes()).sum::<u64>().next_multiple_of(2 << 20);
        assert_eq!(again[0].config.file_mode, 0o600);
        let exactly = &devices["requests"][0]["exactly"];
        assert_eq!(exactly["capacity"]["requests"]["bytes"], Bytes(bytes).to_string());
        assert_eq!(exactly["deviceClassName"], "shmesh-domain");
    }

    #[test]
    fn objects_are_of_the_api() {
        for claim in made(PODS, None, ClaimKind::Claim) {
            let typed: ResourceClaim = serde_json::from_value(claim.clone()).unwrap();
            assert_eq!(serde_json::to_value(&typed).unwrap(), claim, "no key is unknown");
        }
        for template in made_with_warnings(PODS, None, ClaimKind::Template).0 {
            let typed: ResourceClaimTemplate = serde_json::from_value(template.clone()).unwrap();
            assert_eq!(serde_json::to_value(&typed).unwrap(), template, "no key is unknown");
        }
    }

    #[test]
    fn names_come_from_scope_option_and_object() {
        let names = |name| {
            let all = made(PODS, name, ClaimKind::Claim);
            all.iter().map(|claim| claim["metadata"]["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(names(None), ["du", "l3"]);
        let all = made(PODS, Some("du"), ClaimKind::Claim);
        assert_eq!(
            all[0]["spec"]["devices"]["config"][0]["opaque"]["parameters"]["links"][2]["name"],
            "inner"
        );
    }

    #[test]
    fn shared_claim_without_links_has_the_default_size() {
        let pod = "kind: Pod\nmetadata: {name: p, annotations: {shmesh.io/share: claim/triton}}\nspec: {containers: [{name: a}]}\n";
        let [claim] = &made(pod, None, ClaimKind::Claim)[..] else { panic!() };
        assert_eq!(claim["metadata"], json!({"name": "triton", "namespace": "default"}));
        assert_eq!(
            claim["spec"]["devices"],
            json!({"requests": [{"name": "domain", "exactly": {"deviceClassName": "shmesh-domain"}}]})
        );
    }

    #[test]
    fn links_with_comments_and_anchors_are_copied() {
        let mut links = "- {name: a, pools: &small {cpu_msg: {pool_len: 16}}}\n".to_owned();
        links += &"# no comment\n".repeat(40);
        (0..150).for_each(|at| links += &format!("- {{name: b{at}, pools: *small}}\n"));
        let pod = json!({
            "kind": "Pod",
            "metadata": {"name": "p", "annotations": {"shmesh.io/links": links}},
            "spec": {"containers": [{"name": "a"}]},
        });
        let [claim] = &made(&pod.to_string(), None, ClaimKind::Claim)[..] else { panic!() };
        let copied = &claim["spec"]["devices"]["config"][0]["opaque"]["parameters"]["links"];
        assert_eq!(copied.as_array().unwrap().len(), 151);
        assert_eq!(copied[150], json!({"name": "b99", "pools": {"cpu_msg": {"pool_len": 16}}}));
    }

    #[test]
    fn link_without_primary_is_warned_of() {
        let secondary = pod(
            "p",
            "[{name: a, scope: claim/du, side: secondary}, {name: b, scope: claim/du, side: primary}]",
            "",
        );
        let (_, warnings) = made_with_warnings(&secondary, None, ClaimKind::Claim);
        assert!(
            matches!(&warnings[..], [one] if one.starts_with("claim du: link a has no primary in these pods")),
            "{warnings:?}"
        );
        let primary = pod("q", "[{name: a, scope: claim/du, side: primary}]", "");
        made(&(secondary.clone() + &primary), None, ClaimKind::Claim);
        let (_, warnings) = made_with_warnings(&(secondary + &primary), None, ClaimKind::Template);
        assert!(
            matches!(&warnings[..], [one] if one.starts_with("Pod default/p: claim du: link a has no primary")),
            "the claim of each pod is its own: {warnings:?}"
        );
    }

    #[test]
    fn template_is_for_the_largest_of_its_pods() {
        let of = |name: &str, len: u32| {
            pod(
                name,
                &format!(
                    "[{{name: a, scope: claim/ipc, side: primary, pools: {{cpu_msg: {{pool_len: {len}}}}}}}]"
                ),
                "",
            )
        };
        let (small, large) = (of("p", 16), of("q", 4096));
        let bytes = |text: &str| {
            let [template] = &made(text, None, ClaimKind::Template)[..] else { panic!() };
            let devices = &template["spec"]["spec"]["devices"];
            let len =
                devices["config"][0]["opaque"]["parameters"]["links"][0]["pools"]["cpu_msg"]["pool_len"]
                    .clone();
            (devices["requests"][0]["exactly"]["capacity"]["requests"]["bytes"].clone(), len)
        };
        assert_eq!(bytes(&(small.clone() + &large)), bytes(&large));
        assert_eq!(bytes(&(large.clone() + &small)), bytes(&large));
        assert_ne!(bytes(&small), bytes(&large));
        assert!(refused(&(small + &large)).contains("has two primaries of it"));
        let share = |name: &str, users| {
            format!(
                "---\nkind: Pod\nmetadata: {{name: {name}, annotations: {{shmesh.io/share: claim/ipc}}}}\n\
                 spec: {{hostUsers: {users}, containers: [{{name: a}}]}}\n"
            )
        };
        let text = share("p", false) + &large;
        let error =
            claims(&text, "default", None, &Config::default(), ClaimKind::Template, OutputFormat::Yaml);
        assert!(error.unwrap_err().to_string().contains("give all of its pods the same hostUsers"));
    }

    #[test]
    fn pods_that_injector_refuses_get_no_claim() {
        let in_claim = "- {name: a, scope: claim/du, side: primary}";
        for (text, words) in [
            (pod("p", in_claim, ", hostIPC: true"), "remove hostIPC"),
            (pod("p", "- name: a", ", hostIPC: true"), "remove hostIPC"),
            (pod("p", "- {name: a, containers: [x]}", ""), "there is no container \"x\""),
            (
                pod("p", in_claim, ", resourceClaims: [{name: du, resourceClaimName: gpu}]"),
                "du for the claim gpu",
            ),
            (
                pod("p", "- name: a", ", resourceClaims: [{name: p, resourceClaimName: gpu}]"),
                "p for the claim gpu",
            ),
            (
                pod("p", in_claim, "").replace("annotations: {", "annotations: {shmesh.io/share: claim/du, "),
                "is there too",
            ),
            (
                pod("p", in_claim, "").replace("annotations: {", "annotations: {shmesh.io/size: 64Mi, "),
                "no link has scope pod",
            ),
        ] {
            let said = refused(&text);
            assert!(said.starts_with("Pod default/p: ") && said.contains(words), "{text}: {said}");
        }
        // Sizes and pools of today's scope are not in the way.
        let sized =
            pod("p", "- name: a", "").replace("annotations: {", "annotations: {shmesh.io/size: 64Mi, ");
        made(&sized, None, ClaimKind::Claim);
        made(&pod("p", "- {name: a, scope: pool/elsewhere, side: primary}", ""), None, ClaimKind::Claim);
        made(
            &(pod("p", "- name: a", "")
                + "---\nkind: Pod\nmetadata: {name: q, annotations: {shmesh.io/share: elsewhere}}\n"),
            None,
            ClaimKind::Claim,
        );
    }

    #[test]
    fn invalid_or_unused_names_have_a_remedy() {
        for object in ["{generateName: du-", "{name: Du", "{namespace: x"] {
            let text = pod("p", "- name: a", "").replace("{name: p", object);
            let said = refused(&text);
            assert!(said.contains("give the claim a name by -n NAME"), "{said}");
            made(&text, Some("du"), ClaimKind::Claim);
        }
        let text = pod("p", "- {name: a, scope: claim/du, side: primary}", "");
        let error =
            claims(&text, "default", Some("du"), &Config::default(), ClaimKind::Claim, OutputFormat::Yaml);
        assert!(error.unwrap_err().to_string().starts_with("-n du: every link names its claim"));
    }

    #[test]
    fn pods_with_user_namespaces_get_another_mount() {
        let pod = |name: &str, users| {
            format!(
                "---\nkind: Pod\nmetadata: {{name: {name}, annotations: {{shmesh.io/share: claim/du}}}}\n\
                 spec: {{hostUsers: {users}, containers: [{{name: a}}]}}\n"
            )
        };
        let [claim] = &made(&(pod("p", false) + &pod("q", false)), None, ClaimKind::Claim)[..] else {
            panic!()
        };
        let parameters = &claim["spec"]["devices"]["config"][0]["opaque"]["parameters"];
        assert_eq!(
            parameters,
            &json!({"apiVersion": "shmesh.io/v1alpha1", "kind": "DomainConfig", "userNamespaces": "always"})
        );
        assert!(
            refused(&(pod("p", false) + &pod("q", true))).contains("give all of its pods the same hostUsers")
        );
    }

    #[test]
    fn impossible_claims_are_refused() {
        let two = PODS.replace(
            "{name: b, scope: claim/du, side: secondary}",
            "{name: b, scope: claim/du, side: primary}",
        );
        let said = refused(&two);
        assert!(said.starts_with("Deployment radio/l2: metadata.annotations[shmesh.io/links]: link b: claim du has two primaries"), "{said}");
        let pod = |links: &str| {
            format!(
                "kind: Pod\nmetadata: {{name: P, annotations: {{shmesh.io/links: '{links}'}}}}\nspec: {{containers: [{{name: a}}]}}\n"
            )
        };
        assert!(refused(&pod("- name: a")).contains("\"P\" is not the name of a ResourceClaim"));
        assert!(refused(&pod("- name: a/b")).contains("(line 1, column 9)"));
        assert!(refused("kind: ConfigMap\n").contains("no pod has the annotation shmesh.io/links"));
        // 48 links with every key are more than the API server takes.
        let keys = "pools: {cpu_msg: {buf_size_bytes: 4096, pool_len: 16}, cpu_data: {buf_size_bytes: 65536, pool_len: 16}, \
                    cpu_large: {buf_size_bytes: 131072, pool_len: 16}}, ring: {len: 64, mode: spsc}, memory: {prefault: false}, \
                    notify: {enabled: true, spin_us: 50}";
        let many: String = (0..48)
            .map(|at| format!("\n    - {{name: l{at}, scope: claim/du, side: primary, {keys}}}"))
            .collect();
        let text = format!(
            "kind: Pod\nmetadata:\n  name: p\n  annotations:\n   shmesh.io/links: |{many}\nspec: {{containers: [{{name: a}}]}}\n"
        );
        let said = refused(&text);
        assert!(
            said.starts_with("claim du: its 48 links are ")
                && said.contains("the limit of Kubernetes is 10240; give some"),
            "{said}"
        );
    }
}
