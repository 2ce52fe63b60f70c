"""Servers that refuse forms of requests by a rule, gateways before them, and callers with keys."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

from gateway.app import Gateway
from tests.support.builders import Caller, calling, get, post
from tests.support.gateways import pool, running
from tests.support.two_callers import GOOD
from tests.support.upstream import Received, Script, Upstream, reply

Json = dict[str, Any]
JSON = "content-type: application/json"
A, B, C = (f"sk-{name}-0123456789abcdef" for name in "abc")
KEYS = [{"name": key[3], "sha256": sha256(key.encode()).hexdigest()} for key in (A, B, C)]
HELLO: Json = {"role": "user", "content": "hello"}
TOOL: Json = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
RESPONSE: Json = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "model": "served",
    "output": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "hi", "annotations": []}],
        }
    ],
    "usage": {"input_tokens": 7, "output_tokens": 1, "total_tokens": 8},
}


def refused(body: Any, status: str = "400 Bad Request") -> bytes:
    return reply(json.dumps(body).encode(), status, JSON)


def openai(message: str, param: str | None = None, code: str | None = None) -> bytes:
    return refused({"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}})


def anthropic(message: str) -> bytes:
    return refused({"type": "error", "error": {"type": "invalid_request_error", "message": message}})


def mistral(*loc: Any) -> bytes:
    entry = {"type": "extra_forbidden", "loc": ["body", *loc], "msg": "Extra inputs are not permitted"}
    return refused({"detail": [entry]}, "422 Unprocessable Entity")


Rule = Callable[[str, Json], bytes | None]  # by path and body: a refusal


class Verifying(Upstream):
    """Refuses what its rule refuses, and answers all else well. `bodies`: as received."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        self.bodies: list[Json] = []
        self.targets: list[str] = []

    def script(self, received: Received) -> Script:
        if received.method == "GET":
            return [reply()]
        body = json.loads(received.body)
        self.bodies.append(body)
        self.targets.append(received.target)
        if (refusal := self.rule(received.target, body)) is not None:
            return [refusal]
        if received.target.endswith("/responses"):
            return [reply(json.dumps(RESPONSE).encode(), "200 OK", JSON)]
        return [GOOD[received.target.endswith("/messages"), bool(body.get("stream"))]]


def no_temperature(target: str, body: Json) -> bytes | None:
    return anthropic("`temperature` is deprecated for this model.") if "temperature" in body else None


def tools_elsewhere(target: str, body: Json) -> bytes | None:
    is_refused = target.endswith("/chat/completions") and body.get("tools")
    return openai("To use function tools, use /v1/responses") if is_refused else None


def never(target: str, body: Json) -> bytes | None:
    return None


@asynccontextmanager
async def served(
    *servers: tuple[str, Verifying], keys: bool = True, **route: Any
) -> AsyncIterator[tuple[Gateway, Caller]]:
    """Pools `p0`, `p1` ... of one endpoint each, by kind of backend. `keys`: callers are told apart."""
    pools = {f"p{place}": pool(server.url, backend=kind) for place, (kind, server) in enumerate(servers)}
    more: Json = {"keys": KEYS} if keys else {}
    routes = {"chat": {"tiers": list(pools), **route}}
    async with running(pools, routes, **more) as gateway, calling(gateway.url) as caller:
        yield gateway, caller


async def ask(
    caller: Caller, key: str = A, path: str = "/v1/chat/completions", **members: Any
) -> tuple[int, dict[str, str], Json]:
    body = {"model": "chat", "messages": [HELLO], "max_tokens": 9, **members}
    status, headers, said = await caller.whole(post(body, f"authorization: Bearer {key}", path=path))
    return status, headers, json.loads(said)


async def lessons(gateway: Gateway) -> list[Json]:
    """As GET /fleet tells them, of all pools."""
    _, _, page = await get(gateway.admin_url, "/fleet")
    return [lesson for row in json.loads(page) for lesson in row["lessons"]]


def schema_refused(target: str, body: Json) -> bytes | None:
    words = (
        "Invalid JSON payload received. Unknown name \"const\" at 'tools[0].function.parameters': Cannot find field."
    )
    return openai(words) if '"const"' in json.dumps(body) else None


def custom_refused(target: str, body: Json) -> bytes | None:
    words = "tools[0].type: unknown variant `custom`, expected `function`"
    return openai(words) if body["tools"][0]["type"] == "custom" else None


def long_name_refused(target: str, body: Json) -> bytes | None:
    words = "Invalid 'tools[0].function.name': string too long. Expected a string with maximum length 64."
    tool = body["tools"][0]["function"]
    return openai(words, "tools[0].function.name", "string_above_max_length") if len(tool["name"]) > 64 else None


_CONST: Json = {"type": "object", "properties": {"a": {"type": "string", "const": "x"}}}
FITTED: Mapping[str, tuple[str, Rule, Json]] = {
    "a schema": (
        "compatible",
        schema_refused,
        {"type": "function", "function": {"name": "look", "parameters": _CONST}},
    ),
    "a custom tool": ("openai", custom_refused, {"type": "custom", "custom": {"name": "look"}}),
    "a long name": (
        "compatible",
        long_name_refused,
        {"type": "function", "function": {"name": "x" * 81, "parameters": {"type": "object"}}},
    ),
}
