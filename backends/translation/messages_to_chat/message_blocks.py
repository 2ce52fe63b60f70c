"""Writes the content blocks of a streamed message, which follow one another in Anthropic's dialect.

A chat may interleave parallel tool calls and text:

- The first incomplete block is open, and its deltas are written on arrival. Later blocks wait, in order.
- A text is complete when another block begins; so is a tool call, if its arguments are a complete JSON object. The end
  of the answer completes all blocks.
- A tool call, and all blocks after, wait until its name and id are known.
- KeptTexts limits the size of waiting blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from backends.translation.streamed_calls import StreamedCall
from backends.translation.tool_arguments import WHITESPACE, StreamedObject
from backends.translation.translation import InexpressibleError, Json, KeptTexts, sse

Ending = Callable[[], list[Json]]
GivenId = Callable[[StreamedCall], str]  # the id of a call that the caller gets


class _Block:
    """A block of text or thinking. `is_closed`: complete. `ending`: returns the final deltas."""

    def __init__(self, kind: str, empty: Json, ending: Ending | None = None) -> None:
        self.kind = kind
        self._ending = ending
        self.empty = empty  # members of the start event
        self.waiting: list[Json] = []  # deltas
        self.is_started = self.is_closed = False

    @property
    def is_ready(self) -> bool:
        """The start event can be written."""
        return True

    @property
    def is_complete(self) -> bool:
        """The block can end where another block begins."""
        return True

    def start(self) -> Json:
        return {"type": self.kind, **self.empty}

    def end(self) -> list[Json]:
        """Deltas that complete the block."""
        return [] if self._ending is None else self._ending()


class _ToolBlock(_Block):
    """A tool call."""

    def __init__(self, call: StreamedCall, given_id: GivenId) -> None:
        super().__init__("tool_use", {"input": {}})
        self._call = call
        self._given_id = given_id
        self._input = StreamedObject()

    @property
    def is_ready(self) -> bool:
        return self._call.is_ready

    @property
    def is_complete(self) -> bool:
        return self._call.end.is_complete and not self._input.is_wrapped

    def add(self, text: str) -> None:
        if written := self._input.feed(text):
            self.waiting.append(_input_delta(written))

    def start(self) -> Json:
        """Raises ValueError for a call without a name, which no dialect has."""
        if not self._call.name:
            raise ValueError("a tool call has no name")
        return {"type": self.kind, "id": self._given_id(self._call), "name": self._call.name, **self.empty}

    def end(self) -> list[Json]:
        rest = self._input.close()
        return [_input_delta(rest)] if rest else []


def _input_delta(text: str) -> Json:
    return {"type": "input_json_delta", "partial_json": text}


class MessageBlocks:
    """Blocks of one message; each method returns the events to write."""

    def __init__(self, kept: KeptTexts, given_id: GivenId) -> None:
        self._kept, self._given_id = kept, given_id
        self._queue: deque[_Block] = deque()  # the first one is open, or not ready
        self._tools: dict[int, _ToolBlock] = {}  # by number of the call
        self._started = 0

    def add_text(
        self, kind: str, empty: Json, delta: Json, text: str, *, is_last: bool = False, ending: Ending | None = None
    ) -> bytes:
        """`text`: in the delta. `is_last`: the next delta of the kind begins another block. `ending`: of a new
        block."""
        block = self._queue[-1] if self._queue else None
        if block is None or block.kind != kind or block.is_closed:
            block = _Block(kind, empty, ending)
            self._queue.append(block)
        block.waiting.append(delta)
        block.is_closed = is_last
        return self._write(block, text)

    def close_last(self, kind: str) -> bytes:
        """Close the latest block if of this kind: the next delta of the kind begins a new block."""
        if not self._queue or self._queue[-1].kind != kind:
            return b""
        self._queue[-1].is_closed = True
        return self._write(self._queue[-1], "")

    def add_whole(self, kind: str, members: Json) -> bytes:
        """A block without deltas."""
        block = _Block(kind, members)
        block.is_closed = True
        self._queue.append(block)
        return self._write(block, "")

    def add_arguments(self, call: StreamedCall, text: str) -> bytes:
        """Raises InexpressibleError for more of a call whose block has ended."""
        block = self._tools.get(call.number)
        if block is None:
            block = self._tools[call.number] = _ToolBlock(call, self._given_id)
            self._queue.append(block)
        if block.is_closed:
            if text.strip(WHITESPACE):
                raise InexpressibleError("arguments of a tool call go on after their end")
            return b""
        block.add(text)
        return self._write(block, text)

    def finish(self) -> bytes:
        """End all blocks."""
        written = b""
        while self._queue:
            written += self._start(self._queue[0]) + self._stop()
        return written

    def _write(self, block: _Block, text: str) -> bytes:
        """Write all blocks that are ready, in order. `text`: new text of `block`, buffered until the block is first."""
        written = b""
        while self._queue and self._queue[0].is_ready:
            first = self._queue[0]
            written += self._start(first)
            if not first.is_closed and (len(self._queue) == 1 or not first.is_complete):
                break
            written += self._stop()
        if block.waiting:
            self._kept.take(text)
        return written

    def _start(self, block: _Block) -> bytes:
        """Write the waiting deltas of a block, after its start event if not yet written."""
        written = b""
        if not block.is_started:
            block.is_started = True
            self._started += 1
            written = self._event("content_block_start", content_block=block.start())
        deltas, block.waiting = block.waiting, []
        return written + b"".join(self._event("content_block_delta", delta=delta) for delta in deltas)

    def _stop(self) -> bytes:
        block = self._queue.popleft()
        block.is_closed = True
        rest = b"".join(self._event("content_block_delta", delta=delta) for delta in block.end())
        return rest + self._event("content_block_stop")

    def _event(self, kind: str, **members: Json) -> bytes:
        return sse({"type": kind, "index": self._started - 1, **members}, kind)
