"""The life of a request: one answer and one Record in all cases."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from time import monotonic
from typing import Any

import pytest

from gateway.api.api_error import ApiError, bad_request, internal
from gateway.downstream import answer_headers
from gateway.observe.record import RequestOutcome, Stage
from gateway.observe.timeline import RequestTimeline
from gateway.refusals import outcome_of, reject_unplaced
from policies.types import FOREVER, AttemptOutcome, Decision, Placement, RejectionKind
from tests.support.builders import (
    ANSWER,
    CHAT,
    DONE,
    FINISH,
    STREAMED,
    TOKEN,
    USAGE,
    WHOLE,
    calling,
    conversing,
    decided,
    get,
    last,
    post,
)
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import GATE, HANG, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

STREAM = {**CHAT, "stream": True}
KEYS = [
    {"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest(), "routes": ["chat"]},
    {"name": "all", "sha256": hashlib.sha256(b"sk-all").hexdigest()},
]
TWO = {"chat": {"tiers": ["only"]}, "agent": {"tiers": ["only"]}}
WEB, ALL = "authorization: Bearer sk-web", "authorization: Bearer sk-all"


# --------------------------------------------------------------------------- without failures


async def test_one_request_has_one_complete_record() -> None:
    """Request, endpoint, stage times, predictions and cost are in the Record."""
    script: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(TOKEN + FINISH + USAGE + DONE) + LAST_CHUNK]
    routes = {"chat": {"workload": "chat", "tiers": ["only"], "ttft": {"budget": "5s"}, "total": {"budget": "30s"}}}
    async with Upstream(script) as upstream:
        pools = {"only": pool(upstream.url, price={"input": 1.0, "output": 10.0})}
        async with running(pools, routes, keys=KEYS) as gateway, calling(gateway.url) as caller:
            await caller.ask(post(STREAM, ALL, "x-request-id: mine-1"))
            upstream.proceed()
            await caller.chunks()
            await eventually(lambda: gateway.recorder.recent)
    (found,) = gateway.recorder.recent
    assert (found.request_id, found.operation, found.asked.stream, found.tenant) == ("mine-1", "chat", True, "all")
    assert (found.route.name, found.route.workload, found.endpoint.pool, found.answer.model, found.placed.tier) == (
        "chat",
        "chat",
        "only",
        "served",
        0,
    )
    assert (found.end, found.status, found.error) == (RequestOutcome.COMPLETED, 200, "")
    assert found.budgets.ttft == pytest.approx(5.0)
    assert found.budgets.total == 30.0
    assert (found.answer.prompt_tokens, found.answer.cached_tokens, found.answer.output_tokens) == (7, 4, 2)
    assert found.cost_usd == pytest.approx((7 * 1.0 + 2 * 10.0) / 1e6)
    assert found.answer.tpot is not None
    assert found.ttft is not None
    assert found.ttft <= found.total
    assert [(a.number, a.ending) for a in found.attempts] == [(1, AttemptOutcome.COMPLETED)]
    assert [*found.stages] == [
        Stage.READ,
        Stage.PARSE,
        Stage.ESTIMATE,
        Stage.ADMIT,
        Stage.QUEUE,
        Stage.DECIDE,
        Stage.CONNECT,
        Stage.SEND,
        Stage.UPSTREAM,
        Stage.RELAY,
        Stage.STREAM,
    ]


@pytest.mark.parametrize(("served", "factor"), [("flex", 0.5), ("default", 1.0)])
async def test_an_answer_costs_the_price_of_the_speed_at_which_it_was_served(served: str, factor: float) -> None:
    """The caller asked for another."""
    priced = {"price": {"input": 1.0, "output": 10.0}, "accepts": {"speeds": {"flex": 0.5, "priority": 2}}}
    body = b'{"service_tier":"%b","choices":[{"message":{"content":"x"},"finish_reason":"stop"}],' % served.encode()
    script: Script = [reply(body + b'"usage":{"prompt_tokens":7,"completion_tokens":2}}')]
    async with (
        Upstream(script) as upstream,
        running({"only": pool(upstream.url, **priced)}) as gateway,
        calling(gateway.url) as caller,
    ):
        assert (await caller.whole(post({**CHAT, "service_tier": "priority"})))[0] == 200
        await eventually(lambda: gateway.recorder.recent)
    (found,) = gateway.recorder.recent
    assert (found.answer.facts.speed, found.cost_usd) == (served, pytest.approx(factor * 27 / 1e6))


@pytest.mark.parametrize(
    ("path", "method"),
    [("/v1/models", "GET"), ("/health", "GET"), ("/ready", "GET"), ("/nope", "GET"), ("/v1/chat/completions", "GET")],
)
async def test_only_inference_requests_have_a_record(path: str, method: str) -> None:
    """Probes and scanners are not requests."""
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway:
        assert (await get(gateway.url, path, method=method))[0] in (200, 404, 405)
        assert (list(gateway.recorder.recent), gateway.recorder.live) == ([], 0)


async def test_a_query_string_is_ignored() -> None:
    """Some SDKs add `?api-version=`."""
    async with conversing([reply(WHOLE)]) as (_, caller, upstream):
        assert (await caller.whole(post(CHAT, path="/v1/chat/completions?api-version=1")))[0] == 200
    assert upstream.requests[0].target == "/v1/chat/completions"


async def test_the_host_of_an_absolute_target_is_ignored() -> None:
    """The form is valid (RFC 9112 section 3.2.2); only the configuration selects backends."""
    async with conversing([reply(WHOLE)]) as (_, caller, upstream):
        target = "http://127.0.0.1:9/v1/chat/completions"
        assert (await caller.whole(post(CHAT, path=target)))[0] == 200
    assert upstream.requests[0].target == "/v1/chat/completions"


async def test_completions_are_served_like_chat_completions() -> None:
    """Both of OpenAI's operations."""
    async with conversing([reply(b'{"choices":[{"text":"hi"}]}')]) as (gateway, caller, upstream):
        status, _, _ = await caller.whole(post({"model": "chat", "prompt": "hello"}, path="/v1/completions"))
    assert (status, upstream.requests[0].target, last(gateway).operation) == (200, "/v1/completions", "completion")


# --------------------------------------------------------------------------- refusals


async def test_a_refusal_has_the_headers_of_an_answer() -> None:
    """Request id, route and timing so far; the Record's outcome is `refused`."""
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway, calling(gateway.url) as caller:
        status, headers, _ = await caller.whole(post({**CHAT, "model": "nope"}, "x-request-id: mine-1"))
    assert (status, headers["x-request-id"], headers["x-firsttoken-route"]) == (404, "mine-1", "-")
    assert headers["x-firsttoken-attempts"] == "0"
    assert headers["server-timing"].startswith("read;dur=")
    found = last(gateway)
    assert (found.end, found.status, found.route.name, found.ttft_met) == (RequestOutcome.REFUSED, 404, "-", None)


async def test_an_error_counts_all_failed_attempts() -> None:
    """Without a winning attempt."""
    async with conversing([reply(b"{}", "500 x")]) as (
        gateway,
        caller,
        _,
    ):  # tried twice: the pool has no other endpoint
        status, headers, _ = await caller.whole(post(STREAM))
    assert (status, headers["x-firsttoken-attempts"], headers["x-should-retry"]) == (502, "2", "false")
    assert (last(gateway).end, len(last(gateway).attempts), last(gateway).ttft_met) == (RequestOutcome.FAILED, 2, False)


async def test_without_a_usable_endpoint_the_reply_is_503_with_retry_after() -> None:
    """At once."""
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway:
        endpoint = gateway.runtime.current.pools["only"].endpoints[0].id
        for _ in range(2):
            gateway.monitor.fleet.on_probe_failed(endpoint, monotonic())
        async with calling(gateway.url) as caller:
            status, headers, body = await caller.whole(post(STREAM))
        assert (status, int(headers["retry-after"]) >= 1) == (503, True)
        assert json.loads(body)["error"]["code"] == "unavailable"
        assert (last(gateway).end, last(gateway).ttft_met) == (RequestOutcome.UNAVAILABLE, False)
        assert (await get(gateway.url, "/ready"))[0] == 503


async def test_a_key_sees_and_uses_its_own_routes_only() -> None:
    """Other routes are 404, and no backend is called."""
    async with conversing([reply(WHOLE)], routes=TWO, keys=KEYS) as (gateway, caller, upstream):
        listed = [
            [model["id"] for model in json.loads((await get(gateway.url, "/v1/models", key))[2])["data"]]
            for key in (WEB, ALL)
        ]
        assert listed == [["chat"], ["chat", "agent"]]
        assert (await caller.whole(post({**CHAT, "model": "agent"}, WEB)))[0] == 404
        assert (upstream.requests, last(gateway).end, last(gateway).tenant) == ([], RequestOutcome.REFUSED, "web")
        assert (await caller.whole(post(CHAT, WEB)))[0] == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/v1/completions"])
async def test_without_a_key_only_health_is_served(path: str) -> None:
    """401 before the body is parsed; a load balancer needs no key."""
    async with running({"only": pool("http://127.0.0.1:9")}, keys=KEYS) as gateway:
        for headers in ((), ("authorization: Bearer sk-we",), ("authorization: Basic c2std2Vi",)):
            if path == "/v1/models":
                status = (await get(gateway.url, path, *headers))[0]
            else:
                async with calling(gateway.url) as caller:
                    status = (await caller.whole(post(b"not even JSON", *headers, path=path)))[0]
            assert status == 401
        assert [(await get(gateway.url, path))[0] for path in ("/health", "/ready")] == [200, 200]


# --------------------------------------------------------------------------- internal errors


async def test_an_internal_error_before_the_first_token_is_a_500_and_a_record(caplog: pytest.LogCaptureFixture) -> None:
    """The reply names no internals; the next request is served."""
    async with Upstream([STREAMED]) as upstream, running({"only": pool(upstream.url)}) as gateway:
        decide, gateway.queue.decide = gateway.queue.decide, None  # type: ignore[assignment, method-assign]
        with caplog.at_level(logging.ERROR, "firsttoken"):
            async with calling(gateway.url) as caller:
                status, headers, body = await caller.whole(post(STREAM, "x-request-id: mine-1"))
                assert await caller.rest() == b""
        gateway.queue.decide = decide  # type: ignore[method-assign]
        assert (status, headers["x-request-id"], headers["connection"]) == (500, "mine-1", "close")
        assert "NoneType" not in body.decode()
        assert "the fault is ours" in body.decode()
        assert (last(gateway).end, last(gateway).status) == (RequestOutcome.INTERNAL, 500)
        assert "internal error on request mine-1" in caplog.text
        async with calling(gateway.url) as caller:
            assert (await caller.ask(post(STREAM)))[0] == 200


def _bug(*_: object, **__: object) -> Any:
    raise RuntimeError("a bug of ours")


async def test_an_internal_error_in_the_relay_cancels_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the engine nor the fleet's in-flight count stays occupied."""
    async with (
        Upstream([STREAM_HEAD + chunk(TOKEN), HANG]) as upstream,
        running({"only": pool(upstream.url)}) as gateway,
    ):
        monkeypatch.setattr(answer_headers, "response_headers", _bug)
        async with calling(gateway.url) as caller:
            assert (await caller.whole(post(STREAM)))[0] == 500
        await upstream.until(lambda seen: seen.hangups == 1)
        assert [load.in_flight for load in gateway.monitor.loads().values()] == [0]
    assert (last(gateway).end, [a.ending for a in last(gateway).attempts]) == (
        RequestOutcome.INTERNAL,
        [AttemptOutcome.CANCELLED],
    )


async def test_an_internal_error_after_the_first_token_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second head inside a body would be read as text."""
    async with (
        Upstream([STREAM_HEAD + chunk(TOKEN), HANG]) as upstream,
        running({"only": pool(upstream.url)}) as gateway,
    ):
        monkeypatch.setattr(RequestTimeline, "first_token_out", _bug)
        rest = b""
        async with calling(gateway.url) as caller:
            status, _ = await caller.ask(post(STREAM))
            with suppress(ConnectionResetError):
                rest = await caller.rest()
        await eventually(lambda: gateway.recorder.recent)
    assert status == 200
    assert rest in (b"", chunk(TOKEN))
    assert last(gateway).end is RequestOutcome.INTERNAL


# --------------------------------------------------------------------------- health and readiness


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_health_and_ready_answer_get_and_head_only(path: str) -> None:
    """And to nothing else."""
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway:
        status, _, body = await get(gateway.url, path)
        assert (status, json.loads(body)["status"] in ("alive", "ready")) == (200, True)
        status, _, body = await get(gateway.url, path, method="HEAD")
        assert (status, body) == (200, b"")
        status, headers, _ = await get(gateway.url, path, method="POST")
        assert (status, headers["allow"]) == (405, "GET, HEAD")


async def test_a_draining_gateway_is_alive_and_not_ready() -> None:
    """Load balancers send no new requests while running requests end."""
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway:
        gateway.proxy.draining = True
        status, _, body = await get(gateway.url, "/ready")
        assert (status, json.loads(body)) == (503, {"status": "draining"})
        assert (await get(gateway.url, "/health"))[0] == 200


async def test_answers_while_draining_close_the_connection() -> None:
    """Refusals, streams and whole answers; a next request would come too late."""
    async with Upstream([STREAMED], [reply(WHOLE)]) as upstream, running({"only": pool(upstream.url)}) as gateway:
        gateway.proxy.draining = True
        for body, status in (({**CHAT, "model": "nope"}, 404), (STREAM, 200), (CHAT, 200)):
            async with calling(gateway.url) as caller:
                found, headers = await caller.ask(post(body))
                await caller.rest()
            assert (found, headers["connection"]) == (status, "close")


# --------------------------------------------------------------------------- functions


@pytest.mark.parametrize(
    ("outcome", "reason", "cause", "status", "code"),
    [
        (Placement.SHED, "the best chance is 0.1", None, 429, "rate_limit_exceeded"),
        (Placement.UNAVAILABLE, "all are down", None, 503, "unavailable"),
        (Placement.UNFIT, "small: 10 tokens at most", RejectionKind.CONTEXT_WINDOW, 400, "context_length_exceeded"),
        (Placement.UNFIT, "small: no images", RejectionKind.CAPABILITY, 400, "no_suitable_tier"),
    ],
)
def test_an_unplaced_request_is_rejected_with_its_reason(
    outcome: Placement, reason: str, cause: RejectionKind | None, status: int, code: str
) -> None:
    """With Retry-After, unless a retry cannot help."""
    with pytest.raises(ApiError) as caught:
        reject_unplaced(Decision(outcome, 0.0, FOREVER, reason=reason, cause=cause, retry_after=1.2))
    refusal = caught.value
    assert (refusal.status, refusal.code) == (status, code)
    assert reason in refusal.message
    assert refusal.headers == ({} if status == 400 else {"retry-after": "2", "retry-after-ms": "1200"})


def test_a_placed_request_is_not_rejected() -> None:
    """No exception is raised."""
    reject_unplaced(decided())


@pytest.mark.parametrize(
    ("refusal", "outcome", "end"),
    [
        (bad_request("x"), None, RequestOutcome.REFUSED),
        (ApiError(401, "x"), None, RequestOutcome.REFUSED),
        (ApiError(429, "x"), Placement.SHED, RequestOutcome.SHED),
        (ApiError(503, "x"), Placement.UNAVAILABLE, RequestOutcome.UNAVAILABLE),
        (ApiError(400, "x"), Placement.UNFIT, RequestOutcome.REFUSED),
        (ApiError(400, "x"), Placement.PLACE, RequestOutcome.REFUSED),
        (ApiError(422, "x"), Placement.PLACE, RequestOutcome.REFUSED),
        (ApiError(429, "x"), Placement.PLACE, RequestOutcome.FAILED),
        (ApiError(502, "x"), Placement.PLACE, RequestOutcome.FAILED),
        (ApiError(504, "x"), Placement.PLACE, RequestOutcome.FAILED),
        (internal("x"), Placement.PLACE, RequestOutcome.FAILED),
    ],
)
def test_the_outcome_of_an_error(refusal: ApiError, outcome: Placement | None, end: RequestOutcome) -> None:
    """A 4xx after sending is the request's own fault; a 429 or 5xx then means that every attempt failed."""
    assert outcome_of(refusal, None if outcome is None else Decision(outcome, 0.0, FOREVER)) is end


async def test_a_requested_usage_event_passes_unchanged() -> None:
    """Both streams are metered."""
    metered = TOKEN + FINISH + USAGE + DONE
    async with conversing([STREAM_HEAD + chunk(metered) + LAST_CHUNK]) as (gateway, caller, _):
        for options, body in ((None, ANSWER), ({"include_usage": True}, metered)):
            await caller.ask(post({**STREAM, "stream_options": options}))
            assert b"".join(await caller.chunks()) == body
    assert [found.answer.prompt_tokens for found in gateway.recorder.recent] == [7, 7]
