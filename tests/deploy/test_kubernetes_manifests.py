"""Manifests are valid for the oldest and the newest Kubernetes that validation knows, unknown fields included."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from gateway.kubernetes.pod_discovery import PODS, POOLS, SLICES

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
MANIFESTS = [(path.name, one) for path in sorted(FOLDER.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize("version", ["1.33", kubernetes_validate.latest_version()])
@pytest.mark.parametrize(("name", "manifest"), MANIFESTS, ids=[f"{name}-{one['kind']}" for name, one in MANIFESTS])
def test_a_manifest_is_valid(name: str, manifest: dict[str, object], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_role_allows_what_is_read_and_nothing_else() -> None:
    (role,) = [one for _, one in MANIFESTS if one["kind"] == "Role"]
    allowed = {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert allowed == {group_and_resource(path): {"list", "watch"} for path in (SLICES, POOLS, PODS)}


def group_and_resource(path: str) -> tuple[str, str]:
    parts = path.split("/")
    return (parts[2] if parts[1] == "apis" else "", parts[-1])
