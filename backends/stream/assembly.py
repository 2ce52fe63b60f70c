"""Base of the assemblers: they put the events of a stream together into the JSON that the server sends whole.

A caller who wants no stream gets the answer of a streamed request, so that its tokens are seen as they come. Rules:
- Every word of the stream is in the answer, in its place, or there is no answer: an event of which the meaning is not
  known raises `Unassembled`. So does an incomplete stream, and an error event.
- Labels do not cost an answer: an id that changes, a member that is absent or has two values, an event beside the
  answer. The answer may then differ from the server's own whole one, and says so (`difference`): an equal request is
  better asked for whole.
- An event that is no JSON object is left out, as the tap judges whether text was lost with it.
- An answer ends where an SDK stops to read: what follows [DONE], or the last event of a dialect, is ignored.
- Memory is bounded by ASSEMBLED_LIMIT. After an obstacle nothing is held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from backends import failures
from backends.stream.sse import ServerSentEvent, SseDecoder, StreamError

ASSEMBLED_LIMIT = 64 << 20  # bytes of an answer's events
TOO_LARGE = "an answer above 64 MiB"
Counted = Callable[[], tuple[int, int]]
_LONGEST_NAME = 64

_decode = msgspec.json.Decoder(dict[str, Any]).decode
encode = msgspec.json.Encoder().encode


class Unassembled(ValueError):
    """The events cannot be put together. `of_calls`: this shows in answers with tool calls alone."""

    def __init__(self, obstacle: str, *, of_calls: bool = False) -> None:
        super().__init__(obstacle)
        self.of_calls = of_calls


class Differences:
    """Ways in which an answer may differ from the server's own whole one. `first`: empty: it does not. `of_calls`: all
    are of tool calls."""

    def __init__(self) -> None:
        self.first = ""
        self.of_calls = True

    def note(self, what: str, *, of_calls: bool = False) -> None:
        self.first = self.first or what
        self.of_calls = self.of_calls and of_calls


def named(name: str) -> str:
    """The name of a member for the log."""
    return f"'{name[:_LONGEST_NAME]}'" if name.isascii() and name.isprintable() else "a member"


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
        self.found = Differences()
        self._ended = False  # nothing further is of the answer
        self._size = 0  # bytes of the events so far, or of what is kept of them
        self._decoder = SseDecoder()

    @property
    def difference(self) -> str:
        return self.found.first

    @property
    def of_calls(self) -> bool:
        return self.found.of_calls

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
            self.refuse(str(error), of_calls=error.of_calls)

    def whole(self, counted: Counted | None = None) -> bytes:
        """The JSON of the whole answer. The body must be complete. `counted`: tokens of prompt and answer by the
        gateway's count, for a server that reports none. Raises Unassembled."""
        if self.obstacle:
            raise Unassembled(self.obstacle)
        try:
            with _refusing_malformed():
                self._read_all(self._decoder.flush())
                return self._assembled(counted)
        except Unassembled as error:
            self.refuse(str(error), of_calls=error.of_calls)
            raise

    def refuse(self, obstacle: str, *, of_calls: bool = False) -> None:
        """Give up, and forget all events."""
        self.obstacle, self._size = obstacle, 0
        self.found = Differences()
        self.found.note(obstacle, of_calls=of_calls)
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
        chunk: dict[str, Any] | None
        try:
            chunk = _decode(event.data)
        except ValueError:
            self.found.note("an event that is no JSON object")
            if (chunk := _leniently(event.data)) is None:
                return
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
    def _assembled(self, counted: Counted | None) -> bytes:
        """The whole answer. Raises Unassembled for an incomplete one."""

    @abstractmethod
    def _forget(self) -> None: ...


def _leniently(data: bytes) -> dict[str, Any] | None:
    """As Python's clients decode it; None: no object."""
    try:
        value = failures.decode_leniently(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def keep_first(members: dict[str, Any], name: str, value: Any, found: Differences, *, of_calls: bool = False) -> None:
    """Keep the value of a label. Null gives way to any other."""
    known = members.setdefault(name, value)
    if known is None:
        members[name] = value
    elif value is not None and value != known:
        found.note(f"{named(name)} with two values", of_calls=of_calls)


def keep_latest(members: dict[str, Any], name: str, value: Any, found: Differences) -> None:
    """The same, of a member whose meaning is not known, or whose last value counts."""
    keep_first(members, name, value, found)
    if value is not None:
        members[name] = value


def joined(parts: Sequence[Any]) -> Any:
    """The value that came in several parts, as OpenAI's SDKs join those of a delta: texts and lists one after another,
    objects by member; of anything else the last. A text that is the same in every part is a label."""
    if all(isinstance(part, str) for part in parts):
        return parts[0] if all(part == parts[0] for part in parts) else "".join(parts)
    if all(isinstance(part, list) for part in parts):
        return [item for part in parts for item in part]
    if all(isinstance(part, dict) for part in parts):
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: joined([part[name] for part in parts if name in part]) for name in names}
    return parts[-1]
