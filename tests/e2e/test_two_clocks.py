"""Two clocks of reasoning models: the first token of reasoning, and the first of the answer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gateway.cli.why import request_screen
from gateway.observe.record import Record
from gateway.observe.record_columns import RECORD
from tests.support.builders import CHAT, DONE, FINISH, TOKEN, calling, get, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Pause, Upstream, chunk

pytestmark = pytest.mark.virtual_time

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
THOUGHT = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"hm"}}]}\n\n'
REQUEST = post({"model": "chat", "stream": True, "messages": [{"role": "user", "content": "why"}]})
REST = chunk(TOKEN + FINISH + DONE) + LAST_CHUNK
PROMISED: dict[str, Any] = {"ttft": {"budget": "1s", "of": "answer"}, "hedge": "off"}
THINKING = [STREAM_HEAD + chunk(THOUGHT), Pause(1.2), REST]
THOUGHT_S = 1.19  # from arrival to the answer at least, by a timer in ms; how soon the thought is read is chance


async def asked(*script: Any, route: dict[str, Any], **body: Any) -> tuple[Record, str, str]:
    """The Record, the metrics page and the access log's line."""
    routes = {"chat": {"tiers": ["only"], **route}}
    async with Upstream(script) as upstream, running({"only": pool(upstream.url)}, routes) as gateway:
        async with calling(gateway.url) as caller:
            await caller.ask(post({**CHAT, "stream": True, **body}))
            await caller.chunks()
        await eventually(lambda: gateway.recorder.recent)
        page = (await get(gateway.admin_url, "/metrics"))[2].decode()
        return last(gateway), page, json.dumps(RECORD.view(last(gateway)))


async def test_head_and_first_byte_of_a_reply_are_told_apart_from_its_first_token() -> None:
    """An engine that answers at once and computes long: 0.3 s to its head, 0.5 s to the role, 1 s to a token."""
    script = [Pause(0.3), STREAM_HEAD, Pause(0.5), chunk(ROLE), Pause(1.0), REST]
    record, _, line = await asked(*script, route={}, reasoning_effort="high")
    shown = json.loads(line)
    assert 290 < shown["head_ms"] < 450
    assert 490 < shown["first_byte_ms"] - shown["head_ms"] < 650
    assert 990 < shown["ttft_ms"] - shown["first_byte_ms"] < 1150
    screen = request_screen(shown)
    assert re.search(r"upstream: head of the reply 3\d\d ms, then first byte 5\d\d ms, then first", screen)
    assert "reasoning effort high" in screen
    assert record.asked.members["reasoning_effort"] == "high"


async def test_both_first_tokens_are_recorded_measured_and_logged() -> None:
    """The answer begins 1.2 s after the reasoning."""
    record, page, line = await asked(*THINKING, route={"ttft": {"budget": "1s"}})
    assert record.ttft is not None
    assert record.answer.first_reasoning == record.ttft
    assert record.answer.first_answer is not None
    assert record.ttft < THOUGHT_S <= record.answer.first_answer
    assert record.ttft_met is True
    assert 'firsttoken_first_reasoning_seconds_count{pool="only",route="chat"} 1.0' in page
    assert 'firsttoken_first_answer_seconds_count{pool="only",route="chat"} 1.0' in page
    assert json.loads(line)["first_reasoning_ms"] < 1000 * THOUGHT_S <= json.loads(line)["first_answer_ms"]


async def test_a_budget_of_the_answer_is_missed_by_reasoning() -> None:
    """Attainment is judged by the first token of the answer."""
    record, page, _ = await asked(*THINKING, route=PROMISED)
    assert record.ttft is not None
    assert record.answer.first_answer is not None
    assert record.ttft < THOUGHT_S <= record.answer.first_answer
    assert record.ttft_met is False
    assert 'firsttoken_slo_total{met="false",objective="ttft",route="chat"} 1.0' in page


async def test_an_answer_without_reasoning_has_one_clock() -> None:
    """No reasoning is recorded, and the first token is the answer's."""
    record, page, _ = await asked(STREAM_HEAD + REST, route=PROMISED)
    assert (record.answer.first_reasoning, record.answer.first_answer, record.ttft_met) == (None, record.ttft, True)
    assert "firsttoken_first_reasoning_seconds_count{" not in page


async def test_reasoning_without_an_answer_misses_a_budget_of_the_answer() -> None:
    """Cut off by its length, say; a budget of any token is met."""
    script = STREAM_HEAD + chunk(THOUGHT + FINISH + DONE) + LAST_CHUNK
    for of, met in (("answer", False), ("any", True)):
        record, *_ = await asked(script, route={"ttft": {"budget": "1s", "of": of}})
        assert (record.answer.first_answer, record.ttft_met) == (None, met)


async def test_a_tier_whose_reasoning_takes_too_long_is_left_for_the_next() -> None:
    """Its first tokens come in time, its answers do not: learned from one answer."""
    routes = {"chat": {"tiers": ["thinker", "direct"], **PROMISED, "ttft": {"budget": "1s", "of": "answer"}}}
    async with (
        Upstream(THINKING) as thinker,
        Upstream([STREAM_HEAD + REST]) as direct,
        running({"thinker": pool(thinker.url), "direct": pool(direct.url)}, routes) as gateway,
        calling(gateway.url) as caller,
    ):
        for number in range(3):
            await caller.ask(REQUEST)
            await caller.chunks()
            await eventually(lambda count=number: len(gateway.recorder.recent) > count)
        pools = [record.endpoint.pool for record in gateway.recorder.recent]
    assert pools == ["thinker", "direct", "direct"]


async def test_the_effort_of_reasoning_chooses_the_tier() -> None:
    """A word or a budget of thinking tokens; a request that names none goes on to the next tier."""
    tiers = [{"pool": "thinker", "when": {"reasoning_effort": ">= medium"}}, "direct"]
    asked: list[tuple[dict[str, Any], str]] = [
        ({"reasoning_effort": "high"}, "thinker"),
        ({"reasoning_effort": "low"}, "direct"),
        ({"reasoning": {"max_tokens": 4000}}, "thinker"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "direct"),
        ({}, "direct"),
    ]
    async with (
        Upstream([STREAM_HEAD + REST]) as thinker,
        Upstream([STREAM_HEAD + REST]) as direct,
        running({"thinker": pool(thinker.url), "direct": pool(direct.url)}, {"chat": {"tiers": tiers}}) as gateway,
        calling(gateway.url) as caller,
    ):
        for body, _ in asked:
            await caller.ask(post({**CHAT, "stream": True, **body}))
            await caller.chunks()
        await eventually(lambda: len(gateway.recorder.recent) == len(asked))
        assert [record.endpoint.pool for record in gateway.recorder.recent] == [name for _, name in asked]


async def test_an_api_that_hides_its_reasoning_is_forecast_by_effort() -> None:
    """Its first token comes after all of the reasoning: 0.2 s with low effort, 4 s with high."""
    predicted, took = dict[str, float](), {"low": 0.2, "high": 4.0}
    asked = ["low", "high"] * 10
    async with (
        Upstream(*([Pause(took[effort]), STREAM_HEAD + REST] for effort in asked)) as only,
        running({"only": pool(only.url)}, {"chat": {"tiers": ["only"]}}) as gateway,
        calling(gateway.url) as caller,
    ):
        for number, effort in enumerate(asked):
            await caller.ask(post({**CHAT, "stream": True, "reasoning_effort": effort}))
            await caller.chunks()
            await eventually(lambda count=number: len(gateway.recorder.recent) > count)
            predicted[effort] = last(gateway).placed.ttft_p50 or 0.0
    assert predicted["low"] < 0.5
    assert predicted["high"] > 2.0
