"""Quota headers on answers and refusals, and the claim of a request."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import inspect
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.fitting.hints import asked_speeds
from backends.interface import Operation
from gateway.admission.local_quotas import LocalQuotas
from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.part_notes import RESERVATION
from gateway.observe.record import RequestOutcome, Stage
from gateway.parts.quotas.quotas import Admission, AnswerBounds, QuotaExceeded, claim_of, duration, quota_headers, usd
from gateway.tokenize.prompt import prompt_of
from gateway.tokenize.prompt_reader import PromptText
from gateway.tokenize.tokenizers import encoder
from policies.quota.key_limits import NANO, Claim, KeyLimits, QuotaLimit, RefusalCause, Reservation, Verdict
from policies.types import Pool, PoolEstimate, PrefixBlocks, Price, PromptEstimate
from tests.support.builders import CHAT, DONE, ERROR, FINISH, TOKEN, USAGE, WHOLE, calling, post
from tests.support.gateways import document, pool, running
from tests.support.simulated import eventually
from tests.support.upstream import GATE, HANG, LAST_CHUNK, RESET, STREAM_HEAD, Step, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

WEB = "authorization: Bearer sk-web"
STREAM = {**CHAT, "stream": True}


def key(**limits: Any) -> list[dict[str, Any]]:
    return [{"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest(), **limits}]


def made(limits: KeyLimits, verdict: Verdict, claim: Claim = Claim(70)) -> Reservation:  # noqa: B008
    return Reservation("web", limits, claim, verdict, 0, 0.0)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0.0, "0ms"), (0.0124, "12ms"), (8.64, "8.64s"), (60, "1m0s"), (90, "1m30s"), (60.5, "1m0.5s"), (59.999, "1m0s")],
)
def test_a_duration_is_written_as_openai_does(seconds: float, written: str) -> None:
    assert duration(seconds) == written


@pytest.mark.parametrize(
    ("nano", "written"),
    [
        (0, "0.00 USD"),
        (NANO, "1.00 USD"),
        (1_999_999_999, "2.00 USD"),
        (4_000_000, "0.004 USD"),
        (1_000, "0.000001 USD"),
    ],
)
def test_a_cost_is_written_in_cents_or_exactly(nano: int, written: str) -> None:
    assert usd(nano) == written


RETRY_1 = {"retry-after": "1", "retry-after-ms": "1000"}
NEVER = {"x-should-retry": "false"}
RATE, EMPTY = "rate_limit_exceeded", "insufficient_quota"


@pytest.mark.parametrize(
    ("verdict", "type", "code", "message", "headers"),
    [
        (
            Verdict(QuotaLimit.REQUESTS, 1.2),
            *("requests", RATE, "This key has reached its limit of 9 requests per minute. Try again in 1.2s."),
            {"retry-after": "2", "retry-after-ms": "1200"},
        ),
        (
            Verdict(QuotaLimit.TOKENS, 30.0),
            *("tokens", RATE, "This key has reached its limit of 50 tokens per minute. Try again in 30s."),
            {"retry-after": "30", "retry-after-ms": "30000"},
        ),
        (
            Verdict(QuotaLimit.TOKENS, 1.0, cause=RefusalCause.HELD),
            *("tokens", RATE),
            "Requests in progress hold what is left of this key's 50 tokens per minute, until they end. Try "
            "again in 1s.",
            RETRY_1,
        ),
        (
            Verdict(QuotaLimit.CONCURRENT, 1.0),
            *("requests", RATE, "This key has reached its limit of 2 requests at a time. Try again in 1s."),
            RETRY_1,
        ),
        (
            Verdict(QuotaLimit.TOKENS, None, cause=RefusalCause.TOO_LARGE),
            *(
                "tokens",
                RATE,
                "The request is too large: it may take 70 tokens, and this key has 50 per minute. Shorten",
            ),
            NEVER,
        ),
        (
            Verdict(QuotaLimit.COST, None, cause=RefusalCause.SPENT, spent=5 * NANO),
            *(EMPTY, EMPTY, "This key has used its 5.00 USD of this calendar month (UTC)."),
            NEVER,
        ),
        (
            Verdict(QuotaLimit.COST, None, cause=RefusalCause.SPENT, spent=4 * NANO),
            *(EMPTY, EMPTY),
            "This key has 1.00 USD left of its 5.00 USD of this calendar month (UTC), and the request may "
            "cost 6.00 USD.",
            NEVER,
        ),
        (
            Verdict(QuotaLimit.COST, 1.0, cause=RefusalCause.HELD),
            *("requests", RATE),
            "Requests in progress hold what is left of this key's 5.00 USD of this calendar month (UTC), until they "
            "end. Try again in 1s.",
            RETRY_1,
        ),
        (
            Verdict(QuotaLimit.COST, None, cause=RefusalCause.TOO_LARGE),
            *("requests", RATE),
            "The request is too large: it may cost 6.00 USD, and this key has 5.00 USD for a whole calendar month.",
            NEVER,
        ),
    ],
)
def test_a_refusal_names_the_limit_the_cause_and_the_remedy(
    verdict: Verdict, type: str, code: str, message: str, headers: dict[str, str]
) -> None:
    """Spent is final; held is over as soon as a request ends; a request above the whole limit says so."""
    assert verdict.limit is not None
    claim, limits = Claim(70, 6 * NANO), KeyLimits(9, 50, 2, 5 * NANO)
    found = QuotaExceeded(made(limits, verdict, claim), verdict.limit)
    assert (found.status, found.type, found.code, found.headers) == (429, type, code, headers)
    assert found.message.startswith(message)


def test_headers_show_configured_limits_only() -> None:
    verdict = Verdict(None, None, 3, 40, 61.0, 0.25)
    assert list(quota_headers(made(KeyLimits(concurrent=1), verdict))) == []
    assert "\r\n".join(quota_headers(made(KeyLimits(requests=9, tokens=50), verdict))).split("\r\n") == [
        "x-ratelimit-limit-requests: 9",
        "x-ratelimit-remaining-requests: 3",
        "x-ratelimit-reset-requests: 1m1s",
        "x-ratelimit-limit-tokens: 50",
        "x-ratelimit-remaining-tokens: 40",
        "x-ratelimit-reset-tokens: 250ms",
    ]


def test_a_claim_is_the_maximum_over_pools() -> None:
    """Of the usual answer; and of the longest: of a key whose answers are not known, that which the context window
    allows."""
    blocks = PrefixBlocks((), 16, 1.0)
    pools = {"a": PoolEstimate(100, blocks, 100, 1), "b": PoolEstimate(120, blocks, 120, 1)}
    priced = {
        "a": Pool("a", "served", (), price=Price(1.0, 10.0), context_window=1_100),
        "b": Pool("b", "served", (), price=Price(1.0, 1.0), context_window=500),
    }
    estimate, micro = PromptEstimate(pools, 50), NANO / 1e6
    assert claim_of(estimate, AnswerBounds(1), priced) == Claim(170, most_tokens=120 + 2_048)
    assert claim_of(estimate, AnswerBounds(1, cap=60), priced) == Claim(170, most_tokens=180)
    assert claim_of(estimate, AnswerBounds(1, priced=True), priced) == Claim(
        170, round(600 * micro), most_tokens=120 + 2_048, most_cost=round((100 + 10_000) * micro)
    )
    known = AnswerBounds(8, cap=200, longest=80, priced=True)
    assert claim_of(estimate, known, priced) == Claim(
        520, round(4100 * micro), most_tokens=120 + 640, most_cost=round((100 + 6_400) * micro)
    )


@pytest.mark.parametrize(
    ("asked", "factor"),
    [
        ({}, 1),
        ({"service_tier": "flex"}, 0.5),
        ({"speed": "fast"}, 2),
        ({"service_tier": "priority"}, 2),
        ({"service_tier": "auto", "speed": "fast"}, 2),
        ({"service_tier": "flex", "speed": "other"}, 1),
        ({"service_tier": ["fast"], "speed": 7}, 1),
    ],
)
def test_a_claim_is_of_the_dearest_speed_by_any_of_its_names(asked: dict[str, Any], factor: float) -> None:
    """A server that sells `fast` serves it where a caller asks for `priority`, and beside any tier."""
    priced = {"a": Pool("a", "served", (), price=Price(1.0, 10.0, speeds={"flex": 0.5, "fast": 2}))}
    estimate = PromptEstimate({"a": PoolEstimate(100, PrefixBlocks((), 16, 1.0), 100, 1)}, 50)
    claim = claim_of(estimate, AnswerBounds(1, priced=True, speeds=asked_speeds(asked)), priced)
    assert claim.cost == round(600 * factor * NANO / 1e6)


# --------------------------------------------------------------------------- through the gateway


async def test_answers_show_the_remaining_quota_and_refusals_are_counted() -> None:
    """With the outcome `refused`, which no objective counts."""
    routes = {"chat": {"workload": "chat", "tiers": ["only"], "ttft": {"budget": "5s"}}}
    async with Upstream([reply(WHOLE)]) as upstream:
        pools = {"only": pool(upstream.url)}
        async with running(pools, routes, keys=key(requests_per_minute=1)) as gateway, calling(gateway.url) as caller:
            status, headers, _ = await caller.whole(post(CHAT, WEB))
            assert (status, headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == (
                200,
                "1",
                "0",
            )
            assert headers["x-ratelimit-reset-requests"].startswith("1m")
            status, headers, body = await caller.whole(post(CHAT, WEB))
            assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
            assert 55_000 < int(headers["retry-after-ms"]) <= 61_000
            assert headers["x-ratelimit-remaining-requests"] == "0"
            assert len(upstream.requests) == 1
            _, refused = gateway.recorder.recent
            assert (refused.end, refused.status, refused.ttft_met) == (RequestOutcome.REFUSED, 429, None)
            assert gateway.part(Admission).refused.of["web", "requests"].value == 1


HEAD_OF_20_MB = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer sk-web\r\n"
    b"content-type: application/json\r\ncontent-length: 20000000\r\n\r\n"
)


async def test_a_large_body_above_the_quota_is_refused_unread() -> None:
    """Once, in the caller's dialect, with one Record: no byte of the body has to arrive."""
    async with Upstream([reply(WHOLE)]) as upstream:
        limits = key(requests_per_minute=1)
        async with running({"only": pool(upstream.url)}, keys=limits) as gateway, calling(gateway.url) as caller:
            assert (await caller.whole(post(CHAT, WEB)))[0] == 200
            messages = HEAD_OF_20_MB.replace(b"chat/completions", b"messages")
            status, headers, body = await caller.whole(messages)
            assert (status, json.loads(body)["error"]["type"]) == (429, "rate_limit_error")
            assert 55_000 < int(headers["retry-after-ms"]) <= 61_000
            assert (headers["connection"], headers["x-ratelimit-remaining-requests"]) == ("close", "0")
            await eventually(lambda: len(gateway.recorder.recent) == 2)
            refused = gateway.recorder.recent[1]
            assert (refused.end, refused.status, refused.tenant) == (RequestOutcome.REFUSED, 429, "web")
            assert gateway.part(Admission).refused.of["web", "requests"].value == 1


async def test_a_body_above_the_quota_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read, so the connection stays open: the same refusal before the body is judged."""
    async with Upstream([reply(WHOLE)]) as upstream:
        limits = key(requests_per_minute=1)
        async with running({"only": pool(upstream.url)}, keys=limits) as gateway, calling(gateway.url) as caller:
            assert (await caller.whole(post(CHAT, WEB)))[0] == 200
            status, headers, _ = await caller.whole(post({"no": "chat"}, WEB))
            assert (status, headers.get("connection")) == (429, None)
            assert gateway.recorder.recent[1].spent[Stage.PARSE] is None


async def test_a_request_refused_after_its_head_counts_and_returns_its_place() -> None:
    async with Upstream([reply(WHOLE)]) as upstream:
        limits = key(requests_per_minute=4, concurrent_requests=1, tokens_per_minute=100)
        async with running({"only": pool(upstream.url)}, keys=limits) as gateway, calling(gateway.url) as caller:
            invalid, unknown = {"no": "chat"}, {**CHAT, "model": "nobody"}
            large = {**CHAT, "messages": [{"role": "user", "content": "word " * 200}]}
            seen = [(await caller.whole(post(each, WEB)))[0] for each in (invalid, unknown, large)]
            assert seen == [400, 404, 429]
            status, headers, _ = await caller.whole(post({**CHAT, "max_tokens": 9}, WEB))
            assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "1")  # a refused claim counts nothing
            assert len(gateway.recorder.recent) == 4


LONG = inspect.getsource(inspect)[:12_000]
TOKENS = encoder("o200k_base").count(LONG) + 4 + 3  # the template's: of a message, and of the answer's opening


def teach(gateway: Gateway) -> None:
    """Teach the estimates of the key's texts, as prompts before have."""
    body = {"messages": [{"role": "user", "content": inspect.getsource(argparse)}]}
    for _ in gateway.core.estimator.count(PromptText(prompt_of(Operation.CHAT, body), ["only"], key="web")):
        pass


def noted_claims(gateway: Gateway) -> list[Claim]:
    """Of the Records from now on."""
    claims: list[Claim] = []
    gateway.recorder.sinks.append(
        lambda record: claims.append(RESERVATION.of(record).claim) if RESERVATION.of(record) else None
    )
    return claims


@pytest.mark.parametrize("room", [-1, 0])
async def test_a_quota_admits_a_new_prompt_by_its_exact_count(room: int) -> None:
    """One token too many is refused, and the last one that fits is not: an estimate decides neither."""
    asked = {**CHAT, "messages": [{"role": "user", "content": LONG}], "max_tokens": 9}
    async with Upstream([reply(WHOLE)]) as upstream:
        limits = key(tokens_per_minute=TOKENS + 9 + room)
        async with running({"only": pool(upstream.url)}, keys=limits) as gateway, calling(gateway.url) as caller:
            teach(gateway)
            claims = noted_claims(gateway)
            assert (await caller.whole(post(asked, WEB)))[0] == (200 if room == 0 else 429)
    [made] = claims
    assert made.tokens == TOKENS + 9


async def test_a_new_prompt_far_below_the_quota_is_claimed_by_its_estimate() -> None:
    """By the most that it allows, and counted after the send: the key's texts have taught its estimates."""
    async with Upstream([reply(WHOLE)]) as upstream:
        limits = key(tokens_per_minute=100_000)
        async with running({"only": pool(upstream.url)}, keys=limits) as gateway, calling(gateway.url) as caller:
            teach(gateway)
            claims = noted_claims(gateway)
            asked = {**CHAT, "messages": [{"role": "user", "content": LONG}], "max_tokens": 9}
            assert (await caller.whole(post(asked, WEB)))[0] == 200
    [claim] = claims
    assert TOKENS + 9 < claim.tokens < 1.4 * TOKENS


async def test_a_monthly_cost_refuses_a_new_prompt_by_its_exact_count() -> None:
    """A price of a USD per token, and half a budget too little by the estimate of an untaught key."""
    asked = {**CHAT, "messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
    async with Upstream([reply(WHOLE)]) as upstream:
        pools = {"only": pool(upstream.url, price={"input": 1e6})}
        async with running(pools, keys=key(monthly_cost_usd=TOKENS - 1)) as gateway, calling(gateway.url) as caller:
            teach(gateway)
            claims = noted_claims(gateway)
            assert (await caller.whole(post(asked, WEB)))[0] == 429
    [made] = claims
    assert made.cost == TOKENS * NANO


async def test_a_concurrency_slot_is_held_until_the_end_of_the_answer() -> None:
    """Completed, or abandoned by the caller."""
    begun = [STREAM_HEAD + chunk(TOKEN), GATE]
    whole = [*begun, chunk(TOKEN + FINISH + USAGE + DONE) + LAST_CHUNK]
    async with Upstream(whole, begun, begun, [reply(WHOLE)]) as upstream:
        limits = key(concurrent_requests=1, tokens_per_minute=10_000)
        async with running({"only": pool(upstream.url)}, keys=limits) as gateway, calling(gateway.url) as other:
            for n, how in enumerate(("completed", "client_gone", "client_gone"), 1):
                async with calling(gateway.url) as caller:
                    await caller.ask(post(STREAM, WEB))
                    status, _, body = await other.whole(post(CHAT, WEB))
                    assert (status, json.loads(body)["error"]["type"]) == (429, "requests")
                    if how == "completed":
                        upstream.proceed()
                        await caller.chunks()
                await eventually(lambda n=n: len(gateway.recorder.recent) == 2 * n)  # type: ignore[misc]
            assert (await other.whole(post(CHAT, WEB)))[0] == 200


async def test_the_cost_of_answers_uses_up_the_monthly_limit() -> None:
    async with Upstream([reply(WHOLE)]) as upstream:
        pools = {"only": pool(upstream.url, price={"input": 1e6, "output": 1e6})}  # a USD per token
        cheap = {**CHAT, "max_tokens": 1}
        async with running(pools, keys=key(monthly_cost_usd=40)) as gateway, calling(gateway.url) as caller:
            seen = [await caller.whole(post(cheap, WEB)) for _ in range(6)]
    spent = sum(record.cost_usd for record in gateway.recorder.recent)
    assert 0 < spent <= 40
    assert seen[0][0] == 200
    assert seen[-1][0] == 429
    assert seen[-1][1]["x-should-retry"] == "false"
    assert json.loads(seen[-1][2])["error"]["code"] == "insufficient_quota"


@pytest.mark.parametrize(
    ("path", "asked", "choices"),
    [
        ("chat/completions", {"n": 4}, 4),
        ("completions", {"prompt": "p", "best_of": 3}, 3),
        ("completions", {"prompt": ["p", "q"], "n": 2, "best_of": 3}, 6),
        ("completions", {"prompt": [[1, 2], [3]]}, 2),
        ("completions", {"prompt": [1, 2, 3]}, 1),
    ],
)
async def test_every_requested_choice_is_claimed(path: str, asked: dict[str, Any], choices: int) -> None:
    """Before the request is sent; unused tokens are refunded at the end."""
    async with Upstream([GATE, reply(WHOLE)]) as upstream:
        limits = key(tokens_per_minute=100_000)
        async with running({"only": pool(upstream.url)}, keys=limits) as gateway, calling(gateway.url) as caller:
            ask = {**CHAT, "max_tokens": 100, **asked}
            if "prompt" in ask:
                del ask["messages"]
            asking = asyncio.create_task(caller.whole(post(ask, WEB, path=f"/v1/{path}")))
            await eventually(lambda: len(upstream.requests) == 1)
            [live] = gateway.recorder.lives
            made = RESERVATION.of(live.record)
            assert made is not None
            assert 0 < made.claim.tokens - 100 * choices < 40
            upstream.proceed()
            assert (await asking)[0] == 200


REFUSING = b"HTTP/1.1 500 Error\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("lost", "billed"),
    [
        ([STREAM_HEAD, RESET], True),  # the endpoint may have computed the whole prompt
        ([RESET], True),
        ([REFUSING], False),
        ([STREAM_HEAD + chunk(ERROR), HANG], False),
        (None, False),  # nothing listens
    ],
)
async def test_a_lost_attempt_counts_tokens_that_may_be_billed(lost: list[Step] | None, billed: bool) -> None:
    """Toward tokens per minute and monthly cost, as in the Record."""
    answer = [STREAM_HEAD + chunk(TOKEN + FINISH + USAGE + DONE) + LAST_CHUNK]
    async with Upstream(lost or [HANG]) as first, Upstream(answer) as second:
        url = first.url if lost else "http://127.0.0.1:9"
        price = {"input": 1e6, "output": 1e6}  # a USD per token
        pools = {"first": pool(url, price=price), "second": pool(second.url, price=price)}
        limits = key(tokens_per_minute=1_000_000, monthly_cost_usd=1e6)
        async with running(pools, keys=limits) as gateway, calling(gateway.url) as caller:
            await caller.ask(post(STREAM, WEB))
            await caller.chunks()
            await eventually(lambda: len(gateway.recorder.recent) == 1)
            [record] = gateway.recorder.recent
            failed, won = record.attempts
            assert (failed.tokens > 0) is billed
            assert (won.tokens, won.cost_usd) == (9, 9)
            assert record.cost_usd == failed.tokens + 9
            quotas = gateway.part(Admission).quotas
            assert isinstance(quotas, LocalQuotas)
            account = gateway.runtime.current.keys.tenants[0].account
            assert quotas.spent(account) == record.cost_usd * NANO
            assert quotas._key(account).own.window.total() == (1, failed.tokens + 9)


async def test_a_key_without_limits_has_no_quota_work() -> None:
    """Nor a sink of Records."""
    async with (
        Upstream([reply(WHOLE)]) as upstream,
        running({"only": pool(upstream.url)}, keys=key()) as gateway,
        calling(gateway.url) as caller,
    ):
        sinks = len(gateway.recorder.sinks)
        status, headers, _ = await caller.whole(post(CHAT, WEB))
        assert status == 200
        assert not [name for name in headers if name.startswith("x-ratelimit")]
        assert len(gateway.recorder.sinks) == sinks
        assert RESERVATION.of(gateway.recorder.recent[0]) is None


async def test_a_reload_changes_limits_and_keeps_usage() -> None:
    async with Upstream([reply(WHOLE)]) as upstream:
        pools = {"only": pool(upstream.url)}
        async with running(pools, keys=key()) as gateway, calling(gateway.url) as caller:
            await gateway.apply_config(Config.model_validate(document(pools, keys=key(requests_per_minute=3))))
            assert [(await caller.whole(post(CHAT, WEB)))[0] for _ in range(2)] == [200, 200]
            await gateway.apply_config(Config.model_validate(document(pools, keys=key(requests_per_minute=2))))
            assert (await caller.whole(post(CHAT, WEB)))[0] == 429
            await gateway.apply_config(Config.model_validate(document(pools, keys=key())))
            assert (await caller.whole(post(CHAT, WEB)))[0] == 200


# --------------------------------------------------------------------------- causes of a refusal for costs

DEAR = {"input": 0.0, "output": 1e6}  # a USD per token of output


def answer_of(tokens: int) -> bytes:
    usage = {"prompt_tokens": 7, "completion_tokens": tokens}
    return json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": usage}).encode()


@asynccontextmanager
async def dear(*scripts: Any, budget: float, **more: Any) -> AsyncIterator[tuple[Gateway, Upstream]]:
    async with Upstream(*scripts) as upstream:
        pools = {"only": pool(upstream.url, price=DEAR)}
        async with running(pools, keys=key(monthly_cost_usd=budget), **more) as gateway:
            yield gateway, upstream


async def at_once(gateway: Gateway, number: int, body: Any) -> list[asyncio.Task[Any]]:
    async def one() -> tuple[int, Any, Any]:
        async with calling(gateway.url) as caller:
            status, headers, raw = await caller.whole(post(body, WEB))
        return status, headers, json.loads(raw)

    return [asyncio.create_task(one()) for _ in range(number)]


async def test_a_budget_that_is_only_held_refuses_for_a_second() -> None:
    """Eight at once, whose sizes nobody knows: one holds the budget, the others are told to come again, and may."""
    async with dear([GATE, reply(answer_of(1))], budget=1000) as (gateway, upstream):
        asked = await at_once(gateway, 8, CHAT)
        await eventually(lambda: sum(task.done() for task in asked) == 7)
        upstream.proceed()
        results = [await task for task in asked]
        refused = [(headers, body["error"]) for status, headers, body in results if status == 429]
        assert len(refused) == 7
        for headers, error in refused:
            assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
            assert error["message"].startswith("Requests in progress hold what is left of this key's 1000.00 USD")
            assert (headers["retry-after"], "x-should-retry" in headers) == ("1", False)
        upstream.proceed()
        [again] = await at_once(gateway, 1, CHAT)
        assert (await again)[0] == 200


async def test_many_dear_answers_at_once_spend_no_more_than_one_beyond_the_budget() -> None:
    """40 at once of 3 budgets each; then the budget is spent, which is final."""
    async with dear([reply(answer_of(3000))], budget=1000) as (gateway, upstream):
        await asyncio.gather(*(await at_once(gateway, 40, CHAT)))
        spent = sum(record.cost_usd for record in gateway.recorder.recent)
        assert (spent, len(upstream.requests)) == (3000, 1)
        [last] = await at_once(gateway, 1, CHAT)
        status, headers, body = await last
        assert (status, body["error"]["code"], headers["x-should-retry"]) == (429, "insufficient_quota", "false")
        assert body["error"]["message"] == "This key has used its 1000.00 USD of this calendar month (UTC)."


async def test_a_request_above_the_whole_budget_says_so() -> None:
    """Five answers of 10 tokens for 20 USD a month. One of them fits."""
    async with dear([reply(answer_of(9))], budget=20) as (gateway, upstream):
        [large] = await at_once(gateway, 1, {**CHAT, "n": 5, "max_tokens": 10})
        status, headers, body = await large
        assert (status, body["error"]["code"], headers["x-should-retry"]) == (429, "rate_limit_exceeded", "false")
        assert body["error"]["message"].startswith(
            "The request is too large: it may cost 50.00 USD, and this key has 20.00 USD for a whole calendar month."
        )
        [small] = await at_once(gateway, 1, {**CHAT, "max_tokens": 10})
        assert ((await small)[0], len(upstream.requests)) == (200, 1)


async def test_known_answers_are_served_side_by_side() -> None:
    """After a few short ones, a budget of 1000 USD has room for eight of a key whose answers cost 3 USD."""
    scripts = [[reply(answer_of(3))]] * 8 + [[GATE, reply(answer_of(3))]]
    async with dear(*scripts, budget=3000) as (gateway, upstream):
        for _ in range(8):
            [one] = await at_once(gateway, 1, CHAT)
            assert (await one)[0] == 200
        asked = await at_once(gateway, 8, CHAT)
        await eventually(lambda: len(upstream.requests) == 16)
        for _ in asked:
            upstream.proceed()
        assert {(await task)[0] for task in asked} == {200}


async def test_tokens_held_by_answers_in_progress_refuse_for_a_second() -> None:
    async with Upstream([GATE, reply(answer_of(1))]) as upstream:
        pools = {"only": pool(upstream.url)}
        async with running(pools, keys=key(tokens_per_minute=1_000)) as gateway:
            asked = await at_once(gateway, 3, CHAT)
            await eventually(lambda: sum(task.done() for task in asked) == 2)
            upstream.proceed()
            refused = [(headers, body) for status, headers, body in [await task for task in asked] if status == 429]
            for headers, body in refused:
                assert body["error"]["message"].startswith("Requests in progress hold what is left of this key's 1000 ")
                assert (headers["retry-after"], body["error"]["type"]) == ("1", "tokens")
            assert len(refused) == 2
