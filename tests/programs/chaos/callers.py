"""Callers over raw sockets: a request each, the time of the first token, and the end of the answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Any

PATIENCE = 60.0  # s; a slower answer counts as a hang
DONE = b"data: [DONE]"
FINISHED = re.compile(rb'"finish_reason": ?"')
_ids = count(1)


@dataclass
class Sent:
    """Ids of requests sent to the last byte: each must have a Record."""

    whole: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Reply:
    """Times are s after sending. `ended`: whole (all bytes of the framing arrived), cut, refused (no connection), hang,
    aborted (by the caller)."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: str = "cut"
    ttft: float | None = None
    total: float = 0.0
    ended_at: float = 0.0  # monotonic

    @property
    def finished(self) -> bool:
        """The stream ends with [DONE] or, from some servers, with a finish_reason only."""
        return DONE in self.body or FINISHED.search(self.body) is not None

    @property
    def error_event(self) -> bool:
        return b'data: {"error"' in self.body

    @property
    def completed(self) -> bool:
        """A success: a whole answer; a stream has an end and no error event."""
        stream = "event-stream" in self.headers.get("content-type", "")
        return self.status == 200 and self.ended == "whole" and (not stream or (self.finished and not self.error_event))

    @property
    def explicit(self) -> bool:
        """A failure recognisable by the caller: an error status, an error event, or an unfinished body."""
        return self.status >= 400 or self.error_event or self.ended in ("cut", "refused")

    @property
    def false_end(self) -> bool:
        """A 200 with a whole body, but neither completed nor with an error event."""
        return self.status == 200 and self.ended == "whole" and not self.completed and not self.error_event

    @property
    def text(self) -> str:
        """Content of all chunks of a stream."""
        events = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: {")]
        parts = [json.loads(event).get("choices") or [{}] for event in events]
        return "".join((part[0].get("delta") or {}).get("content") or "" for part in parts)


def chat(text: str = "hello", model: str = "chat", **more: Any) -> bytes:
    """Body of a chat request."""
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], **more}).encode()


def words(number: int, seed: object = "") -> str:
    """A prompt of about `number` tokens, different for each seed."""
    return f"{seed} " + "word " * number


def request_id() -> str:
    return f"chaos-{next(_ids)}"


def post(body: bytes, headers: Mapping[str, str] | None = None, path: str = "/v1/chat/completions") -> bytes:
    given = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **(headers or {}),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


async def ask(
    port: int,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    *,
    sent: Sent | None = None,
    patience: float = PATIENCE,
    abort_after: float | None = None,
) -> Reply:
    """Send a request on a new connection. `abort_after`: s until the caller disconnects."""
    reply, began = Reply(), monotonic()
    headers = {"x-request-id": request_id(), "connection": "close", **(headers or {})}
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        reply.ended = "refused"
        return reply
    try:
        writer.write(post(body, headers))
        await writer.drain()
        if sent is not None and abort_after is None:
            sent.whole.add(headers["x-request-id"])
        async with asyncio.timeout(min(patience, abort_after if abort_after is not None else patience)):
            await _read(reader, reply, began)
    except TimeoutError:
        reply.ended = "aborted" if abort_after is not None else "hang"
    except (OSError, asyncio.IncompleteReadError):
        reply.ended = "cut"
    finally:
        writer.transport.abort()
        reply.ended_at = monotonic()
        reply.total = reply.ended_at - began
    return reply


async def _read(reader: asyncio.StreamReader, reply: Reply, began: float) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    reply.status = int(head[0].split()[1])
    pairs = (line.partition(":") for line in head[1:] if line)
    reply.headers = {name.lower(): value.strip() for name, _, value in pairs}
    if "chunked" in reply.headers.get("transfer-encoding", ""):
        await _read_chunks(reader, reply, began)
    else:
        reply.body = await reader.readexactly(int(reply.headers.get("content-length", 0)))
        reply.ttft = monotonic() - began
    reply.ended = "whole"


async def _read_chunks(reader: asyncio.StreamReader, reply: Reply, began: float) -> None:
    body = bytearray()
    try:
        while size := int(await reader.readline() or b"!", 16):
            body += await reader.readexactly(size)
            if reply.ttft is None and b'"content"' in body:
                reply.ttft = monotonic() - began
            await reader.readexactly(2)
        await reader.readexactly(2)
    except ValueError:
        raise asyncio.IncompleteReadError(b"", None) from None
    finally:
        reply.body = bytes(body)


# --------------------------------------------------------------------------- figures


def quantile(values: list[float], share: float) -> float:
    """NaN without values."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
