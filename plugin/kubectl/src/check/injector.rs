//! Questions about the injector.

use std::time::{Duration, UNIX_EPOCH};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;
use shmesh_injector::Config;
use shmesh_injector::certificate::verify;

use super::certificate::ends;
use super::installation::{is_bound, pods_ready};
use super::state::ClusterState;
use super::{
    CheckAnswer, Outcome, QuestionEntry, QuestionResult, count, failure, ok, skipped, some, warning,
};
use crate::pods::{list, name, namespace, number, text};

/// Days before the end of a certificate at which it should have been renewed long ago.
const RENEWED_DAYS: u64 = 14;

pub(super) const INJECTOR: [QuestionEntry; 10] = [
    ("injector-mode", "pods with links are injected in the cluster", mode),
    ("injector-config", "the injector's configuration is valid and agrees with the plugin's", config),
    ("injector-ready", "all pods of the injector are ready", ready),
    ("injector-replicas", "one replica can fail", replicas),
    ("injector-endpoints", "the Service of the webhook has endpoints", endpoints),
    ("injector-rights", "the injector can renew its certificate", rights),
    ("webhook-service", "the webhook configuration names that Service", service),
    ("webhook-certificate", "the webhook's caBundle and certificate do not expire soon", certificate),
    ("webhook-trust", "the API server accepts the injector's certificate", trust),
    ("webhook-scope", "the webhook refuses pods while it is away, and excludes kube-system", scope),
];

fn mode(state: &ClusterState) -> QuestionResult {
    match state.injector() {
        Ok(_) => return Ok(ok("by a webhook")),
        Err(answer) if answer.outcome != Outcome::Skipped => return Err(answer),
        Err(_) => {}
    }
    let bindings = state.all("mutatingadmissionpolicybindings")?;
    match bindings.iter().find(|binding| text(binding, "/spec/policyName").starts_with("shmesh")) {
        Some(binding) => {
            Ok(ok(format!("by the MutatingAdmissionPolicy {}", text(binding, "/spec/policyName"))))
        }
        None => Err(warning(
            "no webhook and no policy",
            "inject manifests by `kubectl shmesh inject`, or set injector.mode",
        )),
    }
}

/// Reads the configuration of the injector.
pub(super) fn injector_config(state: &ClusterState) -> Result<Result<Config, String>, CheckAnswer> {
    let volumes = "/spec/template/spec/volumes";
    let deployment = state.injector()?;
    let volume = list(deployment, volumes).find(|volume| text(volume, "/name") == "config");
    let yaml =
        state.config_map(volume.map_or("", |volume| text(volume, "/configMap/name")), "injector.yaml")?;
    Ok(Config::from_yaml("injector.yaml", yaml))
}

fn config(state: &ClusterState) -> QuestionResult {
    let remedy = "run helm upgrade, which writes both from the same values";
    let config = injector_config(state)?.map_err(|problem| failure(problem, remedy))?;
    let plugin = state.valid_plugin_config()?;
    let ours: Vec<&str> = config.pools.iter().map(|pool| pool.name.as_str()).collect();
    let theirs: Vec<&str> = plugin.pools.iter().map(|(name, _)| name.as_str()).collect();
    if config.domain != plugin.domain || ours != theirs {
        let seen = format!(
            "domains {} and {}, pools [{}] and [{}]",
            config.domain,
            plugin.domain,
            ours.join(", "),
            theirs.join(", ")
        );
        return Err(failure(seen, remedy));
    }
    Ok(ok(format!("sidecar {}", config.sidecar.image)))
}

fn ready(state: &ClusterState) -> QuestionResult {
    state.injector()?;
    pods_ready(state, "injector", "injector")
}

fn replicas(state: &ClusterState) -> QuestionResult {
    let deployment = state.injector()?;
    let (available, wanted) =
        (number(deployment, "/status/availableReplicas"), number(deployment, "/spec/replicas"));
    let seen = format!("{available} of {wanted} available");
    match available {
        0 => Err(failure(
            seen,
            "pods with links cannot be created: look at the injector's pods, or as a stopgap set injector.failurePolicy=Ignore",
        )),
        1 => Err(warning(seen, "set injector.replicas to 2 or more, or look at the injector's pods")),
        _ => Ok(ok(seen)),
    }
}

fn endpoints(state: &ClusterState) -> QuestionResult {
    let deployment = state.injector()?;
    let of = namespace(deployment);
    let services = state.of_release("services", "injector")?;
    let service = services.first().ok_or_else(|| failure("there is no Service", "run helm upgrade again"))?;
    let slices = state.all("endpointslices")?.iter().filter(|slice| {
        namespace(slice) == of && crate::pods::label(slice, "kubernetes.io/service-name") == name(service)
    });
    let is_ready = |endpoint: &&Value| endpoint.pointer("/conditions/ready") != Some(&Value::Bool(false));
    let ready = slices.flat_map(|slice| list(slice, "/endpoints")).filter(is_ready).count();
    if ready == 0 {
        return Err(failure(
            format!("Service {of}/{} has no ready endpoint", name(service)),
            format!("kubectl get pods,endpointslices --namespace {of}"),
        ));
    }
    Ok(ok(count(ready, "endpoint")))
}

/// Whether the replicas issue their certificate themselves, and no other program does.
fn is_self_issued(deployment: &Value) -> bool {
    let args =
        list(deployment, "/spec/template/spec/containers").flat_map(|container| list(container, "/args"));
    !args.filter_map(Value::as_str).any(|arg| arg.starts_with("--tls-cert"))
}

fn rights(state: &ClusterState) -> QuestionResult {
    let deployment = state.injector()?;
    if !is_self_issued(deployment) {
        return Ok(skipped("cert-manager issues it"));
    }
    let account = text(deployment, "/spec/template/spec/serviceAccountName");
    for kind in ["rolebindings", "clusterrolebindings"] {
        if !is_bound(state, kind, account, "-injector")? {
            let what = if kind == "rolebindings" { "its Secret" } else { "its webhook configuration" };
            return Err(failure(
                format!("service account {account} may not update {what}"),
                "run helm upgrade again",
            ));
        }
    }
    Ok(ok(format!("service account {account}")))
}

fn service(state: &ClusterState) -> QuestionResult {
    let webhook = state.webhook()?;
    let services = state.of_release("services", "injector")?;
    for hook in list(webhook, "/webhooks") {
        let (wanted, of) =
            (text(hook, "/clientConfig/service/name"), text(hook, "/clientConfig/service/namespace"));
        let port = hook.pointer("/clientConfig/service/port").and_then(Value::as_i64).unwrap_or(443);
        let is_named = |service: &&&Value| {
            name(service) == wanted
                && namespace(service) == of
                && list(service, "/spec/ports").any(|one| number(one, "/port") == port)
        };
        if !services.iter().any(|service| is_named(&service)) {
            return Err(failure(
                format!(
                    "{} calls {of}/{wanted}:{port}, which is not a Service of the release",
                    name(webhook)
                ),
                "run helm upgrade again; delete webhook configurations of releases that are gone",
            ));
        }
    }
    Ok(ok(name(webhook)))
}

/// The certificates that the API server trusts.
fn ca_bundle(state: &ClusterState) -> Result<String, CheckAnswer> {
    let webhook = state.webhook()?;
    decoded(text(webhook, "/webhooks/0/clientConfig/caBundle")).ok_or_else(|| {
        failure(
            format!("{} has no caBundle", name(webhook)),
            "the injector sets it (or cert-manager): its log says why not; pods with links cannot be created",
        )
    })
}

/// The certificate that the injector presents, and those between it and the authority.
fn serving_certificate(state: &ClusterState) -> Result<String, CheckAnswer> {
    state.injector()?;
    let found = state.all("secret")?.first().and_then(Value::as_str).and_then(decoded);
    found.ok_or_else(|| {
        let remedy = "the injector writes it (or cert-manager): its log says why not";
        failure("the Secret has no tls.crt", remedy)
    })
}

fn decoded(base64: &str) -> Option<String> {
    let bytes = BASE64_STANDARD.decode(base64).ok()?;
    String::from_utf8(bytes).ok().filter(|text| !text.trim().is_empty())
}

fn certificate(state: &ClusterState) -> QuestionResult {
    let log = "the log of the injector (or of cert-manager) says why it was not renewed";
    let ends = |what, pem: &str| ends(pem).map_err(|error| failure(format!("the {what}: {error}"), log));
    // An earlier authority stays in it for replicas that have not switched yet.
    let authorities = ends("caBundle", &ca_bundle(state)?)?.into_iter().max().unwrap_or(0);
    let chain = ends("certificate", &serving_certificate(state)?)?.into_iter().min().unwrap_or(0);
    let (end, what) = (authorities, "caBundle").min((chain, "certificate"));
    let days = |seconds: u64| count(usize::try_from(seconds / 86_400).unwrap_or(usize::MAX), "day");
    if end <= state.now {
        return Err(failure(format!("the {what} expired {} ago", days(state.now - end)), log));
    }
    let seen = format!("the {what} expires in {}", days(end - state.now));
    if end - state.now < RENEWED_DAYS * 86_400 { Err(warning(seen, log)) } else { Ok(ok(seen)) }
}

fn trust(state: &ClusterState) -> QuestionResult {
    let (bundle, chain, injector) = (ca_bundle(state)?, serving_certificate(state)?, state.injector()?);
    let webhook = state.webhook()?;
    let service = |key| text(webhook, &format!("/webhooks/0/clientConfig/service/{key}"));
    let host = format!("{}.{}.svc", service("name"), service("namespace"));
    let now = UNIX_EPOCH + Duration::from_secs(state.now);
    match verify(&bundle, &chain, std::slice::from_ref(&host), now) {
        Ok(()) => Ok(ok(host)),
        Err(error) => Err(failure(
            format!("it refuses the certificate for {host}: {error:#}"),
            format!(
                "kubectl rollout restart --namespace {} deployment/{}; another program may overwrite the webhook configuration",
                namespace(injector),
                name(injector)
            ),
        )),
    }
}

fn scope(state: &ClusterState) -> QuestionResult {
    let webhook = state.webhook()?;
    let excludes = |hook: &Value| {
        list(hook, "/namespaceSelector/matchExpressions").any(|expression| {
            text(expression, "/operator") == "NotIn"
                && list(expression, "/values").any(|value| value.as_str() == Some("kube-system"))
        })
    };
    for hook in list(webhook, "/webhooks") {
        if !excludes(hook) {
            return Err(failure(
                "pods of kube-system are sent to the webhook",
                "run helm upgrade again: a cluster whose system pods need the webhook may not start",
            ));
        }
        if text(hook, "/failurePolicy") != "Fail" {
            return Err(warning(
                format!("failurePolicy {}", text(hook, "/failurePolicy")),
                "while the webhook is away, pods are created without their links; set injector.failurePolicy=Fail",
            ));
        }
    }
    let excluded =
        list(webhook, "/webhooks/0/namespaceSelector/matchExpressions").flat_map(|one| list(one, "/values"));
    let excluded: Vec<String> = excluded.filter_map(Value::as_str).map(str::to_owned).collect();
    Ok(ok(format!("failurePolicy Fail, excluded: {}", some(&excluded))))
}
