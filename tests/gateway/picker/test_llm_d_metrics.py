"""Metrics under the names of llm-d's endpoint picker, which KEDA objects query."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from gateway.parts.picker.llm_d_metrics import LlmDMetrics
from policies.types import Health, Load
from tests.support.builders import get
from tests.support.gateways import pool, running
from tests.support.simulated import engine_pool, engines

UP, DOWN = Load(in_flight=3), Load(in_flight=9, health=Health.DOWN)


def figures(loads: dict[str, Load], held: int = 0) -> dict[str, float]:
    """Of the pool `only`, by the last part of a metric's name."""

    class OnlyRoute:
        name, pools = "chat", ("only", "other")

    registry = CollectorRegistry()
    registry.register(LlmDMetrics(lambda _: "only", lambda: loads, lambda: [OnlyRoute()], lambda: {"chat": held}))  # type: ignore[list-item]
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert all(sample.labels == {"inference_pool": "only"} for sample in samples)
    return {sample.name.removeprefix("llm_d_epp_"): sample.value for sample in samples}


def test_only_ready_endpoints_count() -> None:
    found = figures({"a": UP, "b": UP, "c": DOWN})
    assert (found["ready_endpoints"], found["request_running"]) == (2, 6)


@pytest.mark.parametrize(
    ("loads", "held", "saturation"),
    [
        ([UP], 0, 0.0),
        ([Load(waiting=5)], 0, 1.0),
        ([Load(kv_usage=0.8)], 0, 1.0),
        ([Load(waiting=5, kv_usage=0.4), UP], 0, 0.5),
        ([UP, UP], 10, 1.0),
        ([DOWN], 0, 1.0),
    ],
)
def test_saturation_is_by_the_rule_of_llm_d(loads: list[Load], held: int, saturation: float) -> None:
    """Five waiting requests, or 80% of the KV cache, at each endpoint; held requests wait in the engines' place."""
    found = figures({str(at): load for at, load in enumerate(loads)}, held)
    assert found["flow_control_pool_saturation"] == pytest.approx(saturation)
    assert found["flow_control_queue_size"] == held


async def test_they_are_served_where_pick_is_configured() -> None:
    """Of a gateway without a picker, a query of them finds nothing."""
    routes = {"served": {"tiers": ["only"]}}
    async with (
        engines(2) as servers,
        running({"only": engine_pool(*servers)}, routes, pick={"listen": "127.0.0.1:0"}) as gateway,
        running({"only": pool("http://127.0.0.1:9")}, routes) as other,
    ):
        assert b'llm_d_epp_ready_endpoints{inference_pool="only"} 2.0' in (await get(gateway.admin_url, "/metrics"))[2]
        assert b"llm_d_epp" not in (await get(other.admin_url, "/metrics"))[2]
