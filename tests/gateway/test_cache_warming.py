"""Prefixes of saved prompts, for warming caches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from backends.interface import Operation
from gateway.parts.warming.part import LAST_WORD, SavedPrompt
from gateway.tokenize.estimator import Estimator
from gateway.tokenize.prompt import prompt_of
from gateway.tokenize.prompt_reader import PromptText, TokenizerConfig
from policies.latency.token_counts import TokenScale
from policies.types import PoolEstimate

POOL = "small"
TOOLS = [{"type": "function", "function": {"name": "look_up"}}]


def words(name: str, count: int) -> str:
    return " ".join(f"{name}{i}" for i in range(count))


def turn(role: str, count: int) -> dict[str, str]:
    return {"role": role, "content": words(role, count)}


TALK = [turn("system", 200), turn("user", 50), turn("assistant", 50), turn("user", 50)]


@pytest.fixture
def estimator() -> Iterator[Estimator]:
    found = Estimator({POOL: TokenizerConfig()}, lambda pool: TokenScale())
    yield found
    found.close()


def estimate(estimator: Estimator, operation: Operation, body: Mapping[str, Any]) -> PoolEstimate:
    return estimator.estimate(PromptText(prompt_of(operation, body), [POOL], "group")).pools[POOL]


def keep(estimator: Estimator, operation: Operation = Operation.CHAT, **body: Any) -> SavedPrompt:
    known = estimate(estimator, operation, body)
    return SavedPrompt(operation, json.dumps(body).encode(), "served", POOL, "group", known, "alice", "chat")


def test_a_prefix_ends_with_the_message_that_completes_its_blocks(estimator: Estimator) -> None:
    """Later messages are not computed; blocks equal those of the whole prompt."""
    prompt = keep(estimator, messages=TALK)
    for count in (2, 4):
        wanted = estimate(estimator, Operation.CHAT, {"messages": TALK[:count]})
        blocks = len(wanted.blocks.hashes)
        body, found = prompt.prefix(blocks, estimator)
        assert body == {"messages": TALK[:count]}
        assert list(found.blocks.hashes) == list(prompt.estimate.blocks.hashes[:blocks])


def test_a_prefix_without_a_final_user_message_gets_one(estimator: Estimator) -> None:
    """Chat templates refuse a system prompt alone; the added message follows the wanted blocks."""
    prompt = keep(estimator, messages=TALK)
    body, found = prompt.prefix(2, estimator)
    assert body == {"messages": [TALK[0], LAST_WORD]}
    assert found.blocks.hashes[:2] == prompt.estimate.blocks.hashes[:2]


def test_a_prefix_keeps_only_fields_rendered_into_the_prompt(estimator: Estimator) -> None:
    """Tools are; sampling and output options are not."""
    prompt = keep(estimator, messages=TALK, tools=TOOLS, n=4, stop=["x"], max_tokens=900, logprobs=True)
    body, _ = prompt.prefix(len(prompt.estimate.blocks.hashes), estimator)
    assert body == {"messages": TALK, "tools": TOOLS}


def test_a_completion_prefix_is_the_first_part_of_the_prompt(estimator: Estimator) -> None:
    """Of a text by proportion, of token ids exactly; several prompts are kept whole."""
    ids = list(range(240))
    text = keep(estimator, Operation.COMPLETION, prompt="abcd" * 400)
    tokens = keep(estimator, Operation.COMPLETION, prompt=ids)
    several = keep(estimator, Operation.COMPLETION, prompt=["one " * 40, "two " * 40])
    half = len(text.estimate.blocks.hashes) // 2
    body, _ = text.prefix(half, estimator)
    assert body["prompt"] == ("abcd" * 400)[: len(body["prompt"])]
    assert 700 <= len(body["prompt"]) <= 900
    assert tokens.prefix(4, estimator)[0] == {"prompt": ids[:120]}
    assert several.prefix(1, estimator)[0] == {"prompt": ["one " * 40, "two " * 40]}


def test_the_size_of_a_saved_prompt_is_its_bytes_and_hashes(estimator: Estimator) -> None:
    """The memory limit counts this size."""
    prompt = keep(estimator, messages=TALK)
    assert prompt.size == len(prompt.raw) + 8 * len(prompt.estimate.blocks.hashes)
