"""Base of the assemblers: they put the events of a stream together into the JSON that the server sends whole.

A caller who wants no stream gets the answer of a streamed request, so that its tokens are seen as they come. Rules:
- The whole answer has the members of the server's own, or there is none: what cannot be put together exactly raises
  `Unassembled`. So does an incomplete stream, an error event and an event that is no JSON.
- An unknown member is kept where its values agree. How several values would be joined is not guessed.
- An answer ends where an SDK stops to read: what follows [DONE], or the last event of a dialect, is ignored.
- Memory is bounded by ASSEMBLED_LIMIT. After an obstacle nothing is held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from backends.stream.sse import ServerSentEvent, SseDecoder, StreamError

ASSEMBLED_LIMIT = 64 << 20  # bytes of an answer's events
TOO_LARGE = "an answer above 64 MiB"

_decode = msgspec.json.Decoder(dict[str, Any]).decode
encode = msgspec.json.Encoder().encode


class Unassembled(ValueError):
    """The events cannot be put together exactly."""


_MALFORMED = (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)  # raised by odd values


@contextmanager
def _refusing_malformed() -> Iterator[None]:
    """Turn all that a malformed event raises, when it is read or later, into Unassembled."""
    try:
        yield
    except StreamError as error:
        raise Unassembled(str(error)) from None
    except _MALFORMED:
        raise Unassembled("an event of unknown form") from None


class EventAssembler(ABC):
    """An `Assembler`. `obstacle`: the reason for which there will be no whole answer; empty: none so far."""

    def __init__(self) -> None:
        self.obstacle = ""
        self._ended = False  # nothing further is of the answer
        self._size = 0  # bytes of the events so far, or of what is kept of them
        self._decoder = SseDecoder()

    @property
    def held_bytes(self) -> int:
        return self._size + self._decoder.held_bytes

    def feed(self, data: bytes) -> None:
        """Read bytes of the stream, torn anywhere."""
        if self.obstacle or self._ended:
            return
        try:
            with _refusing_malformed():
                self._read_all(self._decoder.feed(data))
        except Unassembled as error:
            self.refuse(str(error))

    def whole(self) -> bytes:
        """The JSON of the whole answer. The body must be complete. Raises Unassembled."""
        if self.obstacle:
            raise Unassembled(self.obstacle)
        with _refusing_malformed():
            self._read_all(self._decoder.flush())
            return self._assembled()

    def refuse(self, obstacle: str) -> None:
        """Give up, and forget all events."""
        self.obstacle, self._size = obstacle, 0
        self._decoder = SseDecoder()
        self._forget()

    def _read_all(self, events: list[ServerSentEvent]) -> None:
        for event in events:
            if self._ended:
                return
            self._hold(len(event.data))
            self._read(event)

    def _read(self, event: ServerSentEvent) -> None:
        if event.data.startswith(b"[DONE]"):
            self._ended = True
            return
        try:
            chunk = _decode(event.data)
        except ValueError:
            raise Unassembled("an event that is no JSON object") from None
        if event.name == b"error" or chunk.get("error") or chunk.get("type") == "error":
            raise Unassembled("an error event")
        self._add(chunk, event.data)

    def _hold(self, size: int) -> None:
        """Count bytes. Raises Unassembled above the limit."""
        self._size += size
        if self._size > ASSEMBLED_LIMIT:
            raise Unassembled(TOO_LARGE)

    @abstractmethod
    def _add(self, chunk: dict[str, Any], data: bytes) -> None:
        """Add an event, decoded and as written. Raises Unassembled."""

    @abstractmethod
    def _assembled(self) -> bytes:
        """The whole answer. Raises Unassembled for an incomplete one."""

    @abstractmethod
    def _forget(self) -> None: ...


def keep_same(members: dict[str, Any], name: str, value: Any) -> None:
    """Keep the value of a member. Null gives way to any other; raises Unassembled for two others that differ."""
    known = members.setdefault(name, value)
    if known is None:
        members[name] = value
    elif value is not None and value != known:
        raise Unassembled(f"'{name}' with two values")


def keep_once(members: dict[str, Any], name: str, value: Any) -> None:
    """The same, for a part of a value perhaps: raises Unassembled even for two equal values."""
    if value is not None and members.get(name) is not None:
        raise Unassembled(f"'{name}' in several parts")
    keep_same(members, name, value)
