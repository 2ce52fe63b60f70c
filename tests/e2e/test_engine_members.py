"""Members and headers by which a caller could address the machinery of an engine reach no server, and are told."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from backends.engine_members import ENGINE_HEADERS, ENGINE_MEMBERS, without_engine_members
from tests.support.builders import CHAT, STREAMED, WHOLE, calling, post
from tests.support.gateways import pool, running
from tests.support.upstream import Received, ScriptedEngine, reply

pytestmark = pytest.mark.virtual_time

VLLM_PULL = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 5600, "remote_block_ids": [1]}
# As a caller would write them for each engine, by the names of its own API.
ASKED: dict[str, dict[str, Any]] = {
    "vllm": {
        "kv_transfer_params": VLLM_PULL,
        "ec_transfer_params": {},
        "vllm_xargs": {"kv_transfer_params": [1], "a": 1},
    },
    "sglang": {
        "bootstrap_host": "10.0.0.9",
        "bootstrap_port": 8998,
        "bootstrap_room": 7,
        "bootstrap_pair_key": "a",
        "routed_dp_rank": 3,
        "disagg_prefill_dp_rank": 1,
        "data_parallel_rank": 2,
        "session_params": {"id": "s"},
    },
    "trtllm": {"disaggregated_params": {"request_type": "generation_only", "opaque_state": "x"}},
    "compatible": {
        "nvext": {"backend_instance_id": 7, "dp_rank": 1, "greed_sampling": True},
        "remote_host": "10.0.0.9",
    },
}
NESTED = {"extra_body": {"extra_args": {"kv_transfer_params": {}, "b": 2}}}
PATHS = {"vllm_xargs": "vllm_xargs.kv_transfer_params", "nvext": "nvext.backend_instance_id, nvext.dp_rank"}
KEY = {"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest()}
WHOLE_REPLY = reply(WHOLE, "200 OK", "content-type: application/json")


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("backend", ASKED)
async def test_no_member_or_header_of_an_engines_own_is_sent_on(backend: str, stream: bool, keyed: bool) -> None:
    """Whether or not caches are kept apart by keys, members beside them stay."""
    asked, seen = ASKED[backend], list[Received]()
    headers = ["authorization: Bearer sk-web", *(f"{name}: 1" for name in ENGINE_HEADERS)]
    async with ScriptedEngine([STREAMED if stream else WHOLE_REPLY], answered=seen) as engine:
        routes = {"chat": {"tiers": ["only"], "upstream_stream": "off"}}
        keys = [KEY] if keyed else []
        pools = {"only": pool(engine.url, backend=backend)}
        async with running(pools, routes, keys=keys) as gateway, calling(gateway.url) as caller:
            status, answered = await caller.ask(post({**CHAT, "stream": stream, "seed": 7, **asked}, *headers))
    [sent] = seen
    body = json.loads(sent.body)
    assert status == 200
    assert ENGINE_MEMBERS.isdisjoint(body)
    assert not {*ENGINE_HEADERS} & sent.headers.keys()
    assert body["seed"] == 7
    assert body.get("vllm_xargs", {"a": 1}) == {"a": 1}
    assert body.get("nvext", {"greed_sampling": True}) == {"greed_sampling": True}
    assert answered["x-firsttoken-left-out"] == ", ".join(PATHS.get(name, name) for name in asked)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 9}),
    ],
)
@pytest.mark.parametrize("backend", ["vllm", "compatible"])
async def test_of_no_operation(backend: str, path: str, body: dict[str, Any]) -> None:
    """In the server's own dialect, or translated."""
    seen = list[Received]()
    async with ScriptedEngine([WHOLE_REPLY], answered=seen) as engine:
        pools = {"only": pool(engine.url, backend=backend)}
        routes = {"chat": {"tiers": ["only"], "upstream_stream": "off"}}
        async with running(pools, routes) as gateway, calling(gateway.url) as caller:
            await caller.ask(post({"model": "chat", "kv_transfer_params": VLLM_PULL, **body}, path=path))
    assert b"10.0.0.9" not in b"".join(each.body for each in seen)
    assert seen


async def test_no_repair_brings_them_back() -> None:
    """The prompt is read again after a repair, from the caller's own bytes."""
    seen = list[Received]()
    moved = {"role": "system", "content": "Now is 2026-11-28 11:03:04. Be brief."}
    async with ScriptedEngine([WHOLE_REPLY], answered=seen) as engine:
        routes = {"chat": {"tiers": ["only"], "repair": ["sort_tools"]}}
        async with (
            running({"only": pool(engine.url, backend="vllm")}, routes) as gateway,
            calling(gateway.url) as caller,
        ):
            tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "ba"]
            body = {**CHAT, "messages": [moved, *CHAT["messages"]], "tools": tools, "kv_transfer_params": VLLM_PULL}
            _, answered = await caller.ask(post(body))
    assert "kv_transfer_params" not in json.loads(seen[0].body)
    assert answered["x-firsttoken-left-out"] == "kv_transfer_params"


def test_a_member_is_found_in_one_holder_within_another() -> None:
    kept, found = without_engine_members({**NESTED, "seed": 7})
    assert found == ("extra_body.extra_args.kv_transfer_params",)
    assert kept == {"extra_body": {"extra_args": {"b": 2}}, "seed": 7}
