"""The Helm chart, rendered by Helm: `make chart`."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from shutil import which
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.helm.generate import CHART
from scripts.chart_setup import CRDS, crd
from tests.support.chart import (
    CASES,
    DIGEST,
    Manifest,
    digest,
    golden,
    helm,
    manifests,
    of_kind,
    rendered,
    without_generated,
)
from tests.support.chart import values as values_of

MINORS = ("1.33", "1.35", kubernetes_validate.latest_version())
WRITE = os.environ.get("FIRSTTOKEN_WRITE_CHART") == "1"  # make chart-write


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def text(case: str) -> str:
    return rendered(values_of(case))


def test_the_kept_render_is_what_helm_makes_of_the_chart(case: str, text: str) -> None:
    """Look at the difference, then `make chart-write`."""
    if WRITE:
        golden(case).write_text(without_generated(text))
        DIGEST.write_text(digest() + "\n")
    assert golden(case).read_text() == without_generated(text)
    assert DIGEST.read_text().strip() == digest()


@pytest.mark.parametrize("minor", MINORS)
def test_every_manifest_is_valid(text: str, minor: str) -> None:
    """By the schemas of three versions of Kubernetes, unknown fields included, and by those of the custom resources."""
    for one in manifests(text):
        if one["kind"] in CRDS:
            jsonschema.Draft202012Validator(strict(definition(one))).validate(one)
        else:
            kubernetes_validate.validate(one, minor, strict=True)


def definition(one: Manifest) -> dict[str, Any]:
    """The schema of a custom resource, of its version."""
    found = yaml.safe_load(crd(one["kind"]).read_text())
    assert one["apiVersion"].startswith(f"{found['spec']['group']}/")
    (schema,) = (
        each["schema"]["openAPIV3Schema"]
        for each in found["spec"]["versions"]
        if each["name"] == one["apiVersion"].partition("/")[2]
    )
    return dict(schema)


def strict(schema: Any) -> Any:
    """The API server drops fields that a schema does not have; here they are errors."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    is_object = isinstance(found.get("properties"), dict) and found.get("type") == "object"
    if is_object and "additionalProperties" not in found and not found.get("x-kubernetes-preserve-unknown-fields"):
        found["additionalProperties"] = False
    if found.get("properties", {}).keys() >= {"kind", "apiVersion", "metadata", "spec"}:
        found["properties"]["metadata"] = {"type": "object"}
    return found


def test_a_field_that_a_custom_resource_does_not_have_is_found() -> None:
    """The strictness of the test above."""
    (one,) = of_kind(manifests(rendered(values_of("pick-scaled"))), "ScaledObject")
    one["spec"]["fallback"]["behaviour"] = "static"
    with pytest.raises(jsonschema.ValidationError, match="behaviour"):
        jsonschema.validate(one, strict(definition(one)))


def test_rules_and_dashboards_are_those_of_the_repository() -> None:
    found = manifests(rendered(values_of("serve-observed")))
    rules = {one["metadata"]["name"]: one["spec"] for one in of_kind(found, "PrometheusRule")}
    sources = (CHART / "files" / "rules").glob("*.yml")
    assert rules == {f"gw-firsttoken-{path.stem}": yaml.safe_load(path.read_text()) for path in sources}
    maps = [one["data"] for one in of_kind(found, "ConfigMap") if "-dashboard-" in one["metadata"]["name"]]
    shown = {name: json.loads(text) for data in maps for name, text in data.items()}
    dashboards = (CHART / "files" / "dashboards").glob("*.json")
    assert shown == {f"firsttoken-{path.name}": json.loads(path.read_text()) for path in dashboards}


@pytest.mark.skipif(which("kubectl") is None, reason="needs kubectl")
def test_kustomize_puts_a_render_into_the_namespace_of_its_release(tmp_path: Path) -> None:
    """By the file of docs/kubernetes.md; a role stays where its engines are."""
    page = (CHART.parents[2] / "docs" / "kubernetes.md").read_text()
    (tmp_path / "kustomization.yaml").write_text(page.partition("<<'END'\n")[2].partition("END\n")[0])
    engines = {"pools": {"qwen": {"endpoints": {"kubernetes": {"service": "engines/vllm", "port": 8000}}}}}
    (tmp_path / "manifests.yaml").write_text(rendered(merged(values_of("serve"), {"config": engines})))
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True, check=True)
    spread = {(one["kind"], one["metadata"]["namespace"]) for one in manifests(done.stdout)}
    assert {kind for kind, namespace in spread if namespace == "engines"} == {"Role", "RoleBinding"}
    assert {namespace for _, namespace in spread} == {"ai", "engines"}
    assert ("Deployment", "ai") in spread


def test_helm_finds_nothing_to_complain_of() -> None:
    report = helm().lint(str(CHART), values_of("serve"), strict=True)
    assert [message["error"] for message in report["messages"] if message["error"] != "icon is recommended"] == []


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("serve", {"replcas": 3}, "additional properties 'replcas' not allowed"),
    ("serve", {"mode": "serv"}, "at '/mode': value must be one of 'serve', 'pick'"),
    ("serve", {"image": {"repository": ""}}, "at '/image/repository'"),
    ("serve", {"drain": {"wait": "10s"}}, "at '/drain/wait': got string, want integer"),
    ("serve", {"config": {"server": {"listen": "0.0.0.0:80"}}}, "at '/config/server': additional properties 'listen'"),
    ("serve", {"config": {"pools": {"qwen": {"enpoints": []}}}}, "additional properties 'enpoints' not allowed"),
    ("serve", {"config": {"routes": {"chat": {"ttft": {"budget": "fast"}}}}}, "/config/routes/chat/ttft/budget"),
    ("serve-apis", {"config": {"passthrough": None}}, "config.routes: there are none"),
    ("serve", {"config": {"keys": []}}, "config.keys: callers need keys"),
    ("serve", {"networkPolicy": {"callers": [{}]}}, "at '/networkPolicy/callers/0'"),
    ("serve", {"config": {"records": {"dir": "/var/lib/firsttoken/records"}}}, "stateSize: records take up to"),
    ("serve", {"env": {"REDIS_URL": {"value": "redis://r"}}}, "env.REDIS_URL is set by redis.secret"),
    ("serve", {"env": {"KEY": {"secret": "x"}}}, "at '/env/KEY'"),
    ("serve", {"envoy": {"enabled": True}}, "mode: serve carries the bytes itself"),
    ("serve", {"monitoring": {"serviceMonitor": {"enabled": True}}}, "networkPolicy.admin: Prometheus must reach"),
    ("serve", {"autoscaling": {"engines": {"qwin": {"name": "x", "max": 2}}}}, "autoscaling.engines.qwin"),
    ("serve-scaled", {"networkPolicy": {"scaler": []}}, "networkPolicy.scaler: KEDA must reach"),
    ("serve-scaled", {"autoscaling": {"prometheusAddress": ""}}, "autoscaling.prometheusAddress: remove it"),
    ("serve-scaled", {"autoscaling": {"trigger": "external"}}, "autoscaling.trigger: remove it"),
    ("pick-envoy", {"envoy": {"engines": {"host": "vllm.ai.svc"}}}, "envoy.engines: set selector"),
    ("pick-envoy", {"tls": {"secret": "x"}}, "tls.secret is of the data port"),
    ("pick-gateway", {"networkPolicy": {"pickers": []}}, "networkPolicy.pickers: your gateway must reach"),
    ("pick-gateway", {"inferencePool": {"selector": None}}, "inferencePool.selector: name the labels"),
    ("pick-gateway", {"inferencePool": {"targetPorts": []}}, "at '/inferencePool/targetPorts'"),
]


@pytest.mark.parametrize(("case", "change", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_a_wrong_value_is_named(case: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(helm().HelmError) as raised:
        rendered(merged(values_of(case), change))
    assert message in str(raised.value)


SECRET = "sk-live-4f9a8c7b6d5e"
HOLDERS: list[tuple[str, dict[str, Any]]] = [
    ("config.pools.openai.api_key", {"pools": {"openai": {"api_key": SECRET}}}),
    ("config.pools.openai.api_key", {"pools": {"openai": {"api_key": "${KEY:-" + SECRET + "}"}}}),
    ("config.pools.openai.api_keys", {"pools": {"openai": {"api_key": "", "api_keys": ["${KEY}", SECRET]}}}),
    (
        "config.pools.qwen.headers.Authorization",
        {"pools": {"qwen": {"headers": {"Authorization": f"Bearer {SECRET}"}}}},
    ),
    ("config.pools.qwen.query.api-key", {"pools": {"qwen": {"query": {"api-key": SECRET}}}}),
    ("config.pools.openai.proxy", {"pools": {"openai": {"proxy": f"http://me:{SECRET}@proxy:3128"}}}),
    ("config.server.admin_key", {"server": {"admin_key": SECRET}}),
    ("config.state.cache_secret", {"state": {"cache_secret": SECRET}}),
]


@pytest.mark.parametrize(("path", "change"), HOLDERS, ids=[f"{path}-{i}" for i, (path, _) in enumerate(HOLDERS)])
def test_a_secret_among_the_values_is_refused_and_not_repeated(path: str, change: dict[str, Any]) -> None:
    """The configuration becomes a ConfigMap, and Helm's errors end up in logs."""
    with pytest.raises(helm().HelmError) as raised:
        rendered(merged(values_of("serve"), {"config": change}))
    assert f"{path} holds a secret: write ${{NAME}}" in str(raised.value)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "is_rolled"),
    [
        ({"config": {"routes": {"chat": {"ttft": {"budget": "1s"}}}}}, False),
        ({"config": {"pools": {"qwen": {"context_window": 8192}}}}, False),
        ({"config": {"server": {"workers": 2}}}, True),
        ({"config": {"state": {"namespace": "other"}}}, True),
        ({"config": {"telemetry": {"traces": "1%"}}}, True),
        ({"drain": {"wait": 20}}, True),
    ],
    ids=str,
)
def test_pods_are_replaced_for_what_a_reload_does_not_change(change: dict[str, Any], is_rolled: bool) -> None:
    """A new budget costs no connection and no learned state."""
    before, after = (
        next(of_kind(manifests(rendered(given)), "Deployment"))["spec"]["template"]
        for given in (values_of("serve"), merged(values_of("serve"), change))
    )
    assert (before != after) is is_rolled


def merged(given: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(given)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if both else value
    return found
