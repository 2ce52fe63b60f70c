"""Prompts of known structure, and a client that times the answers.

The models' text is noise, so prompts need no sense, only length and shared prefixes. Words are from the tokenizer's
own corpus: about 1.23 tokens each. Every run has its own words, so that a new gateway finds no prefixes of the last
run cached.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

WORDS = (
    *("the", "quick", "brown", "def", "return", "self", "import", "class", "value"),
    *("index", "name", "list", "while", "else", "for", "in", "not", "raise"),
)
TOKENS_PER_WORD = 1.23
RUN = secrets.token_hex(4)
Messages = list[Any]


def text(tokens: int, name: str) -> str:
    """About this many tokens of words: equal for equal names in one run."""
    rng = random.Random(f"{RUN} {name}")
    return " ".join(rng.choice(WORDS) for _ in range(round(tokens / TOKENS_PER_WORD)))


def user(content: str) -> Any:
    return {"role": "user", "content": content}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a workload. `prefix` names a long common beginning."""

    kind: str  # short, long, turn
    prefix: str
    messages: Messages
    max_tokens: int
    repeats: bool  # the engine of the last request with `prefix` holds the prefix


def mixed() -> list[Asked]:
    """200 requests: 60 short, 20 documents of 4k tokens asked about twice, 20 conversations of 5 turns.

    Five conversations at a time share a system prompt of 1k tokens. Shuffled, each conversation and document
    in its own order.
    """
    queues: list[list[Asked]] = [[short(i)] for i in range(60)]
    queues += [document(i) for i in range(20)]
    queues += [conversation(i) for i in range(20)]
    rng, asked = random.Random("mixed"), []
    while queues:
        queue = rng.choice(queues)
        asked.append(queue.pop(0))
        queues = [queue for queue in queues if queue]
    return asked


def short(i: int) -> Asked:
    return Asked("short", f"short-{i}", [user(text(20 + 5 * i, f"short-{i}"))], 8, repeats=False)


def document(i: int) -> list[Asked]:
    body = text(4000, f"document-{i}")
    questions = [user(f"{body}\n\n{text(30, f'question-{i}-{n}')}") for n in range(2)]
    return [Asked("long", f"document-{i}", [question], 8, repeats=n > 0) for n, question in enumerate(questions)]


def conversation(i: int) -> list[Asked]:
    messages: Messages = [{"role": "system", "content": text(1000, f"system-{i // 5}")}]
    turns = []
    for n in range(5):
        messages = [*messages, user(text(80, f"turn-{i}-{n}"))]
        turns.append(Asked("turn", f"conversation-{i}", messages, 12, repeats=n > 0))
        messages = [*messages, {"role": "assistant", "content": text(40, f"answer-{i}-{n}")}]
    return turns


@dataclass(slots=True)
class Answer:
    """A streamed answer as seen by the client."""

    request_id: str
    ttft: float | None  # s from the call to the first visible output; None: no output
    gateway_ttft: float | None  # s, by the response header
    text: str
    usage: Any
    finish: str | None


def client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)


async def ask(to: AsyncOpenAI, model: str, asked: Asked, **more: Any) -> Answer:
    """Streams one answer with the official SDK.

    `seed` needs a prompt below 256 tokens, one prefill step: vLLM 0.32's CPU worker dies of a seed in a prefill of
    several steps ("CPU Generator does not use offset").
    """
    began = time.perf_counter()
    raw = await to.chat.completions.with_raw_response.create(
        model=model, messages=asked.messages, max_tokens=asked.max_tokens, stream=True, **more
    )
    header = raw.headers.get("x-firsttoken-ttft-ms")
    answer = Answer(raw.headers.get("x-request-id", ""), None, float(header) / 1e3 if header else None, "", None, None)
    async for chunk in await _stream(raw):
        answer.usage = chunk.usage or answer.usage
        for choice in chunk.choices:
            if choice.delta.content:
                answer.ttft = answer.ttft or time.perf_counter() - began
                answer.text += choice.delta.content
            answer.finish = choice.finish_reason or answer.finish
    return answer


async def _stream(raw: Any) -> Any:
    """Awaits `parse`, which is a coroutine in some versions of the SDK only."""
    parsed = raw.parse()
    return await parsed if hasattr(parsed, "__await__") else parsed


def same_prefix(asked: list[Asked]) -> Iterator[tuple[int, int]]:
    """(earlier, later) positions of successive requests with the same prefix."""
    last: dict[str, int] = {}
    for i, one in enumerate(asked):
        if one.repeats:
            yield last[one.prefix], i
        last[one.prefix] = i
