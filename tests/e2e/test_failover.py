"""A first tier that cannot serve, and a healthy second tier that answers every caller.

Attempts at another pool are not charged to the retry budget, which protects a single pool from being hammered.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.observe.record import RequestOutcome
from policies.types import AttemptOutcome
from tests.support.gateways import pool, running
from tests.support.scripted_fleet import dead_url
from tests.support.upstream import CLOSE, HANG, LAST_CHUNK, RESET, STREAM_HEAD, Pause, Script, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

JSON = "content-type: application/json"
CALLERS = 40  # an empty retry budget allows 10, what 40 requests earn, and a tenth of them
CROWD = 200
ANSWER = json.dumps(
    {
        "id": "1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "two"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    },
    separators=(",", ":"),
).encode()
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"two"}}]}\n\n'
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def error(status: str, message: str = "no", **more: Any) -> Script:
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error", **more}}).encode()
    return [reply(body, status, JSON)]


FAULTS: dict[str, Script] = {
    "429": error("429 Too Many Requests"),
    "429 with a long retry-after": [reply(b"{}", "429 Too Many Requests", JSON, "retry-after: 30")],
    "an exhausted quota": error("429 Too Many Requests", code="insufficient_quota"),
    "500": error("500 Internal Server Error"),
    "503": error("503 Service Unavailable"),
    "401 for our key": error("401 Unauthorized"),
    "404 for our model": error("404 Not Found", "The model `served` does not exist.", type="NotFoundError", code=404),
    "404 for our path": [reply(b'{"detail":"Not Found"}', "404 Not Found", JSON)],
    "400 for our model": error("400 Bad Request", "served is not a valid model ID"),
    "200 with an error": [reply(b'{"error":{"message":"Provider returned error","code":502}}', "200 OK", JSON)],
    "200 with a page": [reply(b"<html>please log in</html>", "200 OK", "content-type: text/html")],
    "200 with half a JSON": [reply(b'{"id":"1","choices":[{"ind', "200 OK", JSON)],
    "200 with an empty body": [reply(b"", "200 OK", JSON)],
    "a reset": [RESET],
    "a close": [CLOSE],
    "garbage": [b"SSH-2.0-OpenSSH_9.2\r\n", CLOSE],
}
SERVED = {False: [reply(ANSWER, "200 OK", JSON)], True: [STREAM_HEAD + chunk(TOKEN) + chunk(STOP) + LAST_CHUNK]}


@asynccontextmanager
async def two_tiers(first: str, second: Upstream, **route: Any) -> AsyncIterator[Gateway]:
    routes = {"chat": {"tiers": ["first", "second"], "ttft": {"budget": "2s"}, **route}}
    defaults = {"connect": "30s"}  # on a busy machine, 200 connections at once take more than the 2 s of the default
    async with running({"first": pool(first), "second": pool(second.url)}, routes, defaults=defaults) as gateway:
        yield gateway


async def ask(session: aiohttp.ClientSession, gateway: Gateway, stream: bool = False, **more: Any) -> tuple[int, bytes]:
    body = {"model": "chat", "stream": stream, "messages": [{"role": "user", "content": "hello"}], **more}
    async with session.post(f"{gateway.url}/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.read()


async def ask_all(gateway: Gateway, stream: bool, count: int) -> list[tuple[int, bytes]]:
    """Answers to `count` concurrent requests."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.timeout(60):
        return await asyncio.gather(*(ask(session, gateway, stream) for _ in range(count)))


def answered(replies: list[tuple[int, bytes]]) -> int:
    return sum(status == 200 and b'"two"' in body for status, body in replies)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_all_callers_at_once_are_answered_by_the_second_tier(fault: str, stream: bool) -> None:
    async with (
        Upstream(FAULTS[fault]) as first,
        Upstream(SERVED[stream]) as second,
        two_tiers(first.url, second) as gateway,
    ):
        assert answered(await ask_all(gateway, stream, CALLERS)) == CALLERS
        assert {record.end for record in gateway.recorder.recent} == {RequestOutcome.COMPLETED}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_refused_connection_moves_all_callers_on(stream: bool) -> None:
    async with Upstream(SERVED[stream]) as second, two_tiers(dead_url(), second) as gateway:
        assert answered(await ask_all(gateway, stream, CROWD)) == CROWD


async def test_a_failed_tls_handshake_moves_all_callers_on() -> None:
    """The first tier speaks plain HTTP on a port configured as https."""
    async with (
        Upstream(banner=[b"HTTP/1.1 400 Bad Request\r\n\r\n", CLOSE]) as first,
        Upstream(SERVED[False]) as second,
        two_tiers(first.url.replace("http://", "https://"), second) as gateway,
    ):
        assert answered(await ask_all(gateway, False, CALLERS)) == CALLERS


async def test_a_silent_first_tier_moves_streams_on_within_the_budget() -> None:
    async with Upstream([HANG]) as first, Upstream(SERVED[True]) as second, two_tiers(first.url, second) as gateway:
        assert answered(await ask_all(gateway, True, CROWD)) == CROWD
        for record in gateway.recorder.recent:
            assert [attempt.pool for attempt in record.attempts] == ["first", "second"]
            assert record.attempts[-1].ending is AttemptOutcome.COMPLETED
            assert record.ttft is not None
            assert record.ttft < 20.0  # ten budgets: the test machine may be busy; without failover it is a minute


async def test_an_unstreamed_answer_has_the_total_limit_of_its_route() -> None:
    """A hung engine is abandoned for the next tier while there is time for another answer within `total.limit`."""
    async with (
        Upstream([HANG]) as first,
        Upstream(SERVED[False]) as second,
        two_tiers(first.url, second, ttft={"budget": "500ms"}, total={"budget": "1s", "limit": "2s"}) as gateway,
    ):
        assert answered(await ask_all(gateway, False, 5)) == 5


async def test_total_ends_an_answer_that_does_not_finish() -> None:
    """A stream is cut by an error event when `total.limit` has passed; an unstreamed one is a 504."""
    async with Upstream([STREAM_HEAD + chunk(TOKEN), HANG]) as only:
        routes = {
            "chat": {"tiers": ["first"], "ttft": {"budget": "300ms"}, "total": {"budget": "400ms", "limit": "500ms"}}
        }
        async with running({"first": pool(only.url)}, routes) as gateway:
            async with asyncio.timeout(10):
                ((status, body),) = await ask_all(gateway, True, 1)
            assert status == 200
            assert b'"error"' in body
            assert b"[DONE]" not in body


@pytest.mark.parametrize(("workload", "is_whole"), [("agent", True), ("task", False)])
async def test_no_answer_of_an_agent_is_ended_while_tokens_come(workload: str, is_whole: bool) -> None:
    """Claude Code asks for 32,000 tokens: at 20 ms each, 640 s. Other workloads have a limit of ten budgets."""
    slow = [STREAM_HEAD, *[step for _ in range(33) for step in (chunk(TOKEN), Pause(20.0))], chunk(STOP) + LAST_CHUNK]
    async with (
        Upstream(slow) as only,
        running({"first": pool(only.url)}, {"chat": {"workload": workload, "tiers": ["first"]}}) as gateway,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(1000)) as session,
    ):
        status, body = await ask(session, gateway, True)
        assert (status, body.count(TOKEN) == 33, b'"error"' in body) == (200, is_whole, not is_whole)
        assert (gateway.recorder.recent[-1].total > 640.0) is is_whole


async def test_an_exhausted_quota_takes_the_key_out_of_use() -> None:
    """For minutes no further request is sent with the key."""
    async with (
        Upstream(FAULTS["an exhausted quota"]) as first,
        Upstream(SERVED[False]) as second,
        two_tiers(first.url, second) as gateway,
    ):
        await ask_all(gateway, False, 1)
        await asyncio.sleep(1.2)
        await ask_all(gateway, False, 20)
        of_callers = [request for request in first.requests if b'"max_tokens":1' not in request.body]
        assert len(of_callers) == 1
        assert len(first.requests) <= 2  # with the gateway's own, which confirms the refusal


async def test_a_misconfigured_engine_does_not_take_all_requests_of_its_pool() -> None:
    """An engine started under another model name answers at once, and looks idle; the pool still serves."""
    async with (
        Upstream(FAULTS["404 for our model"]) as wrong,
        Upstream(SERVED[False]) as right,
        running({"both": pool(wrong.url, right.url)}, {"chat": {"tiers": ["both"]}}) as gateway,
    ):
        assert answered(await ask_all(gateway, False, CALLERS)) == CALLERS
        sent = len(wrong.requests)
        assert answered(await ask_all(gateway, False, CALLERS)) == CALLERS
        assert len(wrong.requests) - sent <= 2, "the circuit breaker keeps requests away"


async def test_a_pool_of_one_endpoint_is_not_retried_at_once_after_a_429() -> None:
    """The caller gets the provider's own retry-after, and the provider a single request."""
    limited = [reply(b'{"error":{"message":"slow down"}}', "429 Too Many Requests", JSON, "retry-after: 7")]
    async with Upstream(limited) as only, running({"api": pool(only.url)}, {"chat": {"tiers": ["api"]}}) as gateway:
        async with aiohttp.ClientSession() as session:
            body = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
            async with session.post(f"{gateway.url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 429
                assert 6 <= float(answer.headers["retry-after"]) <= 7
        assert len(only.requests) == 1


async def test_a_request_error_is_not_retried_at_the_next_tier() -> None:
    """A 400 about the request would be the same at any backend."""
    mistake = error("400 Bad Request", "messages: at least one is needed", param="messages")
    async with Upstream(mistake) as first, Upstream(SERVED[False]) as second, two_tiers(first.url, second) as gateway:
        ((status, _),) = await ask_all(gateway, False, 1)
        assert status == 400
        assert not second.requests


# --------------------------------------------------------------------------- by the kind of the refusal


TOO_LONG = error("400 Bad Request", "This model's maximum context length is 8192 tokens.", type="BadRequestError")
FILTERED = error("400 Bad Request", "The content was refused.", code="content_filter")


@pytest.mark.parametrize(
    ("script", "route", "windows", "status"),
    [
        (TOO_LONG, {}, (None, None), 200),
        (TOO_LONG, {}, (8192, 32768), 200),
        (TOO_LONG, {}, (8192, 8192), 400),
        (TOO_LONG, {"fallback": {"context": False}}, (8192, 32768), 400),
        (FILTERED, {}, (None, None), 400),
        (FILTERED, {"fallback": {"content_filter": True}}, (None, None), 200),
        (error("400 Bad Request", "Invalid schema", code="invalid_json_schema"), {}, (None, None), 400),
    ],
)
async def test_a_refusal_falls_back_where_the_route_says_so(
    script: Script, route: dict[str, Any], windows: tuple[int | None, int | None], status: int
) -> None:
    """A prompt that is too long to a larger, or unknown, window; a content filter only if configured."""
    async with Upstream(script) as first, Upstream(SERVED[False]) as second:
        pools = {
            name: pool(upstream.url, context_window=window)
            for name, upstream, window in zip(("first", "second"), (first, second), windows, strict=True)
        }
        async with running(pools, {"chat": {"tiers": ["first", "second"], **route}}) as gateway:
            ((found, _),) = await ask_all(gateway, False, 1)
            assert (found, len(second.requests)) == (status, status == 200)


async def test_a_passthroughs_unknown_model_is_the_callers_mistake() -> None:
    """Requests of other callers do not suffer."""
    async with (
        Upstream(FAULTS["404 for our model"], SERVED[False]) as only,
        running({"api": pool(only.url)}, {}, passthrough="api") as gateway,
    ):
        assert [(await ask_all(gateway, False, 1))[0][0] for _ in range(2)] == [404, 200]


async def test_request_errors_do_not_take_an_endpoint_down() -> None:
    """Refusals confirmed by other endpoints of the pool are the caller's fault."""
    mistake = error("400 Bad Request", "messages: at least one is needed", param="messages")
    async with (
        Upstream(mistake) as first,
        Upstream(mistake) as second,
        running({"both": pool(first.url, second.url)}, {"chat": {"tiers": ["both"]}}) as gateway,
    ):
        assert {status for status, _ in await ask_all(gateway, False, CALLERS)} == {400}
        assert {load.health.value for load in gateway.monitor.loads().values()} == {"up"}


async def test_an_endpoint_that_alone_refuses_requests_is_avoided() -> None:
    """For example an engine without a chat template: its 400s are tried elsewhere as soon as the other endpoints
    have answered such requests."""
    odd = error("400 Bad Request", "No chat template.", type="BadRequestError")
    async with (
        Upstream(odd) as first,
        Upstream(SERVED[False]) as second,
        running({"both": pool(first.url, second.url)}, {"chat": {"tiers": ["both"]}}) as gateway,
    ):
        for _ in range(8):
            await ask_all(gateway, False, 10)
        assert answered(await ask_all(gateway, False, 50)) == 50


# --------------------------------------------------------------------------- a dead endpoint


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_requests_are_moved_from_an_endpoint_with_failed_probes(stream: bool) -> None:
    """Without waiting for the request's own limit: 600 s for an unstreamed answer, here 60 s for a stream."""
    async with Upstream([HANG]) as first, Upstream(SERVED[stream]) as second:
        routes = {"chat": {"tiers": ["first", "second"], "ttft": "off"}}
        async with running({"first": pool(first.url), "second": pool(second.url)}, routes) as gateway:
            asked = asyncio.create_task(ask_all(gateway, stream, 20))
            await first.until(lambda seen: len(seen.requests) == 20)
            for _ in range(2):
                gateway.fleet.on_probe_failed(next(iter(gateway.monitor.loads())), monotonic())
            assert answered(await asked) == 20


async def test_a_vanished_host_is_noticed_by_tcp_keepalive() -> None:
    """The kernel probes after 15 s, three times."""
    async with Upstream(SERVED[False]) as only, running({"api": pool(only.url)}) as gateway:
        await ask_all(gateway, False, 1)
        (connections,) = gateway.runtime.current.connections.values()
        (connection,) = connections._idle
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [15, 5, 3]


async def test_an_exhausted_quota_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A log line with the pool, and a count by cause."""
    async with (
        Upstream(FAULTS["an exhausted quota"]) as first,
        Upstream(SERVED[False]) as second,
        two_tiers(first.url, second) as gateway,
    ):
        await ask_all(gateway, False, 3)
        (line,) = [entry.message for entry in caplog.records if "down" in entry.message]
        assert line.startswith("endpoint first/127.0.0.1:")
        assert "is down for 300 s: the gateway's account with the provider is used up (429 insufficient_quota)" in line
        (labels,) = gateway.monitor.ejections.of
        assert (labels[0], labels[2]) == ("first", "quota")
