"""Predictions of a gateway compared with a real engine: 200 mixed requests, one at a time."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import aiohttp
import pytest

from tests.programs.vllm.figures import Figures
from tests.programs.vllm.fleet import Gateway, Server
from tests.programs.vllm.traffic import Answer, Asked, ask, client, mixed, same_prefix, text, user

BLOCK = 32  # tokens, of the servers
LEARNING = 50  # requests after which predictions are held to their bound
VISIBLE = re.compile(rb'"content": ?"[^"]')


@dataclass(frozen=True, slots=True)
class Observed:
    """A request, its answer and its Record."""

    asked: Asked
    answer: Answer
    record: dict[str, Any]


@pytest.fixture(scope="module")
def observations(pair: Gateway) -> list[Observed]:
    """The workload, run once for all tests of this file."""
    return asyncio.run(observe(pair, mixed()))


async def observe(pair: Gateway, asked: list[Asked]) -> list[Observed]:
    async with client(pair.base_url) as sdk:
        answers = [await ask(sdk, "chat", one) for one in asked]
    records = await pair.records_of([answer.request_id for answer in answers])
    return [Observed(*row) for row in zip(asked, answers, records, strict=True)]


def share(truths: list[bool]) -> float:
    return 100 * sum(truths) / len(truths)


def relative(error: float, of: float) -> float:
    return 100 * abs(error) / of


def test_every_request_is_answered(observations: list[Observed], figures: Figures) -> None:
    """200 requests without error; with 30 s to the deadline second attempts stay below the default `max_extra`."""
    wrong = [
        observed.record
        for observed in observations
        if observed.record["end"] != "completed" or observed.answer.finish is None
    ]
    figures.at_most("requests of 200 that did not complete", len(wrong), "", 0)
    figures.at_most(
        "requests that took a second attempt",
        share([len(observed.record["attempts"]) > 1 for observed in observations]),
        "%",
        3,
    )


def test_a_repeated_prefix_returns_to_its_engine(observations: list[Observed], figures: Figures) -> None:
    """With idle engines, the cached prefix decides."""
    pairs = same_prefix([observed.asked for observed in observations])
    returned = [observations[a].record["endpoint"] == observations[b].record["endpoint"] for a, b in pairs]
    figures.at_least("repeated prefixes that went back to their engine", share(returned), "%", 95)
    fresh = [observed.record["endpoint"] for observed in observations if not observed.asked.repeats]
    busier = max(fresh.count(endpoint) for endpoint in fresh)
    figures.note("fresh prompts on the busier of two engines, one at a time", 100 * busier / len(fresh), "%")


def test_predicted_hits_equal_reported_hits(observations: list[Observed], figures: Figures) -> None:
    """Within one block, since the engine caches whole blocks only."""
    errors = [
        observed.record["cached_tokens_predicted"] - observed.record["cached_tokens_reported"]
        for observed in observations
    ]
    figures.at_least(
        f"predicted hits within one block ({BLOCK} tokens) of cached_tokens",
        share([abs(error) <= BLOCK for error in errors]),
        "%",
        95,
    )
    reused = sum(observed.record["cached_tokens_reported"] for observed in observations)
    sent = sum(observed.record["prompt_tokens_reported"] for observed in observations)
    figures.note("prompt tokens served from the engines' caches", 100 * reused / sent, "%")


def test_token_estimates_equal_reported_tokens(observations: list[Observed], figures: Figures) -> None:
    """Tokens of the chat template included."""
    errors = [
        relative(r["prompt_tokens_estimated"] - r["prompt_tokens_reported"], r["prompt_tokens_reported"])
        for r in (observed.record for observed in observations)
    ]
    figures.at_most("error of the prompt token estimate, median", median(errors), "%", 3)
    figures.note("error of the prompt token estimate, worst", max(errors), "%")


def test_predicted_ttft_is_right_after_fifty_requests(observations: list[Observed], figures: Figures) -> None:
    """Median error after the first fifty requests."""
    timed = [observed for observed in observations if observed.answer.ttft is not None]
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


def test_stages_sum_to_ttft(observations: list[Observed]) -> None:
    """All stages but `stream`, which follows the first token."""
    for observed in observations:
        stages = {name: ms for name, ms in observed.record["stages_ms"].items() if name != "stream"}
        assert sum(stages.values()) == pytest.approx(observed.record["ttft_ms"], abs=1.0)


def test_the_sdk_measures_the_gateways_ttft(observations: list[Observed], figures: Figures) -> None:
    """The SDK measures from the call to the first visible chunk, so its own milliseconds are included."""
    apart = [
        1e3 * abs(observed.answer.ttft - observed.answer.gateway_ttft)
        for observed in observations
        if observed.answer.ttft is not None and observed.answer.gateway_ttft is not None
    ]
    figures.note("TTFT in the SDK against TTFT in the gateway's header, median", median(apart), "ms")


async def test_gateway_and_client_agree_on_ttft(pair: Gateway, figures: Figures) -> None:
    """With a minimal client on kept connections."""
    apart = []
    async with aiohttp.ClientSession() as session:
        for i in range(40):
            theirs, ours = await first_token(session, pair, text(100, f"truth-{i}"))
            apart.append(1e3 * abs(theirs - ours))
    figures.at_most("TTFT on the client's wire against the gateway's header, median", median(apart), "ms", 2)


async def first_token(session: aiohttp.ClientSession, gateway: Gateway, prompt: str) -> tuple[float, float]:
    """Seconds to the first token: by the client's clock, and by the gateway's header."""
    body = {"model": "chat", "messages": [user(prompt)], "max_tokens": 4, "stream": True}
    began = time.perf_counter()
    async with session.post(f"{gateway.base_url}/chat/completions", json=body) as reply:
        async for line in reply.content:
            if VISIBLE.search(line):
                theirs = time.perf_counter() - began
                await reply.read()
                return theirs, float(reply.headers["x-firsttoken-ttft-ms"]) / 1e3
    raise AssertionError("an answer without a visible token")


def test_the_gateways_own_part_of_ttft(observations: list[Observed], figures: Figures) -> None:
    """All stages but upstream and connect."""
    own = [
        observed.record["ttft_ms"]
        - observed.record["stages_ms"]["upstream"]
        - observed.record["stages_ms"].get("connect", 0.0)
        for observed in observations
    ]
    figures.note("the gateway's own part of TTFT, median", median(own), "ms")
    longest = [ms for observed, ms in zip(observations, own, strict=True) if observed.asked.kind == "long"]
    figures.note("the gateway's own part of TTFT, 4k-token prompts, median", median(longest), "ms")


async def test_the_upstream_stage_agrees_with_vllms_own_histogram(
    pair: Gateway, engines: list[Server], figures: Figures
) -> None:
    """One request at a time, so the histogram's growth is that request's: within 5 ms + 2%, median."""
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
    """Four concurrent prompts are spread by load; repeated when all engines are idle, each returns to its engine."""
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
    """Four at a time over two engines: queues form, no request fails."""
    gate = asyncio.Semaphore(4)
    asked = [one for one in mixed() if one.kind != "long"][:60]

    async def answer_of(sdk: Any, one: Asked) -> Answer:
        async with gate:
            return await ask(sdk, "chat", one)

    async with client(pair.base_url) as sdk:
        answers = await asyncio.gather(*(answer_of(sdk, one) for one in asked))
    records = await pair.records_of([answer.request_id for answer in answers])
    assert [record["end"] for record in records] == ["completed"] * len(asked)
    errors = [relative(r["ttft_predicted_p50_ms"] - r["ttft_ms"], r["ttft_ms"]) for r in records]
    figures.note("error of predicted TTFT with four in flight, median", median(errors), "%")
