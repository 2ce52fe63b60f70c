"""What the gateway believes of a real engine, against what the engine does: 200 mixed requests, one at a time."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import aiohttp
import pytest

from tests.vllm.figures import Figures
from tests.vllm.fleet import Gateway, Server
from tests.vllm.traffic import Answer, Asked, ask, client, mixed, same_prefix, text, user

BLOCK = 32  # tokens, of the servers
LEARNING = 50  # requests after which predictions are held to their bound
VISIBLE = re.compile(rb'"content": ?"[^"]')


@dataclass(frozen=True, slots=True)
class Told:
    """One request from its three sides."""

    asked: Asked
    answer: Answer
    record: dict[str, Any]


@pytest.fixture(scope="module")
def story(pair: Gateway) -> list[Told]:
    """The workload, run once; every test of this file reads another side of it."""
    return asyncio.run(tell(pair, mixed()))


async def tell(pair: Gateway, asked: list[Asked]) -> list[Told]:
    async with client(pair.base_url) as sdk:
        answers = [await ask(sdk, "chat", one) for one in asked]
    records = await pair.records_of([answer.request_id for answer in answers])
    return [Told(*row) for row in zip(asked, answers, records, strict=True)]


def share(truths: list[bool]) -> float:
    return 100 * sum(truths) / len(truths)


def relative(error: float, of: float) -> float:
    return 100 * abs(error) / of


def test_every_request_is_answered(story: list[Told], figures: Figures) -> None:
    """200 requests, no error; with 30 s to the deadline a second attempt is as rare as the default `max_extra`."""
    wrong = [told.record for told in story if told.record["end"] != "completed" or told.answer.finish is None]
    figures.at_most("requests of 200 that did not complete", len(wrong), "", 0)
    figures.at_most(
        "requests that took a second attempt",
        share([len(told.record["attempts"]) > 1 for told in story]),
        "%",
        3,
    )


def test_a_repeated_prefix_returns_to_the_engine_that_holds_it(story: list[Told], figures: Figures) -> None:
    """Where engines are idle nothing speaks against the warm one."""
    pairs = same_prefix([told.asked for told in story])
    returned = [story[a].record["endpoint"] == story[b].record["endpoint"] for a, b in pairs]
    figures.at_least("repeated prefixes that went back to their engine", share(returned), "%", 95)
    fresh = [told.record["endpoint"] for told in story if not told.asked.repeats]
    busier = max(fresh.count(endpoint) for endpoint in fresh)
    figures.note("fresh prompts on the busier of two engines, one at a time", 100 * busier / len(fresh), "%")


def test_the_predicted_hit_is_what_the_engine_reports(story: list[Told], figures: Figures) -> None:
    """Within one block, since the engine caches whole blocks only."""
    errors = [told.record["cached_tokens_predicted"] - told.record["cached_tokens_reported"] for told in story]
    figures.at_least(
        f"predicted hits within one block ({BLOCK} tokens) of cached_tokens",
        share([abs(error) <= BLOCK for error in errors]),
        "%",
        95,
    )
    reused = sum(told.record["cached_tokens_reported"] for told in story)
    sent = sum(told.record["prompt_tokens_reported"] for told in story)
    figures.note("prompt tokens served from the engines' caches", 100 * reused / sent, "%")


def test_the_token_estimate_is_what_the_engine_counts(story: list[Told], figures: Figures) -> None:
    """The chat template's own tokens included."""
    errors = [
        relative(r["prompt_tokens_estimated"] - r["prompt_tokens_reported"], r["prompt_tokens_reported"])
        for r in (told.record for told in story)
    ]
    figures.at_most("error of the prompt token estimate, median", median(errors), "%", 3)
    figures.note("error of the prompt token estimate, worst", max(errors), "%")


def test_predicted_ttft_is_right_after_fifty_requests(story: list[Told], figures: Figures) -> None:
    """The median is over the requests that followed the first fifty."""
    timed = [told for told in story if told.answer.ttft is not None]
    errors = [relative(t.record["ttft_predicted_p50_ms"] - t.record["ttft_ms"], t.record["ttft_ms"]) for t in timed]
    figures.note(f"error of predicted TTFT, requests 1 to {LEARNING}, median", median(errors[:LEARNING]), "%")
    for kind in ("short", "long", "turn"):
        of_kind = [e for t, e in list(zip(timed, errors, strict=True))[LEARNING:] if t.asked.kind == kind]
        figures.note(f"error of predicted TTFT after {LEARNING}, {kind}, median", median(of_kind), "%")
    within = [t.record["ttft_ms"] <= t.record["ttft_predicted_p90_ms"] for t in timed[LEARNING:]]
    figures.note("TTFT under its predicted 90% quantile", share(within), "%")
    figures.at_most(
        f"error of predicted TTFT, requests {LEARNING + 1} to {len(timed)}, median",
        median(errors[LEARNING:]),
        "%",
        25,
    )


def test_stages_sum_to_ttft(story: list[Told]) -> None:
    """All but the stream, which follows the first token."""
    for told in story:
        stages = {name: ms for name, ms in told.record["stages_ms"].items() if name != "stream"}
        assert sum(stages.values()) == pytest.approx(told.record["ttft_ms"], abs=1.0)


def test_the_sdk_sees_the_ttft_that_the_gateway_tells(story: list[Told], figures: Figures) -> None:
    """Its clock starts at the call and stops at the first visible chunk: its own milliseconds of work are in it."""
    apart = [
        1e3 * abs(told.answer.ttft - told.answer.gateway_ttft)
        for told in story
        if told.answer.ttft is not None and told.answer.gateway_ttft is not None
    ]
    figures.note("TTFT in the SDK against TTFT in the gateway's header, median", median(apart), "ms")


async def test_gateway_and_client_agree_on_ttft(pair: Gateway, figures: Figures) -> None:
    """A client that does nothing but wait for the first visible byte, on connections that it keeps."""
    apart = []
    async with aiohttp.ClientSession() as session:
        for i in range(40):
            theirs, ours = await first_token(session, pair, text(100, f"truth-{i}"))
            apart.append(1e3 * abs(theirs - ours))
    figures.at_most("TTFT on the client's wire against the gateway's header, median", median(apart), "ms", 2)


async def first_token(session: aiohttp.ClientSession, gateway: Gateway, prompt: str) -> tuple[float, float]:
    """Seconds to the first token: the client's clock, and what the gateway says."""
    body = {"model": "chat", "messages": [user(prompt)], "max_tokens": 4, "stream": True}
    began = time.perf_counter()
    async with session.post(f"{gateway.base_url}/chat/completions", json=body) as reply:
        async for line in reply.content:
            if VISIBLE.search(line):
                theirs = time.perf_counter() - began
                await reply.read()
                return theirs, float(reply.headers["x-firsttoken-ttft-ms"]) / 1e3
    raise AssertionError("an answer without a visible token")


def test_the_gateway_adds_little(story: list[Told], figures: Figures) -> None:
    """Every stage but upstream and connect is the gateway's own time."""
    own = [
        told.record["ttft_ms"] - told.record["stages_ms"]["upstream"] - told.record["stages_ms"].get("connect", 0.0)
        for told in story
    ]
    figures.note("the gateway's own part of TTFT, median", median(own), "ms")
    longest = [ms for told, ms in zip(story, own, strict=True) if told.asked.kind == "long"]
    figures.note("the gateway's own part of TTFT, 4k-token prompts, median", median(longest), "ms")


async def test_the_upstream_stage_agrees_with_vllms_own_histogram(
    pair: Gateway, engines: list[Server], figures: Figures
) -> None:
    """One request at a time, so that a histogram's growth is that request's: within 5 ms + 2%, median."""
    beyond, apart = [], []
    async with client(pair.base_url) as sdk:
        for one in mixed()[:60:2]:
            before = sum(engine.ttft()[1] for engine in engines)
            answer = await ask(sdk, "chat", one)
            engine_s = sum(engine.ttft()[1] for engine in engines) - before
            (record,) = await pair.records_of([answer.request_id])
            difference = abs(record["stages_ms"]["upstream"] - 1e3 * engine_s)
            apart.append(difference)
            beyond.append(difference - (5 + 0.02 * 1e3 * engine_s))
    figures.note("upstream stage minus vLLM's time_to_first_token_seconds, median", median(apart), "ms")
    figures.at_most("the same, beyond 5 ms + 2%, median", median(beyond), "ms", 0)


async def test_prefixes_on_both_engines_are_found_again(pair: Gateway, engines: list[Server], figures: Figures) -> None:
    """Four sent at once are spread by load; asked about again when all is idle, each goes where it was."""
    bursts = [[spread(4 * i + n) for n in range(4)] for i in range(6)]
    async with client(pair.base_url) as sdk:
        first = [a for burst in bursts for a in await asyncio.gather(*(ask(sdk, "chat", one) for one in burst))]
        again = [await ask(sdk, "chat", one) for burst in bursts for one in burst]
    homes = [record["endpoint"] for record in await pair.records_of([answer.request_id for answer in first])]
    later = [record["endpoint"] for record in await pair.records_of([answer.request_id for answer in again])]
    fewer = min(homes.count(f"small/{engine.url.removeprefix('http://')}") for engine in engines)
    figures.at_least("prompts sent four at once: on the engine with fewer", 100 * fewer / len(homes), "%", 15)
    returned = [home == endpoint for home, endpoint in zip(homes, later, strict=True)]
    figures.at_least("the same asked again: back on their engine", share(returned), "%", 95)


def spread(i: int) -> Asked:
    return Asked("long", f"spread-{i}", [user(text(1500, f"spread-{i}"))], 4, repeats=False)


async def test_overlapping_requests_are_all_answered(pair: Gateway, figures: Figures) -> None:
    """Four at a time over two engines: queues form, nothing fails."""
    gate = asyncio.Semaphore(4)
    asked = [one for one in mixed() if one.kind != "long"][:60]

    async def one_of(sdk: Any, one: Asked) -> Answer:
        async with gate:
            return await ask(sdk, "chat", one)

    async with client(pair.base_url) as sdk:
        answers = await asyncio.gather(*(one_of(sdk, one) for one in asked))
    records = await pair.records_of([answer.request_id for answer in answers])
    assert [record["end"] for record in records] == ["completed"] * len(asked)
    errors = [relative(r["ttft_predicted_p50_ms"] - r["ttft_ms"], r["ttft_ms"]) for r in records]
    figures.note("error of predicted TTFT with four in flight, median", median(errors), "%")
