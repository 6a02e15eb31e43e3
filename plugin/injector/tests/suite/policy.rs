//! The chart's policies in CEL (`helm/policy`), interpreted: for what they support they give the pod that [`inject`] gives, and what they refuse has
//! a message.
//!
//! The interpreter is `cel`; what Kubernetes adds to the language is added here: `quantity`, objects, and the two kinds of
//! patches. It checks no types, so that the API server takes the expressions is not shown here.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use crate::support::{config, files, pod_of, pods, violations};
use cel::common::ast::{EntryExpr, Expr, IdedEntryExpr, IdedExpr, LiteralValue, MapEntryExpr, MapExpr};
use cel::{Context, Env, Program};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use shmesh_injector::{Bytes, Config, bytes_of, inject};

/// Objects of Kubernetes are maps here.
fn untyped(mut expr: IdedExpr) -> IdedExpr {
    let each = |expr: &mut IdedExpr| *expr = untyped(std::mem::take(expr));
    match &mut expr.expr {
        Expr::Call(call) => {
            call.target.iter_mut().for_each(|target| each(target));
            call.args.iter_mut().for_each(each);
        }
        Expr::List(list) => list.elements.iter_mut().for_each(each),
        Expr::Select(select) => each(&mut select.operand),
        Expr::Comprehension(c) => {
            for part in
                [&mut c.iter_range, &mut c.accu_init, &mut c.loop_cond, &mut c.loop_step, &mut c.result]
            {
                each(part);
            }
        }
        Expr::Map(map) => {
            for entry in &mut map.entries {
                if let EntryExpr::MapEntry(entry) = &mut entry.expr {
                    each(&mut entry.value);
                }
            }
        }
        Expr::Struct(object) => {
            let entries = std::mem::take(&mut object.entries).into_iter().map(|entry| {
                let EntryExpr::StructField(field) = entry.expr else { panic!("a field") };
                let name = LiteralValue::String(field.field.as_str().to_owned().into());
                let key = IdedExpr { id: 0, expr: Expr::Literal(name) };
                let entry = MapEntryExpr { key, value: untyped(field.value), optional: field.optional };
                IdedEntryExpr { id: 0, expr: EntryExpr::MapEntry(entry) }
            });
            expr.expr = Expr::Map(MapExpr { entries: entries.collect() });
        }
        _ => {}
    }
    expr
}

/// A document whose whole numbers are signed, as in the API.
struct SignedObject<'a>(&'a Value);

impl Serialize for SignedObject<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Array(list) => to.collect_seq(list.iter().map(SignedObject)),
            Value::Object(map) => to.collect_map(map.iter().map(|(key, value)| (key, SignedObject(value)))),
            Value::Number(number) => to.serialize_i64(number.as_i64().unwrap()),
            other => other.serialize(to),
        }
    }
}

thread_local! {
    static ENV: Arc<Env> = {
        let mut env = Env::stdlib();
        cel::extensions::strings(&mut env).unwrap();
        Arc::new(env)
    };
    static COMPILED: RefCell<HashMap<String, Rc<IdedExpr>>> = RefCell::default();
}

/// Compiles an expression when it is first used.
fn compiled(expression: &str) -> Rc<IdedExpr> {
    let compile = || {
        let program = Program::compile(expression).unwrap_or_else(|error| panic!("{expression}: {error}"));
        Rc::new(untyped(program.expression().clone()))
    };
    COMPILED.with_borrow_mut(|all| Rc::clone(all.entry(expression.to_owned()).or_insert_with(compile)))
}

/// Evaluates as the API server does with these variables.
fn evaluate(expression: &str, object: &Value, variables: &Value) -> Value {
    evaluate_with(expression, &[("object", object), ("variables", variables)])
}

fn evaluate_with(expression: &str, names: &[(&str, &Value)]) -> Value {
    let mut context = Context::with_env(ENV.with(Arc::clone));
    let whole =
        |text: Arc<String>| bytes_of(&Value::from(text.as_str())).and_then(|bytes| i64::try_from(bytes).ok());
    context.add_function("isQuantity", move |text: Arc<String>| whole(text).is_some()).unwrap();
    context.add_function("quantity", move |text: Arc<String>| whole(text).unwrap()).unwrap();
    let compare =
        |cel::extractors::This(this): cel::extractors::This<i64>, other: i64| (this - other).signum();
    context.add_function("compareTo", compare).unwrap();
    context
        .add_function("asInteger", |cel::extractors::This(this): cel::extractors::This<i64>| this)
        .unwrap();
    #[expect(clippy::cast_precision_loss, reason = "bytes below 2^53")]
    let float = |cel::extractors::This(this): cel::extractors::This<i64>| this as f64;
    context.add_function("asApproximateFloat", float).unwrap();
    for (name, value) in names {
        context.add_variable(*name, SignedObject(value)).unwrap();
    }
    let value = cel::Value::resolve(&compiled(expression), &context)
        .unwrap_or_else(|error| panic!("{expression}: {error}"));
    value.json().unwrap()
}

/// A list of server-side apply is a map by this key.
fn merge_key(list: &str) -> Option<&'static str> {
    match list {
        "volumes" | "containers" | "env" => Some("name"),
        "volumeMounts" => Some("mountPath"),
        _ => None,
    }
}

fn apply(target: &mut Value, name: &str, patch: Value) {
    match (target, patch) {
        (Value::Object(target), Value::Object(patch)) => {
            assert_ne!(name, "fieldRef", "an ApplyConfiguration may not set an atomic structure");
            for (key, value) in patch {
                let empty = if value.is_array() { json!([]) } else { json!({}) };
                // An empty list in an apply adds nothing.
                if value != json!([]) {
                    apply(target.entry(&key).or_insert(empty), &key, value);
                }
            }
        }
        (Value::Array(target), Value::Array(patch)) if merge_key(name).is_some() => {
            let key = merge_key(name).unwrap();
            for item in patch {
                match target.iter_mut().find(|there| there[key] == item[key]) {
                    Some(there) => apply(there, "", item),
                    None => target.push(item),
                }
            }
        }
        (target, patch) => {
            assert!(!patch.is_array(), "{name}: an ApplyConfiguration may not set an atomic list");
            *target = patch;
        }
    }
}

/// The documents of a policy of the chart, with the values that its template fills in.
fn documents(file: &str, marks: &[(&str, &str)]) -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../helm/policy/");
    let text = std::fs::read_to_string(format!("{path}{file}")).unwrap();
    let text = marks.iter().fold(text, |text, (mark, value)| text.replace(mark, value));
    serde_saphyr::from_multiple(&text).unwrap()
}

struct Policies {
    mutating: Value,
    validating: Vec<Value>,
}

impl Policies {
    fn of(config: &Config) -> Self {
        let sidecar = &config.sidecar;
        let (overhead, port) = (sidecar.memory.0.to_string(), sidecar.admin_port.to_string());
        let documents = documents(
            "policy.yaml",
            &[
                ("@DOMAIN@", &config.domain),
                ("@NAMESPACE@", "shmesh"),
                ("@IMAGE@", &sidecar.image),
                ("@PULL@", &sidecar.image_pull_policy),
                ("@OVERHEAD@", &overhead),
                ("@CPU@", &sidecar.cpu),
                ("@ADDRESS@", &sidecar.admin_address),
                ("@PORT@", &port),
                ("@LOG@", &sidecar.log),
                ("@AGENT@", &config.agent_resource),
            ],
        );
        let of_kind = |kind: &str| -> Vec<Value> {
            documents.iter().filter(|document| document["kind"] == kind).cloned().collect()
        };
        let [mutating] = of_kind("MutatingAdmissionPolicy").try_into().unwrap();
        Self { mutating, validating: of_kind("ValidatingAdmissionPolicy") }
    }

    fn variables(policy: &Value, object: &Value) -> Value {
        let mut variables = Map::new();
        for variable in policy["spec"]["variables"].as_array().into_iter().flatten() {
            let so_far = Value::Object(variables.clone());
            let value = evaluate(variable["expression"].as_str().unwrap(), object, &so_far);
            variables.insert(variable["name"].as_str().unwrap().to_owned(), value);
        }
        Value::Object(variables)
    }

    fn matches(policy: &Value, object: &Value) -> bool {
        let conditions = policy["spec"]["matchConditions"].as_array().unwrap();
        conditions
            .iter()
            .all(|condition| evaluate(condition["expression"].as_str().unwrap(), object, &json!({})) == true)
    }

    /// The pod, or all messages.
    fn admit(&self, pod: &Value) -> Result<Value, Vec<String>> {
        let mut object = pod.clone();
        if Self::matches(&self.mutating, &object) {
            for mutation in self.mutating["spec"]["mutations"].as_array().unwrap() {
                // Each mutation sees what those before did.
                let variables = Self::variables(&self.mutating, &object);
                if mutation["patchType"] == "ApplyConfiguration" {
                    let expression = mutation["applyConfiguration"]["expression"].as_str().unwrap();
                    let patch = evaluate(expression, &object, &variables);
                    apply(&mut object, "", patch);
                } else {
                    let patch =
                        evaluate(mutation["jsonPatch"]["expression"].as_str().unwrap(), &object, &variables);
                    let patch: json_patch::Patch = serde_json::from_value(patch).unwrap();
                    json_patch::patch(&mut object, &patch).unwrap();
                }
            }
        }
        let broken: Vec<_> =
            self.validating.iter().flat_map(|policy| Self::broken(policy, &object)).collect();
        if broken.is_empty() { Ok(object) } else { Err(broken) }
    }

    /// The messages of the rules of a policy that the pod breaks.
    fn broken(policy: &Value, object: &Value) -> Vec<String> {
        if !Self::matches(policy, object) {
            return Vec::new();
        }
        let variables = Self::variables(policy, object);
        let validations = policy["spec"]["validations"].as_array().unwrap().iter();
        validations
            // The API server takes an evaluation error for a refusal, and there should be none after the first.
            .scan(true, |goes_on, validation| {
                let holds = evaluate(validation["expression"].as_str().unwrap(), object, &variables) == true;
                let looked = *goes_on;
                *goes_on &= holds;
                looked.then(|| (!holds).then(|| validation["message"].as_str().unwrap().to_owned()))
            })
            .flatten()
            .collect()
    }
}

/// With quantities as numbers of bytes, whichever way they are written.
fn normal(value: &Value) -> Value {
    match value {
        Value::Array(list) => list.iter().map(normal).collect(),
        Value::Object(map) => {
            let of = |(key, value): (&String, &Value)| {
                let is_size = ["sizeLimit", "memory"].contains(&key.as_str());
                let value = bytes_of(value).filter(|_| is_size).map_or_else(|| normal(value), Value::from);
                (key.clone(), value)
            };
            map.iter().map(of).collect()
        }
        other => other.clone(),
    }
}

fn pod(annotations: &Value, spec: &Value) -> Value {
    let mut all: BTreeMap<String, Value> = [("shmesh.io/links".to_owned(), json!("- name: a\n"))].into();
    all.extend(annotations.as_object().unwrap().clone());
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "annotations": all}, "spec": spec})
}

const SIZE: &str = "shmesh.io/size";

#[test]
fn policy_and_webhook_produce_the_same_pod() {
    let config = Config::default();
    let policies = Policies::of(&config);
    let secure = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    let container = |name: &str| json!({"name": name, "image": "i", "securityContext": secure});
    let with = |more: Value| {
        let mut container = container("a");
        container.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        container
    };
    let of_pod =
        json!({"runAsUser": 1000, "runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}});
    let spec = |containers: Value| json!({"securityContext": of_pod, "containers": containers});
    let full = json!({"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "2", "memory": "1Gi"}});
    let burst = json!({"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}});
    let mut grouped = spec(json!([container("a"), container("b")]));
    grouped["securityContext"]["fsGroup"] = 7.into();
    let mut with_init = spec(json!([container("a")]));
    with_init["initContainers"] = json!([container("prepare")]);
    with_init["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    let cases = [
        (json!({SIZE: "32Mi"}), spec(json!([container("a")]))),
        (json!({SIZE: "96Mi"}), spec(json!([container("a"), container("b")]))),
        (json!({SIZE: "5Gi"}), spec(json!([with(json!({"resources": full}))]))),
        (json!({SIZE: "100000001"}), spec(json!([with(json!({"resources": burst})), container("b")]))),
        (
            json!({SIZE: "64M", "shmesh.io/containers": " b , c"}),
            spec(json!([container("a"), container("b"), container("c")])),
        ),
        (
            json!({SIZE: "32Mi"}),
            spec(json!([with(
                json!({"env": [{"name": "A", "value": "1"}], "volumeMounts": [{"name": "v", "mountPath": "/v"}]})
            )])),
        ),
        (
            json!({SIZE: "32Mi"}),
            spec(json!([with(json!({"env": [{"name": "SHMESH_DIR", "value": "/mine"}]}))])),
        ),
        (json!({SIZE: "32Mi", "shmesh.io/links": "- name: a\n  memory: { file_mode: '0660' }\n"}), grouped),
        (json!({SIZE: "32Mi"}), with_init),
    ];
    for (annotations, spec) in cases {
        let pod = pod(&annotations, &spec);
        let by_policy = policies.admit(&pod).unwrap_or_else(|broken| panic!("{pod}: {broken:?}"));
        let by_webhook = inject(&pod, "default", &config).unwrap();
        assert_eq!(normal(&by_policy), normal(&by_webhook.pod), "{annotations}");
        assert_eq!(violations(&by_policy), [""; 0]);
        assert_eq!(policies.admit(&by_policy).unwrap(), by_policy, "once is twice");
        // One after the other, as when both are on.
        assert!(inject(&by_policy, "default", &config).unwrap().operations.is_empty());
        assert_eq!(policies.admit(&by_webhook.pod).unwrap(), by_webhook.pod);
    }
}

#[test]
fn changed_pool_configuration_is_applied() {
    let mut config =
        Config { domain: "mesh.example".into(), agent_resource: "identity".into(), ..Config::default() };
    config.sidecar.image = "registry.example/sidecar:7".into();
    (config.sidecar.cpu, config.sidecar.memory, config.sidecar.admin_port) =
        ("1".into(), Bytes(64 << 20), 9000);
    let pod = json!({
        "metadata": {"annotations": {"mesh.example/links": "- name: a", "mesh.example/size": "64Mi"}},
        "spec": {"securityContext": {"runAsUser": 1}, "containers": [{"name": "a"}]},
    });
    let by_policy = Policies::of(&config).admit(&pod).unwrap();
    assert_eq!(normal(&by_policy), normal(&inject(&pod, "default", &config).unwrap().pod));
}

#[test]
fn unsupported_pods_are_rejected_with_a_message() {
    let policies = Policies::of(&Config::default());
    let plain = json!({"securityContext": {"runAsUser": 1}, "containers": [{"name": "a"}]});
    let with = |key: &str, value: Value| {
        let mut spec = plain.clone();
        spec[key] = value;
        spec
    };
    let sized = json!({SIZE: "32Mi"});
    let links = |text: &str| json!({SIZE: "32Mi", "shmesh.io/links": text});
    for (annotations, spec, words) in [
        (json!({}), plain.clone(), "write the size that the links need"),
        // What needs the webhook is said before a size is asked for, which would not help.
        (json!({"shmesh.io/links": "- name: a\n  scope: pool/radio\n"}), plain.clone(), "need the webhook"),
        (json!({SIZE: "much"}), plain.clone(), "not a size"),
        (json!({SIZE: "0"}), plain.clone(), "not a size"),
        (links("- name: a\n  scope: pool/radio\n"), plain.clone(), "need the webhook"),
        (links("- { \"name\": \"a\", \"containers\": [\"a\"] }"), plain.clone(), "need the webhook"),
        (links("- name: a\n  backing: memfd\n"), plain.clone(), "need the webhook"),
        (sized.clone(), with("hostPID", json!(true)), "remove hostPID"),
        (sized.clone(), with("hostIPC", json!(true)), "remove hostIPC"),
        (sized.clone(), with("initContainers", json!([{"name": "shmesh"}])), "rename that"),
        (json!({SIZE: "32Mi", "shmesh.io/containers": "b"}), plain.clone(), "no container of that name"),
        (
            sized.clone(),
            with(
                "containers",
                json!([{"name": "a", "volumeMounts": [{"name": "v", "mountPath": "/dev/shm"}]}]),
            ),
            "mounts something else",
        ),
        (
            sized.clone(),
            with("containers", json!([{"name": "a", "resources": {"limits": {"shmesh.io/shm": "1"}}}])),
            "two things at /dev/shm",
        ),
        (
            sized.clone(),
            with("containers", json!([{"name": "a", "securityContext": {"runAsUser": 2}}])),
            "one user owns the files",
        ),
        (sized, with("securityContext", json!({})), "one user owns the files"),
    ] {
        let pod = pod(&annotations, &spec);
        let broken = policies.admit(&pod).expect_err(words);
        assert!(broken.iter().any(|message| message.contains(words)), "{pod}: {broken:?}");
        assert!(
            broken.iter().all(|message| message.contains("; ") && message.ends_with("(line 1, column 1)"))
        );
    }
}

#[test]
fn container_without_requests_gets_nothing() {
    let policies = Policies::of(&Config::default());
    for file in files(&pods(), "nothing.in.yaml") {
        let object: Value = serde_saphyr::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        assert_eq!(policies.admit(pod_of(&object)).unwrap(), object);
    }
}

#[test]
fn shared_pool_needs_the_webhook_or_injection_by_hand() {
    let policies = Policies::of(&Config::default());
    let config: Config = serde_json::from_value(json!({"pools": [{"name": "radio"}]})).unwrap();
    let pod = json!({
        "metadata": {"annotations": {"shmesh.io/share": "radio"}},
        "spec": {"containers": [{"name": "a"}, {"name": "b"}]},
    });
    let [message] = policies.admit(&pod).unwrap_err().try_into().unwrap();
    assert!(message.contains("needs the webhook") && message.ends_with("(line 1, column 1)"), "{message}");
    let by_hand = inject(&pod, "default", &config).unwrap().pod;
    assert_eq!(policies.admit(&by_hand).unwrap(), by_hand);
}

#[test]
fn claims_need_the_webhook_or_injection_by_hand() {
    let policies = Policies::of(&Config::default());
    let pod = |annotations: Value| {
        let spec = json!({"securityContext": {"runAsUser": 1}, "containers": [{"name": "a"}, {"name": "b"}]});
        json!({"metadata": {"annotations": annotations}, "spec": spec})
    };
    let links = |side: &str| format!("- {{ name: a, scope: claim/du, side: {side}, containers: [b] }}");
    for (annotations, words) in [
        (json!({"shmesh.io/links": links("primary")}), "scope claim needs the webhook"),
        (json!({"shmesh.io/links": links("secondary")}), "scope claim needs the webhook"),
        (
            json!({"shmesh.io/links": r#"[{"name": "a", "scope": "claim/du", "side": "primary"}]"#}),
            "scope claim needs",
        ),
        (json!({"shmesh.io/share": "claim/du"}), "a shared claim needs the webhook"),
        (json!({"shmesh.io/share": " claim/du\n"}), "a shared claim needs the webhook"),
    ] {
        let asked = pod(annotations);
        let broken = policies.admit(&asked).expect_err(words);
        assert!(broken[0].contains(words) && broken[0].ends_with("(line 1, column 1)"), "{broken:?}");
        let mut sized = asked.clone();
        sized["metadata"]["annotations"][SIZE] = "32Mi".into();
        policies.admit(&sized).expect_err("a directory of the pod's own is not what it asked for");
        let by_hand = inject(&asked, "default", &Config::default()).unwrap().pod;
        assert_eq!(policies.admit(&by_hand).unwrap(), by_hand);
        // The claim is in the pod, but in no container.
        let mut unused = asked.clone();
        unused["spec"]["resourceClaims"] = by_hand["spec"]["resourceClaims"].clone();
        policies.admit(&unused).expect_err(words);
    }
    // Another claim, which a container uses, is not the one of the links.
    for side in ["primary", "secondary"] {
        for other in ["gpu", "d", "du-2", "xdu"] {
            let mut with_other = pod(json!({"shmesh.io/links": links(side)}));
            with_other["spec"]["resourceClaims"] = json!([{"name": "shmesh", "resourceClaimName": other}]);
            with_other["spec"]["containers"][1]["resources"] = json!({"claims": [{"name": "shmesh"}]});
            let broken = policies.admit(&with_other).expect_err(other);
            assert!(broken[0].contains("scope claim needs the webhook"), "{broken:?}");
        }
    }
    let by_hand = |side| {
        let asked = pod(json!({"shmesh.io/links": links(side)}));
        inject(&asked, "default", &Config::default()).unwrap().pod
    };
    let mut no_sidecar = by_hand("primary");
    no_sidecar["spec"].as_object_mut().unwrap().remove("initContainers");
    let broken = policies.admit(&no_sidecar).unwrap_err();
    assert!(matches!(&broken[..], [one] if one.contains("the sidecar was not injected")), "{broken:?}");
    let claim = json!([{"name": "shmesh"}]);
    for (path, value, words) in [
        ("hostPID", json!(true), "remove hostPID"),
        ("hostIPC", json!(true), "remove hostIPC"),
        (
            "containers",
            json!([{"name": "b", "resources": {"claims": claim}, "volumeMounts": [{"name": "v", "mountPath": "/dev/shm"}]}]),
            "mounts something else",
        ),
        (
            "containers",
            json!([{"name": "b", "resources": {"claims": claim, "limits": {"shmesh.io/shm": "1"}}}]),
            "two things at /dev/shm",
        ),
    ] {
        let mut changed = by_hand("secondary");
        changed["spec"][path] = value;
        let broken = policies.admit(&changed).expect_err(words);
        assert!(matches!(&broken[..], [one] if one.contains(words)), "{words}: {broken:?}");
    }
    let mut elsewhere = by_hand("secondary");
    elsewhere["spec"]["containers"][1]["volumeMounts"] = json!([{"name": "v", "mountPath": "/dev/shm"}]);
    elsewhere["spec"]["containers"][1]["env"] = json!([{"name": "SHMESH_DIR", "value": "/ipc"}]);
    assert_eq!(policies.admit(&elsewhere).unwrap(), elsewhere);
    let mut of_template = pod(json!({"shmesh.io/share": "claim/ipc"}));
    of_template["spec"]["resourceClaims"] = json!([{"name": "ipc", "resourceClaimTemplateName": "t"}]);
    let by_hand = inject(&of_template, "default", &Config::default()).unwrap().pod;
    assert_eq!(policies.admit(&by_hand).unwrap(), by_hand);
}

#[test]
fn library_needs_the_webhook_or_injection_by_hand() {
    let policies = Policies::of(&Config::default());
    let config: Config = serde_json::from_value(json!({"pools": [{"name": "radio"}]})).unwrap();
    let pod = |annotations: Value| json!({"metadata": {"annotations": annotations}, "spec": {"containers": [{"name": "a"}]}});
    let rejected = |pod: &Value, words: &str| {
        let [message] = policies.admit(pod).expect_err(words).try_into().unwrap();
        assert!(message.contains(words) && message.ends_with("(line 1, column 1)"), "{message}");
    };
    rejected(&pod(json!({"shmesh.io/as": "posix"})), "the pod has no annotation shmesh.io/share");
    let asked = pod(json!({"shmesh.io/share": "radio", "shmesh.io/as": "posix"}));
    rejected(&asked, "a shared pool needs the webhook");
    // The pool was added, and the annotation later.
    let mut only_pool = inject(&pod(json!({"shmesh.io/share": "radio"})), "default", &config).unwrap().pod;
    only_pool["metadata"]["annotations"]["shmesh.io/as"] = "posix".into();
    rejected(&only_pool, "the library needs the webhook");
    let by_hand = inject(&asked, "default", &config).unwrap().pod;
    assert_eq!(policies.admit(&by_hand).unwrap(), by_hand);
}

/// A ValidatingAdmissionPolicy of mode dra.
fn claims_policy_named(name: &str) -> Value {
    let marks = [("@DOMAIN@", "shmesh.io"), ("@NAMESPACE@", "shmesh"), ("@ACCOUNT@", "shmesh-plugin")];
    let documents = documents("claims.yaml", &marks);
    let is_it = |one: &&Value| one["kind"] == "ValidatingAdmissionPolicy" && one["metadata"]["name"] == name;
    documents.iter().find(is_it).unwrap().clone()
}

fn claim(config: Value) -> Value {
    json!({"kind": "ResourceClaim", "spec": {"devices": {"requests": [{"name": "domain"}], "config": config}}})
}

fn parameters(more: Value) -> Value {
    let mut all = json!({"apiVersion": "shmesh.io/v1alpha1", "kind": "DomainConfig"});
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"requests": ["domain"], "opaque": {"driver": "shmesh.io", "parameters": all}})
}

/// Claims that `shmesh-plugin claim` prints pass, and so do claims for other drivers.
#[test]
fn claims_of_the_command_pass_the_policy() {
    let policy = claims_policy_named("shmesh-claims");
    let pod = "kind: Pod\nmetadata: {name: p, annotations: {shmesh.io/links: '[{name: a, ring: {len: 64}}, {name: b.1}]'}}\n\
               spec: {hostUsers: false, containers: [{name: a}]}\n";
    for kind in [shmesh_injector::ClaimKind::Claim, shmesh_injector::ClaimKind::Template] {
        let form = shmesh_injector::manifest::OutputFormat::Json;
        let (text, _) =
            shmesh_injector::claims(pod, "default", None, &Config::default(), kind, form).unwrap();
        let object: Value = serde_json::from_str(&text).unwrap();
        assert!(Policies::matches(&policy, &object), "{object}");
        assert_eq!(Policies::broken(&policy, &object), [""; 0]);
    }
    for path in ["/dev/shm", "/dev/shm/a", "/run/ipc", "/a.b/..c"] {
        assert_eq!(
            Policies::broken(&policy, &claim(json!([parameters(json!({"mountPath": path}))]))),
            [""; 0],
            "{path}"
        );
    }
    let of_others = json!([{"opaque": {"driver": "gpu.nvidia.com", "parameters": {"x": 1}}}]);
    assert!(!Policies::matches(&policy, &claim(of_others)));
    assert!(
        !Policies::matches(&policy, &json!({"spec": {}}))
            && !Policies::matches(&policy, &json!({"spec": {"spec": {}}}))
    );
    let mut two = claim(json!([parameters(json!({})), parameters(json!({}))]));
    two["spec"]["devices"]["config"][1]["requests"] = json!(["other"]);
    assert_eq!(Policies::broken(&policy, &two), [""; 0], "one for each request");
}

#[test]
fn impossible_configurations_are_rejected_with_a_message() {
    let policy = claims_policy_named("shmesh-claims");
    let one = |more: Value| json!([parameters(more)]);
    let everywhere = || {
        let mut config = parameters(json!({}));
        config.as_object_mut().unwrap().remove("requests");
        config
    };
    for (config, words) in [
        (json!([parameters(json!({})), parameters(json!({}))]), "two configurations of shmesh.io"),
        (json!([parameters(json!({})), everywhere()]), "two configurations of shmesh.io"),
        (one(json!({"apiVersion": "shmesh.io/v1"})), "correct both"),
        (one(json!({"kind": "Domain"})), "correct both"),
        (one(json!({"mountpath": "/x"})), "known here: apiVersion, kind, links, mountPath, userNamespaces"),
        (one(json!({"userNamespaces": "mixed"})), "write never or always"),
        (one(json!({"mountPath": "dev/shm"})), "not an absolute path"),
        (one(json!({"mountPath": "/a/../b"})), "not an absolute path"),
        (one(json!({"mountPath": "/"})), "not an absolute path"),
        (one(json!({"mountPath": "/proc/x"})), "not an absolute path"),
        (one(json!({"mountPath": "/dev"})), "not an absolute path"),
        (one(json!({"links": [{}]})), "up to 31 letters"),
        (one(json!({"links": [{"name": "a/b"}]})), "up to 31 letters"),
        (one(json!({"links": [{"name": "a"}, {"name": "b"}, {"name": "a"}]})), "two links have one name"),
        (one(json!({"links": [{"name": "a", "ringlen": 7}]})), "a link has an unknown key"),
    ] {
        let object = claim(config);
        assert!(Policies::matches(&policy, &object));
        let broken = Policies::broken(&policy, &object);
        assert!(matches!(&broken[..], [one] if one.contains(words)), "{object}: {broken:?}");
        let template = json!({"kind": "ResourceClaimTemplate", "spec": {"spec": object["spec"]}});
        assert_eq!(Policies::broken(&policy, &template), broken);
    }
}

/// The message of the first rule that is broken, or an empty one; `None` if the policy does not apply.
fn verdict(policy: &Value, names: &[(&str, &Value)]) -> Option<String> {
    let mut variables = json!({});
    let look = |expression: &Value, variables: &Value| {
        let names = [names, &[("variables", variables)]].concat();
        evaluate_with(expression.as_str().unwrap(), &names)
    };
    let conditions = policy["spec"]["matchConditions"].as_array().unwrap();
    if !conditions.iter().all(|condition| look(&condition["expression"], &variables) == true) {
        return None;
    }
    for variable in policy["spec"]["variables"].as_array().unwrap() {
        let value = look(&variable["expression"], &variables);
        variables[variable["name"].as_str().unwrap()] = value;
    }
    let validations = policy["spec"]["validations"].as_array().unwrap();
    let broken = validations.iter().find(|validation| look(&validation["expression"], &variables) != true);
    Some(broken.map_or("", |validation| validation["message"].as_str().unwrap()).to_owned())
}

#[test]
fn driver_writes_slices_of_its_own_node_only() {
    let policy = claims_policy_named("shmesh-slices");
    let user = |name: &str, node: Value| json!({"username": format!("system:serviceaccount:shmesh:{name}"), "extra": {"authentication.kubernetes.io/node-name": node}});
    let slice = |node: &str, driver: &str| json!({"spec": {"nodeName": node, "driver": driver}});
    let answer = |user: &Value, operation: &str, object: &Value, old: &Value| {
        let request = json!({"userInfo": user, "operation": operation});
        verdict(&policy, &[("request", &request), ("object", object), ("oldObject", old)])
    };
    let (driver, none, ours) = (user("shmesh-plugin", json!(["a"])), Value::Null, slice("a", "shmesh.io"));
    let allowed = Some(String::new());
    assert_eq!(answer(&driver, "CREATE", &ours, &none), allowed);
    assert_eq!(answer(&driver, "UPDATE", &ours, &ours), allowed);
    assert_eq!(answer(&driver, "DELETE", &none, &ours), allowed);
    let refused = |answer: Option<String>, words: &str| {
        assert!(answer.as_ref().is_some_and(|said| said.contains(words)), "{answer:?}")
    };
    for other in [slice("b", "shmesh.io"), json!({"spec": {"allNodes": true, "driver": "shmesh.io"}})] {
        refused(answer(&driver, "CREATE", &other, &none), "of its own node");
        refused(answer(&driver, "UPDATE", &ours, &other), "of its own node");
        refused(answer(&driver, "DELETE", &none, &other), "of its own node");
    }
    refused(answer(&driver, "CREATE", &slice("a", "gpu.nvidia.com"), &none), "of shmesh.io");
    let unbound = json!({"username": "system:serviceaccount:shmesh:shmesh-plugin"});
    refused(answer(&unbound, "CREATE", &ours, &none), "names no node");
    assert_eq!(
        answer(&user("other", json!(["b"])), "CREATE", &ours, &none),
        None,
        "of others is not our matter"
    );
}

#[test]
fn shared_memory_above_the_memory_limit_is_refused() {
    let marks = [("@NAME@", "shmesh"), ("@DOMAIN@", "shmesh.io"), ("@UNIT@", "64Mi"), ("@ACTION@", "Deny")];
    let documents = documents("memory.yaml", &marks);
    let policy = &documents[0];
    assert_eq!(documents[1]["spec"]["policyName"], policy["metadata"]["name"]);
    let pod = |limits: &[Value], of_init: &[Value]| {
        let container = |limits: &Value| json!({"name": "a", "resources": {"limits": limits}});
        let all = |limits: &[Value]| limits.iter().map(container).collect::<Vec<_>>();
        json!({"spec": {"containers": all(limits), "initContainers": all(of_init)}})
    };
    let broken = |pod: &Value| {
        assert!(Policies::matches(policy, pod));
        Policies::broken(policy, pod)
    };
    let exact = json!({"memory": "128Mi", "shmesh.io/shm": "2"});
    let over = json!({"memory": "127Mi", "shmesh.io/shm": "2"});
    let unlimited = json!({"shmesh.io/shm": "2"});
    assert_eq!(broken(&pod(std::slice::from_ref(&exact), &[])), [""; 0]);
    assert_eq!(broken(&pod(&[unlimited, json!({"memory": "1Mi"})], &[])), [""; 0]);
    let [said] = &broken(&pod(&[exact.clone(), over.clone()], &[]))[..] else { panic!("one message") };
    assert!(said.contains("requests more shmesh.io/shm, 64Mi each, than its memory limit"), "{said}");
    assert_eq!(broken(&pod(&[exact], &[over])).len(), 1, "init containers have a /dev/shm too");
    // Other pods do not concern it.
    let mut other = pod(&[json!({"memory": "1Mi"})], &[]);
    assert!(!Policies::matches(policy, &other));
    other["spec"].as_object_mut().unwrap().remove("initContainers");
    other["spec"]["containers"][0].as_object_mut().unwrap().remove("resources");
    assert!(!Policies::matches(policy, &other));
}

#[test]
fn labels_of_bridges_need_the_bridge() {
    let domain = config().domain;
    let documents =
        documents("labels.yaml", &[("@NAMESPACES@", "ran"), ("@NAME@", "shmesh"), ("@DOMAIN@", &domain)]);
    let policy = &documents[0];
    assert_eq!(documents[1]["spec"]["policyName"], policy["metadata"]["name"]);
    let verdict = |pod: &Value, old: &Value| verdict(policy, &[("object", pod), ("oldObject", old)]);
    let (allowed, new) = (Some(String::new()), Value::Null);
    let mut ends = Vec::new();
    for file in files(&pods(), ".out.yaml") {
        let object: Value = serde_saphyr::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let pod = pod_of(&object);
        let end = &pod["metadata"]["labels"]["shmesh.io/bridge"];
        let expected = if end.is_null() { None } else { allowed.clone() };
        assert_eq!(verdict(pod, &new), expected, "{}", file.display());
        if let Some(end) = end.as_str() {
            ends.push(end.to_owned());
        }
        // With the labels of a bridge that it does not have.
        for (label, value) in [("far-other", "home"), ("far-fronthaul", "far"), ("bridge", "near")] {
            let mut labelled = pod.clone();
            labelled["metadata"]["labels"][format!("shmesh.io/{label}")] = json!(value);
            for old in [&new, pod] {
                let said = verdict(&labelled, old).unwrap();
                assert!(said.contains("remove the label"), "{}: {label}: {said:?}", file.display());
            }
            let old = labelled.clone();
            labelled["metadata"]["labels"]["app"] = json!("renamed");
            assert_eq!(verdict(&labelled, &old), None, "an update that leaves these labels as they are");
        }
    }
    assert!(["home", "far"].iter().all(|end| ends.iter().any(|found| found == end)), "{ends:?}");
    // A pod without annotations is not the webhook's.
    let stray = json!({"metadata": {"labels": {"shmesh.io/far-fronthaul": "home"}}, "spec": {"containers": [{"name": "a"}]}});
    assert!(verdict(&stray, &new).unwrap().contains("has no bridge with the link"));
    let bridge = json!({"name": "shmesh-bridge", "restartPolicy": "Always", "args": ["--connect=a"]});
    let pod = |end: &str, container: Value| json!({"metadata": {"labels": {"shmesh.io/bridge": end}}, "spec": {"initContainers": [container]}});
    assert_eq!(verdict(&pod("far", bridge.clone()), &new), allowed);
    assert!(verdict(&pod("home", bridge.clone()), &new).unwrap().contains("none of this kind"));
    for (key, value) in [("command", json!(["sleep"])), ("restartPolicy", json!("OnFailure"))] {
        let mut other = bridge.clone();
        other[key] = value;
        assert!(verdict(&pod("far", other), &new).unwrap().contains("none of this kind"), "{key}");
    }
    let rules = &policy["spec"]["matchConstraints"]["resourceRules"][0];
    assert_eq!(
        rules["resources"],
        json!(["pods", "pods/status"]),
        "labels can be changed with the status, too"
    );
}
