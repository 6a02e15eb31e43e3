"""The chart with the real Helm library and the strict schemas of Kubernetes.

Lints, renders scenarios, validates every object, tries what must be refused, compares what is rendered from the chart with
what the repository has, and looks whether alerts and dashboard name metrics that exist. `--bless` writes the former.
"""

import argparse
import base64
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import kubernetes_validate
import yaml
from helm_python import Chart, lint

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
NAMESPACE = "shmesh-system"
# The oldest that the chart allows, the first with the policy, and the newest that has schemas.
VERSIONS = ["1.31", "1.36", "1.37"]
# The first with the policy, and with what the DRA driver needs.
DRA = "1.36"
# Kinds of others, for which there are no schemas.
CUSTOM = {"monitoring.coreos.com/v1", "cert-manager.io/v1"}
POOL = {"name": "fronthaul", "gid": 60001}

problems = []


def expect(what, text):
    if not what:
        problems.append(text)


class Strict(yaml.SafeLoader):
    """A key that is there twice is a mistake, which YAML parsers read over."""


def mapping(loader, node):
    seen = set()
    for key, _ in node.value:
        if key.value in seen:
            raise yaml.YAMLError(f"the key {key.value} is there twice, at {key.start_mark}")
        seen.add(key.value)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)


def render(values, namespace=NAMESPACE, name="shmesh", chart=CHART):
    """Every file that the chart gives, by its name."""
    with Chart.load(str(chart)) as loaded:
        return loaded.render(values=values, name=name, namespace=namespace)


def objects(files):
    found = []
    for path, text in sorted(files.items()):
        if path.endswith(".yaml"):
            found += [one for one in yaml.load_all(text, Strict) if one]
    return found


def named(found, kind, name=None):
    return next(one for one in found if one["kind"] == kind and name in (None, one["metadata"]["name"]))


def container(pod, name):
    return next(one for one in pod["spec"]["containers"] if one["name"] == name)


def names_of(container):
    return [mount["name"] for mount in container.get("volumeMounts", [])]


def validate(one, where, oldest=VERSIONS[0]):
    label = f"{where}: {one['kind']} {one['metadata']['name']}"
    if one["apiVersion"] in CUSTOM:
        return
    for version in VERSIONS:
        if version < oldest:
            continue
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            problems.append(f"{label} ({version}): {error.message} at {list(error.path)}")
        except kubernetes_validate.SchemaNotFoundError as error:
            problems.append(f"{label}: {error.message}")


def restricted(one, where):
    """What Pod Security restricted asks of each container of a pod."""
    pod = one["spec"]
    label = f"{where}: {one['metadata']['name']}"
    for kind in ("hostPID", "hostIPC", "hostNetwork"):
        expect(not pod.get(kind), f"{label}: {kind}")
    for volume in pod.get("volumes", []):
        expect("hostPath" not in volume, f"{label}: hostPath {volume['name']}")
    of_pod = pod.get("securityContext", {})
    for each in pod.get("initContainers", []) + pod["containers"]:
        context = each.get("securityContext", {})
        who = f"{label}/{each['name']}"
        expect(context.get("allowPrivilegeEscalation") is False, f"{who}: allowPrivilegeEscalation")
        expect(context.get("capabilities", {}).get("drop") == ["ALL"], f"{who}: capabilities")
        expect(context.get("runAsNonRoot", of_pod.get("runAsNonRoot")) is True, f"{who}: runAsNonRoot")
        seccomp = context.get("seccompProfile", of_pod.get("seccompProfile", {}))
        expect(seccomp.get("type") == "RuntimeDefault", f"{who}: seccompProfile")


def check_lint():
    found = lint(str(CHART), namespace=NAMESPACE, strict=True)
    # 1 is advice.
    serious = [message for message in found["messages"] if message["severity"] > 1]
    expect(not serious and not found["errors"], f"lint: {serious} {found['errors']}")


def check_scenarios():
    count = 0
    for file in [*sorted((CHART / "tests/values").glob("*.yaml")), ROOT / "e2e/values.yaml"]:
        values = yaml.load(file.read_text(), Strict) or {}
        try:
            found = objects(render(values))
        except Exception as error:  # noqa: BLE001 - the library's own kinds
            problems.append(f"{file.name}: {error}")
            continue
        expect(found, f"{file.name}: nothing was rendered")
        for one in found:
            is_new = values.get("injector", {}).get("mode") == "policy" or values.get("config", {}).get("mode") == "dra"
            validate(one, file.name, DRA if is_new else VERSIONS[0])
            count += 1
        identities = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in found]
        expect(len(identities) == len(set(identities)), f"{file.name}: two objects have one name")
    return count


def check_default():
    """What the defaults promise: least rights, and nothing twice."""
    found = objects(render({"config": {"pools": [POOL]}}))
    daemon = named(found, "DaemonSet")
    pod = daemon["spec"]["template"]
    spec = pod["spec"]
    expect(spec["hostPID"] and not spec.get("hostNetwork") and not spec.get("hostIPC"), "plugin: host namespaces")
    expect(spec["automountServiceAccountToken"] is False, "plugin: it has a token")
    expect(60001 in spec["securityContext"]["supplementalGroups"], "plugin: it is not in the pool's group")
    for each in spec["initContainers"] + spec["containers"]:
        context = each["securityContext"]
        expect(context["capabilities"] == {"drop": ["ALL"]}, f"plugin/{each['name']}: capabilities")
        expect(context["readOnlyRootFilesystem"] is True, f"plugin/{each['name']}: its root is writable")
        expect(context["allowPrivilegeEscalation"] is False, f"plugin/{each['name']}: escalation")
        expect(not context.get("privileged"), f"plugin/{each['name']}: privileged")
    identity = container(pod, "identity")
    expect(identity["securityContext"]["runAsUser"] == 65532, "identity: its user")
    token = "/var/run/secrets/kubernetes.io/serviceaccount"
    expect([m["mountPath"] for m in identity["volumeMounts"]] == ["/run/shmesh", token], "identity: sees more than its directory")
    reads = named(found, "ClusterRole", "shmesh-plugin-pods")["rules"]
    expect(reads == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["watch"]}], f"identity: rights: {reads}")
    expect(container(pod, "plugin")["securityContext"]["runAsUser"] == 0, "plugin: the kubelet's sockets are root's")
    strategy = daemon["spec"]["updateStrategy"]["rollingUpdate"]
    expect(strategy == {"maxSurge": "10%", "maxUnavailable": 0}, "plugin: a gap in an upgrade")
    daemon = named(objects(render({"plugin": {"maxSurge": 0}})), "DaemonSet")
    strategy = daemon["spec"]["updateStrategy"]["rollingUpdate"]
    expect(strategy == {"maxSurge": 0, "maxUnavailable": "10%"}, "plugin: an upgrade without a second plugin on a node")
    injector = named(found, "Deployment")
    restricted({**injector["spec"]["template"], "metadata": injector["metadata"]}, "injector")
    expect(injector["spec"]["replicas"] == 2 and named(found, "PodDisruptionBudget"), "injector: replicas and budget")
    for kind, name in (("Role", "shmesh-injector"), ("ClusterRole", "shmesh-injector")):
        for rule in named(found, kind, name)["rules"]:
            expect(rule.get("resourceNames") and set(rule["verbs"]) == {"get", "update"}, f"{kind}: more than it needs")
    events = named(found, "Role", "shmesh-plugin-events")
    expect(events["rules"] == [{"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]}], "events: rights")
    expect(events["metadata"]["namespace"] == "default", "events: a node's are in default")
    roles = [one for one in found if one["kind"] in ("Role", "ClusterRole")]
    expect(len(roles) == 4, "there are more roles than are known here")
    tokens = [each["name"] for each in spec["initContainers"] + spec["containers"] if "api" in names_of(each)]
    expect(tokens == ["plugin", "identity"], f"plugin: a token in {tokens}")
    expect("agent" in names_of(container(pod, "plugin")), "plugin: cannot see whether the identity service is there")
    nameless = objects(render({"plugin": {"identity": {"podNames": False}}}))
    expect("shmesh-plugin-pods" not in [one["metadata"]["name"] for one in nameless], "without names there are rights for them")
    without = container(named(nameless, "DaemonSet")["spec"]["template"], "identity")
    expect("api" not in names_of(without) and "SHMESH_NODE" not in str(without["env"]), "without names there is a token")
    quiet = objects(render({"plugin": {"events": False, "identity": {"podNames": False}}}))
    for one in quiet:
        expect(not one["metadata"]["name"].endswith("-events"), "without Events there are rights for them")
    without = named(quiet, "DaemonSet")["spec"]["template"]["spec"]
    expect("api" not in [volume["name"] for volume in without["volumes"]], "without Events there is a token")
    hook = named(found, "MutatingWebhookConfiguration")["webhooks"][0]
    out = hook["namespaceSelector"]["matchExpressions"][0]
    expect(out["operator"] == "NotIn" and out["values"] == ["kube-system"], "webhook: namespaces")
    asked = " ".join(one["expression"] for one in hook["matchConditions"])
    expect(all(f'"{name}"' in asked for name in ("links", "share", "as")), f"webhook: asked for {asked}")
    expect(hook["matchConditions"] and hook["sideEffects"] == "None" and hook["timeoutSeconds"] <= 5, "webhook: conditions")
    for one in found:
        if one["kind"] == "Pod":
            restricted(one, "helm test")
    for values in ({}, {"config": {"mode": "dra"}}, {"config": {"mode": "dra"}, "injector": {"mode": "none"}}):
        hooks = [one for one in objects(render(values)) if "helm.sh/hook" in one["metadata"].get("annotations", {})]
        # `helm test --logs` reads the logs of each hook, whatever it is.
        logged = {(one["kind"], one["metadata"]["namespace"], one["metadata"]["annotations"]["helm.sh/hook-delete-policy"]) for one in hooks}
        expect(logged == {("Pod", NAMESPACE, "before-hook-creation")}, f"helm test --logs fails with {values}: {logged}")
    return found


def check_dra():
    """The DRA driver: its rights, its directories at the paths that it tells the kubelet, and one mode per node."""
    pool = {**POOL, "name": "front-haul"}
    found = objects(render({"config": {"mode": "dra", "pools": [pool]}}))
    for one in found:
        validate(one, "dra", DRA)
    spec = named(found, "DaemonSet")["spec"]["template"]["spec"]
    groups = spec["securityContext"]["supplementalGroups"]
    expect(groups == [65532, 60001, *range(61000, 61256)], f"dra: the groups of claims: {groups}")
    plugin = container({"spec": spec}, "plugin")
    mounts = {mount["name"]: mount for mount in plugin["volumeMounts"]}
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    expect(not {"device-plugins", "pod-resources"} & set(mounts), "dra: directories of the device plugin")
    for name, path in (("driver", "/var/lib/kubelet/plugins/shmesh.io"), ("plugins-registry", "/var/lib/kubelet/plugins_registry")):
        expect(paths[name] == mounts[name]["mountPath"] == path, f"dra: {name} is not where the kubelet sees it")
        expect(not mounts[name].get("readOnly"), f"dra: {name} is read-only")
    kinds = {volume["name"]: volume["hostPath"]["type"] for volume in spec["volumes"] if "hostPath" in volume}
    expect(kinds["driver"] == "DirectoryOrCreate", "dra: the driver's directory is there from the first start")
    others = [path for path in paths.values() if "/var/lib/kubelet/plugins/shmesh.io".startswith(f"{path}/")]
    expect(not others, f"dra: {others} has the mounts of other drivers, which this pod would keep busy")
    expect(mounts["claims"]["mountPath"] == "/host/dev/shm/shmesh-claims", "dra: the directory of claims")
    env = {one["name"]: one for one in plugin["env"]}
    expect(env["SHMESH_NODE"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName", "dra: the name of the node")
    expect(env["POD_UID"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.uid", "dra: the uid of the pod")
    expect("api" in mounts and not plugin["securityContext"].get("privileged"), "dra: a token, and no privileges")
    rights = {"drop": ["ALL"], "add": ["DAC_OVERRIDE", "FOWNER"]}
    expect(plugin["securityContext"]["capabilities"] == rights, "dra: what other users made cannot be removed")
    none = [each["name"] for each in spec["initContainers"] + spec["containers"] if each["securityContext"]["capabilities"] == {"drop": ["ALL"]}]
    expect(none == ["prepare", "identity"], f"dra: capabilities of others than the driver: {none}")
    for key in ("runAsUser", "allowPrivilegeEscalation", "readOnlyRootFilesystem", "seccompProfile"):
        with_plugins = container(named(objects(render({})), "DaemonSet")["spec"]["template"], "plugin")["securityContext"]
        expect(plugin["securityContext"][key] == with_plugins[key], f"dra: {key} is not as with the device plugin")
    rules = {rule["resources"][0]: rule for rule in named(found, "ClusterRole", "shmesh-plugin-dra")["rules"]}
    expect(rules["resourceclaims"]["verbs"] == ["get"], "dra: claims are read one by one")
    expect(rules["resourceclaims/status"]["verbs"] == ["patch"], "dra: the status of claims")
    granular = {"associated-node:patch"}
    expect(set(rules["resourceclaims/driver"]["verbs"]) == granular, "dra: the driver's part of the status")
    expect(rules["resourceclaims/driver"]["resourceNames"] == ["shmesh.io"], "dra: the status of other drivers")
    slices = {"get", "list", "watch", "create", "patch", "delete"}
    expect(set(rules["resourceslices"]["verbs"]) == slices, "dra: slices")
    expect(rules["nodes"]["verbs"] == ["get"] and len(rules) == 5, f"dra: more rights than are known here: {list(rules)}")
    classes = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "DeviceClass"}
    resources = {name: spec.get("extendedResourceName") for name, spec in classes.items()}
    wanted = {"shmesh-domain": None, "shmesh-pool-front-haul": "shmesh.io/front-haul"}
    wanted |= {f"shmesh-{kind}-ipc": f"shmesh.io/{kind}-ipc" for kind in ("gpu", "npu")}
    expect(resources == wanted, f"dra: classes: {resources}")
    asked = classes["shmesh-pool-front-haul"]["selectors"][0]["cel"]["expression"]
    said = 'device.driver == "shmesh.io" && device.attributes["shmesh.io"].kind == "pool" && device.attributes["shmesh.io"].pool == "front-haul"'
    expect(asked == said, f"dra: the selector of a pool: {asked}")
    config = yaml.load(named(found, "ConfigMap", "shmesh-plugin")["data"]["plugin.yaml"], Strict)
    expect(config["mode"] == "dra", "dra: the plugin is not told the mode")
    config = yaml.load(named(found, "ConfigMap", "shmesh-injector")["data"]["injector.yaml"], Strict)
    expect(config["agentResource"] == "", "dra: sidecars ask for a resource that no node has")
    expect(named(found, "NetworkPolicy", "shmesh-plugin")["spec"]["egress"], "dra: the API server is out of reach")
    policies = [one for one in found if one["kind"] == "ValidatingAdmissionPolicy"]
    expect({one["metadata"]["name"] for one in policies} == {"shmesh-claims", "shmesh-slices"}, "dra: policies")
    user = named(policies, "ValidatingAdmissionPolicy", "shmesh-slices")["spec"]["matchConditions"][0]["expression"]
    expect(f"system:serviceaccount:{NAMESPACE}:shmesh-plugin" in user, f"dra: whose slices: {user}")
    account = named(found, "ServiceAccount", "shmesh-plugin")["metadata"]["name"]
    expect(spec["serviceAccountName"] == account, "dra: the policy is about another account")
    # Nothing of it is there with the device plugin.
    without = objects(render({"config": {"mode": "devicePlugin", "pools": [pool]}}))
    default = objects(render({"config": {"pools": [pool]}}))
    dra = [one for one in without if one["kind"] == "DeviceClass" or one["kind"].startswith("Validating")]
    expect({one["metadata"]["name"] for one in dra} == {"shmesh-memory"}, "device plugin: objects of mode dra")
    same = [one for one in without if one["kind"] != "ConfigMap"] == [one for one in default if one["kind"] != "ConfigMap"]
    expect(same, "device plugin: writing the default mode changes something")
    # Two releases of a migration, which share a namespace.
    values = yaml.load((CHART / "tests/values/dra-without-injector.yaml").read_text(), Strict)
    second = objects(render(values, name="dra"))

    def names(found):
        return {(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in found}

    expect(not names(second) & names(default), f"dra: two releases are in each other's way: {names(second) & names(default)}")


def check_bridge():
    """What bridges need in their namespaces, and what the injector knows of it."""
    values = yaml.load((CHART / "tests/values/bridge.yaml").read_text(), Strict)
    found = objects(render(values))

    def of(namespace):
        return [one for one in found if one["metadata"].get("namespace") == namespace]

    service = named(of("ran"), "Service", "shmesh-far-fronthaul")["spec"]
    expect(service["clusterIP"] == "None" and service["publishNotReadyAddresses"], "bridge: the Service has an address of its own")
    expect(service["selector"] == {"shmesh.io/far-fronthaul": "home"}, "bridge: the Service selects others than the primary's pod")
    expect(service["ports"][0]["port"] == 7447, "bridge: the port")
    names = {(one["kind"], one["metadata"]["name"]) for one in of("ran")}
    wanted = {("Service", "shmesh-far-fronthaul"), ("Service", "shmesh-far-midhaul"), ("NetworkPolicy", "shmesh-bridge"), ("Secret", "shmesh-bridge-tls")}
    expect(names == wanted, f"bridge: objects of the namespace: {names}")

    def ports(namespace):
        rules = named(of(namespace), "NetworkPolicy", "shmesh-bridge")["spec"]["ingress"]
        expect(rules[0]["ports"] == [{"port": 7447, "protocol": "UDP"}] and rules[0]["from"], "bridge: the port is not for pods with a bridge")
        return [(port["protocol"], range(port["port"], port["endPort"] + 1)) for rule in rules[1:] for port in rule["ports"]]

    open_to_all = ports("ran")
    opens = {(protocol, port) for protocol, each in open_to_all for port in (1, 7446, 7447, 7448, 65535) if port in each}
    wanted = {(protocol, port) for protocol in ("TCP", "UDP", "SCTP") for port in (1, 7446, 7447, 7448, 65535)} - {("UDP", 7447)}
    expect(opens == wanted, f"bridge: the policy closes or opens other ports: {opens ^ wanted}")
    expect(not ports("core"), "bridge: the policy opens ports that the namespace has closed")
    secrets = {one["metadata"]["namespace"]: one["data"] for one in found if one["metadata"]["name"] == "shmesh-bridge-tls"}
    expect(secrets["ran"]["ca.crt"] == secrets["core"]["ca.crt"] and secrets["ran"]["tls.crt"] != secrets["core"]["tls.crt"], "bridge: one authority, two certificates")
    expect(all("tls.key" not in one["data"] or one["data"]["tls.key"] != named(of(NAMESPACE), "Secret", "shmesh-bridge-authority")["data"]["tls.key"] for one in of("ran") if "data" in one), "bridge: the authority's key is in a namespace of pods")
    with tempfile.NamedTemporaryFile() as file:
        file.write(base64.b64decode(secrets["ran"]["tls.crt"]))
        file.flush()
        try:
            text = subprocess.run(["openssl", "x509", "-noout", "-text", "-in", file.name], capture_output=True, text=True, check=True).stdout
            expect(re.search(r"Subject: CN ?= ?ran\.shmesh", text), "bridge: the certificate's common name")
            expect("DNS:ran.shmesh, DNS:*.ran.svc" in text and "Client Authentication" in text, f"bridge: names and uses of the certificate: {text}")
        except FileNotFoundError:
            print("skipped: the names in a certificate, without openssl")
    config = yaml.load(named(found, "ConfigMap", "shmesh-injector")["data"]["injector.yaml"], Strict)["bridge"]
    expect(config["namespaces"][0] == {"name": "ran", "links": ["fronthaul", "midhaul"]} and config["cluster"] == "east", f"bridge: the injector's part: {config}")
    policy = named(found, "ValidatingAdmissionPolicy", "shmesh-bridge-labels")["spec"]
    selector = policy["matchConstraints"]["namespaceSelector"]["matchExpressions"][0]
    expect(selector["values"] == ["ran", "core"] and not re.search(r"@[A-Z]+@", str(policy)), f"bridge: the policy of labels: {selector}")
    binding = named(found, "ValidatingAdmissionPolicyBinding", "shmesh-bridge-labels")["spec"]
    expect(binding["validationActions"] == ["Deny"] and binding["policyName"] == "shmesh-bridge-labels", "bridge: the policy of labels is not bound")
    off = objects(render({**values, "bridge": {**values["bridge"], "enabled": False}}))
    expect(not [one for one in off if one["metadata"]["name"] == "shmesh-bridge-labels"], "bridge: a policy of labels although it is not enabled")
    expect(not [one for one in off if one["metadata"].get("namespace") in ("ran", "core")], "bridge: objects although it is not enabled")
    config = yaml.load(named(off, "ConfigMap", "shmesh-injector")["data"]["injector.yaml"], Strict)["bridge"]
    expect(config["namespaces"] == [], "bridge: the injector would inject bridges although it is not enabled")
    values = yaml.load((CHART / "tests/values/bridge-cert-manager.yaml").read_text(), Strict)
    found = objects(render(values))
    certificate = named(found, "Certificate", "shmesh-bridge")["spec"]
    expect(certificate["commonName"] == "ran.shmesh" and "*.ran.svc" in certificate["dnsNames"], "bridge: cert-manager's names")
    expect(set(certificate["usages"]) == {"server auth", "client auth"}, "bridge: cert-manager's usages")
    expect(not [one for one in found if one["kind"] == "Secret" and "bridge" in one["metadata"]["name"]], "bridge: two have the Secret")


def check_bridge_upgrades():
    """Helm keeps the authority and the certificates over upgrades, until they are old. Here, `lookup` finds what a file has."""
    values = yaml.load((CHART / "tests/values/bridge.yaml").read_text(), Strict)
    values["bridge"]["namespaces"][0]["name"] = "123"
    with tempfile.TemporaryDirectory() as directory:
        chart = pathlib.Path(directory) / "chart"
        shutil.copytree(CHART, chart)
        template = chart / "templates/bridge-certificates.yaml"
        look_up = re.compile(r'lookup "v1" "Secret" (\S+) (\S+)')
        text, count = look_up.subn(r'index ($.Files.Get "there.yaml" | fromYaml) (printf "%s/%s" \1 \2)', template.read_text())
        expect(count == 2, "bridge: how the chart finds its Secrets")
        template.write_text(text)

        def upgrade(secrets, days):
            """Renders the chart as if these Secrets were made so many days ago."""
            there = {f"{one['metadata']['namespace']}/{one['metadata']['name']}": one for one in secrets}
            for one in there.values():
                made = one["metadata"]["annotations"]["shmesh.io/made"]
                one["metadata"]["annotations"]["shmesh.io/made"] = str(int(made) - days * 86400)
            (chart / "there.yaml").write_text(json.dumps(there))
            found = objects(render(values, chart=chart))
            return [one for one in found if one["kind"] == "Secret" and "bridge" in one["metadata"]["name"]]

        def data(secrets, name):
            return next(one["data"] for one in secrets if one["metadata"]["name"] == name)

        def trusted(secrets):
            return base64.b64decode(data(secrets, "shmesh-bridge-tls")["ca.crt"]).count(b"BEGIN CERTIFICATE")

        first = upgrade([], 0)
        expect({one["metadata"]["namespace"] for one in first} == {NAMESPACE, "123", "core"}, "bridge: a namespace of digits is not a text")
        kept = upgrade(first, 500)
        expect([one["data"] for one in kept] == [one["data"] for one in first], "bridge: an upgrade makes other certificates")
        renewed = upgrade(kept, 60)
        expect(data(renewed, "shmesh-bridge-authority") == data(first, "shmesh-bridge-authority"), "bridge: the authority is young")
        expect(data(renewed, "shmesh-bridge-tls") != data(first, "shmesh-bridge-tls"), "bridge: a certificate with a third of its days left is kept")
        replaced = upgrade(renewed, 2800)
        expect(data(replaced, "shmesh-bridge-authority") != data(first, "shmesh-bridge-authority"), "bridge: the authority is kept in its last year")
        expect((trusted(renewed), trusted(replaced)) == (1, 2), "bridge: the last authority is no longer trusted")
        again = upgrade(replaced, 1)
        expect([one["data"] for one in again] == [one["data"] for one in replaced], "bridge: the new authority is not kept")


def check_refusals():
    """Values that must be rejected, with a part of the message."""
    cases = [
        ({}, "default", "--namespace shmesh-system"),
        ({}, "kube-system", "--namespace shmesh-system"),
        ({"config": {"hostRoot": "/"}}, NAMESPACE, "config.hostRoot is set by the chart"),
        ({"config": {"identity": {"enabled": True}}}, NAMESPACE, "remove it"),
        ({"config": {"identity": {"pods": "/x"}}}, NAMESPACE, "remove it"),
        ({"config": {"identity": {"requireInitialPidNamespace": True}}}, NAMESPACE, "plugin.identity.require"),
        ({"config": {"pools": [{"name": "a"}]}}, NAMESPACE, "config.pools[a].gid is missing"),
        ({"config": {"pools": [{"name": "shm", "gid": 60001}]}}, NAMESPACE, "choose another"),
        ({"config": {"pools": [POOL, {**POOL, "gid": 60002}]}}, NAMESPACE, "duplicate pool name"),
        ({"config": {"pools": [POOL, {**POOL, "name": "b"}]}}, NAMESPACE, "also the group of pool fronthaul"),
        ({"config": {"pools": [{**POOL, "healthCommand": ["/x"]}]}}, NAMESPACE, "no other program"),
        ({"config": {"cdi": {"enabled": False}}}, NAMESPACE, "config.shm.budget=0"),
        ({"config": {"mode": "dra", "cdi": {"enabled": False}}}, NAMESPACE, "mounts claims by CDI"),
        ({"config": {"mode": "dra"}, "injector": {"mode": "policy"}}, NAMESPACE, "set injector.mode=webhook"),
        ({"config": {"mode": "dra"}, "plugin": {"events": False}}, NAMESPACE, "set plugin.events=true"),
        ({"config": {"mode": "dra", "dra": {"gids": {"first": 65500}}}}, NAMESPACE, "choose a lower first"),
        ({"config": {"mode": "dra", "dra": {"gids": {"first": 60000, "count": 2}}, "pools": [POOL]}}, NAMESPACE, "60000 to 60001"),
        ({"config": {"mode": "dra", "pools": [{**POOL, "name": "Front"}]}}, NAMESPACE, "lower-case letters"),
        ({"config": {"dra": {"budget": "1Gi"}}}, NAMESPACE, "set config.mode=dra"),
        ({"bridge": {"enabled": True}, "injector": {"mode": "policy"}}, NAMESPACE, "set injector.mode=webhook"),
        ({"bridge": {"enabled": True, "certificate": {"from": "certManager"}}}, NAMESPACE, "set bridge.certificate.issuer"),
        ({"bridge": {"enabled": True, "namespaces": [{"name": "a" * 58, "links": []}]}}, NAMESPACE, "at most 57"),
        ({"bridge": {"enabled": True, "namespaces": [{"name": "a", "links": []}] * 2}}, NAMESPACE, "is there twice"),
        ({"bridge": {"enabled": True, "namespaces": [{"name": "a", "links": []}]}, "injector": {"excludedNamespaces": ["a"]}}, NAMESPACE, "remove it from one"),
        # By the schema:
        ({"bridge": {"namespaces": [{"name": "a", "links": ["A_b"]}]}}, NAMESPACE, "pattern"),
        ({"config": {"mode": "both"}}, NAMESPACE, "mode"),
        ({"config": {"mode": "dra", "dra": {"gid": 1}}}, NAMESPACE, "gid"),
        ({"config": {"pool": []}}, NAMESPACE, "pool"),
        ({"config": {"pools": [{**POOL, "name": "a/b"}]}}, NAMESPACE, "pattern"),
        ({"config": {"pools": [{**POOL, "name": "-a"}]}}, NAMESPACE, "pattern"),
        ({"config": {"shm": {"unit": "64MB"}}}, NAMESPACE, "pattern"),
        ({"config": {"pools": [{**POOL, "giid": 1}]}}, NAMESPACE, "giid"),
        ({"injecter": {}}, NAMESPACE, "injecter"),
        ({"injector": {"mode": "both"}}, NAMESPACE, "mode"),
        ({"injector": {"replicas": 0}}, NAMESPACE, "replicas"),
        ({"plugin": {"adminPort": 99999}}, NAMESPACE, "adminPort"),
        ({"plugin": {"memoryPolicy": "Refuse"}}, NAMESPACE, "memoryPolicy"),
        ({"plugin": {"maxUnavailable": "some"}}, NAMESPACE, "maxUnavailable"),
        ({"injector": {"mode": "policy", "limits": {"pod": "1Gi"}}}, NAMESPACE, "ResourceQuota"),
        ({"injector": {"mode": "policy"}, "config": {"identity": {"attachments": 0}}}, NAMESPACE, "attachments is 0"),
        ({"injector": {"mode": "policy"}, "sidecar": {"memory": "64MB"}}, NAMESPACE, "is not a number of bytes; write 64Mi"),
    ]
    for values, namespace, said in cases:
        try:
            with Chart.load(str(CHART)) as chart:
                chart.validate_schema(chart.merge_values(values))
            render(values, namespace)
            problems.append(f"{json.dumps(values)} in {namespace} was not refused")
        except Exception as error:  # noqa: BLE001 - the library's own kinds
            expect(said in str(error), f"{json.dumps(values)} in {namespace}: {said!r} is not in: {error}")
            expect("anyOf" not in str(error), f"{json.dumps(values)}: what is wrong is buried in anyOf: {error}")
    return len(cases)


def keys_of(schema, whole, path=""):
    """Every key that has no keys of its own: `shm.unit`, `pools[].gid`."""
    def found(one):
        return whole["$defs"][one["$ref"].split("/")[-1]] if "$ref" in one else one

    for key, value in found(schema).get("properties", {}).items():
        value = found(value)
        items = found(value.get("items", {}))
        if "properties" in value:
            yield from keys_of(value, whole, f"{path}{key}.")
        elif "properties" in items:
            yield from keys_of(items, whole, f"{path}{key}[].")
        else:
            yield path + key


def set_key(config, key, value):
    *parents, last = key.split(".")
    for parent in parents:
        config = config["pools"][0] if parent == "pools[]" else config.setdefault(parent, {})
    config[last] = value


def check_restarts():
    """A change restarts the plugin exactly if the plugin cannot reload it: for every key that there is."""
    def template(config):
        return named(objects(render({"config": config})), "DaemonSet", "shmesh-plugin")["spec"]["template"]

    changes = yaml.load((CHART / "tests/restarts.yaml").read_text(), Strict)
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = set(keys_of(schema["properties"]["config"], schema))
    expect(known == set(changes), f"restarts.yaml lacks, or has too many, of the keys of config: {sorted(known ^ set(changes))}")
    for key, change in changes.items():
        before = {"pools": [dict(POOL)]}
        for other, value in change.get("base", {}).items():
            set_key(before, other, value)
        after = json.loads(json.dumps(before))
        set_key(after, key, change["to"])
        old = template(before)
        try:
            new = template(after)
        except Exception as error:  # noqa: BLE001 - the library's own kinds
            expect(change["does"] == "refused", f"{key}: the chart refuses {change['to']}: {error}")
            continue
        found = "reload" if old == new else "restart"
        expect(found == change["does"], f"a change of {key} does a {found}, and should do a {change['does']}")
    # What is written and is the default is no change.
    written = {"pools": [dict(POOL)], "kubelet": {"registration": "legacy"}, "cdi": {"enabled": True}}
    expect(template(written) == template({"pools": [dict(POOL)]}), "a default that is written restarts the plugin")


def check_config(plugin):
    """The plugin accepts the rendered configuration."""
    values = {"config": {"shm": {"budget": "64Mi"}, "pools": [POOL]}}
    text = named(objects(render(values)), "ConfigMap", "shmesh-plugin")["data"]["plugin.yaml"]
    with tempfile.TemporaryDirectory() as root:
        for path in ("var/lib/kubelet/device-plugins", "var/run/cdi", "dev/shm/shmesh"):
            pathlib.Path(root, path).mkdir(parents=True)
        file = pathlib.Path(root, "plugin.yaml")
        file.write_text(text.replace("hostRoot: /host", f"hostRoot: {root}"))
        ran = subprocess.run([plugin, "run", "--check", "--config", str(file)], capture_output=True, text=True)
        expect(ran.returncode == 0, f"shmesh-plugin run --check: {ran.stdout} {ran.stderr}")
    with tempfile.TemporaryDirectory() as root:
        registry, drivers = pathlib.Path(root, "plugins_registry"), pathlib.Path(root, "plugins")
        for path in (registry, drivers, pathlib.Path(root, "var/run/cdi"), pathlib.Path(root, "dev/shm")):
            path.mkdir(parents=True)
        kubelet, dra = {"pluginsRegistryDir": str(registry)}, {"pluginsDir": str(drivers), "attachments": 4, "gids": {"first": 62000, "count": 4}}
        values = {"config": {"mode": "dra", "kubelet": kubelet, "dra": dra, "pools": [POOL]}}
        text = named(objects(render(values)), "ConfigMap", "shmesh-plugin")["data"]["plugin.yaml"]
        file = pathlib.Path(root, "plugin.yaml")
        file.write_text(text.replace("hostRoot: /host", f"hostRoot: {root}"))
        ran = subprocess.run([plugin, "run", "--check", "--config", str(file)], capture_output=True, text=True)
        expect(ran.returncode == 0, f"shmesh-plugin run --check, mode dra: {ran.stdout} {ran.stderr}")
    # The command lines of the manifests are ones that the program has.
    for one in objects(render({})):
        pods = [one["spec"]["template"]] if one["kind"] in ("DaemonSet", "Deployment") else []
        for each in [c for pod in pods for c in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]]:
            helped = subprocess.run([plugin, each["args"][0], "--help"], capture_output=True, text=True)
            expect(helped.returncode == 0, f"shmesh-plugin has no command {each['args'][0]}")
            for arg in each["args"][1:]:
                flag = arg.split("=")[0]
                expect(flag in helped.stdout, f"shmesh-plugin {each['args'][0]} has no flag {flag}")


def rendered_manifests():
    """`install.yaml`: the chart's defaults and the namespace, without what only Helm runs."""
    files = render({"namespace": {"create": True}})
    head = "# Rendered from helm/ with its defaults; never edited by hand. Another way to have it: kubectl kustomize manifests\n"
    first = ["namespace.yaml", "serviceaccount.yaml", "rbac.yaml", "configmap.yaml"]

    def order(path):
        return next((at for at, end in enumerate(first) if path.endswith(end)), len(first)), path

    parts = []
    for path in sorted(files, key=order):
        if not path.endswith(".yaml") or path.endswith("/tests.yaml"):
            continue
        for text in re.split(r"^---\n", files[path], flags=re.MULTILINE):
            one = yaml.load(text, Strict)
            if not one:
                continue
            lines = [line.rstrip() for line in text.splitlines() if line.strip()]
            parts.append("\n".join(line for line in lines if "app.kubernetes.io/managed-by" not in line))
    text = head + "---\n" + "\n---\n".join(parts) + "\n"
    return text.replace("    helm.sh/resource-policy: keep\n", "").replace("  annotations:\n---", "---")


def check_policy():
    """Nothing is left to fill in."""
    for unit, written in (("64Mi", "64Mi"), (134217728, "134217728")):
        text = render({"config": {"shm": {"unit": unit}}})["shmesh/templates/memory-policy.yaml"]
        expect(not re.search(r"@[A-Z]+@", text) and f'quantity("{written}")' in text, f"memory: the unit {unit} is not filled in")
    for values in ({"config": {"mode": "dra"}}, {"config": {"shm": {"budget": 0}}}, {"plugin": {"memoryPolicy": "None"}}):
        left = [one["metadata"]["name"] for one in objects(render(values)) if one["metadata"]["name"] == "shmesh-memory"]
        expect(not left, f"memory: a policy with {values}")
    for action in ("Deny", "Warn", "Audit"):
        bindings = [one for one in objects(render({"plugin": {"memoryPolicy": action}})) if one["kind"] == "ValidatingAdmissionPolicyBinding"]
        expect([one["spec"]["validationActions"] for one in bindings] == [[action]], f"memory: {action} is not what the policy does")
    text = render({"config": {"mode": "dra"}})["shmesh/templates/claims-policy.yaml"]
    expect(not re.search(r"@[A-Z]+@", text), "claims: something is not filled in")
    values = yaml.load((CHART / "tests/values/policy.yaml").read_text(), Strict)
    files = render(values)
    text = files["shmesh/templates/injector-policy.yaml"]
    expect(not re.search(r"@[A-Z]+@", text), "policy: something is not filled in")
    expect("20971520" in text, "policy: the sidecar's memory is not in it")
    for memory, size in [("20M", 20_000_000), ("1.5Gi", 3 << 29), (".5Ki", 512), ("1e+09", 10**9), ("1E", 10**18), ("1500m", 2), (1 << 24, 1 << 24)]:
        files = render({**values, "sidecar": {**values.get("sidecar", {}), "memory": memory}})
        text = files["shmesh/templates/injector-policy.yaml"]
        expect(re.search(rf"\b{size}\b", text), f"policy: sidecar.memory {memory!r} is not {size}")
    found = objects(files)
    for kind in ("MutatingAdmissionPolicy", "ValidatingAdmissionPolicy"):
        selector = named(found, kind)["spec"]["matchConstraints"]["namespaceSelector"]["matchExpressions"][0]
        expect(selector["values"] == ["kube-system", "monitoring"], f"{kind}: namespaces")
    expect(not [one for one in found if one["metadata"]["name"] == "shmesh-injector"], "policy: there is a server")


def check_manifests(bless):
    file = ROOT / "manifests/install.yaml"
    text = rendered_manifests()
    if bless:
        file.write_text(text)
    expect(file.exists() and file.read_text() == text, "manifests/install.yaml is not what the chart gives: run with SHMESH_BLESS=1")
    found = [one for one in yaml.load_all(text, Strict) if one]
    for one in found:
        validate(one, "install.yaml")
    expect(found[0]["kind"] == "Namespace", "install.yaml: the namespace must be first")
    enforce = found[0]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    expect(enforce == "privileged", "install.yaml: Pod Security labels")
    kustomization = yaml.load((ROOT / "manifests/kustomization.yaml").read_text(), Strict)
    expect(kustomization["resources"] == ["install.yaml"], "kustomization.yaml: resources")
    return len(found)


def check_samples(plugin):
    """Every sample is valid and runs in a restricted namespace, also with what the chart's own injector adds."""
    count = 0
    bridge = {"enabled": True, "namespaces": [{"name": "shmesh-sample", "links": ["radio"]}]}
    values = {"config": {"pools": [POOL]}, "bridge": bridge}
    config = named(objects(render(values)), "ConfigMap", "shmesh-injector")["data"]["injector.yaml"]
    for file in sorted((ROOT / "manifests/samples").glob("*.yaml")):
        claims = []
        for one in yaml.load_all(file.read_text(), Strict):
            if not one:
                continue
            count += 1
            validate(one, file.name, DRA if one["kind"] == "ResourceClaim" else VERSIONS[0])
            if one["kind"] == "ResourceClaim":
                claims.append(one)
            if one["kind"] == "Pod":
                restricted(one, file.name)
                for value in one["metadata"].get("annotations", {}).values():
                    yaml.load(value, Strict)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as told:
            told.write(config)
            told.flush()
            command = [plugin, "inject", "-f", str(file), "--config", told.name]
            ran = subprocess.run(command, capture_output=True, text=True)
        expect(ran.returncode == 0, f"{file.name}: not injected: {ran.stderr}")
        if claims:
            printed = subprocess.run([plugin, "claim", "-f", str(file)], capture_output=True, text=True)
            same = printed.returncode == 0 and [one for one in yaml.load_all(printed.stdout, Strict)] == claims
            expect(same, f"{file.name}: its claims are not what the command prints: {printed.stdout} {printed.stderr}")
        for one in yaml.load_all(ran.stdout, Strict):
            if one and one["kind"] == "Pod":
                validate(one, f"{file.name}, injected")
                restricted(one, f"{file.name}, injected")
                sidecars = [each for each in one["spec"].get("initContainers", []) if each["name"] == "shmesh"]
                # A secondary in a pool has none: the primary's sidecar keeps the link.
                has_claim = [each for each in one["spec"]["containers"] + sidecars if each["resources"].get("claims") == [{"name": "shmesh"}]]
                asks = [each for each in one["spec"]["containers"] + sidecars if "shmesh.io/fronthaul" in each["resources"]["limits"]]
                expect(bool(has_claim) == bool(claims), f"{file.name}: {one['metadata']['name']}: the claim")
                asks += has_claim
                expect(sidecars or asks, f"{file.name}: {one['metadata']['name']}: nothing was added")
                for each in sidecars:
                    agent = {"shmesh.io/agent", "shmesh.io/fronthaul"} & set(each["resources"]["limits"])
                    expect(len(agent) + len(each["resources"].get("claims", [])) == 1, f"{file.name}: the sidecar has no identity service: {each['resources']}")
    expect(count >= 3, "manifests/samples: some are missing")
    return count


# In place of the programs: what they were called with, and what kubectl read.
DOUBLES = """
docker() { :; }
helm() { printf '%s\\n' "$@" >"$OUT/helm"; }
kubectl() { case $1 in apply) cat >"$OUT/sample";; *) printf '%s\\n' "$@" >"$OUT/kubectl";; esac; }
"""


def check_readme():
    """The README's commands for a cluster, run with doubles: they install this chart, and the sample has the images of the registry."""
    section = (ROOT / "README.md").read_text().split("### Cluster", 1)[1]
    commands = section.split("```console\n", 1)[1].split("```", 1)[0]
    commands = re.sub(r"^\$ ", "", commands, flags=re.MULTILINE)
    registry = "registry.example.com/shmesh"
    with tempfile.TemporaryDirectory() as out:
        variables = {"PATH": os.environ["PATH"], "OUT": out, "REGISTRY": registry}
        subprocess.run(["bash", "-euc", DOUBLES + commands], cwd=ROOT, env=variables, check=True)
        helm, sample, kubectl = ((pathlib.Path(out) / name).read_text() for name in ("helm", "sample", "kubectl"))
    pool = f"config.pools[0].name={POOL['name']},config.pools[0].gid={POOL['gid']}"
    expected = ["install", "shmesh", "helm", "--namespace", NAMESPACE, "--create-namespace", "--set", f"image.registry={registry}", "--set", pool]
    expect(helm.split() == expected, f"README.md: helm {helm.split()}")
    rendered = "".join(render({"image": {"registry": registry}, "config": {"pools": [POOL]}}).values())
    for where, text in (("the chart", rendered), ("the sample", sample)):
        images = re.findall(r"^ *(?:- )?image: *\"?([^\s\"]+)", text, re.MULTILINE)
        expect(images and all(image.startswith(registry + "/shmesh-") for image in images), f"README.md: images of {where}: {images}")
    namespace, pod = kubectl.split()[1], kubectl.split()[3]
    names = {(one["metadata"].get("namespace"), one["metadata"]["name"]) for one in yaml.load_all(sample, Strict)}
    expect((namespace, pod) in names, f"README.md: the sample has no pod {namespace}/{pod}")


def check_e2e(plugin):
    """Pods of the tests on a cluster: valid, restricted but for the one that kills, and with links that are injected."""
    count = 0
    for file in sorted((ROOT / "e2e/pods").glob("*.yaml")):
        for one in yaml.load_all(file.read_text(), Strict):
            count += 1
            validate(one, file.name)
            if one["kind"] == "Pod" and file.name != "tool.yaml":
                restricted(one, file.name)
    values = yaml.load((ROOT / "e2e/values.yaml").read_text(), Strict)
    config = named(objects(render(values)), "ConfigMap", "shmesh-injector")["data"]["injector.yaml"]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as told:
        told.write(config)
        told.flush()
        for name in ("device-keys.yaml", "service-accounts.yaml"):
            command = [plugin, "inject", "-f", str(ROOT / "e2e/pods" / name), "--config", told.name]
            ran = subprocess.run(command, capture_output=True, text=True)
            expect(ran.returncode == 0, f"{name}: not injected: {ran.stderr}")
            for one in yaml.load_all(ran.stdout, Strict):
                if one and one["kind"] == "Pod":
                    restricted(one, f"{name}, injected")
                    limits = one["spec"]["containers"][0]["resources"]["limits"]
                    expect("shmesh.io/fronthaul" in limits, f"{name}: {one['metadata']['name']} has no pool")
    return count


def known_metrics():
    """For each metric, from the code that registers it: the names of its series."""
    metrics = []
    sources = [
        ("shmesh_sidecar", ROOT / "sidecar/src/metrics.rs"),
        ("shmesh_plugin", ROOT / "plugin/src/metrics.rs"),
        ("shmesh_plugin", ROOT / "plugin/src/domain/claim_metrics.rs"),
        ("shmesh_injector", ROOT / "plugin/injector/src/webhook/metrics.rs"),
        ("shmesh_bridge", ROOT / "lib/bridge/src/bridge.rs"),
    ]
    for prefix, file in sources:
        text = file.read_text()
        found = re.findall(r'register(_with_unit)?\(\s*"(\w+)"', text)
        found += [("", name) for name in re.findall(r'encode_descriptor\("(\w+)"', text)]
        found += [("", name) for name in re.findall(r'=\s+\(\s*"(\w+)",\s+"', text)]
        for unit, name in found:
            full = f"{prefix}_{name}" + ("_seconds" if unit else "")
            metrics.append({full, full + "_total", full + "_bucket", full + "_count", full + "_sum"})
    return metrics


def check_metrics():
    """Alerts and dashboard use existing metrics, and monitoring.md describes every alert and every metric."""
    metrics = known_metrics()
    names = set().union(*metrics)
    rules = yaml.load((CHART / "dashboards/rules.yaml").read_text(), Strict)
    board = json.loads((CHART / "dashboards/shmesh.json").read_text())
    asked = [(rule["alert"], rule["expr"]) for group in rules["groups"] for rule in group["rules"]]
    for rule in [rule for group in rules["groups"] for rule in group["rules"]]:
        expect({"summary", "description"} <= set(rule["annotations"]), f"{rule['alert']}: has no summary or description")
    for panel in board["panels"]:
        expect(panel["type"] == "row" or panel.get("description"), f"{panel['title']}: the panel has no description")
        asked += [(panel["title"], target["expr"]) for target in panel.get("targets", [])]
    documented = (ROOT / "docs/monitoring.md").read_text() + (ROOT / "docs/between-machines.md").read_text()
    for where, expr in asked:
        found = re.findall(r"\bshmesh_\w+", expr)
        expect(found, f"{where}: the expression has no metric of shmesh")
        for name in found:
            expect(name in names, f"{where}: there is no metric {name}")
    for name, _ in asked:
        if name.startswith("Shmesh"):
            expect(f"`{name}`" in documented, f"docs/monitoring.md does not describe {name}")
    described = set(re.findall(r"`(shmesh_\w+)", documented))
    for name in described - names:
        expect(False, f"docs/monitoring.md describes {name}, which no daemon has")
    for metric in metrics:
        expect(metric & described, f"docs/monitoring.md does not describe {min(metric, key=len)}")
    return len(asked)


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--plugin", required=True, help="the program shmesh-plugin")
    arguments.add_argument("--bless", action="store_true")
    given = arguments.parse_args()
    check_lint()
    began = time.perf_counter()
    default = check_default()
    took = time.perf_counter() - began
    for one in default:
        validate(one, "defaults")
    scenarios = check_scenarios()
    check_dra()
    check_bridge()
    check_bridge_upgrades()
    refusals = check_refusals()
    check_restarts()
    check_config(given.plugin)
    check_policy()
    manifests = check_manifests(given.bless)
    samples = check_samples(given.plugin)
    check_readme()
    check_e2e(given.plugin)
    metrics = check_metrics()
    if problems:
        print("\n".join(problems))
        sys.exit(1)
    print(f"{len(default)} objects by default, rendered in {took * 1000:.0f} ms; {scenarios} in scenarios, {refusals} refusals, "
          f"{manifests} in install.yaml, {samples} in samples, {metrics} queries")


main()
