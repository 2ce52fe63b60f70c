"""Event streams: bytes, torn anywhere, into events (HTML specification, 9.2.6)."""

from __future__ import annotations

from dataclasses import dataclass

LINE_LIMIT = 1 << 20  # bytes of a line, and of an event: bounds the memory for a hostile server
BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class ServerSentEvent:
    """An event. An empty name stands for the default, `message`."""

    name: bytes
    data: bytes

    def __bytes__(self) -> bytes:
        name = b"event: " + self.name + b"\n" if self.name else b""
        return name + b"data: " + self.data.replace(b"\n", b"\ndata: ") + b"\n\n"


class StreamError(ValueError):
    """A line or an event is larger than LINE_LIMIT."""


class SseDecoder:
    """Turns bytes, torn anywhere, into events. An event is complete at the blank line, whatever ends the lines."""

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
        if self.held_bytes > LINE_LIMIT:
            self._partial_line.clear()
            self._reset_event()
            raise StreamError("an event is larger than 1 MiB")
        return events

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
