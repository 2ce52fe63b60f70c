"""Random answers of engines, whole and as the events of their streams, for property tests.

An `Answer` says what the engine wrote. `ENGINES` write it in their dialect: parallel calls one after the other or in
turns, with ids and names early or late; texts in any characters; the last call cut or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from backends.interface import Operation
from tests.support.dialect_strategies import Json, named_sse

_RANGES = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
_SIGNS = '"\\{}[]:, \n\r\t\0\x7f\u2028\ufeff\u200d😀é'
_MALFORMED = ["[1]", "null", '"x"', "12", "[", "nonsense {}", '"\\', '\n["a\\"b", {}]', "}"]


@dataclass(frozen=True, slots=True)
class Answer:
    """`calls`: names and arguments. `is_cut`: by the limit of tokens."""

    text: str
    reasoning: str
    calls: list[tuple[str, str]]
    is_cut: bool


def text(random: Random, most: int) -> str:
    return "".join(_character(random) for _ in range(random.randint(0, most)))


def _character(random: Random) -> str:
    return random.choice(_SIGNS) if random.random() < 0.4 else chr(random.randint(*random.choice(_RANGES)))


def _value(random: Random, depth: int = 2) -> Any:
    kind = random.randrange(6 if depth else 4)
    if kind == 4:
        return [_value(random, depth - 1) for _ in range(random.randint(0, 2))]
    if kind == 5:
        return json_object(random, depth - 1)
    return [text(random, 6), random.randint(-(2**60), 2**60), None, random.random() < 0.5][kind]


def json_object(random: Random, depth: int = 2) -> Json:
    return {text(random, 5): _value(random, depth) for _ in range(random.randint(0, 3))}


def _arguments(random: Random, malformed: list[str]) -> str:
    if malformed and random.random() < 0.2:
        return random.choice(malformed)
    indent = random.choice([None, None, 2])
    return random.choice(["", " "]) + json.dumps(json_object(random), indent=indent, ensure_ascii=random.random() < 0.5)


def answer(random: Random, malformed: list[str]) -> Answer:
    """`malformed`: arguments that are no objects, as the dialect of the engine allows them."""
    names = [
        "".join(random.choices("abc_XYZ09-", k=random.randint(1, 9))) for _ in range(random.choice([0, 0, 1, 2, 3]))
    ]
    calls = [(name, _arguments(random, malformed)) for name in names]
    is_cut = random.random() < 0.3
    if is_cut and calls:
        name, arguments = calls[-1]
        calls[-1] = name, arguments[: random.randint(0, len(arguments))]
    return Answer(text(random, 20), text(random, 12) * random.randint(0, 1), calls, is_cut)


def pieces(random: Random, whole: str) -> list[str]:
    cuts = sorted(random.randint(0, len(whole)) for _ in range(random.randint(0, 4)))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    return [part for part in parts if part]


def woven(random: Random, threads: list[list[Json]]) -> list[Json]:
    """Events of several threads, each in its own order: one thread after the other, or in turns, begun in order."""
    waiting = [list(thread) for thread in threads if thread]
    if random.random() < 0.4:
        return [event for thread in waiting for event in thread]
    begun: list[list[Json]] = []
    found = []
    while waiting or begun:
        if waiting and (not begun or random.random() < 0.4):
            begun.append(waiting.pop(0))
            thread = begun[-1]
        else:
            thread = random.choice(begun)
        found.append(thread.pop(0))
        begun = [thread for thread in begun if thread]
    return found


def cut(random: Random, stream: bytes) -> Iterator[bytes]:
    ends = sorted(random.randint(0, len(stream)) for _ in range(random.randint(0, 9)))
    return (stream[start:end] for start, end in zip([0, *ends], [*ends, len(stream)], strict=True))


# --------------------------------------------------------------------------- an engine of chat completions


def chat_whole(random: Random, answer: Answer) -> Json:
    calls = [
        {"id": f"t{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(answer.calls)
    ]
    message: Json = {"role": "assistant", "content": answer.text or random.choice(["", None])}
    message |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    message |= {"tool_calls": calls} if calls else {}
    return {"id": "c", "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": _finish(answer)}]}


def _finish(answer: Answer) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.calls else "stop"


def chat_stream(random: Random, answer: Answer) -> bytes:
    threads = [[{"reasoning": part} for part in pieces(random, answer.reasoning)]]
    threads += [[{"content": part} for part in pieces(random, answer.text)]]
    threads += [_call_deltas(random, n, *call) for n, call in enumerate(answer.calls)]
    deltas = [{"role": "assistant", "content": ""}, *woven(random, threads), {}]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices[-1]["finish_reason"] = _finish(answer)
    is_ascii = random.random() < 0.5
    chunks = [json.dumps({"id": "c", "model": "m", "choices": [each]}, ensure_ascii=is_ascii) for each in choices]
    return b"".join(b"data: %b\n\n" % each.encode() for each in [*chunks, "[DONE]"])


def _call_deltas(random: Random, index: int, name: str, arguments: str) -> list[Json]:
    """Deltas of a call. Id and name come with any of them; the id may never come."""
    parts = ["", *pieces(random, arguments)]
    calls: list[Json] = [{"index": index, "function": {"arguments": part}} for part in parts]
    late = random.random() < 0.4
    calls[random.randrange(len(calls)) if late else 0]["function"]["name"] = name
    if random.random() < 0.9:
        calls[random.randrange(len(calls)) if late else 0] |= {"id": f"t{index}", "type": "function"}
    return [{"tool_calls": [call]} for call in calls]


# --------------------------------------------------------------------------- an engine of Messages


def messages_whole(random: Random, answer: Answer) -> Json:
    """A call that was cut has the input that there was."""
    content: list[Json] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": "s"})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    for n, (name, arguments) in enumerate(answer.calls):
        content.append({"type": "tool_use", "id": f"t{n}", "name": name, "input": parsed(arguments) or {}})
    return {"id": "m", "model": "m", "content": content, "stop_reason": _stop(answer), "usage": {}}


def parsed(arguments: str) -> Json | None:
    """The object of the arguments; None: they are none."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _stop(answer: Answer) -> str:
    return "max_tokens" if answer.is_cut else "tool_use" if answer.calls else "end_turn"


def messages_stream(random: Random, answer: Answer) -> bytes:
    threads, blocks = [], []
    if answer.reasoning:
        blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", answer.reasoning))
    if answer.text:
        blocks.append(({"type": "text", "text": ""}, "text_delta", answer.text))
    for n, (name, arguments) in enumerate(answer.calls):
        blocks.append(({"type": "tool_use", "id": f"t{n}", "name": name, "input": {}}, "input_json_delta", arguments))
    for index, (block, kind, whole) in enumerate(blocks):
        key = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}[kind]
        deltas = [{"delta": {"type": kind, key: part}} for part in pieces(random, whole)]
        events: list[Json] = [{"type": "content_block_delta", "index": index, **delta} for delta in deltas]
        start = {"type": "content_block_start", "index": index, "content_block": block}
        threads.append([start, *events, {"type": "content_block_stop", "index": index}])
    begin = {"type": "message_start", "message": {"id": "m", "model": "m", "usage": {}}}
    end = {"type": "message_delta", "delta": {"stop_reason": _stop(answer)}, "usage": {"output_tokens": 1}}
    return b"".join(named_sse(iter([begin, *woven(random, threads), end, {"type": "message_stop"}])))


@dataclass(frozen=True, slots=True)
class Engine:
    dialect: Operation
    malformed: list[str]
    whole: Callable[[Random, Answer], Json]
    stream: Callable[[Random, Answer], bytes]


ENGINES = {
    "chat": Engine(Operation.CHAT, _MALFORMED, chat_whole, chat_stream),
    "messages": Engine(Operation.MESSAGES, [], messages_whole, messages_stream),
}
