"""A caller that has read the last event of its stream has a complete answer, whoever closes first.

OpenAI's SDK closes at [DONE]; many servers end the body a moment later. The connection to the server is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.observe.record import RequestOutcome
from policies.types import AttemptOutcome
from tests.support.builders import CHAT, calling, last, post
from tests.support.dialect_strategies import Json, message_events, named_sse
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import GATE, HANG, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

pytestmark = pytest.mark.virtual_time

MESSAGE: Json = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "content": [{"type": "text", "text": "all of it"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 9},
}
RESPONSE = {"id": "resp_1", "object": "response", "status": "completed", "output": [], "usage": None}
CHUNKS = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":"all of it"},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
)
RESPONSES = named_sse(
    iter(
        [
            {"type": "response.created", "response": {**RESPONSE, "status": "in_progress"}},
            {"type": "response.output_text.delta", "delta": "all of it"},
            {"type": "response.completed", "response": RESPONSE},
        ]
    )
)
MESSAGES = named_sse(message_events(MESSAGE))
ASKED = {**CHAT, "stream": True, "max_tokens": 9}
WAYS: Mapping[str, tuple[str, tuple[bytes, ...], str, bytes]] = {  # kind of server, its events, path, the last event
    "chat": ("compatible", CHUNKS, "/v1/chat/completions", b"[DONE]\n\n"),
    "messages": ("anthropic", tuple(MESSAGES), "/v1/messages", b'"message_stop"}\n\n'),
    "responses": ("openai", tuple(RESPONSES), "/v1/responses", b'"output":[],"usage":null}}\n\n'),
    "chat over messages": ("anthropic", tuple(MESSAGES), "/v1/chat/completions", b"[DONE]\n\n"),
    "messages over chat": ("compatible", CHUNKS, "/v1/messages", b'"message_stop"}\n\n'),
}


def asked(path: str) -> dict[str, Any]:
    return {"model": "chat", "input": "hi", "stream": True} if path.endswith("responses") else ASKED


async def read_until(gateway: Gateway, path: str, end: bytes) -> None:
    """Ask, read to `end`, and close at once."""
    async with calling(gateway.url) as caller:
        assert (await caller.ask(post(asked(path), path=path)))[0] == 200
        async with asyncio.timeout(30):
            await caller.reader.readuntil(end)


@asynccontextmanager
async def before(script: Script, kind: str = "compatible") -> AsyncIterator[tuple[Gateway, Upstream]]:
    async with (
        Upstream(script) as upstream,
        running({"only": pool(upstream.url, backend=kind, prompt_caching="off")}) as gateway,
    ):
        yield gateway, upstream


@pytest.mark.parametrize("way", WAYS)
async def test_a_caller_that_closes_at_the_last_event_has_a_complete_answer(way: str) -> None:
    """Twenty callers one after the other: twenty complete Records, one connection to the server."""
    kind, events, path, end = WAYS[way]
    script = [STREAM_HEAD + b"".join(map(chunk, events)), GATE, LAST_CHUNK]
    async with before(script, kind) as (gateway, upstream):
        connections = next(iter(gateway.runtime.current.upstreams.values())).connections
        for number in range(1, 21):
            await read_until(gateway, path, end)
            await eventually(lambda count=number: len(gateway.recorder.recent) == count)
            upstream.proceed()
            await eventually(lambda: connections.idle == 1)
        assert {record.end for record in gateway.recorder.recent} == {RequestOutcome.COMPLETED}
        assert {each.ending for record in gateway.recorder.recent for each in record.attempts} == {
            AttemptOutcome.COMPLETED
        }
        assert (upstream.connections, upstream.hangups) == (1, 0)


async def test_a_caller_that_closes_before_the_last_event_is_gone() -> None:
    """The server may have more to say: the connection is closed, which stops it."""
    async with before([STREAM_HEAD + chunk(CHUNKS[0]), HANG]) as (gateway, upstream):
        await read_until(gateway, "/v1/chat/completions", b'"stop"}]}\n\n')
        await upstream.until(lambda up: up.hangups == 1)
        await eventually(lambda: gateway.recorder.recent)
        assert last(gateway).end is RequestOutcome.CLIENT_GONE
        assert last(gateway).attempts[0].ending is AttemptOutcome.CANCELLED


@pytest.mark.parametrize(("more", "within"), [(0, 2.0), (20, 0.5)])
async def test_a_server_that_does_not_end_its_reply_keeps_no_connection(more: int, within: float) -> None:
    """The end of a reply is awaited for a second of (virtual) time, and for 64 KB."""
    clock = asyncio.get_running_loop().time
    comments = [chunk(b": " + b"x" * 4_000 + b"\n\n")] * more
    async with before([STREAM_HEAD + b"".join(map(chunk, CHUNKS)), GATE, *comments, HANG]) as (gateway, upstream):
        await read_until(gateway, "/v1/chat/completions", b"[DONE]\n\n")
        await eventually(lambda: gateway.recorder.recent)
        assert last(gateway).end is RequestOutcome.COMPLETED
        began = clock()
        upstream.proceed()
        await upstream.until(lambda up: up.hangups == 1)
        assert clock() - began < within
        assert next(iter(gateway.runtime.current.upstreams.values())).connections.active == 0
