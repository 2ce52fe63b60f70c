"""What engines say of their caches, against what their answers say: 300 requests, eight at a time.

Conversations that give the model's own answers back, documents that are asked about twice with others in between,
and nearly as many as the caches hold.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.vllm import fleet
from tests.vllm.figures import Figures
from tests.vllm.fleet import Gateway, Server
from tests.vllm.traffic import Answer, Asked, Messages, ask, client, text, user

BLOCK = 32  # tokens, of the servers
CONCURRENT = 8
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
        "prompts tied to the engine's own chain", share([True] * sum(one["anchored"] for one in known)
        + [False] * sum(one["unanchored"] for one in known)), "%", 99,
    )  # fmt: skip


async def test_speculation_alone_knows_less(pair: Gateway, figures: Figures) -> None:
    """The same traffic with other words and without events, for comparison."""
    figures.note("without events: hits within one block", within_a_block(await told(pair, "alone")), "%")


def error(record: dict[str, Any]) -> int:
    difference: int = record["cached_tokens_predicted"] - record["cached_tokens_reported"]
    return difference


def within_a_block(records: list[dict[str, Any]]) -> float:
    return share([abs(error(record)) <= BLOCK for record in records])


def share(truths: list[bool]) -> float:
    return 100 * sum(truths) / len(truths)


@dataclass
class Talk:
    """Requests that follow one another."""

    kind: str
    name: str
    group: str  # whose system prompt it shares
    turns: int
    asked: int = 0
    messages: Messages = field(default_factory=list)

    def next(self) -> Asked:
        self.asked += 1
        turn = f"{self.name}-{self.asked}"
        if self.kind == "turn":
            system = {"role": "system", "content": text(1000, self.group)}
            self.messages = [*(self.messages or [system]), user(text(80, turn))]
            return Asked("turn", self.name, self.messages, 24, repeats=self.asked > 1)
        body = text(4500 if self.kind == "long" else 20 + 7 * int(self.name.rpartition("-")[2]), self.name)
        return Asked(self.kind, self.name, [user(f"{body}\n\n{text(30, turn)}")], 8, repeats=self.asked > 1)

    def answered(self, answer: Answer) -> bool:
        """Whether there is more to ask."""
        self.messages = [*self.messages, {"role": "assistant", "content": answer.text}]
        return self.asked < self.turns


def talks(name: str) -> list[Talk]:
    """26 conversations of six turns, 48 documents asked about twice, 48 short questions: 300 requests."""
    turns = [Talk("turn", f"{name}-turn-{i}", f"{name}-system-{i // 5}", 6) for i in range(26)]
    documents = [Talk("long", f"{name}-long-{i}", "", 2) for i in range(48)]
    return turns + documents + [Talk("short", f"{name}-short-{i}", "", 1) for i in range(48)]


async def told(gateway: Gateway, name: str) -> list[dict[str, Any]]:
    """The Records of the whole workload; whoever is free takes any talk that waits."""
    waiting, rng, answers = talks(name), random.Random("kv"), list[Answer]()
    unfinished = len(waiting)

    async def ask_on() -> None:
        nonlocal unfinished
        while unfinished:
            if not waiting:
                await asyncio.sleep(0.02)
                continue
            talk = waiting.pop(rng.randrange(len(waiting)))
            answer = await ask(sdk, "chat", talk.next())
            answers.append(answer)
            if talk.answered(answer):
                waiting.append(talk)
            else:
                unfinished -= 1

    await gateway.looked(BLOCK)
    async with client(gateway.base_url) as sdk:
        await asyncio.gather(*(ask_on() for _ in range(CONCURRENT)))
    records = await gateway.records_of([answer.request_id for answer in answers])
    assert [record["end"] for record in records] == ["completed"] * 300
    return records
