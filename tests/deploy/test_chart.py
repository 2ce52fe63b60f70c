"""The Helm chart by its kept renders, without Helm. `make chart` holds the renders to the chart."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.helm.generate import CHART, DEPLOY, files
from gateway.config.loading import FIXED_AT_START, load
from gateway.config.models import Config
from lab.autoscale.autoscale_command import pool_bounds
from scripts.chart_setup import CRDS
from tests.deploy.test_supply_chain import PROJECT
from tests.support.certificates import made
from tests.support.chart import CASES, DIGEST, Manifest, digest, golden, kept, of_kind, values

ALL = [(case, one) for case in CASES for one in kept(case)]
EVERY_CASE = pytest.mark.parametrize("case", CASES)
SERVED, PICKED = [case for case in CASES if "serve" in case], [case for case in CASES if "pick" in case]
VALUES = DEPLOY.parent / "tests" / "deploy" / "chart" / "values"
SECOND = 1.0


def of_all(kind: str) -> list[Manifest]:
    return [one for _, one in ALL if one["kind"] == kind]


def pods() -> list[Manifest]:
    return [one["spec"]["template"]["spec"] for one in of_all("Deployment")]


def gateway_of(case: str) -> Manifest:
    return next(one for one in of_kind(kept(case), "Deployment") if not one["metadata"]["name"].endswith("-envoy"))


def config_text(case: str) -> str:
    (found,) = (one for one in of_kind(kept(case), "ConfigMap") if "firsttoken.yaml" in one.get("data", {}))
    return str(found["data"]["firsttoken.yaml"])


def config(case: str, folder: Path) -> Config:
    """As the gateway reads it, with every variable of the container set."""
    container = gateway_of(case)["spec"]["template"]["spec"]["containers"][0]
    environ = {each["name"]: "0123456789abcdef" for each in container.get("env", ())}
    text = config_text(case).replace("/etc/firsttoken-tls", str(folder))
    if "/tls.crt" in text:
        certificates = made(folder)
        shutil.copy(certificates.server, folder / "tls.crt")
        shutil.copy(certificates.server, folder / "tls.key")
    path = folder / "firsttoken.yaml"
    path.write_text(text)
    return load([path], {**environ, "REDIS_URL": "redis://redis:6379"})


def test_eight_renders_are_kept() -> None:
    """One for each file of values, of the present chart: else `make chart-write`."""
    assert len(CASES) == 8
    assert [case for case in CASES if not golden(case).exists()] == []
    assert DIGEST.read_text().strip() == digest()


def test_the_schema_of_the_chart_is_up_to_date() -> None:
    """Else `python -m deploy.helm.generate`."""
    assert [str(path) for path, text in files().items() if not path.exists() or path.read_text() != text] == []


def test_the_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {PROJECT["version"]}


@EVERY_CASE
def test_values_fit_the_schema(case: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values(case), schema)
    assert defaults.keys() == schema["properties"].keys() - {"global"}


@pytest.mark.parametrize(
    ("route", "path", "message"),
    [
        ({"ttft": {"budget": 800}}, ["ttft", "budget"], "800 is not of type 'string'"),
        ({"ttft": {"budget": "1s", "target": []}}, ["ttft", "target"], "[] is not of type 'number', 'string'"),
        (
            {"ttft": {"budget": "1s", "buget": "1s"}},
            ["ttft"],
            "Additional properties are not allowed ('buget' was unexpected)",
        ),
        ({"tiers": [{"pool": 3}]}, ["tiers", 0, "pool"], "3 is not of type 'string'"),
        ({"tiers": [{"pool": "p", "when": {"turns": []}}]}, ["tiers", 0, "when", "turns"], "[] is not of type"),
    ],
)
def test_a_wrong_value_is_one_error_at_its_place(route: dict[str, Any], path: list[str | int], message: str) -> None:
    """Helm prints the errors of all branches of an `anyOf`."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    given = {"image": {"repository": "a"}, "config": {"pools": {}, "routes": {"chat": {"tiers": ["p"], **route}}}}
    (error,) = jsonschema.Draft202012Validator(schema).iter_errors(given)
    assert list(error.absolute_path) == ["config", "routes", "chat", *path]
    assert error.message.startswith(message)


def test_values_of_the_page_are_rendered() -> None:
    """docs/kubernetes.md shows three of the files of values, word for word."""
    page = (DEPLOY.parent / "docs" / "kubernetes.md").read_text()
    shown = re.findall(r"<!-- check: values -->\n```yaml\n(.*?)```", page, re.DOTALL)
    assert shown == [(VALUES / f"{case}.yaml").read_text() for case in ("serve", "pick-envoy", "pick-gateway")]


@pytest.mark.parametrize("minor", ["1.33", "1.35", kubernetes_validate.latest_version()])
def test_every_manifest_is_valid(minor: str) -> None:
    for case, one in ALL:
        if one["kind"] not in CRDS:
            kubernetes_validate.validate(one, minor, strict=True)
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"], case


@EVERY_CASE
def test_the_gateway_accepts_its_configuration(case: str, tmp_path: Path) -> None:
    """On the ports of the container's probes and services."""
    found, container = config(case, tmp_path), gateway_of(case)["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == [case.partition("-")[0], "--config", "/etc/firsttoken/firsttoken.yaml"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports.get("admin", 9090) == found.server.admin.port
    if case in PICKED:
        assert found.pick is not None
        assert (found.pick.listen.port, found.pick.listen.loopback) == (ports["grpc"], False)
        assert found.server.listen.loopback
    else:
        assert (found.server.listen.port, found.server.listen.loopback) == (ports["http"], False)
        assert (found.server.tls is not None) == (container["livenessProbe"]["httpGet"]["scheme"] == "HTTPS")


def test_the_checksum_is_of_what_a_reload_does_not_change() -> None:
    """The picker's port is bound at the start, too."""
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    (names,) = re.findall(r'define "firsttoken.fixed".*?fromYaml\) (.*?)\) -}}', helpers, re.DOTALL)
    assert set(re.findall(r'"(\w+)"', names)) == {*FIXED_AT_START, "pick"}


# ---------------------------------------------------------------- as an attacker


def test_no_secret_is_in_a_config_map() -> None:
    """Variables alone, and every one of them is set from a Secret, by name and key."""
    for case in CASES:
        text = config_text(case)
        assert re.findall(r"(?m)^\s*(?:api_key|admin_key|cache_secret|redis): (?!\$\{\w+\}$).*$", text) == []
        container = gateway_of(case)["spec"]["template"]["spec"]["containers"][0]
        from_secret = {each["name"] for each in container.get("env", ()) if "secretKeyRef" in each.get("valueFrom", {})}
        assert set(re.findall(r"\$\{(\w+)", text)) <= from_secret
    assert of_all("Secret") == []


def test_roles_allow_reading_in_one_namespace_and_nothing_else() -> None:
    """The rules of deploy/kubernetes, those of InferencePools only where one is followed."""
    manifest = yaml.safe_load_all((DEPLOY / "kubernetes" / "rbac.yaml").read_text())
    slices, *pools = next(one for one in manifest if one["kind"] == "Role")["rules"]
    found = {(case, one["metadata"]["namespace"]): one["rules"] for case, one in ALL if one["kind"] == "Role"}
    assert found.keys() == {
        ("pick-envoy", "ai"),
        ("pick-gateway", "ai"),
        ("pick-scaled", "ai"),
        ("serve", "ai"),
        ("serve-full", "ai"),
        ("serve-full", "large"),
        ("serve-observed", "ai"),
        ("serve-scaled", "ai"),
    }
    for where, rules in found.items():
        follows_pools = where in {("pick-gateway", "ai"), ("serve-full", "large")}
        assert rules == ([slices, *pools] if follows_pools else [slices])
    assert of_all("ClusterRole") == of_all("ClusterRoleBinding") == []
    for binding in of_all("RoleBinding"):
        assert [subject["namespace"] for subject in binding["subjects"]] == ["ai"]


def test_a_token_is_mounted_only_where_a_role_is() -> None:
    for case in CASES:
        has_role = any(of_kind(kept(case), "Role"))
        assert gateway_of(case)["spec"]["template"]["spec"]["automountServiceAccountToken"] is has_role
    assert [one for one in of_all("ServiceAccount") if one["automountServiceAccountToken"]] == []


def test_containers_have_no_rights() -> None:
    """The restricted Pod Security Standard, and no file but those of volumes."""
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] >= 100
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & pod.keys()
        assert not [each for each in pod["volumes"] if "hostPath" in each]
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_what_a_gateway_writes_is_in_volumes(tmp_path: Path) -> None:
    """The image's user has no other folder; both are bounded."""
    for case in CASES:
        pod = gateway_of(case)["spec"]["template"]["spec"]
        mounts = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
        empty = {each["name"]: each["emptyDir"]["sizeLimit"] for each in pod["volumes"] if "emptyDir" in each}
        folder = config(case, tmp_path).state.dir
        assert empty.keys() == {mounts[each] for each in ("/tmp", "/var/lib/firsttoken")}
        assert folder is None or str(folder) in mounts
    user = re.search(r"useradd .*--uid (\d+)", (DEPLOY / "Dockerfile").read_text())
    assert user is not None
    assert {gateway_of(case)["spec"]["template"]["spec"]["securityContext"]["runAsUser"] for case in CASES} == {
        int(user[1])
    }


def test_the_admin_port_is_closed_unless_somebody_is_named(tmp_path: Path) -> None:
    """It is on the pod's loopback; where Prometheus reads it, the NetworkPolicy names its peers."""
    for case in CASES:
        peers = values(case).get("networkPolicy", {}).get("admin", [])
        assert config(case, tmp_path).server.admin.loopback is not bool(peers)
        services = [one for one in of_kind(kept(case), "Service") if 9090 in map(target, one["spec"]["ports"])]
        assert [one["spec"]["type"] for one in services] == ["ClusterIP"] * bool(peers)
        for one in of_kind(kept(case), "NetworkPolicy", "firsttoken"):
            allowed = [rule["from"] for rule in one["spec"]["ingress"] if rule["ports"][0]["port"] == 9090]
            assert allowed == ([peers] if peers else [])


def target(port: dict[str, Any]) -> int:
    return 9090 if port.get("targetPort") == "admin" else int(port["port"])


def test_network_policies_name_peers_and_ports() -> None:
    """A rule without `from`, an empty one or an empty peer would let everybody in; so would one without ports."""
    found = of_all("NetworkPolicy")
    assert len(found) == len(CASES) - 1 + 2  # one is without, two have an Envoy
    for one in found:
        assert "Ingress" in one["spec"]["policyTypes"]
        for rule in one["spec"]["ingress"]:
            assert rule["from"]
            assert all(rule["from"])
            assert [port["protocol"] for port in rule["ports"]] == ["TCP"]
    (full,) = of_kind(kept("serve-full"), "NetworkPolicy")
    assert full["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert full["spec"]["ingress"] == [
        {"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"protocol": "TCP", "port": 8080}]}
    ]


def test_only_envoy_reaches_its_pickers() -> None:
    (policy,) = of_kind(kept("pick-envoy"), "NetworkPolicy", "firsttoken")
    envoy = next(of_kind(kept("pick-envoy"), "Deployment", "-envoy"))
    labels = envoy["spec"]["template"]["metadata"]["labels"]
    (rule,) = policy["spec"]["ingress"]
    assert rule == {
        "from": [{"podSelector": {"matchLabels": labels}}],
        "ports": [{"protocol": "TCP", "port": 9002}],
    }


# ---------------------------------------------------------------- as an operator


@EVERY_CASE
def test_a_pod_is_not_killed_while_it_drains(case: str, tmp_path: Path) -> None:
    """Its time is above wait and grace, and 5 s more of a worker's. Within `wait` balancers notice: after the probe's
    failures, and a second."""
    drain = config(case, tmp_path).server.drain
    for one in of_kind(kept(case), "Deployment"):
        pod = one["spec"]["template"]["spec"]
        probe = pod["containers"][0]["readinessProbe"]
        assert pod["terminationGracePeriodSeconds"] >= drain.wait + drain.grace + 10 * SECOND
        assert drain.wait > probe["periodSeconds"] * probe["failureThreshold"] + SECOND
    for one in of_kind(kept(case), "Deployment", "-envoy"):
        command = one["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["bash", "/etc/envoy/drain.sh", str(int(drain.wait)), str(int(drain.grace))]


@EVERY_CASE
def test_a_rollout_and_a_drain_of_nodes_leave_replicas(case: str) -> None:
    for one in of_kind(kept(case), "Deployment"):
        assert one["spec"]["replicas"] >= 2
        assert one["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
        labels = one["spec"]["template"]["metadata"]["labels"]
        spread = one["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert [each["topologyKey"] for each in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
        selectors = [each["labelSelector"]["matchLabels"] for each in spread]
        budgets = [one["spec"]["selector"]["matchLabels"] for one in of_kind(kept(case), "PodDisruptionBudget")]
        selectors += [each for each in budgets if each["app.kubernetes.io/component"] in labels.values()]
        assert len(selectors) == 3
        assert all(each.items() <= labels.items() for each in selectors)


@EVERY_CASE
def test_every_service_selects_pods_with_its_port(case: str) -> None:
    templates = [one["spec"]["template"] for one in of_kind(kept(case), "Deployment")]
    for one in of_kind(kept(case), "Service"):
        if one["metadata"]["name"].endswith("-engines"):
            assert one["spec"]["selector"] == values(case)["envoy"]["engines"]["selector"]
            continue
        fitting = [each for each in templates if one["spec"]["selector"].items() <= each["metadata"]["labels"].items()]
        (found,) = fitting
        names = {port["name"] for each in found["spec"]["containers"] for port in each["ports"]}
        assert {port["targetPort"] for port in one["spec"]["ports"]} <= names


def test_alerts_know_the_job_of_the_service_monitor() -> None:
    """FirsttokenDown selects jobs by name: another one would never fire."""
    (monitor,) = of_kind(kept("serve-observed"), "ServiceMonitor")
    (job,) = monitor["spec"]["endpoints"][0]["relabelings"]
    (pattern,) = re.findall(r'up\{job=~"([^"]+)"', (CHART / "files" / "rules" / "gateway.yml").read_text())
    assert job["targetLabel"] == "job"
    assert re.fullmatch(pattern, job["replacement"])
    admin = next(one for one in of_kind(kept("serve-observed"), "Service", "-admin"))
    assert monitor["spec"]["selector"]["matchLabels"].items() <= admin["metadata"]["labels"].items()


def test_keda_asks_the_autoscaler_beside_the_gateway() -> None:
    """By the name of its service; its bounds are those of the ScaledObject."""
    for case in ("pick-scaled", "serve-scaled"):
        _, autoscaler = gateway_of(case)["spec"]["template"]["spec"]["containers"]
        (service,) = of_kind(kept(case), "Service", "-scaler")
        assert service["spec"]["ports"][0]["targetPort"] == autoscaler["ports"][0]["name"]
        pools = dict(pool_bounds(each.removeprefix("--pool=")) for each in autoscaler["args"] if "--pool" in each)
        for one in of_kind(kept(case), "ScaledObject"):
            (trigger,) = one["spec"]["triggers"]
            assert trigger["metadata"]["scalerAddress"] == f"{service['metadata']['name']}.ai.svc:9003"
            bounds = pools.pop(trigger["metadata"]["pool"])
            assert (bounds.least, bounds.most) == (one["spec"]["minReplicaCount"], one["spec"]["maxReplicaCount"])
        assert not pools


def test_envoy_is_configured_as_the_one_that_is_tested() -> None:
    """Beside deploy/envoy it has a port for probes, names of services, and asks no picker that is not healthy."""
    (own,) = of_kind(kept("pick-envoy"), "ConfigMap", "-envoy")
    found = yaml.safe_load(own["data"]["envoy.yaml"])
    resources, probes = found["static_resources"], found["static_resources"]["listeners"].pop()
    picker, engines, admin = resources["clusters"]
    resources["clusters"] = [picker, engines]
    assert found.pop("admin")["address"]["socket_address"]["address"] == "127.0.0.1"
    assert (probes["name"], admin["name"]) == ("probes", "admin")
    assert picker.pop("common_lb_config") == {"healthy_panic_threshold": {"value": 0}}
    names = []
    for cluster in (picker, engines):
        dns = cluster.pop("cluster_type")["typed_config"]
        assert (dns["@type"].rpartition(".")[2], dns["dns_refresh_rate"]) == ("DnsCluster", "1s")
        cluster["type"] = "STRICT_DNS"
        names.append(cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"])
    services = {one["metadata"]["name"] for one in of_kind(kept("pick-envoy"), "Service")}
    hosts = [each["socket_address"].pop("address") for each in names]
    assert hosts == ["gw-firsttoken-pickers", "gw-firsttoken-engines"]
    assert set(hosts) <= services
    deployed = yaml.safe_load((DEPLOY / "envoy" / "envoy.yaml").read_text())
    del deployed["static_resources"]["clusters"][0]["common_lb_config"]
    for cluster in deployed["static_resources"]["clusters"]:
        address = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
        del address["socket_address"]["address"]
    assert found == deployed
