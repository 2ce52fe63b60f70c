"""Compose stack, checked without Docker: schema, files and consistency."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
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
    for name, stack in (("gateway", "simulated"), ("gateway-2", "simulated"), ("gateway-gpu", "gpu")):
        service = SERVICES[name]
        assert "./deploy/config:/etc/firsttoken:ro" in service["volumes"]
        named = [Path(arg).name for arg in service["command"] if arg.startswith("/etc/firsttoken/")]
        assert named == STACKS[stack]


def test_each_gateway_keeps_its_state_in_a_volume_of_its_own() -> None:
    """Writable for the user of the image, which owns the folder that a new volume is copied from."""
    folder = str(loaded("simulated").state.dir)
    names = [volume for gate in ("gateway", "gateway-2") for volume in SERVICES[gate]["volumes"] if folder in volume]
    volumes = [name.removesuffix(f":{folder}") for name in names]
    assert len(set(volumes)) == 2
    assert set(volumes) <= COMPOSE["volumes"].keys()
    assert f"--owner firsttoken --mode 0700 {folder}\n" in (DEPLOY / "Dockerfile").read_text("utf-8")


def test_the_gateways_share_the_redis_of_the_stack() -> None:
    url = loaded("simulated").state.redis
    assert url is not None
    assert urlsplit(url.get_secret_value()).hostname in SERVICES
    assert not SERVICES["redis"].get("ports")


def test_haproxy_asks_every_gateway_of_the_stack() -> None:
    """By service name and data port; the only published data port is its own."""
    listen = loaded("simulated").server.listen.port
    text = (DEPLOY / "config/haproxy.cfg").read_text("utf-8")
    servers = re.findall(r"(?m)^    server (\S+) (\S+)$", text)
    gateways = [name for name, service in SERVICES.items() if "fleet.yaml" in str(service.get("command"))]
    assert servers == [(name, f"{name}:{listen}") for name in gateways]
    published = [port for name in [*gateways, "haproxy"] for port in SERVICES[name]["ports"]]
    assert [port for port in published if port.endswith(f":{listen}")] == SERVICES["haproxy"]["ports"]
    assert "    bind :8080\n" in text


def test_a_container_is_not_killed_while_it_drains() -> None:
    """HAProxy takes a gateway out after two failed checks of a second each."""
    drain = loaded("simulated").server.drain
    assert drain.wait > 2
    assert float(SERVICES["gateway"]["stop_grace_period"].removesuffix("s")) > drain.wait + drain.grace + 5


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="needs haproxy")
def test_haproxy_accepts_its_configuration() -> None:
    """Names that nobody knows yet are no error; any other warning is."""
    checked = ["haproxy", "-c", "-f", str(DEPLOY / "config/haproxy.cfg")]
    done = subprocess.run(checked, capture_output=True, text=True, timeout=60, check=False)
    warnings = [line for line in done.stderr.splitlines() if "[WARNING]" in line and "could not resolve" not in line]
    assert (done.returncode, warnings) == (0, [])


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
    assert mounts["./deploy/helm/firsttoken/files/rules"] == "/etc/prometheus/rules"
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
    assert (
        f"./deploy/helm/firsttoken/files/dashboards:{provider['options']['path']}:ro" in SERVICES["grafana"]["volumes"]
    )
