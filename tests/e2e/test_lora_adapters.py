"""LoRA adapters of engines: asked for as models, kept where they are loaded, with prefixes of their own."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.app import Gateway
from gateway.config.loading import problems
from gateway.config.models import Config
from lab.servers.simulated_server import SimulatedServer
from policies.types import Health
from tests.support.builders import CHAT, calling, get, last, post
from tests.support.gateways import document, running
from tests.support.simulated import engine_pool, engines, eventually

pytestmark = pytest.mark.virtual_time

NAMES = [f"adapter-{letter}" for letter in "abcdefgh"]
SLOTS, LOAD = 2, 0.1


def with_adapters(
    servers: list[SimulatedServer], names: list[str] = NAMES, slots: int = SLOTS
) -> list[SimulatedServer]:
    """Give each engine slots of its own."""
    for server in servers:
        server.adapters.names.update(names)
        server.adapters.slots, server.adapters.load = slots, LOAD
    return servers


def adapted(*servers: SimulatedServer, names: list[str] = NAMES, **more: Any) -> dict[str, Any]:
    return engine_pool(*servers, adapters={"names": names, "slots": SLOTS, "load": "100ms"}, **more)


def asking(model: str, text: str, *headers: str, stream: bool = False) -> bytes:
    messages = [{"role": "user", "content": text}]
    return post({**CHAT, "model": model, "messages": messages, "max_tokens": 2, "stream": stream}, *headers)


async def ask(gateway: Gateway, model: str, text: str = "hello", *headers: str) -> tuple[int, dict[str, Any]]:
    async with calling(gateway.url) as caller:
        status, _, body = await caller.whole(asking(model, text, *headers))
        return status, json.loads(body)


async def stream(gateway: Gateway, model: str, text: str = "hello") -> None:
    async with calling(gateway.url) as caller:
        status, _ = await caller.ask(asking(model, text, stream=True))
        assert status == 200
        await caller.chunks()


async def loads_of(scorer: str) -> int:
    """Loads of adapters in four engines, for requests of eight callers, each with an adapter of its own."""
    routes = {name: {"tiers": [{"pool": "local", "adapter": name}], "scorer": scorer} for name in NAMES}
    async with engines(4) as servers, running({"local": adapted(*with_adapters(servers))}, routes) as gateway:

        async def call(name: str) -> None:
            for turn in range(12):
                await stream(gateway, name, f"{name} {turn}")

        await asyncio.gather(*map(call, NAMES))
        return sum(server.adapters.loads for server in servers)


async def test_adapters_stay_where_they_are_loaded() -> None:
    """Eight adapters fit into four engines with two slots each: 96 requests need little more than eight loads."""
    ours, round_robin = await loads_of("predicted"), await loads_of("round_robin")
    assert ours <= 16, (ours, round_robin)
    assert round_robin >= 3 * ours, (ours, round_robin)


async def test_an_adapter_is_a_model_name() -> None:
    """Without a route of its name too. The engine gets it as the model; answer, headers and Record name it."""
    routes = {"chat": {"tiers": ["local"]}, "support": {"tiers": [{"pool": "local", "adapter": "adapter-b"}]}}
    async with engines(1) as servers, running({"local": adapted(*with_adapters(servers))}, routes) as gateway:
        status, answer = await ask(gateway, "adapter-a")
        assert (status, answer["model"], last(gateway).answer.model) == (200, "adapter-a", "adapter-a")
        assert (await ask(gateway, "support"))[1]["model"] == "adapter-b"
        assert (await ask(gateway, "chat"))[1]["model"] == "served"
        assert [request.body["model"] for request in servers[0].requests] == ["adapter-a", "adapter-b", "served"]
        status, _, listed = await get(gateway.url, "/v1/models")
        assert [model["id"] for model in json.loads(listed)["data"]] == ["chat", "support", *NAMES]
        assert (await get(gateway.url, "/v1/models/adapter-c"))[0] == 200
        assert (await ask(gateway, "adapter-z"))[0] == 404


async def test_adapters_share_no_prefix() -> None:
    """The engine computes a prompt anew for each adapter, and the forecast knows that."""
    text = "word " * 2000
    async with engines(1) as servers, running({"local": adapted(*with_adapters(servers, slots=8))}) as gateway:
        cached = []
        for model in ("chat", "adapter-a", "adapter-b", "adapter-a", "chat"):
            _, answer = await ask(gateway, model, text)
            reported = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            cached.append((last(gateway).placed.cached_tokens > 1900, reported > 1900))
        assert cached == [(False, False)] * 3 + [(True, True)] * 2


async def test_an_engine_without_the_adapter_is_asked_for_its_other_models_alone() -> None:
    """A caller gets no 404 for what the engine lacks; where every engine lacks the adapter, the error is ours."""
    async with engines(2) as servers, running({"local": adapted(*servers)}) as gateway:
        with_adapters(servers)
        servers[0].adapters.names.remove("adapter-a")
        assert [(await ask(gateway, "adapter-a", f"text {n}"))[0] for n in range(10)] == [200] * 10
        asked = [request.body["model"] for request in servers[0].requests]
        assert asked.count("adapter-a") <= 1
        assert [(await ask(gateway, "adapter-b", f"text {n}"))[0] for n in range(10)] == [200] * 10
        assert [(await ask(gateway, "chat", f"text {n}"))[0] for n in range(10)] == [200] * 10
        assert {load.health for load in gateway.monitor.loads().values()} == {Health.UP}
        _, _, told = await get(gateway.admin_url, "/fleet")
        whys = {found["why"] for found in json.loads(told)}
        assert "adapter-b" in {name for found in json.loads(told) for name in found["adapters"]}
        assert all(why.endswith("it does not know the model adapter-a") for why in whys - {None})
        servers[1].adapters.names.remove("adapter-a")
        status, answer = await ask(gateway, "adapter-a")
        assert (status, "adapter" in answer["error"]["message"]) == (502, False)
        assert (await ask(gateway, "adapter-a"))[0] == 503
        assert (await ask(gateway, "chat"))[0] == 200


async def test_an_adapter_loaded_while_the_engine_runs_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.adapters.adapter_slots.UNKNOWN", 0.2)
    monkeypatch.setattr("policies.fleet.in_flight_attempt.UNKNOWN", 0.2)
    async with engines(1) as servers, running({"local": adapted(*servers)}) as gateway:
        assert (await ask(gateway, "adapter-a"))[0] == 502
        assert (await ask(gateway, "adapter-a"))[0] == 503
        with_adapters(servers)
        await asyncio.sleep(0.3)
        assert (await ask(gateway, "adapter-a"))[0] == 200


async def test_a_route_may_fall_back_from_the_adapter_to_the_model() -> None:
    routes = {"support": {"tiers": [{"pool": "local", "adapter": "adapter-a"}, "plain"]}}
    async with engines(2) as servers:
        adapter, plain = servers
        pools = {"local": adapted(adapter), "plain": engine_pool(plain)}
        async with running(pools, routes) as gateway:
            status, answer = await ask(gateway, "support")
            assert (status, answer["model"]) == (200, "served")
            with_adapters([adapter])
            assert (await ask(gateway, "support"))[1]["model"] == "served"  # not asked for a while


async def test_a_key_needs_the_right_to_the_adapter() -> None:
    names = "chat", NAMES[0]
    keys = [{"name": name, "sha256": sha256(name.encode()).hexdigest(), "routes": [name]} for name in names]
    async with engines(1) as servers:
        pools = {"local": adapted(*with_adapters(servers))}
        async with running(pools, {"chat": {"tiers": ["local"]}}, keys=keys) as gateway:
            found = {
                (key, model): (await ask(gateway, model, "hello", f"authorization: Bearer {key}"))[0]
                for key in names
                for model in ("chat", NAMES[0], NAMES[1])
            }
    assert [asked for asked, status in found.items() if status == 200] == [("chat", "chat"), (NAMES[0], NAMES[0])]
    assert set(found.values()) == {200, 404}


async def test_a_gateway_learns_from_the_engine_what_others_have_loaded() -> None:
    """A second gateway in front of the same engines sends to the one whose page names the adapter."""
    async with engines(4) as servers:
        pools = {"local": adapted(*with_adapters(servers))}
        async with running(pools) as gateway, calling(servers[2].url) as caller:
            await caller.ask(post({**CHAT, "model": NAMES[0], "stream": True, "max_tokens": 4000, "ignore_eos": True}))
            await eventually(lambda: any(load.variants for load in gateway.monitor.engine_loads().values()))
            await stream(gateway, NAMES[0])
            assert last(gateway).endpoint.id == f"local/127.0.0.1:{servers[2].port}"
        assert [server.adapters.loads for server in servers] == [0, 0, 1, 0]


async def test_an_engine_that_restarts_holds_no_adapter() -> None:
    async with engines(1) as servers, running({"local": adapted(*with_adapters(servers))}) as gateway:
        [state] = gateway.fleet._states.values()
        assert state.variants is not None
        await stream(gateway, NAMES[0])
        assert state.variants.loaded == (NAMES[0],)
        gateway.fleet.on_cache_cleared(state.endpoint.id)
        assert state.variants.loaded == ()
        await stream(gateway, NAMES[0])
        assert state.variants.loaded == (NAMES[0],)


@pytest.mark.parametrize(
    ("pools", "routes", "message"),
    [
        ({"backend": "llamacpp"}, None, "have no LoRA adapters here"),
        ({"adapters": {"names": []}}, None, "at least 1"),
        ({"adapters": {"names": ["a", "a"]}}, None, "there twice"),
        ({"adapters": {"names": ["served"]}}, None, "is the model itself"),
        ({"model": ""}, None, "requires model"),
        ({}, [{"pool": "local", "adapter": "b"}], "no adapter 'b'"),
        ({}, [{"pool": "local", "adapter": "a", "when": {"tools": True}}, "local"], "two adapters in one route"),
    ],
)
def test_adapters_that_cannot_work_are_refused(pools: dict[str, Any], routes: Any, message: str) -> None:
    given = {"backend": "vllm", "model": "served", "endpoints": ["http://a:1"], "adapters": {"names": ["a"]}, **pools}
    config = document({"local": given}, {"chat": {"tiers": routes or ["local"]}})
    try:
        found = [problem.text for problem in problems(Config.model_validate(config))]
    except ValidationError as error:
        found = [str(error)]
    assert any(message in one for one in found), found
