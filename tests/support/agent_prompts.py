"""Recorded sessions of coding agents as bodies of chats, with a break of their prefix planted.

The recording has lengths and times, and no text. A prompt becomes text of Python's own manual, as long as was
recorded: system prompt, tools, and turns of calls and results, which grow as the recorded prompts did.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any
from uuid import UUID

RECORDED = Path(__file__).with_name("agent_sessions.json")
TEXT = "".join(topics.values())
BYTES_PER_TOKEN = 4
SYSTEM, TOOLS = 3000, 24  # tokens, number
PLANTED_AT = 0.3  # of the system prompt

Body = dict[str, Any]
Plant = Callable[[Body, Random, int], None]  # body, randomness, number of the turn in all


@dataclass(frozen=True, slots=True)
class AgentTurn:
    session: int
    at: float  # s
    output_tokens: int
    body: Body


def agent_turns(plant: Plant | None = None, *, scale: float = 1.0, sessions: int | None = None) -> list[AgentTurn]:
    """In order of time. `scale`: of all lengths."""
    recorded = json.loads(RECORDED.read_text("utf-8"))["sessions"][:sessions]
    made = [turn for number, turns in enumerate(recorded, 1) for turn in _session(number, turns, scale)]
    made.sort(key=lambda turn: turn.at)
    random = Random(7)
    for number, turn in enumerate(made):
        if plant is not None:
            plant(turn.body, random, number)
    return made


def _session(number: int, recorded: list[list[float]], scale: float) -> Iterator[AgentTurn]:
    random, messages = Random(number), [_message("system", _system(scale)), _message("user", _text(number, 200))]
    length = 0.0
    for step, (at, prompt, output) in enumerate(recorded):
        grown = max(prompt * scale - length, 60.0)
        length += grown
        if step:
            call = {"id": f"call-{step}", "type": "function", "function": {"name": "tool-3", "arguments": "{}"}}
            messages.append({"role": "assistant", "content": _text(random.random(), 40), "tool_calls": [call]})
        else:
            grown = max(grown - 2 * SYSTEM * scale, 60.0)
        result = {"role": "tool", "tool_call_id": f"call-{step}", "content": _text(random.random(), grown)}
        messages.append(result if step else _message("user", result["content"]))
        body = {"model": "chat", "stream": True, "tools": _tools(scale), "messages": [dict(each) for each in messages]}
        yield AgentTurn(number, at + 3.0 * number, int(output), body)


def _message(role: str, content: str) -> Body:
    return {"role": role, "content": content}


def _text(seed: float, tokens: float) -> str:
    size = int(tokens * BYTES_PER_TOKEN)
    start = Random(seed).randrange(len(TEXT))
    return ((TEXT[start:] + TEXT) * (1 + size // len(TEXT)))[:size]


def _system(scale: float) -> str:
    """The same of all sessions."""
    return _text(0.5, SYSTEM * scale)


def _tools(scale: float) -> list[Body]:
    size = SYSTEM * scale / TOOLS
    return [
        {"type": "function", "function": {"name": f"tool-{i}", "description": _text(i / 100, size), "parameters": {}}}
        for i in range(TOOLS)
    ]


# -- breaks --------------------------------------------------------------------------------


def insert(body: Body, line: str) -> None:
    """A line within the system prompt."""
    text = body["messages"][0]["content"]
    place = text.index("\n", int(len(text) * PLANTED_AT)) + 1
    body["messages"][0]["content"] = f"{text[:place]}{line}\n{text[place:]}"


def timestamp(body: Body, random: Random, number: int) -> None:
    insert(body, f"Current time: 2026-11-23T10:{number // 60:02}:{number % 60:02}Z")


def uuid(body: Body, random: Random, number: int) -> None:
    insert(body, f"Trace of this run: {UUID(int=random.getrandbits(128))}")


def counter(body: Body, random: Random, number: int) -> None:
    insert(body, f"This is request {number + 1000} of this worker.")


def tool_order(body: Body, random: Random, number: int) -> None:
    random.shuffle(body["tools"])


def whitespace(body: Body, random: Random, number: int) -> None:
    """Of each turn its own: an older prompt with the same spaces may be cached, or not, by the choice of the engine."""
    insert(body, "Answer in" + f"{number:012b}".replace("0", " ").replace("1", "\t") + "English.")


def cch(body: Body, random: Random, number: int) -> None:
    """Within the system prompt, behind a line of another: there the gateway does not remove it unasked."""
    line = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={random.getrandbits(20):05x};"
    insert(body, line)


PLANTS: dict[str, Plant] = {each.__name__: each for each in (timestamp, uuid, counter, tool_order, whitespace, cch)}
