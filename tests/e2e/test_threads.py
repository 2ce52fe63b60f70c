"""Anthropic's message threads, with the tool runner of Anthropic's SDK, which asks for them by default."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from time import monotonic
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool

from gateway.app import Gateway
from policies.types import Health
from tests.support.gateways import pool, running
from tests.support.thread_server import HOST, ThreadServer, threads_kept
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

ASKED: list[Any] = [{"role": "user", "content": "Weather in Ulm?"}]
BETA = "message-threads-2026-08-12"
JSON = "content-type: application/json"


def sdk(gateway: Gateway, key: str = "caller") -> AsyncAnthropic:
    return AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0)


async def run(gateway: Gateway, stream: bool = False, between: Callable[[], object] = lambda: None) -> str:
    """A run of the SDK's tool runner over two turns; the text of the last message. `between`: done by the tool."""

    @beta_async_tool
    async def weather(city: str) -> str:
        """Weather of a city."""
        between()
        return f"sunny in {city}"

    async with sdk(gateway) as client:
        asked: dict[str, Any] = {"model": "chat", "max_tokens": 99, "tools": [weather], "messages": ASKED}
        if not stream:
            return text_of(await client.beta.messages.tool_runner(**asked).until_done())
        async for turn in client.beta.messages.tool_runner(**asked, stream=True):
            last = await turn.get_final_message()
        return text_of(last)


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def threads_of(upstream: Upstream) -> list[Any]:
    return [json.loads(each.body).get("thread") for each in upstream.requests if each.target == "/v1/messages"]


# --------------------------------------------------------------------------- where no threads are kept

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}


def completion(finish: str, **message: Any) -> Any:
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def streamed(answer: Any) -> bytes:
    """A chat completion as events."""
    (choice,) = answer["choices"]
    message = dict(choice.pop("message"))
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{**call, "index": place} for place, call in enumerate(calls)]
    chunks = {**answer, "object": "chat.completion.chunk", "choices": [{**choice, "delta": message}]}
    return STREAM_HEAD + chunk(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(chunks).encode()) + LAST_CHUNK


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_run_goes_on_without_a_thread_where_none_is_kept(stream: bool) -> None:
    """The second turn brings the whole conversation. The SDK asks for a thread once in a run."""
    turns = [completion("tool_calls", tool_calls=[CALL]), completion("stop", content="sunny")]
    scripts = [[streamed(each) if stream else reply(json.dumps(each).encode(), "200 OK", JSON)] for each in turns]
    async with Upstream(*scripts) as upstream, running({"engine": pool(upstream.url)}) as gateway:
        assert await run(gateway, stream) == "sunny"
        bodies = [json.loads(each.body) for each in upstream.requests if each.target.endswith("/completions")]
        assert [[message["role"] for message in body["messages"]] for body in bodies] == [
            ["user"],
            ["user", "assistant", "tool"],
        ]
        assert sorted(record.status for record in gateway.recorder.recent) == [200, 200, 400]


@pytest.mark.parametrize("kind", ["vllm", "anthropic", "both"])
async def test_no_server_gets_a_thread_that_it_does_not_keep(kind: str) -> None:
    """Also natively, where it would be ignored, and where only another tier keeps it: any tier may have to answer."""
    async with ThreadServer() as server:
        kept = {"backend": "anthropic", "model": "m", "api_key": "k", "base_url": f"https://{HOST}"}
        known = pool(server.url, backend="vllm" if kind == "both" else kind, prompt_caching="off")
        pools = {"first": known, **({"second": kept} if kind == "both" else {})}
        async with running(pools) as gateway, sdk(gateway) as client:
            assert await run(gateway) == "known: 3"
            assert threads_of(server) == [None, None]
            for kind in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
                with pytest.raises(anthropic.BadRequestError) as refused:
                    await client.beta.messages.create(
                        model="chat",
                        max_tokens=9,
                        messages=ASKED,
                        betas=[BETA],
                        thread=kind,  # type: ignore[arg-type]
                    )
                assert refused.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}  # type: ignore[index]


# --------------------------------------------------------------------------- before the API that keeps them


THREADS = 32  # equal accounts are drawn by chance: one of them alone, once in two thousand million runs


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thread_stays_at_the_account_that_keeps_it(stream: bool) -> None:
    """Two accounts: the second turn brings what is new alone, to the account of the first."""
    async with threads_kept() as (gateway, server):
        for _ in range(THREADS):
            assert await run(gateway, stream) == "known: 3"
        assert server.lost == 0
        assert [kind["type"] for kind in threads_of(server)] == ["create", "continue"] * THREADS
        keys = [each.headers["x-api-key"] for each in server.requests if each.target == "/v1/messages"]
        assert set(keys) == {"sk-ant-1", "sk-ant-2"}
        assert keys[::2] == keys[1::2]


async def test_a_thread_that_the_api_has_lost_begins_anew() -> None:
    """The API's own refusal reaches the SDK with its code, and counts against nobody."""
    async with threads_kept() as (gateway, server):
        assert await run(gateway, between=server.kept.clear) == "known: 3"
        assert [kind["type"] for kind in threads_of(server)] == ["create", "continue", "create"]
        assert {load.health for load in gateway.monitor.loads().values()} == {Health.UP}


async def test_a_thread_of_another_key_is_unknown() -> None:
    keys = [
        {"name": name, "sha256": sha256(f"sk-{name}".encode()).hexdigest(), "cache_group": "all"}
        for name in ("ann", "bob")
    ]
    async with (
        threads_kept(keys=keys) as (gateway, server),
        sdk(gateway, "sk-ann") as ann,
        sdk(gateway, "sk-bob") as bob,
    ):
        first = await begun(ann)
        for stranger, known in ((bob, first), (ann, "msg_1"), (ann, first[:-1] + "9")):
            with pytest.raises(anthropic.NotFoundError):
                await continued(stranger, known)
        assert len(server.answered) == 1
        assert text_of(await continued(ann, first)) == "known: 3"


async def test_a_thread_of_an_account_that_is_gone_begins_anew_at_another() -> None:
    """The endpoint is down: the SDK is told to send the whole conversation again, which the other account answers."""
    async with threads_kept() as (gateway, server):

        def lose_the_account() -> None:
            held = gateway.recorder.recent[-1].endpoint.id
            for _ in range(3):
                gateway.fleet.on_probe_failed(held, monotonic())

        assert await run(gateway, between=lose_the_account) == "known: 3"
        assert [kind["type"] for kind in threads_of(server)] == ["create", "create"]
        assert [record.status for record in gateway.recorder.recent] == [200, 404, 200]


async def test_threads_are_never_answered_from_the_cache() -> None:
    """Two equal requests begin two threads, of one key and of two keys of a cache group."""
    keys = [
        {"name": name, "sha256": sha256(f"sk-{name}".encode()).hexdigest(), "cache_group": "all"}
        for name in ("ann", "bob")
    ]
    route = {"tiers": ["claude"], "ttft": {"budget": "5s"}, "cache": {"ttl": "10m", "any_temperature": True}}
    async with (
        threads_kept({"chat": route}, keys=keys) as (gateway, server),
        sdk(gateway, "sk-ann") as ann,
        sdk(gateway, "sk-bob") as bob,
    ):
        first = [await begun(client) for client in (ann, ann, bob)]
        assert len(set(first)) == len(server.answered) == 3
        for client, previous in zip((ann, ann, bob), first, strict=True):
            assert text_of(await continued(client, previous)) == "known: 3"


async def begun(client: AsyncAnthropic) -> str:
    """Id of the first answer of a thread."""
    answer = await client.beta.messages.create(
        model="chat", max_tokens=9, messages=ASKED, betas=[BETA], thread={"type": "create"}
    )
    return answer.id


async def continued(client: AsyncAnthropic, previous: str) -> Any:
    result: Any = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}]}]
    return await client.beta.messages.create(
        model="chat",
        max_tokens=9,
        messages=result,
        betas=[BETA],
        thread={"type": "continue", "previous_message_id": previous},
    )
