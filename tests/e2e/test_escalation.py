"""Escalation over real sockets: a whole answer with a shortcoming is asked of the next tier once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.observe.part_notes import SHORTCOMING
from gateway.observe.record import RequestOutcome
from policies.types import AttemptKind
from tests.support.builders import CHAT, Caller, calling, last, post
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
JSON_WANTED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def answer(content: str | None, finish: str = "stop", **message: Any) -> bytes:
    body = {
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5},
    }
    return reply(json.dumps(body).encode(), "200 OK", "content-type: application/json")


GOOD = answer('{"n": 1}')
FAILED = reply(b'{"error":{"message":"broken"}}', "500 Internal Server Error")


@asynccontextmanager
async def two_tiers(
    first: Script, second: Script, *kinds: str, **route: Any
) -> AsyncIterator[tuple[Gateway, Caller, Upstream, Upstream]]:
    price = {"input": 1.0, "output": 1.0}
    async with Upstream(first) as small, Upstream(second) as large:
        pools = {"small": pool(small.url, price=price), "large": pool(large.url, price=price)}
        routes = {"chat": {"tiers": ["small", "large"], "escalate": list(kinds), **route}}
        async with running(pools, routes) as gateway, calling(gateway.url) as caller:
            yield gateway, caller, small, large


@pytest.mark.parametrize(
    ("kind", "poor"),
    [
        ("refusal", answer(None, refusal="No.")),
        ("refusal", answer("", "content_filter")),
        ("empty", answer(" ")),
        ("length", answer("and then", "length")),
        ("invalid_json", answer('{"n": ')),
        ("invalid_json", answer('{"n": "one"}')),
        ("invalid_json", answer("{}")),
    ],
)
async def test_a_poor_answer_is_asked_of_the_next_tier(kind: str, poor: bytes) -> None:
    """The caller reads the better answer alone; the Record has both attempts, their cost and the reason."""
    async with two_tiers([poor], [GOOD], kind) as (gateway, caller, small, large):
        status, headers, body = await caller.whole(post({**CHAT, "response_format": JSON_WANTED}))
        assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, '{"n": 1}')
        assert (headers["x-firsttoken-pool"], headers["x-firsttoken-attempts"]) == ("large", "2")
        record = last(gateway)
        assert (record.end, SHORTCOMING.of(record)) == (RequestOutcome.COMPLETED, kind)
        assert [attempt.pool for attempt in record.attempts] == ["small", "large"]
        assert record.cost_usd == pytest.approx(2 * 15 / 1e6)
        assert len(small.requests) == len(large.requests) == 1


@pytest.mark.parametrize("second", [FAILED, answer("and so", "length")])
async def test_the_first_answer_is_kept_where_no_better_one_comes(second: bytes) -> None:
    """A second tier that fails changes nothing; a second answer is taken as it is: escalation happens once."""
    async with two_tiers([answer("and then", "length")], [second], "length") as (gateway, caller, _, _):
        status, _, body = await caller.whole(post(CHAT))
        kept = second is FAILED
        assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "and then" if kept else "and so")
        record = last(gateway)
        assert record.end is RequestOutcome.COMPLETED
        assert {attempt.pool for attempt in record.attempts} == {"large", "small"}
        assert record.ttft == pytest.approx(sum(spent or 0.0 for spent in record.spent[:-1]), abs=1e-6)
        assert [attempt.pool for attempt in record.attempts].count("small") == 1


async def test_an_answer_of_vllm_is_judged_before_the_caller_gets_it() -> None:
    """It is asked for whole, although vLLM could stream it for the gateway to put together."""
    async with Upstream([answer("and then", "length")]) as small, Upstream([GOOD]) as large:
        pools = {name: pool(up.url, backend="vllm") for name, up in (("small", small), ("large", large))}
        routes = {"chat": {"tiers": ["small", "large"], "escalate": ["length"]}}
        async with running(pools, routes) as gateway, calling(gateway.url) as caller:
            status, _, body = await caller.whole(post(CHAT))
            assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, '{"n": 1}')
            [asked] = [json.loads(each.body) for each in small.requests if each.method == "POST"]
            assert not asked.get("stream")


async def test_a_good_answer_is_asked_of_nobody_else() -> None:
    async with two_tiers([GOOD], [GOOD], "refusal", "length", "invalid_json") as (gateway, caller, _, large):
        status, _, _ = await caller.whole(post({**CHAT, "response_format": JSON_WANTED}))
        assert (status, SHORTCOMING.of(last(gateway)), large.requests) == (200, "", [])


async def test_an_answer_with_tool_calls_is_no_broken_json() -> None:
    called = answer(None, "tool_calls", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"}}])
    async with two_tiers([called], [GOOD], "invalid_json") as (_, caller, _, large):
        await caller.whole(post({**CHAT, "response_format": JSON_WANTED}))
        assert not large.requests


async def test_a_stream_is_never_escalated() -> None:
    """Its beginning has been read by the caller."""
    cut = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    async with two_tiers([STREAM_HEAD + chunk(cut) + LAST_CHUNK], [GOOD], "length") as (_, caller, _, large):
        status, _ = await caller.ask(post({**CHAT, "stream": True}))
        assert cut in b"".join(await caller.chunks())
        assert (status, large.requests) == (200, [])


async def test_without_another_tier_the_answer_is_sent_at_once() -> None:
    poor = answer("and then", "length")
    async with Upstream([poor]) as only:
        routes = {"chat": {"tiers": ["only"], "escalate": ["length"]}}
        async with running({"only": pool(only.url)}, routes) as gateway, calling(gateway.url) as caller:
            status, _, _ = await caller.whole(post(CHAT))
            assert (status, SHORTCOMING.of(last(gateway))) == (200, "")
            assert [attempt.kind for attempt in last(gateway).attempts] == [AttemptKind.PRIMARY]


async def test_no_answer_is_escalated_out_of_the_regions() -> None:
    """Of the next tier, an endpoint is within: it alone is asked, and the first answer kept where it fails."""
    poor = answer("and then", "length")
    async with Upstream([poor]) as small, Upstream([FAILED]) as near, Upstream([GOOD]) as far:
        large = pool(near.url) | {"endpoints": [{"url": near.url, "region": "eu"}, {"url": far.url, "region": "us"}]}
        pools = {"small": pool(small.url) | {"endpoints": [{"url": small.url, "region": "eu"}]}, "large": large}
        routes = {"chat": {"tiers": ["small", "large"], "escalate": ["length"], "region": {"only": ["eu"]}}}
        async with running(pools, routes) as gateway, calling(gateway.url) as caller:
            status, _, body = await caller.whole(post(CHAT))
            assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "and then")
            assert SHORTCOMING.of(last(gateway)) == "length"
            assert {each.locality for each in last(gateway).attempts} == {"eu"}
            assert [each for each in far.requests if each.method == "POST"] == []
