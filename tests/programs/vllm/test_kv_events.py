"""Hits predicted from KV events compared with reported hits: 300 requests, eight at a time.

Conversations that repeat the model's own answers, documents asked about twice with other requests in between, and
nearly as many tokens as the caches hold.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.programs.vllm import fleet
from tests.programs.vllm.figures import Figures
from tests.programs.vllm.fleet import Gateway, Server
from tests.programs.vllm.talks import BLOCK, CONCURRENT, Talk, run_talks, share

ROUTES = {"chat": {"tiers": ["small"], "ttft": {"budget": "30s"}}}


@pytest.fixture(scope="module")
def with_events(engines: list[Server]) -> Iterator[Gateway]:
    """One pool of two engines with KV events."""
    with fleet.serving(fleet.config({"small": engines}, ROUTES, events=True)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def records_with_events(with_events: Gateway) -> list[dict[str, Any]]:
    return asyncio.run(run_workload(with_events, "events"))


def test_predicted_hits_equal_reported_hits(records_with_events: list[dict[str, Any]], figures: Figures) -> None:
    """Within one block, with evictions, queues and answers that return as prompts."""
    figures.note(
        "KV events: hits that are too high, by more",
        share([error(record) > BLOCK for record in records_with_events]),
        "%",
    )
    figures.note("KV events: hits that are exact", share([error(record) == 0 for record in records_with_events]), "%")
    figures.at_least(
        f"KV events: hits within one block ({BLOCK} tokens), {CONCURRENT} at a time",
        within_a_block(records_with_events),
        "%",
        99,
    )


def test_every_prompt_is_bound_to_its_chain(
    with_events: Gateway, records_with_events: list[dict[str, Any]], figures: Figures
) -> None:
    """By the session id that vLLM repeats in KV events."""
    known = [endpoint["resident"] for endpoint in with_events.endpoints()]
    assert sum(one["anchored"] + one["unanchored"] for one in known) >= len(records_with_events)
    figures.at_least(
        "prompts tied to the engine's own chain",
        share([True] * sum(one["anchored"] for one in known) + [False] * sum(one["unanchored"] for one in known)),
        "%",
        99,
    )


async def test_hits_without_events_for_comparison(pair: Gateway, figures: Figures) -> None:
    """The same workload with other words."""
    figures.note("without events: hits within one block", within_a_block(await run_workload(pair, "alone")), "%")


def error(record: dict[str, Any]) -> int:
    difference: int = record["cached_tokens_predicted"] - record["cached_tokens_reported"]
    return difference


def within_a_block(records: list[dict[str, Any]]) -> float:
    return share([abs(error(record)) <= BLOCK for record in records])


def talks(name: str) -> list[Talk]:
    """26 conversations of six turns, 48 documents asked about twice, 48 short questions: 300 requests."""
    turns = [Talk("turn", f"{name}-turn-{i}", f"{name}-system-{i // 5}", 6) for i in range(26)]
    documents = [Talk("long", f"{name}-long-{i}", "", 2) for i in range(48)]
    return turns + documents + [Talk("short", f"{name}-short-{i}", "", 1) for i in range(48)]


async def run_workload(gateway: Gateway, name: str) -> list[dict[str, Any]]:
    """Records of the whole workload."""
    answers = await run_talks(gateway.base_url, "chat", talks(name), random.Random("kv"))
    records = await gateway.records_of([answer.request_id for answer in answers])
    assert [record["end"] for record in records] == ["completed"] * 300
    return records
