"""The benchmark of an engine that dies: its callers tell a whole answer from any other, and its processes play it."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.dying_engine import LATER, PROMPT_TOKENS, REST, Caller, ending, measure, word
from benchmarks.engine import HEAD, event

TOKENS = 40


def answer(numbers: list[int], known: int, written: int) -> bytes:
    return HEAD + b"".join(event(b'{"content":"%b"}' % word(number)) for number in numbers) + ending(known, written)


async def ended(reply: bytes, reads: int) -> str:
    """The caller's verdict on a reply that comes in as many reads."""
    Caller.wanted = [b"%05d" % number for number in range(TOKENS + LATER + REST)]
    caller = Caller(TOKENS)
    size = -(-len(reply) // reads)
    for at in range(0, len(reply), size):
        caller.data_received(reply[at : at + size])
    caller.connection_lost(None)
    return await caller.ended


ALL = list(range(TOKENS + REST))


@pytest.mark.parametrize("reads", [1, 7, 400])
async def test_an_answer_with_each_token_once_is_whole_in_any_reads(reads: int) -> None:
    """Wherever a read ends."""
    assert await ended(answer(ALL, 0, len(ALL)), reads) == ""


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (answer([*ALL[:20], *ALL], 0, len(ALL)), "missing or twice"),
        (answer(ALL[:20] + ALL[21:], 0, len(ALL)), "missing or twice"),
        (answer(ALL[:-1], 0, len(ALL) - 1), "44 tokens"),
        (answer(ALL, TOKENS, REST), "other usage"),
        (answer(ALL, 0, len(ALL)).partition(b'data: {"id":"x","object":"chat.completion.chunk"')[0], "closed after 45"),
    ],
)
async def test_any_other_answer_is_not(reply: bytes, reason: str) -> None:
    """Doubled, missing or too few tokens, usage of the second engine alone, and no end."""
    assert reason in await ended(reply, 3)


def test_usage_counts_the_text_that_was_given_as_prompt() -> None:
    """As vLLM counts it: the gateway has to correct it."""
    assert b'"prompt_tokens":%d,"completion_tokens":5' % (PROMPT_TOKENS + 40) in ending(40, 5)


async def test_all_answers_are_whole_after_the_death() -> None:
    """Three streams, with a process for the gateway and each engine."""
    found = await asyncio.to_thread(measure, 3, TOKENS, 0.01, False)
    assert found.ends == ["", "", ""]
    assert found.before
    assert found.after
