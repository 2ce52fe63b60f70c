"""Addresses of KV events: a port for each data-parallel rank, and what `check` tells of shared ones."""

from __future__ import annotations

from typing import Any

import pytest

from backends.kubernetes.objects import (
    InferencePool,
    InferencePoolSpec,
    LabelSelector,
    Metadata,
    Pod,
    PodCondition,
    PodStatus,
    TargetPort,
    pods_of_pool,
)
from backends.kv_events import PublisherRank
from gateway.config.endpoint_section import Discovered
from gateway.config.models import Config
from gateway.config.notes import notes
from tests.support.gateways import document


def config(endpoints: Any) -> Config:
    pool = {"backend": "vllm", "model": "m", "endpoints": endpoints}
    return Config.model_validate(document({"p": pool}, {"chat": {"tiers": ["p"]}}))


def of_pool(*target_ports: int, **more: Any) -> dict[str, tuple[str | None, str | None, PublisherRank | None]]:
    """Endpoints of a pod of an InferencePool: addresses of events and replay, and the rank."""
    found = config({"kubernetes": {"inference_pool": "d/llama", **more}})
    (source,) = found.pod_sources()
    ports = [TargetPort(number) for number in target_ports]
    pool = InferencePool(Metadata("llama"), InferencePoolSpec(LabelSelector(), ports))
    status = PodStatus("10.1.2.3", [PodCondition("Ready", "True")])
    pods = pods_of_pool(pool, [Pod(Metadata("a", "0f6c1d2a"), status)])
    addresses = found.with_discovered(Discovered({}, {source: pods})).addresses().values()
    return {address.url: (address.kv_events, address.kv_replay, address.kv_rank) for address in addresses}


def test_each_target_port_of_a_pod_hears_its_own_rank() -> None:
    """vLLM publishes rank i on the port of rank 0 and i, and replays likewise."""
    assert of_pool(8000, 8001, 8002, kv_events=5557, kv_replay=5657) == {
        f"http://10.1.2.3:{8000 + rank}": (
            f"tcp://10.1.2.3:{5557 + rank}",
            f"tcp://10.1.2.3:{5657 + rank}",
            PublisherRank(rank, 3),
        )
        for rank in range(3)
    }


def test_the_rank_is_the_place_of_the_port_and_not_its_number() -> None:
    found = of_pool(9000, 8000, kv_events=5557)
    assert found["http://10.1.2.3:9000"] == ("tcp://10.1.2.3:5557", None, PublisherRank(0, 2))
    assert found["http://10.1.2.3:8000"] == ("tcp://10.1.2.3:5558", None, PublisherRank(1, 2))


def test_ports_may_be_listed_for_the_target_ports() -> None:
    """One without a port has no events."""
    found = of_pool(8000, 8001, 8002, kv_events=[5600, 5700], kv_replay=[5650])
    assert [(events, replay) for events, replay, _ in found.values()] == [
        ("tcp://10.1.2.3:5600", "tcp://10.1.2.3:5650"),
        ("tcp://10.1.2.3:5700", None),
        (None, None),
    ]


def test_a_pod_with_one_port_may_be_of_any_rank() -> None:
    assert of_pool(8000, kv_events=5557) == {"http://10.1.2.3:8000": ("tcp://10.1.2.3:5557", None, None)}


def test_no_port_is_beyond_the_last() -> None:
    assert [events for events, _, _ in of_pool(1, 2, kv_events=65_535).values()] == ["tcp://10.1.2.3:65535", None]


def ranks(*numbers: int, port: int | None = None) -> list[dict[str, Any]]:
    return [
        {"url": "http://10.0.0.1:8000", "dp_rank": rank, "kv_events": f"tcp://10.0.0.1:{port or 5557 + rank}"}
        for rank in numbers
    ]


@pytest.mark.parametrize(
    ("listed", "known"),
    [
        ((0, 1, 2), [PublisherRank(0, 3), PublisherRank(1, 3), PublisherRank(2, 3)]),
        ((4, 5), [PublisherRank(4), PublisherRank(5)]),
        ((0,), [PublisherRank(0)]),
    ],
)
def test_ranks_listed_from_0_may_be_counted_by_server(listed: tuple[int, ...], known: list[PublisherRank]) -> None:
    assert [address.kv_rank for address in config(ranks(*listed)).kv_events().values()] == known


def test_check_tells_of_endpoints_with_one_address_of_events() -> None:
    (note,) = [note for note in notes(config(ranks(0, 1, port=5557))) if "kv_events" in note]
    assert note.startswith(
        "note: p/10.0.0.1:8000/dp0 and p/10.0.0.1:8000/dp1 have one kv_events tcp://10.0.0.1:5557, and each is taken to"
    )
    servers = [{"url": f"http://10.0.0.{n}:8000", "kv_events": "tcp://10.0.0.1:5557"} for n in (1, 2, 3)]
    assert any("p/10.0.0.1:8000 and p/10.0.0.2:8000 and p/10.0.0.3:8000" in note for note in notes(config(servers)))
    replays = [{**each, "kv_replay": "tcp://10.0.0.1:5657"} for each in ranks(0, 1)]
    assert [note for note in notes(config(replays)) if "have one kv_replay tcp://10.0.0.1:5657" in note]


def test_check_tells_nothing_of_a_server_in_two_pools() -> None:
    one = {"backend": "vllm", "endpoints": ranks(0, 1)}
    pools = {"a": {**one, "model": "m"}, "b": {**one, "model": "adapter"}}
    both = Config.model_validate(document(pools, {"chat": {"tiers": ["a", "b"]}}))
    assert not [note for note in notes(both) if "kv_events" in note]
