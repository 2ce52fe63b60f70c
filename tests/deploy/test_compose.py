"""Compose stack, checked without Docker: schema, files and consistency."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from jsonschema import Draft202012Validator

from gateway.config.loading import load
from gateway.config.models import Config
from tests.support.dashboards import of_panels, of_rules, of_variables

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
STACKS = {"simulated": ["fleet.yaml", "routes.yaml"], "gpu": ["fleet-gpu.yaml"]}
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]


def loaded(stack: str) -> Config:
    return load([DEPLOY / "config" / name for name in STACKS[stack]], {})


def test_the_compose_file_is_valid_by_the_specification() -> None:
    """Checked against the JSON Schema of the Compose Specification."""
    validator = Draft202012Validator(json.loads((Path(__file__).parent / "compose-spec.json").read_text("utf-8")))
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(COMPOSE)] == []


def test_every_mounted_or_built_file_exists() -> None:
    """Docker silently makes an empty directory of a missing bind mount."""
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists(), source
        if "build" in service:
            assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_every_published_port_is_on_loopback() -> None:
    """The stack has no API keys: no port may be reachable from another machine."""
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


@pytest.mark.parametrize("stack", STACKS)
def test_the_configurations_load(stack: str) -> None:
    """Each stack has the routes named in docs and dashboards."""
    assert {"chat", "agent"} <= set(loaded(stack).routes)


@pytest.mark.parametrize("stack", STACKS)
def test_every_endpoint_is_a_service_on_its_listening_port(stack: str) -> None:
    """Host names of the fleet are service names of the stack."""
    for url in loaded(stack).urls().values():
        parts = urlsplit(url)
        command = SERVICES[parts.hostname or ""]["command"]
        assert command[command.index("--port") + 1] == str(parts.port)


def test_each_gateway_is_started_with_files_that_exist() -> None:
    """deploy/config is mounted at /etc/firsttoken."""
    for name, stack in (("gateway", "simulated"), ("gateway-gpu", "gpu")):
        service = SERVICES[name]
        assert "./deploy/config:/etc/firsttoken:ro" in service["volumes"]
        named = [Path(arg).name for arg in service["command"] if arg.startswith("/etc/firsttoken/")]
        assert named == STACKS[stack]


def test_prometheus_scrapes_services_of_the_stack() -> None:
    """Every target is a service; gateways are scraped on the admin port."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))
    for job in config["scrape_configs"]:
        for target in targets(job):
            host, _, port = target.partition(":")
            assert host in SERVICES
            assert int(port) == (loaded("simulated").server.admin.port if host.startswith("gateway") else 8000)


def targets(job: dict[str, Any]) -> list[str]:
    """`host:port` of each target, static or by DNS."""
    static = [target for group in job.get("static_configs", []) for target in group["targets"]]
    by_name = [f"{name}:{dns['port']}" for dns in job.get("dns_sd_configs", []) for name in dns["names"]]
    return static + by_name


def test_prometheus_loads_the_mounted_rules() -> None:
    """The configuration names the rules by a relative path, which compose mounts."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))
    assert config["rule_files"] == ["rules/*.yml"]
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["prometheus"]["volumes"])
    assert mounts["./deploy/prometheus/rules"] == "/etc/prometheus/rules"
    assert mounts["./deploy/prometheus/prometheus.yml"] == "/etc/prometheus/prometheus.yml"
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]


def test_dashboards_and_rules_query_only_exported_series() -> None:
    """docs/metrics.md lists the exported series, and is itself checked against the code."""
    known = set(re.findall(r"^\| `(firsttoken_\w+)`", (ROOT / "docs/metrics.md").read_text("utf-8"), re.MULTILINE))
    queries = [*of_panels(), *of_variables(), *of_rules("record"), *of_rules("alert")]
    used = {name for query in queries for name in re.findall(r"(?<!:)\bfirsttoken_\w+", query.expr)}
    assert {family(name) for name in used} - known == set()


def family(name: str) -> str:
    """Metric family of a series."""
    return re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name)


def test_grafana_is_provisioned_with_the_data_sources_of_the_dashboards() -> None:
    """Provisioning names the service and port of Prometheus."""
    provisioning = DEPLOY / "grafana/provisioning"
    sources = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text("utf-8"))["datasources"]
    assert [(source["type"], source["url"]) for source in sources] == [
        ("prometheus", "http://prometheus:9090"),
        ("jaeger", "http://traces:16686"),
    ]
    assert {urlsplit(source["url"]).hostname for source in sources} <= set(SERVICES)
    (exemplars,) = sources[0]["jsonData"]["exemplarTraceIdDestinations"]
    assert exemplars["datasourceUid"] == sources[1]["uid"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/firsttoken.yml").read_text("utf-8"))["providers"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in SERVICES["grafana"]["volumes"]
