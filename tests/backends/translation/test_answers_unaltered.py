"""Random answers in every direction: the caller reads what the engine wrote, streamed at any cuts and whole.

The suite tries ANSWERS of them, over all directions. 10,000:
`FIRSTTOKEN_ANSWERS=10000 make test PYTEST_ARGS=tests/backends/translation/test_answers_unaltered.py`
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from backends.interface import Operation
from backends.translation.registry import chain
from backends.translation.reply_translation import AnswerTranslation
from tests.support.dialect_strategies import Json
from tests.support.dialogues import events
from tests.support.random_answers import ENGINES, Answer, Engine, answer, cut, parsed

ANSWERS = 1_500
TRIED = int(os.environ.get("FIRSTTOKEN_ANSWERS", ANSWERS))
BATCHES = 5  # of a direction: a failure names a small one

Read = tuple[str, str, list[tuple[str, Any]], bool]  # text, reasoning, calls with their arguments, whether it was cut


# --------------------------------------------------------------------------- callers


def of_chat(found: list[Json]) -> Read:
    text = reasoning = ""
    calls: list[list[str]] = []
    finish = None
    for choice in (choice for event in found for choice in event["choices"]):
        text += choice["delta"].get("content") or ""
        reasoning += choice["delta"].get("reasoning_content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    return text, reasoning, [(name, arguments) for name, arguments in calls], finish == "length"


def of_chat_whole(reply: Json) -> Read:
    [choice] = reply["choices"]
    said = choice["message"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in said.get("tool_calls", ())
    ]
    return said["content"] or "", said.get("reasoning_content", ""), calls, choice["finish_reason"] == "length"


def of_messages(found: list[Json]) -> Read:
    """Anthropic's order of events is checked: one block after the other."""
    blocks: list[list[str]] = []
    is_open = False
    for event in found[1:-2]:
        assert is_open == (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            block = event["content_block"]
            blocks.append([block["type"], block.get("name", ""), ""])
        assert event["index"] == len(blocks) - 1
        is_open = event["type"] != "content_block_stop"
        if event["type"] == "content_block_delta":
            [piece] = [value for name, value in event["delta"].items() if name != "type"]
            blocks[-1][2] += piece
    assert not is_open
    assert [event["type"] for event in (found[0], *found[-2:])] == ["message_start", "message_delta", "message_stop"]
    return _of_blocks(blocks, found[-2]["delta"]["stop_reason"])


def _of_blocks(blocks: list[Any], stop: str) -> Read:
    text, thinking = ("".join(each[2] for each in blocks if each[0] == kind) for kind in ("text", "thinking"))
    calls = [(name, value) for kind, name, value in blocks if kind == "tool_use"]
    return text, thinking, calls, stop == "max_tokens"


def of_messages_whole(reply: Json) -> Read:
    values = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    blocks = [[block["type"], block.get("name", ""), block[values[block["type"]]]] for block in reply["content"]]
    return _of_blocks(blocks, reply["stop_reason"])


def of_responses(found: list[Json]) -> Read:
    """The deltas, which the final response repeats."""
    texts: dict[str, str] = {}
    for event in found:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    final = found[-1]["response"]
    told = [texts.get(item["id"], "") for item in final["output"]]
    assert told == [_of_item(item) for item in final["output"]]
    return _of_output(final, _of_item)


def of_responses_whole(reply: Json) -> Read:
    return _of_output(reply, lambda item: parsed(_of_item(item)) or {} if "arguments" in item else _of_item(item))


def _of_item(item: Json) -> str:
    return item["arguments"] if "arguments" in item else "".join(part["text"] for part in item["content"])


def _of_output(response: Json, read: Callable[[Json], Any]) -> Read:
    output = response["output"]
    text, thought = (
        "".join(_of_item(each) for each in output if each["type"] == kind) for kind in ("message", "reasoning")
    )
    calls = [(item["name"], read(item)) for item in output if item["type"] == "function_call"]
    reason = response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["status"] == ("incomplete" if reason else "completed")
    return text, thought, calls, reason


CALLERS = {
    Operation.CHAT: (of_chat, of_chat_whole),
    Operation.MESSAGES: (of_messages, of_messages_whole),
    Operation.RESPONSES: (of_responses, of_responses_whole),
}
DIRECTIONS = [
    (Operation.CHAT, "messages"),
    (Operation.MESSAGES, "chat"),
    (Operation.RESPONSES, "chat"),
    (Operation.RESPONSES, "messages"),
]


# --------------------------------------------------------------------------- expected answers


def wrapped(arguments: str) -> str | Json:
    """Arguments as the text of an object: the engine's own bytes, or an object that holds them."""
    begins = arguments.lstrip(" \t\r\n")[:1]
    return arguments if begins in ("", "{") else {"arguments": arguments}


def as_streamed(caller: Operation, engine: Engine, written: Answer, read: Read) -> tuple[Read, Read]:
    """Returns the answer of the engine and the answer that the caller read, in the same form."""
    text, reasoning, calls, is_cut = read
    expected: list[tuple[str, Any]] = list(written.calls)
    if engine.dialect is Operation.MESSAGES:
        expected = [(name, arguments or "{}") for name, arguments in expected]
    if caller is Operation.MESSAGES:
        expected = [(name, wrapped(arguments)) for name, arguments in expected]
        wraps = [isinstance(value, dict) for _, value in expected]
        calls = [(name, json.loads(value) if wrap else value) for (name, value), wrap in zip(calls, wraps, strict=True)]
        if engine.dialect is Operation.CHAT:  # text within a call follows the call; whitespace alone is no arguments
            expected = [
                (name, value.strip() and value if isinstance(value, str) else value) for name, value in expected
            ]
    return (written.text, written.reasoning, expected, written.is_cut), (text, reasoning, calls, is_cut)


def as_whole(caller: Operation, written: Answer) -> Read:
    calls: list[tuple[str, Any]] = []
    for number, (name, arguments) in enumerate(written.calls):
        value = parsed(arguments)
        is_kept = caller is Operation.MESSAGES and arguments.strip() != ""
        if value is None and is_kept and not (written.is_cut and number == len(written.calls) - 1):
            value = {"arguments": arguments}
        calls.append((name, value or {}))
    return written.text, written.reasoning, calls, written.is_cut


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize(("caller", "engine"), DIRECTIONS)
def test_the_caller_reads_what_the_engine_wrote(caller: Operation, engine: str, batch: int) -> None:
    """Texts, reasoning, names of tools and arguments: nothing is altered, doubled or cut."""
    for number in range(batch, max(TRIED // len(DIRECTIONS), BATCHES), BATCHES):
        random = Random(f"{caller.value} {engine} {number}")
        check(caller, ENGINES[engine], answer(random, ENGINES[engine].malformed), random)


def check(caller: Operation, engine: Engine, written: Answer, random: Random) -> None:
    steps = chain(caller, frozenset({engine.dialect}))
    assert steps
    translation = AnswerTranslation(steps, [{"model": "m"}] * len(steps))
    read_stream, read_whole = CALLERS[caller]
    stream = translation.stream()
    data = b"".join(map(stream.feed, cut(random, engine.stream(random, written)))) + stream.close()
    expected, found = as_streamed(caller, engine, written, read_stream(events(data)))
    assert found == expected
    whole = json.dumps(engine.whole(random, written), ensure_ascii=random.random() < 0.5).encode()
    assert read_whole(json.loads(translation.whole(whole))) == as_whole(caller, written)
