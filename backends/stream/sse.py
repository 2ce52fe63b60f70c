"""Event streams as the HTML specification has them (9.2.6), without any I/O.

`Decoder` turns bytes, torn anywhere, into events. `UsageStripper` takes out of a stream the one event that the
gateway asked for and the caller did not, and passes every other byte on as it came.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

LINE_LIMIT = 1 << 20  # bytes of one line, and of one event: what a hostile server can make us hold
_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    name: bytes  # empty: the default, `message`
    data: bytes


class StreamError(ValueError):
    """A line or an event is larger than LINE_LIMIT."""


def one_liners(data: bytes) -> list[bytes] | None:
    """The data of its events, if each is one data line and nothing else, and all are whole: as most servers write most
    of theirs. None: a `Decoder` has to read it."""
    if not data.endswith(b"\n\n") or b"\r" in data:
        return None
    events = []
    for event in data[:-2].split(b"\n\n"):
        if not event.startswith(b"data: ") or b"\n" in event:
            return None
        events.append(event[6:])
    return events


class Decoder:
    """`feed` bytes, get events. An event is complete at its blank line, whatever ends the lines."""

    __slots__ = ("_after_cr", "_data", "_held", "_name", "_started", "_tail", "_tail_size", "pending")

    def __init__(self) -> None:
        self._tail: list[bytes] = []  # pieces of the line that is not complete yet
        self._tail_size = 0
        self._data: list[bytes] = []  # data lines of the event that is not complete yet
        self._held = 0  # bytes of all its lines
        self._name = b""
        self._started = False  # past the first line, which may begin with a byte order mark
        self._after_cr = False  # a LF that comes now belongs to the line end before
        self.pending = False  # holding anything that the next bytes continue

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes. Raises StreamError, after which the stream is lost."""
        if self._after_cr and data:
            data, self._after_cr = data.removeprefix(b"\n"), False
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events = self._lines(data)
        self.pending = bool(self._tail or self._data or self._name)
        return events

    def flush(self) -> list[Event]:
        """The body is over: an event without its blank line. The specification drops it; OpenAI's clients read it."""
        return self.feed(b"\n\n") if self.pending else []

    def _lines(self, data: bytes) -> list[Event]:
        *lines, rest = data.split(b"\n")
        events: list[Event] = []
        for line in lines:
            if self._tail:
                line = b"".join((*self._tail, line))
                self._tail.clear()
                self._tail_size = 0
            self._line(line, events)
        if rest:
            self._tail.append(rest)
            self._tail_size += len(rest)
        if self._tail_size + self._held > LINE_LIMIT:
            self._tail, self._data, self._tail_size, self._held = [], [], 0, 0
            raise StreamError("an event is larger than 1 MiB")
        return events

    def _line(self, line: bytes, events: list[Event]) -> None:
        if not self._started:
            self._started = True
            line = line.removeprefix(_BOM)
        if line:
            self._held += len(line) + 1
            self._field(line)
            return
        if self._data:
            events.append(Event(self._name, b"\n".join(self._data)))
        self._data, self._held, self._name = [], 0, b""

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")  # a comment has no name
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value


# --------------------------------------------------------------------------- taking out the usage event

# Blank lines end events. Atomic, else the CR and LF of one line end could be read as two; and a CR that is
# the last byte there is may be half of a line end.
_BLANK = re.compile(rb"(?>\r\n|\n|\r(?!\Z)){2}")
_GAP = rb"(?:\s|data:)*"  # JSON may go on in the next data line
_NO_CHOICES = re.compile(rb'"choices"' + _GAP + b":" + _GAP + rb"\[" + _GAP + rb"\]")


class _Tail(msgspec.Struct, gc=False):
    choices: list[Any] | None = None
    usage: Any = None


_decode_tail = msgspec.json.Decoder(_Tail).decode


class UsageStripper:
    """Removes the event whose `choices` are empty and whose `usage` is not; the rest passes verbatim.

    Only an incomplete event at the end of what came is held back, for no client can use it yet.
    """

    __slots__ = ("_held", "_lost")

    def __init__(self) -> None:
        self._held = b""
        self._lost = False  # an event too large to be held was let through: from there on, all is

    @property
    def idle(self) -> bool:
        """Nothing is held back: whole events without a usage may pass by."""
        return not self._held

    def feed(self, data: bytes) -> bytes:
        """What may be sent on now."""
        if self._lost:
            return data
        if data.endswith(b"\n\n") and b'"usage"' not in data and not self._held:
            return data  # by far the most: whole events, none of them with a usage
        start = max(len(self._held) - 3, 0)  # a blank line may have begun in what was held
        data = self._held + data
        end = _last_blank(data, start)
        self._lost = len(data) - end > LINE_LIMIT
        if self._lost:
            end = len(data)
        self._held = data[end:]
        return _without_usage(data[:end])

    def close(self) -> bytes:
        """The body is over: what was held."""
        rest, self._held = self._held, b""
        return _kept(rest)


def _without_usage(data: bytes) -> bytes:
    if b'"usage"' not in data or (found := _NO_CHOICES.search(data)) is None:
        return data
    if b"\r" not in data and data.endswith(b"\n\n"):
        return _without_found(data, found)
    bounds = [0, *(blank.end() for blank in _BLANK.finditer(data)), len(data)]
    events = (data[start:end] for start, end in pairwise(bounds))
    return b"".join(map(_kept, events))


def _without_found(data: bytes, found: re.Match[bytes] | None) -> bytes:
    """The same where events end with two line feeds: only those in which something was found need to be looked at."""
    parts, at = [], 0
    while found is not None:
        before = data.rfind(b"\n\n", at, found.start())
        start = at if before < 0 else before + 2
        end = data.find(b"\n\n", found.end()) + 2
        parts += [data[at:start], _kept(data[start:end])]
        found, at = _NO_CHOICES.search(data, end), end
    return b"".join([*parts, data[at:]])


def _kept(event: bytes) -> bytes:
    """Blank lines before an event belong to none: where the bytes were torn says which event they come with."""
    return event[: len(event) - len(event.lstrip(b"\r\n"))] if _is_usage(event) else event


def _last_blank(data: bytes, start: int) -> int:
    """Where the last complete event ends; 0 if none does."""
    if b"\r" not in data:
        blank_line = data.rfind(b"\n\n", start)
        return blank_line + 2 if blank_line >= 0 else 0
    end = 0
    for blank in _BLANK.finditer(data, start):
        end = blank.end()
    return end


def _is_usage(event: bytes) -> bool:
    if not _NO_CHOICES.search(event):
        return False
    try:
        if (data := one_liners(event)) is None:
            decoder = Decoder()
            data = [event.data for event in decoder.feed(event) + decoder.flush()]
        tail = _decode_tail(data[0])
    except (StreamError, msgspec.DecodeError, IndexError):
        return False
    return tail.choices == [] and bool(tail.usage)
