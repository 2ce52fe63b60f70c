"""Event streams: bytes, torn anywhere, into events, or passed on without some (HTML specification, 9.2.6).

An event may hold an image of megabytes. Memory is bounded for a hostile server nevertheless:
- `SseDecoder` returns whole events, of up to EVENT_LIMIT.
- `ExcerptDecoder` shortens the strings of a larger event while the event arrives. All other JSON stays as it is.

The other classes are rewriters of an answer (`backends.stream.redaction`). What they pass on, they pass on verbatim:
- The gateway asks every backend for usage. A caller who did not ask must not get the usage event.
- An event that is no JSON object would break a caller's parser.
- Bytes are held back only while an incomplete event may have to go.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec

from backends import failures
from backends.stream.event_shapes import UsageShape

EVENT_LIMIT = 16 << 20  # bytes of an event that has to be whole
EXCERPT_LIMIT = 1 << 20  # bytes of an event in which strings are shortened
BOM = b"\xef\xbb\xbf"

# Blank lines end events. The CR and LF of one line end are not two line ends; a CR as the last byte may be half of one.
# Written without a repetition, eight times as fast.
BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\Z))")


@dataclass(slots=True)
class ServerSentEvent:
    """An event. An empty name stands for the default, `message`."""

    name: bytes
    data: bytes

    def __bytes__(self) -> bytes:
        name = b"event: " + self.name + b"\n" if self.name else b""
        return name + b"data: " + self.data.replace(b"\n", b"\ndata: ") + b"\n\n"


_message = partial(ServerSentEvent, b"")


class StreamError(ValueError):
    """An event is larger than the limit."""


class SseDecoder:
    """Turns bytes, torn anywhere, into events. An event is complete at the blank line, whatever ends the lines."""

    limit: ClassVar[int] = EVENT_LIMIT

    def __init__(self) -> None:
        self.pending = False  # holds the beginning of an event
        self._partial_line = bytearray()
        self._data_lines: list[bytes] = []  # of the incomplete event
        self._event_size = 0  # bytes of all lines of the incomplete event
        self._name = b""
        self._started = False  # past the first line, which may begin with a byte order mark
        self._after_cr = False  # a leading LF belongs to the previous line end

    @property
    def held_bytes(self) -> int:
        return len(self._partial_line) + self._event_size

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """Return the events completed by `data`. Raises StreamError; the stream is then lost."""
        if not self.pending and data.startswith(b"data: ") and data.endswith(b"\n\n") and b"\r" not in data:
            blocks = data[6:-2].split(b"\n\ndata: ")
            if data.count(b"\n") == 2 * len(blocks):  # a data line each, as from most servers: a third of the work
                self._started, self._after_cr = True, False
                return [*map(_message, blocks)]
        if self._after_cr and data:
            data, self._after_cr = data.removeprefix(b"\n"), False
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events = self._split_lines(data)
        self.pending = bool(self._partial_line or self._data_lines or self._name)
        return events

    def flush(self) -> list[ServerSentEvent]:
        """End the body: an event without a blank line is dropped by the specification, but read by OpenAI's SDKs."""
        return self.feed(b"\n\n") if self.pending else []

    def _split_lines(self, data: bytes) -> list[ServerSentEvent]:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._partial_line) + lines[0]
            self._partial_line.clear()
        self._partial_line += rest
        events: list[ServerSentEvent] = []
        for line in lines:
            if not self._started:
                self._started = True
                line = line.removeprefix(BOM)
            if line:
                self._read_field(line)
                continue
            if self._data_lines:
                events.append(ServerSentEvent(self._name, b"\n".join(self._data_lines)))
            self._reset_event()
        if self.held_bytes > self.limit:
            self._shrink()
        return events

    def _shrink(self) -> None:
        """Make room: the event is above the limit."""
        self._partial_line.clear()
        self._reset_event()
        raise StreamError("an event is larger than the limit")

    def _read_field(self, line: bytes) -> None:
        self._event_size += len(line) + 1
        name, _, value = line.partition(b":")  # a comment has no name
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data_lines.append(value)
        elif name == b"event":
            self._name = value

    def _reset_event(self) -> None:
        self._data_lines = []
        self._event_size = 0
        self._name = b""


_STRING = re.compile(rb'"(?:[^"\\]++|(?:\\.)++)*+(")?', re.DOTALL)  # or its beginning, without half an escape
_LONG = 256  # bytes of a string that is shortened


class ExcerptDecoder(SseDecoder):
    """Shortens the strings of an event above the limit. `shortened`: those of the incomplete event."""

    limit: ClassVar[int] = EXCERPT_LIMIT
    shortened = False

    def rest_of_event(self, data: bytes) -> bytes:
        """The part of the next read that belongs to the incomplete event."""
        start = b"" if self._partial_line else b"\n"
        text = start + data
        if b"\n\n" not in text and b"\r" not in text:  # as nearly always
            return data
        blank = BLANK_LINE.search(text)
        return data[: blank.end() - len(start)] if blank else data

    def _shrink(self) -> None:
        self.shortened = True
        self._partial_line = bytearray(excerpt(self._partial_line))
        lines = list(map(excerpt, self._data_lines))
        self._event_size -= sum(map(len, self._data_lines)) - sum(map(len, lines))
        self._data_lines = lines
        if self.held_bytes > self.limit // 2:  # not strings: further reads would be searched in vain
            super()._shrink()

    def _reset_event(self) -> None:
        super()._reset_event()
        self.shortened = False


def excerpt(text: bytes | bytearray) -> bytes:
    """JSON, or its beginning, with all long strings replaced by `x`. The rest of a torn string may follow."""
    return _STRING.sub(_shortened, text)


def _shortened(string: re.Match[bytes]) -> bytes:
    text = string[0]
    if len(text) <= _LONG:
        return text
    if string[1]:
        return b'"x"'
    lead = max((text.rfind(byte, len(text) - 4) for byte in set(text[-4:]) if byte >= 0xC0), default=-1)
    return b'"x' + (text[lead:] if lead >= 0 else b"")


# --------------------------------------------------------------------------- whole events, without the usage event

HELD_LIMIT = 1 << 20  # bytes of an incomplete event to be held
JUDGED_LIMIT = 4 << 20  # the same, to be judged
_GAP = rb"(?:\s|data:)*"  # JSON may continue in the next data line
_NO_CHOICES = re.compile(rb'"choices"' + _GAP + b":" + _GAP + rb"\[" + _GAP + rb"\]")


_decode_chunk = msgspec.json.Decoder(UsageShape).decode


class WholeEvents:
    """Holds back an incomplete event at the end of a read: no use to any client yet, and perhaps never to be whole.

    An event too large to be held passes as it comes; `held` are its last bytes then, which have passed.
    """

    def __init__(self) -> None:
        self.held = b""
        self._passing = False  # a large event

    def feed(self, data: bytes) -> bytes:
        if not self.held and data.endswith(b"\n\n"):
            return data
        return self._complete(data)

    def _complete(self, data: bytes) -> bytes:
        """All complete events, and what may pass of a large event."""
        passed = len(self.held) if self._passing else 0
        search_from = max(len(self.held) - 3, 0)  # a blank line may have begun in the held bytes
        data = self.held + data
        end = _end_of_events(data, search_from)
        self._passing = (self._passing and not end) or len(data) - end > HELD_LIMIT
        if self._passing:
            end = len(data)
        self.held = data[-3:] if self._passing else data[end:]
        return data[passed:end]

    def drop(self) -> bytes:
        torn, self._passing, self.held = self._passing, False, b""
        return b"\n\n" if torn else b""

    def close(self) -> bytes:
        if self._passing:
            return b""
        rest, self.held = self.held, b""
        return rest


def _end_of_events(data: bytes | bytearray, search_from: int) -> int:
    """The end of the last blank line; 0: there is none."""
    if b"\r" not in data:
        at = data.rfind(b"\n\n", search_from)
        return at + 2 if at >= 0 else 0
    return max((blank.end() for blank in BLANK_LINE.finditer(data, search_from)), default=0)


class UsageStripper(WholeEvents):
    """Removes events with empty `choices` and a `usage`; all other complete events pass verbatim."""

    def feed(self, data: bytes) -> bytes:
        if self.held or not data.endswith(b"\n\n"):
            data = self._complete(data)
        return _without_usage(data) if b'"usage"' in data else data

    def close(self) -> bytes:
        return _without_usage(super().close()) if self.held else b""


def _without_usage(data: bytes) -> bytes:
    if b'"usage"' not in data or _NO_CHOICES.search(data) is None:
        return data
    kept = []
    for event in events_of(data):
        if b'"usage"' in event and _is_usage(event):
            # The blank lines before stay: different reads attach blank lines to different events.
            event = event[: len(event) - len(event.lstrip(b"\r\n"))]
        kept.append(event)
    return b"".join(kept)


def events_of(data: bytes) -> list[bytes]:
    """The events, and what follows the last blank line."""
    events, start = [], 0
    for blank in BLANK_LINE.finditer(data):
        events.append(data[start : blank.end()])
        start = blank.end()
    return [*events, data[start:]]


_DATA_LINE = re.compile(rb"(?:\A|[\r\n])data: ?([^\r\n]*)")


def data_of(event: bytes) -> bytes | None:
    """None: there is no data line."""
    lines = _DATA_LINE.findall(event.lstrip(b"\r\n").removeprefix(BOM))
    return b"\n".join(lines) if lines else None


def _is_usage(event: bytes) -> bool:
    try:
        chunk = _decode_chunk(data_of(event) or b"")
    except (ValueError, RecursionError):
        return False
    return chunk.choices == [] and bool(chunk.usage)


# --------------------------------------------------------------------------- junk


class JunkFilter:
    """Removes events that are no JSON object.

    Holds the end of the answer, from the finish_reason on, until [DONE] or `close`: only then is it known that no text
    was lost with the junk (`backends.stream.taps`). Where that and an incomplete event are more than JUDGED_LIMIT, all
    passes from there on.
    """

    def __init__(self) -> None:
        self._overflowed = False
        self._held = bytearray()  # an incomplete event
        self._end: list[bytes] = []  # events
        self._end_size = 0  # bytes

    @property
    def held_bytes(self) -> int:
        return len(self._held) + self._end_size

    def feed(self, data: bytes) -> bytes:
        if self._overflowed:
            return data
        search_from = max(len(self._held) - 3, 0)  # a blank line may have begun in the held bytes
        self._held += data
        passed = self._judge(end) if (end := _end_of_events(self._held, search_from)) else b""
        self._overflowed = self.held_bytes > JUDGED_LIMIT
        return passed + self.close() if self._overflowed else passed

    def _judge(self, end: int) -> bytes:
        """Return the events up to `end` that may pass."""
        *events, rest = events_of(bytes(self._held[:end]))
        self._held[:end] = rest
        return b"".join(map(self._passed, events))

    def drop(self) -> bytes:
        self._held.clear()
        return b""

    def close(self) -> bytes:
        rest = b"".join([*self._end, self._held])
        self._end, self._end_size = [], 0
        self._held = bytearray()
        return rest

    def _passed(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:  # a comment
            return event
        if data.startswith(b"[DONE]"):
            end = b"".join(self._end)
            self._end, self._end_size = [], 0
            return end + event
        chunk = _object_in(data)
        if chunk is None:
            return b""
        if chunk.get("error") or not (self._end or _finishes(chunk)):
            return event
        self._end.append(event)
        self._end_size += len(event)
        return b""


def _object_in(data: bytes) -> dict[str, Any] | None:
    try:
        value = failures.decode_leniently(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _finishes(chunk: dict[str, Any]) -> bool:
    choices = chunk.get("choices")
    choices = choices if isinstance(choices, list) else []
    return any(isinstance(choice, dict) and choice.get("finish_reason") for choice in choices)
