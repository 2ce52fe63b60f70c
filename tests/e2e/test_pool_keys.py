"""Endpoints that share a URL: several API keys of one server, and data-parallel ranks of one engine."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from time import monotonic
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.config.models import Config
from policies.types import NEVER, Health
from tests.support.builders import STREAMED, last, stream_status
from tests.support.gateways import document, pool, running
from tests.support.simulated import eventually
from tests.support.upstream import Received, Script, Upstream, reply

pytestmark = pytest.mark.virtual_time

KEYS = ["sk-one", "sk-two", "sk-three"]
BUSY: Script = [reply(b"{}", "429 Too Many Requests", "content-type: application/json", "retry-after: 30")]
QUOTA = b'{"error":{"message":"no","type":"insufficient_quota","code":"insufficient_quota"}}'
EMPTY: Script = [reply(QUOTA, "429 Too Many Requests", "content-type: application/json")]
REVOKED: Script = [reply(b'{"error":{"message":"no"}}', "401 Unauthorized", "content-type: application/json")]


class Provider(Upstream):
    """Answers by key; counts the requests of each."""

    def __init__(self, scripts: Mapping[str, Script] | None = None) -> None:
        super().__init__([STREAMED])
        self.by_key = scripts or {}
        self.asked: Counter[str] = Counter()

    def script(self, received: Received) -> Script:
        key = received.headers["authorization"].removeprefix("Bearer ")
        self.asked[key] += 1
        return self.by_key.get(key, [STREAMED])


def keyed(url: str, **more: Any) -> dict[str, Any]:
    given = pool(url, api_keys=KEYS, **more)
    del given["api_key"]
    return given


async def test_keys_share_the_load() -> None:
    async with Provider() as provider, running({"api": keyed(provider.url)}) as gateway:
        assert [await stream_status(gateway) for _ in range(60)] == [200] * 60
        assert all(provider.asked[key] >= 10 for key in KEYS), provider.asked
        server = provider.url.removeprefix("http://")
        assert set(gateway.monitor.loads()) == {f"api/{server}/key{number}" for number in (1, 2, 3)}


@pytest.mark.parametrize(("script", "name"), [(BUSY, "429"), (EMPTY, "quota"), (REVOKED, "401")])
async def test_a_key_that_is_refused_is_left_out_alone(script: Script, name: str) -> None:
    """200 callers at once are answered by the other keys; no retry budget is spent on another account."""
    async with Provider({"sk-two": script}) as provider, running({"api": keyed(provider.url)}) as gateway:
        assert await asyncio.gather(*(stream_status(gateway) for _ in range(200))) == [200] * 200
        refused = provider.asked["sk-two"]
        assert refused > 0
        assert await asyncio.gather(*(stream_status(gateway) for _ in range(30))) == [200] * 30
        assert provider.asked["sk-two"] == refused
        loads = gateway.fleet.snapshot_for("127.0.0.1", monotonic()).loads  # of this caller
        out = [id for id, load in loads.items() if load.limits.refused_until > NEVER or load.health is not Health.UP]
        assert [id.rpartition("/")[2] for id in out] == ["key2"]


async def test_no_key_is_in_any_id_or_dump() -> None:
    config = Config.model_validate(document({"api": keyed("http://127.0.0.1:1")}))
    told = json.dumps([repr(config), config.model_dump(mode="json"), *config.addresses()])
    assert not any(key in told for key in KEYS)


def ranks(url: str, *numbers: int, **more: Any) -> dict[str, Any]:
    return {"backend": "vllm", "model": "m", "endpoints": [{"url": url, "dp_rank": n} for n in numbers], **more}


async def test_a_data_parallel_rank_is_an_endpoint() -> None:
    """A header names the rank, and of the engine's page its own series are read."""
    page = b'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
    page += b'vllm:num_requests_running{engine="1",model_name="m"} 0.0\n'
    page += b'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0\n'

    class Engine(Upstream):
        def script(self, received: Received) -> Script:
            return [reply(page)] if received.method == "GET" else [STREAMED]

    async with Engine([STREAMED]) as engine, running({"local": ranks(engine.url, 0, 1)}) as gateway:
        server = engine.url.removeprefix("http://")
        await eventually(lambda: len(gateway.monitor.engine_loads()) == 2)
        found = {id: (load.running, load.waiting) for id, load in gateway.monitor.engine_loads().items()}
        assert found == {f"local/{server}/dp0": (3, 2), f"local/{server}/dp1": (0, None)}
        assert await stream_status(gateway) == 200
        sent = [request.headers for request in engine.requests if request.method == "POST"]
        assert last(gateway).endpoint.id.endswith("/dp" + sent[-1]["x-data-parallel-rank"])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (pool("http://a:1", api_keys=["x"]), "exclude each other"),
        (keyed("http://a:1") | {"api_keys": ["x", "x"]}, "there twice"),
        (keyed("http://a:1") | {"backend": "vllm"}, "have one api_key"),
        (ranks("http://a:1", 0, 0), "keep one"),
        (ranks("http://a:1", 0) | {"endpoints": ["http://a:1", {"url": "http://a:1", "dp_rank": 1}]}, "keep one"),
        (ranks("http://a:1", 0) | {"backend": "llamacpp"}, "take no dp_rank"),
    ],
)
def test_keys_and_ranks_that_cannot_work_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config.model_validate(document({"only": section}))
