"""Requests of reports about gateways, sent to one before fakes that verify (`tests.programs.field`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from backends.interface import Operation
from tests.programs.field.callers import PATHS, Reply, alone, field_of_apis, with_spare
from tests.programs.field.dice import Dice
from tests.programs.field.providers import Accounts, Exchange
from tests.programs.field.rules import targets
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, chunk, reply

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "hello"}
USAGE = {"prompt_tokens": 1200, "completion_tokens": 40, "total_tokens": 1240}
SHELL_SCHEMA: Json = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


@dataclass(frozen=True)
class Asked:
    """An answer, and the requests by which an API was asked."""

    status: int
    headers: Mapping[str, str]
    data: bytes
    exchanges: list[Exchange]

    @property
    def whole(self) -> Json:
        found: Json = json.loads(self.data)
        return found

    @property
    def sent(self) -> Json:
        """The body that the API has answered."""
        return self.exchanges[-1].body


@dataclass
class Caller:
    """Asks models by their names; its accounts remember the state that the fakes have made."""

    apis: Any
    accounts: Accounts = field(default_factory=lambda: Accounts(Dice(7)))

    async def ask(
        self, model: str, operation: Operation, body: Mapping[str, Any], *, knows: bool = True, **headers: str
    ) -> Asked:
        """`knows`: the route has one pool."""
        target = next(target for target in targets() if target.model == model)
        self.accounts.exchanges = []
        self.apis.providers.accounts = self.accounts
        route = alone(target) if knows else with_spare(target)
        reply = await self.apis.send(route, operation, body, headers)
        return Asked(reply.status, reply.headers, reply.data, self.accounts.exchanges)


def before(*apis: str) -> Any:
    """An async context manager: the field of some APIs."""
    return field_of_apis(apis)


def completion(**message: Any) -> bytes:
    """A whole answer of chat completions. `finish_reason` is taken from the message."""
    end = message.pop("finish_reason", "tool_calls" if "tool_calls" in message else "stop")
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": end}
    body = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return reply(json.dumps({**body, "usage": USAGE}).encode(), "200 OK", "content-type: application/json")


def events(*deltas: Json, end: str = "stop") -> list[bytes]:
    """A script: a stream of chat completions."""
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices: list[Json] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": end})
    lines = [b"data: " + json.dumps({**head, "choices": [each]}).encode() + b"\n\n" for each in choices]
    return [STREAM_HEAD + b"".join(map(chunk, [*lines, b"data: [DONE]\n\n"])) + LAST_CHUNK]


def refusal(status: str, body: Any) -> bytes:
    return reply(json.dumps(body).encode(), status, "content-type: application/json")


async def post(url: str, operation: Operation, body: Mapping[str, Any], **headers: str) -> Reply:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + PATHS[operation], json=body, headers=headers) as answer,
    ):
        return Reply(answer.status, answer.headers, await answer.read())
