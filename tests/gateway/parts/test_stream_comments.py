"""Comments before the first token: what callers receive, and what is recorded."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from gateway.api.api_error import ApiError
from gateway.app import Gateway
from gateway.downstream.http_request import HttpRequest
from gateway.observe.record import RequestOutcome
from gateway.parts.comments.stream_comments import StreamComments
from tests.gateway.downstream.test_http_server import serving
from tests.support.builders import ANSWER, CHAT, DONE, FINISH, STREAMED, TOKEN, WHOLE, Caller, calling, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import engines, eventually
from tests.support.upstream import GATE, HANG, LAST_CHUNK, RESET, STREAM_HEAD, Pause, Script, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

STREAM = {**CHAT, "stream": True}
COMMENT = b": keep-alive\n\n"
SOON = {"keepalive": "100ms"}
LATE: Script = [GATE, STREAMED]
FAILING = reply(b'{"error":{"message":"no"}}', "500 Internal Server Error")


@asynccontextmanager
async def commenting(*scripts: Script, **more: Any) -> AsyncIterator[tuple[Gateway, Caller, Upstream]]:
    more = {"defaults": SOON, **more}
    async with (
        Upstream(*scripts) as upstream,
        running({"only": pool(upstream.url)}, **more) as gateway,
        calling(gateway.url) as caller,
    ):
        yield gateway, caller, upstream


async def next_chunk(caller: Caller) -> bytes:
    async with asyncio.timeout(5):
        size = int(await caller.reader.readline(), 16)
        return (await caller.reader.readexactly(size + 2))[:-2]


# --------------------------------------------------------------------------- answers


async def test_comments_come_until_the_first_token_and_no_later() -> None:
    """Each as a chunk of its own; then the answer as it is, on a connection that serves on."""
    script: Script = [GATE, STREAM_HEAD + chunk(TOKEN), Pause(0.35), chunk(FINISH + DONE) + LAST_CHUNK]
    async with commenting(script, LATE) as (gateway, caller, upstream):
        status, headers = await caller.ask(post(STREAM, "x-request-id: mine"))
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert (headers["x-request-id"], headers["x-firsttoken-route"]) == ("mine", "chat")
        assert not {"x-firsttoken-pool", "x-firsttoken-ttft-ms", "server-timing"} & headers.keys()
        assert [await next_chunk(caller) for _ in range(3)] == [COMMENT] * 3
        upstream.proceed()
        received = await caller.chunks()
        while received[0] == COMMENT:  # between the decision to go on and the token
            received.pop(0)
        assert b"".join(received) == ANSWER
        upstream.proceed()
        assert (await caller.ask(post(STREAM)))[0] == 200
        assert b"".join(await caller.chunks()).replace(COMMENT, b"") == ANSWER
        await eventually(lambda: len(gateway.recorder.recent) == 2)


async def test_the_recorded_ttft_is_that_of_the_token() -> None:
    """A comment is no token, neither for the Record nor for what is learned from it."""
    async with commenting([Pause(0.5), STREAMED]) as (gateway, caller, _):
        await caller.ask(post(STREAM))
        await caller.chunks()
        await eventually(lambda: gateway.recorder.recent)
        record = last(gateway)
    assert (record.end, record.status) == (RequestOutcome.COMPLETED, 200)
    assert record.ttft is not None
    assert record.ttft >= 0.5


async def test_a_quick_answer_is_the_same_as_without() -> None:
    async with commenting([STREAMED], defaults={"keepalive": "5s"}) as (_, caller, _):
        _, headers = await caller.ask(post(STREAM))
        assert (headers["x-firsttoken-pool"], b"".join(await caller.chunks())) == ("only", ANSWER)


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (STREAM, {"defaults": {}}),
        (STREAM, {"routes": {"chat": {"tiers": ["only"], "keepalive": "off"}}}),
        (CHAT, {}),
    ],
    ids=["by default", "off in the route", "not streamed"],
)
async def test_otherwise_there_is_silence(body: dict[str, Any], more: dict[str, Any]) -> None:
    answer = STREAMED if body is STREAM else reply(WHOLE)
    async with commenting([GATE, answer], **more) as (_, caller, upstream):
        caller.writer.write(post(body))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(caller.reader.read(1), 0.4)
        upstream.proceed()
        assert (await caller.head())[0] == 200


async def test_a_route_may_have_its_own_interval() -> None:
    routes = {"chat": {"tiers": ["only"], **SOON}}
    async with commenting(LATE, defaults={}, routes=routes) as (_, caller, upstream):
        await caller.ask(post(STREAM))
        assert await next_chunk(caller) == COMMENT
        upstream.proceed()


async def test_http_1_0_gets_comments_and_the_end_of_the_connection() -> None:
    async with commenting(LATE) as (_, caller, upstream):
        status, headers = await caller.ask(post(STREAM, version="1.0"))
        assert (status, headers["connection"], "transfer-encoding" in headers) == (200, "close", False)
        assert await caller.reader.readexactly(len(COMMENT)) == COMMENT
        upstream.proceed()
        assert (await caller.rest()).replace(COMMENT, b"") == ANSWER


async def test_failover_and_cors_are_as_without() -> None:
    """A failed attempt is followed by the next while comments go on; the head is one for pages too."""
    keys = [{"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest()}]
    server = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "cors": {"origins": ["https://a.example"]}}
    async with Upstream([Pause(0.3), RESET]) as bad, Upstream([Pause(0.3), STREAMED]) as good:
        pools = {"bad": pool(bad.url), "good": pool(good.url)}
        async with (
            running(pools, defaults=SOON, keys=keys, server=server) as gateway,
            calling(gateway.url) as caller,
        ):
            _, headers = await caller.ask(post(STREAM, "authorization: Bearer sk-web", "origin: https://a.example"))
            assert headers["access-control-allow-origin"] == "https://a.example"
            assert b"".join(await caller.chunks()).replace(COMMENT, b"") == ANSWER
            await eventually(lambda: gateway.recorder.recent)
            assert [attempt.pool for attempt in last(gateway).attempts] == ["bad", "good"]


async def test_openais_client_reads_past_comments() -> None:
    """From a slow simulated engine."""
    asked: Any = {"model": "chat", "messages": CHAT["messages"], "max_tokens": 4, "stream": True}
    async with (
        engines(1, "8b-l4", speed=0.05) as (engine,),
        running({"only": pool(engine.url, backend="vllm")}, defaults=SOON) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        events = [event async for event in await client.chat.completions.create(**asked)]
        await eventually(lambda: gateway.recorder.recent)
        ttft = last(gateway).ttft
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "length"
    assert ttft is not None
    assert ttft > 0.1  # a comment came first


# --------------------------------------------------------------------------- failures


async def test_a_failure_after_a_comment_is_an_event() -> None:
    """Complete as HTTP, and recorded as the failure that it is."""
    async with commenting([Pause(0.3), FAILING]) as (gateway, caller, _):
        assert (await caller.ask(post(STREAM)))[0] == 200
        *comments, event = await caller.chunks()
        assert comments
        assert {*comments} == {COMMENT}
        error = json.loads(event.removeprefix(b"data: "))["error"]
        assert (error["type"], set(error)) == ("server_error", {"message", "type", "param", "code"})
        await eventually(lambda: gateway.recorder.recent)
        record = last(gateway)
    assert (record.end, record.ttft) == (RequestOutcome.FAILED, None)
    assert record.status in (502, 503)


async def test_a_failure_before_the_first_comment_has_its_status() -> None:
    async with commenting([FAILING], defaults={"keepalive": "5s"}) as (_, caller, _):
        assert (await caller.whole(post(STREAM)))[0] >= 500


async def test_openais_client_raises_a_late_failure() -> None:
    asked: Any = {**CHAT, "stream": True}
    async with (
        commenting([Pause(0.3), FAILING]) as (gateway, _, _),
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(**asked)
        with pytest.raises(openai.APIError) as raised:
            async for _ in stream:
                pass
    assert not isinstance(raised.value, openai.APIConnectionError)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", "server_error"),
        ("/v1/messages", "overloaded_error"),
        ("/v1/responses", "error"),
    ],
)
async def test_a_late_failure_is_in_the_dialect_of_the_caller(path: str, kind: str) -> None:
    """Events of Anthropic's Messages and of Responses have names."""

    async def fail(http: HttpRequest) -> None:
        http.comments = StreamComments(http, 0.05, lambda: ())
        await asyncio.sleep(0.2)
        http.refuse(ApiError(503, "No endpoint is usable now.", type="server_error", code="unavailable"))

    async with serving(fail) as caller:
        assert (await caller.ask(post(STREAM, path=path)))[0] == 200
        comment, *_, event = await caller.chunks()
    *name, data = event.decode().splitlines()[:-1]
    assert comment == COMMENT
    assert name == ([] if path == "/v1/chat/completions" else ["event: error"])
    found = json.loads(data.removeprefix("data: "))
    assert kind == (found.get("error") or found)["type"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"max_tokens": 5, "messages": CHAT["messages"]}),
    ],
)
async def test_a_translated_stream_may_fail_late_too(path: str, body: dict[str, Any]) -> None:
    """The pool speaks chat alone; the event is in the caller's dialect."""
    async with commenting([Pause(0.3), FAILING]) as (_, caller, _):
        assert (await caller.ask(post({"model": "chat", "stream": True, **body}, path=path)))[0] == 200
        comment, *_, event = await caller.chunks()
    assert comment == COMMENT
    assert event.startswith(b"event: error\ndata: ")


async def test_a_caller_that_leaves_while_waiting_ends_the_attempt() -> None:
    async with commenting([HANG]) as (gateway, caller, upstream):
        await caller.ask(post(STREAM))
        caller.writer.transport.abort()
        await upstream.until(lambda upstream: upstream.hangups == 1)
        await eventually(lambda: gateway.recorder.recent)
        assert last(gateway).end is RequestOutcome.CLIENT_GONE


async def test_a_gateway_that_stops_ends_a_waiting_stream_by_an_event() -> None:
    async with commenting([HANG]) as (gateway, caller, _):
        await caller.ask(post(STREAM))
        stopping = asyncio.create_task(gateway.stop())
        received = (await caller.rest()).split(b"\r\n")
        await stopping
    assert b"being stopped" in b"".join(received)
    assert received[-3:] == [b"0", b"", b""]
