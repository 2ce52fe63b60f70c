"""Quotes: POST /quote/v1/..., figures on refusals, and how right quotes were."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.config.models import Config
from gateway.decider import Decider
from gateway.observe.record import RequestOutcome
from gateway.scheduler import RequestQueue
from gateway.tokenize.deferred_counts import DeferredCounts
from policies.queue.queued_request import QueuedRequest
from policies.queue.quotes import RequestQuote
from policies.types import TRAINED_SAMPLES, PromptEstimate
from tests.support.builders import CHAT, STREAMED, calling, conversing, get, last, post
from tests.support.gateways import document, pool, running
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import Upstream

pytestmark = pytest.mark.virtual_time

A, B = "authorization: Bearer sk-a", "authorization: Bearer sk-b"
LONG = {**CHAT, "max_tokens": 2, "messages": [{"role": "user", "content": "word " * 9000}]}


def key(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest(), **more}


async def quoted(gateway: Gateway, body: Any, *headers: str, path: str = "/v1/chat/completions") -> dict[str, Any]:
    async with calling(gateway.url) as caller:
        status, _, found = await caller.whole(post(body, *headers, path=f"/quote{path}"))
    assert status == 200, found
    quote: dict[str, Any] = json.loads(found)
    return quote


async def ask(gateway: Gateway, body: Any, *headers: str) -> tuple[int, dict[str, str]]:
    """Read a streamed answer, or a refusal, to the end."""
    async with calling(gateway.url) as caller:
        status, found = await caller.ask(post({**body, "stream": True}, *headers))
        await (caller.chunks() if status == 200 else caller.body(found))
    await eventually(lambda: gateway.recorder.live == 0)
    return status, found


# --------------------------------------------------------------------------- the figures


async def test_a_quote_tells_ttft_by_tier_and_price_and_sends_nothing() -> None:
    """The tier that would be chosen, and the next one."""
    async with Upstream() as upstream, Upstream() as other:
        pools = {
            "small": pool(upstream.url, price={"input": 1.0, "output": 2.0}),
            "large": pool(other.url, price={"input": 10.0, "output": 20.0}),
        }
        routes = {"chat": {"tiers": ["small", "large"], "ttft": {"budget": "30s"}}}
        async with running(pools, routes) as gateway:
            found = await quoted(gateway, {**CHAT, "max_tokens": 100})
            assert last(gateway).operation == "quote"
        assert not upstream.requests
        assert not other.requests
    assert (found["object"], found["model"], found["route"], found["outcome"]) == ("quote", "chat", "chat", "place")
    assert (found["pool"], found["tier"], found["held_by"], found["reason"]) == ("small", 1, None, None)
    assert (found["budget_met"], found["again_in_s"], found["ttft_budget_ms"]) == (True, 0.0, 30_000.0)
    assert 0 < found["ttft_p50_ms"] < found["ttft_p90_ms"] < 30_000
    small, large = found["tiers"]
    assert (small["pool"], large["pool"], large["tier"]) == ("small", "large", 2)
    assert {name: found[name] for name in small} == small
    assert large["price_usd"] == pytest.approx(10 * small["price_usd"]) != 0
    assert found["prompt_tokens"] == small["prompt_tokens"] > 0


async def test_the_quoted_ttft_is_the_one_that_a_request_is_predicted_at_the_same_moment() -> None:
    """A prompt in the cache is quoted as cached."""
    async with engines() as servers, running({"only": engine_pool(*servers)}) as gateway:
        new = await quoted(gateway, LONG)
        for _ in range(TRAINED_SAMPLES):
            await ask(gateway, LONG)
        found = await quoted(gateway, LONG)
        await ask(gateway, LONG)
        record = last(gateway)
    assert new["cached_tokens"] == 0
    assert found["cached_tokens"] == record.cached_tokens_predicted
    assert record.cached_tokens_predicted is not None
    assert record.cached_tokens_predicted > 8000
    assert found["prompt_tokens"] == record.prompt_tokens_estimated
    assert record.ttft_quoted_p90 is not None
    assert record.ttft_quoted_p50 is not None
    assert found["ttft_p50_ms"] == pytest.approx(1e3 * record.ttft_quoted_p50, rel=0.5)
    assert found["ttft_p90_ms"] < new["ttft_p90_ms"]


async def test_a_quote_says_when_a_budget_is_out_of_reach_and_why_tiers_are_closed() -> None:
    """`again_in_s` null: not even an idle endpoint makes it. A tier that can never take the request has its reason."""
    async with engines() as servers:
        pools = {"only": engine_pool(*servers), "tiny": engine_pool(*servers, context_window=500)}
        routes = {"chat": {"tiers": ["only", "tiny"], "ttft": {"budget": "30s"}, "on_miss": "queue"}}
        async with running(pools, routes) as gateway:
            for _ in range(TRAINED_SAMPLES):
                await ask(gateway, LONG)
            found = await quoted(
                gateway, {**LONG, "messages": [{"role": "user", "content": "new " * 9000}]}, "x-slo-ttft-ms: 1"
            )
    assert (found["budget_met"], found["again_in_s"], found["outcome"]) == (False, None, "place")
    assert found["chance"] < 0.5
    assert "context window" in found["tiers"][1]["reason"]


async def test_a_quote_of_a_pool_that_is_down_says_when_to_come_again() -> None:
    """The request itself would be a 503."""
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway:
        while (await ask(gateway, CHAT))[0] != 503:
            pass
        found = await quoted(gateway, CHAT)
    assert (found["outcome"], found["pool"], found["tiers"][0]["pool"]) == ("unavailable", None, "only")
    assert found["again_in_s"] > 0
    assert "127.0.0.1" not in json.dumps(found)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", CHAT),
        ("/openai/deployments/chat/chat/completions", {**CHAT, "model": "ignored"}),
        ("/v1/completions", {"model": "chat", "prompt": "hello"}),
        ("/v1/responses", {"model": "chat", "input": "hello"}),
        ("/v1/messages", {"model": "chat", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}),
    ],
)
async def test_every_dialect_is_quoted_under_each_of_its_names(path: str, body: Any) -> None:
    async with conversing() as (gateway, _, upstream):
        assert (await quoted(gateway, body, path=path))["route"] == "chat"
        assert not upstream.requests


# --------------------------------------------------------------------------- keys


async def test_a_quote_counts_as_a_request_of_its_key_and_reserves_no_tokens() -> None:
    """The third request of the minute is refused, whatever it is."""
    keys = [key("a", requests_per_minute=2, tokens_per_minute=1000)]
    async with conversing(keys=keys) as (_gateway, caller, _):
        status, headers, _ = await caller.whole(post(CHAT, A, path="/quote/v1/chat/completions"))
        assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "1")
        status, headers, _ = await caller.whole(post(CHAT, A, path="/quote/v1/chat/completions"))
        assert (status, headers["x-ratelimit-remaining-tokens"]) == (200, "1000")
        status, _, body = await caller.whole(post(CHAT, A, path="/quote/v1/chat/completions"))
        assert (status, b"2 requests per minute" in body) == (429, True)


@pytest.mark.parametrize(("caller_key", "status", "counted"), [(A, 429, 1), (B, 401, 0)])
async def test_a_quote_refused_by_its_head_is_recorded(caller_key: str, status: int, counted: int) -> None:
    """Its large body is not read. The refusal counts where a request's does."""
    body = {**CHAT, "messages": [{"role": "user", "content": "x " * 100_000}]}
    async with conversing(keys=[key("a", requests_per_minute=1)]) as (gateway, caller, _):
        assert (await caller.whole(post(CHAT, A, path="/quote/v1/chat/completions")))[0] == 200
        async with calling(gateway.url) as large:
            assert (await large.whole(post(body, caller_key, path="/quote/v1/chat/completions")))[0] == status
        assert (last(gateway).status, last(gateway).end) == (status, RequestOutcome.REFUSED)
        assert gateway.proxy.admission.refused.of["a", "requests"].value == counted


async def test_a_quoted_prompt_takes_no_place_among_those_that_wait_to_be_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Quotes cost no tokens: a flood of them would leave other keys' prompts uncounted."""
    waiting, add = list[int](), DeferredCounts.add

    def adding(counts: DeferredCounts, size: int, count: Iterator[None]) -> None:
        waiting.append(size)
        add(counts, size, count)

    monkeypatch.setattr(DeferredCounts, "add", adding)
    first, second = ({**CHAT, "messages": [{"role": "user", "content": f"{n} apples, {LONG}"}]} for n in (1, 2))
    async with conversing([STREAMED]) as (gateway, _, _):
        for body in (first, second):  # the first is counted at once, as nothing is known of the key's texts
            await quoted(gateway, body)
        assert not waiting
        await ask(gateway, second)
        assert len(waiting) == 1


async def test_a_quote_needs_a_key_and_its_routes() -> None:
    """A route of other keys is the 404 of a route that does not exist."""
    async with (
        running(
            {"only": pool("http://127.0.0.1:9")},
            {name: {"tiers": ["only"]} for name in ("chat", "mine")},
            keys=[key("a", routes=["mine"]), key("b")],
        ) as gateway,
        calling(gateway.url) as caller,
    ):
        assert (await caller.whole(post(CHAT, path="/quote/v1/chat/completions")))[0] == 401
        assert (await caller.whole(post(CHAT, B, path="/quote/v1/chat/completions")))[0] == 200
        status, headers, body = await caller.whole(post(CHAT, A, path="/quote/v1/chat/completions"))
        assert (status, headers["x-firsttoken-route"], b"model_not_found" in body) == (404, "-", True)


async def test_a_quote_of_another_keys_prompt_finds_nothing_cached() -> None:
    """Cache groups hold: only the key that has sent the prompt is quoted a hit."""
    async with engines() as servers, running({"only": engine_pool(*servers)}, keys=[key("a"), key("b")]) as gateway:
        await ask(gateway, LONG, A)
        assert (await quoted(gateway, LONG, A))["cached_tokens"] > 8000
        assert (await quoted(gateway, LONG, B))["cached_tokens"] == 0


# --------------------------------------------------------------------------- other paths and methods


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/quote/v1/chat/completions", 405),
        ("POST", "/quote", 404),
        ("GET", "/quote/v1/models", 404),
        ("GET", "/quote/health", 404),
        ("POST", "/quote/v1/responses/resp_1/cancel", 404),
        ("POST", "/quote/quote/v1/chat/completions", 404),
        ("POST", "/quote" * 1000 + "/v1/chat/completions", 404),
        ("POST", "/quote/v1/messages/count_tokens", 404),
    ],
)
async def test_only_requests_with_a_first_token_are_quoted(method: str, path: str, status: int) -> None:
    async with conversing() as (gateway, _, _):
        assert (await get(gateway.url, path, "content-length: 0", method=method))[0] == status


async def test_a_websocket_is_not_opened_under_a_quotes_path() -> None:
    """It would send requests on."""
    offer = (
        "upgrade: websocket",
        "connection: upgrade",
        "sec-websocket-version: 13",
        "sec-websocket-key: " + "A" * 22 + "==",
    )
    async with conversing() as (gateway, _, _):
        assert (await get(gateway.url, "/quote/v1/responses", *offer))[0] == 405


async def test_a_malformed_body_is_refused_in_the_callers_dialect() -> None:
    async with conversing() as (_, caller, _):
        status, _, body = await caller.whole(post(b"{", path="/quote/v1/messages"))
        assert (status, json.loads(body)["type"]) == (400, "error")
        status, _, body = await caller.whole(
            post({"model": "nowhere", "messages": []}, path="/quote/v1/chat/completions")
        )
        assert status == 400


async def test_a_fault_of_the_gateway_is_told_in_the_callers_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    """And recorded with its status, like that of a request."""

    def fail(queue: RequestQueue, queued: QueuedRequest) -> RequestQuote:
        raise ZeroDivisionError

    monkeypatch.setattr(RequestQueue, "quote", fail)
    async with conversing() as (gateway, caller, _):
        status, _, body = await caller.whole(post({**CHAT, "max_tokens": 5}, path="/quote/v1/messages"))
        assert (status, json.loads(body)["type"]) == (500, "error")
        await eventually(lambda: gateway.recorder.live == 0)
        assert (last(gateway).end, last(gateway).status) == (RequestOutcome.INTERNAL, 500)


# --------------------------------------------------------------------------- while it is read


@asynccontextmanager
async def reading(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Awaitable[Any]]:
    """A quote in Anthropic's dialect, of which the estimate is known, and which goes on at the end of the block."""
    known, go_on, estimate = asyncio.Event(), asyncio.Event(), Decider.estimate

    async def waiting(decider: Decider, *given: Any, **named: Any) -> PromptEstimate:
        found = await estimate(decider, *given, **named)
        known.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(Decider, "estimate", waiting)
    async with calling(gateway.url) as caller:
        asked = post({**CHAT, "max_tokens": 5}, path="/quote/v1/messages")
        answer = asyncio.create_task(caller.whole(asked))
        await known.wait()
        yield answer
        go_on.set()
        await answer


async def test_a_quote_that_a_reload_has_left_without_endpoints_is_of_the_new_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a request would be placed there: it is not told that nothing is available."""
    pools = {"old": pool("http://127.0.0.1:9")}
    async with running(pools) as gateway:
        async with reading(gateway, monkeypatch) as answer:
            await gateway.apply_config(Config.model_validate(document({"new": pool("http://127.0.0.1:10")})))
        status, _, body = await answer
    assert (status, json.loads(body)["pool"], json.loads(body)["outcome"]) == (200, "new", "place")


async def test_a_quote_whose_route_a_reload_has_removed_is_a_404(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the caller's dialect."""
    async with running({"old": pool("http://127.0.0.1:9")}) as gateway:
        async with reading(gateway, monkeypatch) as answer:
            other = document({"new": pool("http://127.0.0.1:10")}, {"other": {"tiers": ["new"]}})
            await gateway.apply_config(Config.model_validate(other))
        status, _, body = await answer
    assert (status, json.loads(body)["type"]) == (404, "error")


async def test_a_quote_that_the_gateways_stop_cancels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a request, in place of a closed connection."""
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway, reading(gateway, monkeypatch) as answer:
        await gateway.stop()
        status, _, body = await answer
    assert (status, json.loads(body)["type"]) == (529, "error")
    assert last(gateway).end is RequestOutcome.CUT


# --------------------------------------------------------------------------- refusals, and scores


async def test_a_refusal_has_the_ttft_that_the_request_would_have_had() -> None:
    """A shed request: p50 and p90 beside Retry-After."""
    async with engines() as servers:
        routes = {"chat": {"tiers": ["only"], "ttft": {"budget": "30s"}, "on_miss": "shed"}}
        async with running({"only": engine_pool(*servers)}, routes) as gateway:
            for _ in range(TRAINED_SAMPLES):
                await ask(gateway, LONG)
            status, headers = await ask(gateway, LONG, "x-slo-ttft-ms: 1")
            found = await quoted(gateway, LONG, "x-slo-ttft-ms: 1")
    assert (status, found["outcome"]) == (429, "shed")
    assert 0 < float(headers["x-firsttoken-ttft-p50-ms"]) <= float(headers["x-firsttoken-ttft-p90-ms"])
    assert float(headers["x-firsttoken-ttft-p50-ms"]) == pytest.approx(found["tiers"][0]["ttft_p50_ms"], rel=0.5)


async def test_the_quotes_of_served_streams_are_scored() -> None:
    """Beside the calibration of forecasts; a quote itself is no request of the route."""
    async with conversing([STREAMED]) as (gateway, _, _):
        await quoted(gateway, CHAT)
        assert last(gateway).end is RequestOutcome.COMPLETED
        await ask(gateway, CHAT)
        gateway.metrics.flush()
        scored = {labels: series.value for labels, series in gateway.metrics.quoted.of.items()}
        requests = {labels: series.value for labels, series in gateway.metrics.requests.of.items()}
    assert {labels[:2] for labels in scored} == {("chat", "p50"), ("chat", "p90")}
    assert sum(scored.values()) == 2
    assert requests == {("-", "-", "completed"): 1, ("chat", "only", "completed"): 1}
