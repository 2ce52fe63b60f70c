"""Conversations with a server in the shapes that its documentation shows, played by a scripted server on a socket.

A module of this folder with a TRANSCRIPT is one kind of backend; `test_transcripts` plays them all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from backends import catalog
from backends.http.connection_pool import ConnectionPool
from backends.interface import Backend, BackendConfig, BackendRequest, FailureKind, HttpCall, Operation, Usage
from tests.support.upstream import LAST_CHUNK, Listener, Upstream, chunk, reply

MESSAGES = [{"role": "user", "content": "hello"}]


def events(*values: Any) -> bytes:
    """Values as events; a text beginning with a colon is a comment, any other text is data."""
    lines = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return b"".join(f"{line}\n\n".encode() if line[:1] == ":" else f"data: {line}\n\n".encode() for line in lines)


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"id": "1", "object": "chat.completion.chunk", "choices": [_choice(finish, delta=fields)]}


def _choice(finish: str | None, **fields: Any) -> dict[str, Any]:
    return {"index": 0, **fields, "finish_reason": finish}


@dataclass(frozen=True)
class ErrorReply:
    """An error, and its meaning."""

    status: int
    body: Any
    kind: FailureKind
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    retry_after: float | None = None


@dataclass(frozen=True)
class Transcript:
    """`target`, `headers`: of the request that must reach the server; `stream`: its answer."""

    kind: str
    stream: bytes
    tokens: int  # visible events
    usage: Usage
    errors: Sequence[ErrorReply]
    path: str = ""  # of the base URL
    target: str = "/v1/chat/completions"
    headers: Mapping[str, str | None] = field(default_factory=dict)  # that the server must see; None: must not
    body: Mapping[str, Any] = field(default_factory=dict)  # members that the server must see
    absent: Sequence[str] = ()  # members that it must not see
    limits: Mapping[str, str] = field(default_factory=dict)  # headers of the answer
    waits: Sequence[tuple[bool, float, float | None, float]] = ()  # read from them: tokens, remaining, limit, reset
    stream_error: bytes = b""  # an error inside a 200
    stream_failure: FailureKind | None = None
    load: tuple[str, bytes, Mapping[str, float]] | None = None  # path, page, and what it says
    query: Mapping[str, str] = field(default_factory=dict)

    def backend(self) -> Backend:
        return catalog.build(BackendConfig(self.kind, "m-1", api_key="sk-secret", query=self.query))


def transcripts() -> Mapping[str, Transcript]:
    """By kind."""
    modules = [path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith(("_", "test_"))]
    found = [getattr(import_module(f"{__package__}.{name}"), "TRANSCRIPT", None) for name in sorted(modules)]
    return {one.kind: one for one in found if one is not None}


def request(**more: Any) -> BackendRequest:
    body = {"model": "chat", "messages": MESSAGES, "max_tokens": 7, **more}
    return BackendRequest(Operation.CHAT, body, "m-1", stream=True, cache_salt="a-salt")


async def exchanged(transcript: Transcript, call: HttpCall, answer: bytes) -> tuple[Listener, Upstream]:
    """The answer of a real server to one call."""
    async with Upstream([answer]) as upstream:
        origin = ConnectionPool(upstream.url + transcript.path, connect_timeout=2)
        listener = Listener()
        await origin.open(call, listener)
        await listener.ended()
        await origin.close()
        return listener, upstream


def streamed(body: bytes, headers: Mapping[str, str]) -> bytes:
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
    begin = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n" + head + b"\r\n"
    return begin + b"".join(chunk(body[at : at + 40]) for at in range(0, len(body), 40)) + LAST_CHUNK


def refused(error: ErrorReply) -> bytes:
    body = error.body if isinstance(error.body, bytes) else json.dumps(error.body).encode()
    lines = [f"{name}: {value}" for name, value in error.headers.items()]
    return reply(body, f"{error.status} Error", "content-type: application/json", *lines)
