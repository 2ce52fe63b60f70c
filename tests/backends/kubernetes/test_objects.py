"""Objects of the Kubernetes API become addresses of pods."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backends.kubernetes.objects import EndpointSlice, InferencePool, Pod, PodAddress, pods_of_pool, pods_of_slices
from tests.support.kubernetes_api import endpoint


def slice_of(*endpoints: Any, family: str = "IPv4", ports: Any = None) -> EndpointSlice:
    found = {
        "metadata": {"name": "one", "resourceVersion": "1"},
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}] if ports is None else ports,
    }
    return msgspec.convert(found, EndpointSlice)


@pytest.mark.parametrize(
    ("conditions", "is_ready"),
    [
        ({}, True),  # nothing is known: ready, by the API's reference
        ({"ready": None}, True),
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),  # finishes what it has
    ],
)
def test_an_endpoint_that_is_not_ready_gets_no_request(conditions: dict[str, bool | None], is_ready: bool) -> None:
    found = pods_of_slices([slice_of(endpoint("10.0.0.1", "a", **conditions))], "http")
    assert found == ((PodAddress("10.0.0.1", 8000, "a"),) if is_ready else ())


def test_slices_of_a_service_are_united() -> None:
    """A pod that moves between two slices is in both for a moment."""
    one = slice_of(endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b"))
    two = slice_of(endpoint("10.0.0.2", "b"), endpoint("10.0.0.3", "c"))
    assert [pod.uid for pod in pods_of_slices([one, two], "http")] == ["a", "b", "c"]


@pytest.mark.parametrize(("port", "numbers"), [("http", [8000]), (9000, [9000]), ("grpc", []), (8001, [])])
def test_a_port_is_known_by_its_name_or_its_number(port: str | int, numbers: list[int]) -> None:
    assert [pod.port for pod in pods_of_slices([slice_of(endpoint("10.0.0.1"))], port)] == numbers


def test_a_pod_with_addresses_of_both_families_is_one_endpoint() -> None:
    """The IPv4 address; names of other hosts are no addresses."""
    six, four = slice_of(endpoint("fd00::1", "a"), family="IPv6"), slice_of(endpoint("10.0.0.1", "a"))
    named = slice_of(endpoint("elsewhere.example", "b"), family="FQDN")
    assert pods_of_slices([six, named, four], "http") == (PodAddress("10.0.0.1", 8000, "a"),)
    assert pods_of_slices([six], "http") == (PodAddress("fd00::1", 8000, "a"),)


@pytest.mark.parametrize("empty", [slice_of(), slice_of(endpoint("10.0.0.1"), ports=[]), slice_of({"addresses": []})])
def test_a_slice_without_endpoints_or_ports_has_no_pods(empty: EndpointSlice) -> None:
    assert pods_of_slices([empty], "http") == ()


def pod(name: str, ready: str = "True", ip: str | None = "10.0.0.1", **metadata: Any) -> Pod:
    conditions = [{"type": "Ready", "status": ready}]
    raw = {"metadata": {"name": name, "uid": name, **metadata}, "status": {"podIP": ip, "conditions": conditions}}
    return msgspec.convert(raw, Pod)


def test_every_target_port_of_a_ready_pod_is_an_endpoint() -> None:
    """A data-parallel rank each. A pod that is being deleted, or has no address yet, is none."""
    raw = {
        "metadata": {"name": "pool"},
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}, {"number": 8001}]},
    }
    pool = msgspec.convert(raw, InferencePool)
    pods = [pod("a"), pod("b", ready="False"), pod("c", ip=None), pod("d", deletionTimestamp="2026-11-23T10:00:00Z")]
    assert pods_of_pool(pool, pods) == (
        PodAddress("10.0.0.1", 8000, "a", 0, 2),
        PodAddress("10.0.0.1", 8001, "a", 1, 2),
    )
    assert pool.spec.selector.query == "app=vllm"
