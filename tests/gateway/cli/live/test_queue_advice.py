"""`check --live` advises the flag by which an engine limits its own queue."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cli.live.live_facts import EndpointFacts, ListingFacts
from gateway.cli.live.live_findings import unset_queue_limits
from gateway.config.models import Config


def advised(backend: str, **pool: Any) -> list[str]:
    section = {"backend": backend, "model": "m", "endpoints": ["http://127.0.0.1:9"], **pool}
    config = Config.model_validate({"pools": {"own": section}, "routes": {"chat": {"tiers": ["own"]}}})
    facts = EndpointFacts("own/127.0.0.1:9", "own", "http://127.0.0.1:9", ("m",), True, ListingFacts(status=200))
    return [*unset_queue_limits(config, [facts, facts])]


@pytest.mark.parametrize(
    ("backend", "flag"), [("vllm", "--max-num-queued-reqs"), ("sglang", "--max-queued-requests"), ("llamacpp", "")]
)
def test_the_flag_of_the_engine_is_advised_once_for_a_pool(backend: str, flag: str) -> None:
    found = advised(backend)
    assert len(found) == bool(flag)
    assert all(line.startswith("note: pools.own ") and flag in line for line in found)


def test_a_pool_with_a_cap_of_its_own_needs_none() -> None:
    assert advised("vllm", concurrent_requests=8) == []
