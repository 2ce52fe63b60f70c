"""What engines say of their caches, against what their answers say: 300 requests, eight at a time.

Conversations that give the model's own answers back, documents that are asked about twice with others in between,
and nearly as many as the caches hold.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm import fleet
from tests.vllm.figures import Figures
from tests.vllm.fleet import Gateway, Server
from tests.vllm.talks import BLOCK, CONCURRENT, Talk, held, share

ROUTES = {"chat": {"tiers": ["small"], "ttft": {"budget": "30s"}}}


@pytest.fixture(scope="module")
def listening(engines: list[Server]) -> Iterator[Gateway]:
    """One pool of two engines, whose events are heard."""
    with fleet.serving(fleet.config({"small": engines}, ROUTES, events=True)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def story(listening: Gateway) -> list[dict[str, Any]]:
    return asyncio.run(told(listening, "events"))


def test_the_believed_hit_is_what_the_engine_reports(story: list[dict[str, Any]], figures: Figures) -> None:
    """Within one block, with evictions, queues and answers that come back as prompts."""
    figures.note("KV events: hits that are too high, by more", share([error(record) > BLOCK for record in story]), "%")
    figures.note("KV events: hits that are exact", share([error(record) == 0 for record in story]), "%")
    figures.at_least(
        f"KV events: hits within one block ({BLOCK} tokens), {CONCURRENT} at a time", within_a_block(story), "%", 99
    )


def test_every_prompt_is_tied_to_its_chain(listening: Gateway, story: list[dict[str, Any]], figures: Figures) -> None:
    """By the session that the gateway names and vLLM repeats."""
    known = [endpoint["resident"] for endpoint in listening.endpoints()]
    assert sum(one["anchored"] + one["unanchored"] for one in known) >= len(story)
    figures.at_least(
        "prompts tied to the engine's own chain",
        share([True] * sum(one["anchored"] for one in known) + [False] * sum(one["unanchored"] for one in known)),
        "%",
        99,
    )


async def test_speculation_alone_knows_less(pair: Gateway, figures: Figures) -> None:
    """The same traffic with other words and without events, for comparison."""
    figures.note("without events: hits within one block", within_a_block(await told(pair, "alone")), "%")


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


async def told(gateway: Gateway, name: str) -> list[dict[str, Any]]:
    """The Records of the whole workload."""
    await gateway.looked(BLOCK)
    answers = await held(gateway.base_url, "chat", talks(name), random.Random("kv"))
    records = await gateway.records_of([answer.request_id for answer in answers])
    assert [record["end"] for record in records] == ["completed"] * 300
    return records
