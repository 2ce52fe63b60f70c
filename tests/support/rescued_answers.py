"""Answers of routes with `rescue`, as a caller reads them, and engines whose answers break."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import openai

from gateway.app import Gateway
from gateway.observe.record import Record
from lab.servers.simulated_server import SimulatedServer
from tests.support.gateways import running
from tests.support.upstream import LAST_CHUNK, Received, Script, ScriptedEngine, chunk

RESCUE: Mapping[str, Any] = {"chat": {"tiers": ["p"], "rescue": "on", "hedge": "off", "ttft": "off", "max_attempts": 4}}


@dataclass
class Answer:
    """An answer as OpenAI's SDK reads it. `times`: of each text."""

    texts: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    roles: int = 0
    usage: Any = None
    error: str = ""
    ttft: float = 0.0  # s

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def longest_gap(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def read(client: openai.AsyncOpenAI, prompt: str, **more: Any) -> Answer:
    answer, began = Answer(), monotonic()
    body = {"model": "chat", "messages": [{"role": "user", "content": prompt}], "max_tokens": 60, **more}
    options = {"include_usage": True}
    try:
        stream = await client.chat.completions.create(**body, stream=True, stream_options=options)
        async for event in stream:
            answer.ids.add(event.id)
            answer.usage = event.usage or answer.usage
            for choice in event.choices:
                answer.roles += choice.delta.role is not None
                if choice.finish_reason:
                    answer.finish_reasons.append(choice.finish_reason)
                if choice.delta.content:
                    answer.texts.append(choice.delta.content)
                    answer.times.append(monotonic())
                    answer.ttft = answer.ttft or monotonic() - began
    except openai.APIError as raised:
        answer.error = raised.message
    return answer


async def whole(client: openai.AsyncOpenAI, prompt: str, **more: Any) -> Answer:
    answer = await read(client, prompt, **more)
    assert not answer.error
    return answer


def last(gateway: Gateway) -> Record:
    return gateway.recorder.recent[-1]


def same(answer: Answer, uncut: Answer) -> bool:
    """Text, usage and ends of two answers are equal, and each has one identity."""
    seen = [(each.text, each.finish_reasons, each.roles, each.error, len(each.ids)) for each in (answer, uncut)]
    counts = [(each.usage.prompt_tokens, each.usage.completion_tokens) for each in (answer, uncut)]
    return seen[0] == seen[1] and counts[0] == counts[1]


def holder(gateway: Gateway, servers: list[SimulatedServer]) -> SimulatedServer:
    """The server of the last answer, whose cache attracts the same prompt."""
    return next(server for server in servers if server.url.endswith(last(gateway).endpoint.id[2:]))


def scripted(*deltas: Mapping[str, Any]) -> bytes:
    events = ({"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas)
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


TEXT = scripted({"role": "assistant", "content": ""}, {"content": "one"}, {"content": " two"})
REST = scripted({"role": "assistant", "content": ""}, {"content": " three"})
FINISH = b'data: {"id":"2","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"id":"2","choices":[],"usage":{"prompt_tokens":12,"completion_tokens":1,"total_tokens":13}}\n\n'
END = (chunk(FINISH + USAGE + b"data: [DONE]\n\n"), LAST_CHUNK)


@dataclass
class Scripted:
    """A gateway before two scripted engines. `answered`: their requests, in order."""

    gateway: Gateway
    client: openai.AsyncOpenAI
    engines: tuple[ScriptedEngine, ScriptedEngine]
    answered: list[Received]

    @property
    def continuation(self) -> Any:
        """Body of the second request."""
        return json.loads(self.answered[1].body)


@asynccontextmanager
async def scripted_pool(*scripts: Script, idle: str = "500ms", **route: Any) -> AsyncIterator[Scripted]:
    """The first request, at either engine, gets the first script."""
    answered: list[Received] = []
    async with (
        ScriptedEngine(*scripts, answered=answered) as one,
        ScriptedEngine(*scripts, answered=answered) as two,
        running(
            {"p": {"backend": "vllm", "model": "served", "endpoints": [one.url, two.url]}},
            {"chat": {**RESCUE["chat"], **route}},
            defaults={"stream_idle": idle},
        ) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Scripted(gateway, client, (one, two), answered)
