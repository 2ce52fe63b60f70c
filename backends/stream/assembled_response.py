"""Takes the whole response from the last event of a stream of OpenAI's Responses. Rules: `backends.stream.assembly`."""

from __future__ import annotations

from typing import Any

import msgspec

from backends.stream.assembly import Counted, EventAssembler, Unassembled

_ENDS = ("response.completed", "response.incomplete")


class _End(msgspec.Struct):
    response: msgspec.Raw


_decode_end = msgspec.json.Decoder(_End).decode


class ResponseAssembler(EventAssembler):
    """An `Assembler`."""

    def __init__(self) -> None:
        super().__init__()
        self._response = b""

    def _add(self, chunk: dict[str, Any], data: bytes) -> None:
        self._size = len(self._response)
        kind = chunk.get("type")
        if kind == "response.failed":
            raise Unassembled("an error event")
        if kind in _ENDS:
            try:
                self._response = bytes(_decode_end(data).response)
            except ValueError:
                raise Unassembled("an end without a response") from None
            self._size = len(self._response)

    def _assembled(self, counted: Counted | None) -> bytes:
        if not self._response:
            raise Unassembled("the stream ends before its end")
        return self._response

    def _forget(self) -> None:
        self._response = b""
