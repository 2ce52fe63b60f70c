"""Providers on loopback, each on a port of its own, that answer with their names and fail as planned.

A request is known by the number in its text ("request 17"). A fault holds for some numbers, and for the first attempts
of each at the provider: so it is the same whatever comes before, and whoever asks.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from aiohttp import web

_NUMBER = re.compile(r"request (\d+)")
_HANG = 3600.0  # s
_MESSAGES = {
    "context": "This model's maximum context length is 8192 tokens. However, your messages resulted in 9321 tokens.",
    "content": "Invalid prompt: your prompt was flagged as potentially violating our usage policy. Please try again "
    "with a different prompt.",
}


@dataclass(frozen=True)
class Fault:
    """`kind`: a status, context, content, filtered, hang or slow. It holds for each `every`-th request from `first` on,
    and for its first `times` attempts at the provider."""

    kind: str
    every: int = 1
    first: int = 0
    times: int = 99
    seconds: float = 0.0

    def hits(self, number: int, attempt: int) -> bool:
        return number % self.every == self.first and attempt <= self.times


class FakeProviders:
    """An async context manager. `ports`: by name."""

    def __init__(self, names: Sequence[str], faults: Mapping[str, Sequence[Fault]]) -> None:
        self.ports: dict[str, int] = {}
        self.asked = Counter[tuple[str, int]]()  # attempts by provider and request
        self._names, self._faults = names, faults
        self._runners: list[web.AppRunner] = []

    async def __aenter__(self) -> FakeProviders:
        for name in self._names:
            app = web.Application(client_max_size=1 << 26)
            app.router.add_post("/{path:.*}", partial(self._serve, name))
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._runners.append(runner)
            assert site._server is not None
            self.ports[name] = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))

    async def _serve(self, name: str, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        found = _NUMBER.search(json.dumps(body.get("messages", "")))
        number = int(found[1]) if found else -1
        self.asked[name, number] += 1
        attempt, filtered = self.asked[name, number], False
        for fault in self._faults.get(name, ()) if found else ():
            if not fault.hits(number, attempt):
                continue
            if fault.kind == "hang":
                await asyncio.sleep(_HANG)
            elif fault.kind == "slow":
                await asyncio.sleep(fault.seconds)
            elif fault.kind == "filtered":
                filtered = True
            else:
                return _error(fault.kind, anthropic=request.path.endswith("/messages"))
        if request.path.endswith("/messages"):
            return await _message(request, body, f"{name} answers")
        return await _completion(request, body, f"{name} answers", "content_filter" if filtered else "stop")


def _error(kind: str, anthropic: bool) -> web.Response:
    status = int(kind) if kind.isdecimal() else 400
    if anthropic:
        texts = {"context": "prompt is too long: 250000 tokens > 200000 maximum"}
        texts["content"] = "Output blocked by content filtering policy"
        types = {429: "rate_limit_error", 529: "overloaded_error", 400: "invalid_request_error"}
        error = {"type": types.get(status, "api_error"), "message": texts.get(kind, "planted")}
        return web.json_response({"type": "error", "error": error}, status=status)
    codes = {"context": "context_length_exceeded", "content": "invalid_prompt", "429": "rate_limit_exceeded"}
    types = {429: "requests", 400: "invalid_request_error"}
    error = {"message": _MESSAGES.get(kind, f"planted {kind}"), "type": types.get(status, "server_error")}
    return web.json_response({"error": {**error, "param": None, "code": codes.get(kind)}}, status=status)


async def _completion(request: web.Request, body: Any, text: str, end: str) -> web.StreamResponse:
    head = {"id": "chatcmpl-1", "created": 1, "model": body.get("model", "m")}
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    if not body.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": end}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    deltas: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": ""}, None)]
    deltas += [({"content": text}, None), ({}, end)]
    events = [
        {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        for delta, finish in deltas
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    return await _stream(request, [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"])


async def _message(request: web.Request, body: Any, text: str) -> web.StreamResponse:
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": body.get("model", "m")}
    usage = {"input_tokens": 9, "output_tokens": 2}
    if not body.get("stream"):
        whole = {**head, "content": [{"type": "text", "text": text}], "stop_reason": "end_turn", "usage": usage}
        return web.json_response({**whole, "stop_sequence": None})
    started = {
        **head,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 1},
    }
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": started},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]
    return await _stream(request, [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events])


async def _stream(request: web.Request, lines: Sequence[str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for line in lines:
        await response.write(line.encode())
    await response.write_eof()
    return response
