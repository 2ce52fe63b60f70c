"""Held openings, rescue, promised gaps and regions on one route: the text is whole, and is the caller's once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from gateway.app import Gateway
from gateway.observe.record import Record, RequestOutcome
from gateway.upstream.race import Race
from tests.support.gateways import running
from tests.support.rescued_answers import END, Answer, last, read, scripted
from tests.support.simulated import eventually
from tests.support.upstream import (
    HANG,
    RESET,
    STREAM_HEAD,
    Pause,
    Received,
    Script,
    ScriptedEngine,
    chunk,
    reply,
)

pytestmark = pytest.mark.virtual_time

REFUSAL = ("I'm sorry,", " but I can't", " help with that.", " Though", " here", " is", " one", " more")
GOOD = ("The sky", " is blue", " by day", " and black", " at night", " as", " you", " know", " well")
REST = " indeed."
FAILED: Script = [reply(b'{"error": {"message": "broken"}}', "500 Internal Server Error")]
HOLD = 8  # tokens: three words


def written(*words: str, role: bool = True) -> bytes:
    first = ({"role": "assistant", "content": ""},) if role else ()
    return scripted(*first, *({"content": word} for word in words))


def begun(words: tuple[str, ...], *then: Any) -> Script:
    """A stream, each word a read of its own."""
    return [STREAM_HEAD, *(chunk(written(word, role=not number)) for number, word in enumerate(words)), *then]


def whole(*words: str) -> Script:
    return begun(words, *END)


CONTINUES: Script = whole(REST)


class Tiers:
    """A gateway before a pool of two small engines and one of a large one, each with scripts in order."""

    def __init__(self, gateway: Gateway, client: openai.AsyncOpenAI, small: list[Received], large: list[Received]):
        self.gateway, self.client, self.small, self.large = gateway, client, small, large

    async def ask(self) -> tuple[Answer, Record]:
        answer = await read(self.client, "Why is the sky blue by day?", max_tokens=60)
        await eventually(lambda: self.gateway.recorder.recent)
        return answer, last(self.gateway)

    @property
    def race(self) -> Race:
        (advance, *_) = self.gateway.proxy.dispatcher.races.values()
        found: Race = advance.__self__  # type: ignore[attr-defined]
        return found


@asynccontextmanager
async def tiers(small: list[Script], large: list[Script], **route: Any) -> AsyncIterator[Tiers]:
    asked: tuple[list[Received], list[Received]] = ([], [])
    async with (
        ScriptedEngine(*small, answered=asked[0]) as one,
        ScriptedEngine(*small, answered=asked[0]) as two,
        ScriptedEngine(*large, answered=asked[1]) as third,
    ):
        near = [{"url": one.url, "region": "eu"}, {"url": two.url, "region": route.pop("second", "eu")}]
        pools = {
            "small": {"backend": "vllm", "model": "served", "endpoints": near},
            "large": {"backend": "vllm", "model": "big", "endpoints": [{"url": third.url, "region": "eu"}]},
        }
        chat = {
            "tiers": ["small", "large"],
            "ttft": "off",
            "hedge": "off",
            "max_attempts": 5,
            "rescue": "on",
            "gap": {"budget": "1s"},
            "tpot": {"budget": "50ms"},
            "escalate": {"when": ["refusal_text"], "hold": HOLD},
            **route,
        }
        async with (
            running(pools, {"chat": chat}, defaults={"stream_idle": "30s", "first_token": "5s"}) as gateway,
            openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield Tiers(gateway, client, *asked)


def endings(record: Record) -> list[str]:
    return [f"{each.pool} {each.kind.value} {each.ending.value}" for each in record.attempts]


async def test_a_stream_whose_opening_was_good_moves_like_any() -> None:
    async with tiers([begun(GOOD, HANG), CONTINUES], [FAILED]) as route:
        answer, record = await route.ask()
        assert (answer.text, answer.error) == ("".join((*GOOD, REST)), "")
        assert (record.rescue, record.escalated, record.end) == ("moved", "", RequestOutcome.COMPLETED)


async def test_a_silence_within_a_held_opening_is_no_gap() -> None:
    """Its caller has waited for the first token, and counts it there."""
    stalls = [*begun(GOOD[:2], Pause(3.0)), *(chunk(written(word, role=False)) for word in GOOD[2:]), *END]
    async with tiers([stalls], [FAILED]) as route:
        answer, record = await route.ask()
        assert (answer.text, record.gap_met, answer.longest_gap < 0.1) == ("".join(GOOD), True, True)
        assert (record.ttft or 0.0) > 2.9


@pytest.mark.parametrize("large", [FAILED, [HANG]], ids=["fails", "hangs"])
async def test_a_kept_stream_that_stalls_later_moves_too(large: Script) -> None:
    """As soon as any: the time for which it was kept is none of its pace."""
    async with tiers([begun(REFUSAL, HANG), CONTINUES], [large]) as route:
        answer, record = await route.ask()
        assert (answer.text, answer.error) == ("".join((*REFUSAL, REST)), "")
        assert (record.rescue, record.escalated) == ("moved", "refusal_text")
        assert (record.gap_met, endings(record)[-2:]) == (True, ["small primary outpaced", "small rescue completed"])


async def test_a_kept_stream_that_breaks_meanwhile_is_continued_by_a_peer() -> None:
    async with tiers([begun(REFUSAL, RESET), CONTINUES], [[Pause(1.0), *FAILED], FAILED]) as route:
        answer, record = await route.ask()
        assert (answer.text, answer.error) == ("".join((*REFUSAL, REST)), "")
        assert (record.rescue, record.escalated) == ("rescued", "refusal_text")


async def test_an_opening_that_breaks_is_asked_and_judged_anew() -> None:
    async with tiers([begun(GOOD[:2], RESET), whole(*REFUSAL)], [whole(*GOOD)]) as route:
        answer, record = await route.ask()
        assert (answer.text, record.escalated, record.rescue) == ("".join(GOOD), "refusal_text", "")


async def test_a_peer_is_not_judged() -> None:
    """Its words may begin with a refusal: they go on in the middle of an answer."""
    async with tiers([begun(GOOD, HANG), whole(*REFUSAL)], [FAILED]) as route:
        answer, record = await route.ask()
        assert answer.text == "".join((*GOOD, *REFUSAL))
        assert (record.rescue, record.escalated) == ("moved", "")


@pytest.mark.parametrize("then", [RESET, HANG], ids=["breaks", "stalls"])
async def test_a_better_answer_is_not_continued_by_the_pool_that_has_refused(then: Any) -> None:
    """It would refuse again, in the middle of an answer: an explicit error is better."""
    async with tiers([whole(*REFUSAL)], [begun(GOOD, then)]) as route:
        answer, record = await route.ask()
        assert (answer.text, bool(answer.error), len(route.small)) == ("".join(GOOD), True, 1)
        assert endings(record) == ["small primary completed", "large fallback broken"]


async def test_no_stream_moves_out_of_its_regions() -> None:
    stalls = begun(GOOD, Pause(1.8), *END)
    async with tiers([stalls, CONTINUES], [FAILED], second="us", region={"only": ["eu"]}) as route:
        answer, record = await route.ask()
        assert (answer.text, record.rescue, len(route.small)) == ("".join(GOOD), "", 1)


async def test_no_stream_is_continued_out_of_its_regions() -> None:
    async with tiers([begun(GOOD, RESET), CONTINUES], [FAILED], second="us", region={"only": ["eu"]}) as route:
        answer, _ = await route.ask()
        assert (answer.text, bool(answer.error), len(route.small)) == ("".join(GOOD), True, 1)


async def test_no_refusal_is_escalated_out_of_the_regions() -> None:
    """Of the next tier, an endpoint is within: it alone is asked, and the refusal kept where it fails."""
    async with tiers([whole(*REFUSAL)], [FAILED], second="us", region={"only": ["eu"], "prefer": "nearest"}) as route:
        answer, record = await route.ask()
        assert (answer.text, record.escalated, len(route.small)) == ("".join(REFUSAL), "refusal_text", 1)
        assert {each.region for each in record.attempts} == {"eu"}


async def test_a_limit_of_the_whole_answer_ends_a_held_stream() -> None:
    """While a peer is asked: an error event follows the text so far."""
    async with tiers([begun(GOOD, HANG), [HANG]], [FAILED], total={"budget": "1500ms", "limit": "1900ms"}) as route:
        answer, record = await route.ask()
        assert (answer.text, bool(answer.error), record.end) == ("".join(GOOD), True, RequestOutcome.UPSTREAM_BROKE)
        assert endings(record) == ["small rescue silent", "small primary cancelled"]
        assert route.gateway.proxy.dispatcher.retries.retrying == 0


async def test_a_silence_counts_of_a_caller_that_has_paused_while_a_peer_was_asked() -> None:
    """From the moment at which it read again."""
    async with tiers([begun(GOOD, HANG), [HANG]], [FAILED]) as route:
        task = asyncio.create_task(route.ask())
        await eventually(lambda: len(route.small) == 2)
        route.race.on_write_paused()
        route.race.on_write_resumed()
        answer, record = await task
        assert (answer.text, record.gap_met) == ("".join(GOOD), False)
