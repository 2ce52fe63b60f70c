"""Event streams: bytes, torn anywhere, into events (HTML specification, 9.2.6).

An event may hold an image of megabytes. Memory is bounded for a hostile server nevertheless:
- `SseDecoder` returns whole events, of up to EVENT_LIMIT.
- `ExcerptDecoder` shortens the strings of a larger event while the event arrives. All other JSON stays as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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


class StreamError(ValueError):
    """An event is larger than the limit."""


class SseDecoder:
    """Turns bytes, torn anywhere, into events. An event is complete at the blank line, whatever ends the lines."""

    limit = EVENT_LIMIT

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
                return [ServerSentEvent(b"", block) for block in blocks]
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

    limit = EXCERPT_LIMIT

    def __init__(self) -> None:
        super().__init__()
        self.shortened = False

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
