"""Puts the events of one of Anthropic's messages together, and takes the whole response from the last event of a stream
of OpenAI's Responses. Rules: `backends.stream.assembly`.

The message begins as in message_start; blocks are filled by their deltas; message_delta adds the reason of the end and
the last counts of tokens. A message is complete with message_stop, with its usage or a count of the gateway. A call
that was cut has an empty input, as in the API's own whole answers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.stream.assembly import Counted, EventAssembler, Unassembled, encode

_BLOCK_EVENTS = ("message_start", "content_block_start", "message_delta")
_CUT = ("max_tokens", "model_context_window_exceeded", "refusal", "pause_turn")  # stop reasons
_COUNTED = ("input_tokens", "output_tokens")
_TEXT_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}  # same name in both


class MessageAssembler(EventAssembler):
    """An `Assembler`."""

    def __init__(self) -> None:
        super().__init__()
        self._message: dict[str, Any] | None = None
        self._blocks: list[_AssembledBlock] = []
        self._stopped = False

    def _add(self, chunk: dict[str, Any], data: bytes) -> None:
        kind = chunk.get("type")
        if kind == "message_start" and self._message is None:
            self._message = chunk["message"]
        elif kind == "content_block_start" and chunk["index"] == len(self._blocks):
            self._blocks.append(_AssembledBlock(chunk["content_block"]))
        elif kind == "content_block_delta":
            self._blocks[chunk["index"]].add(chunk["delta"])
        elif kind == "content_block_stop":
            self._blocks[chunk["index"]].closed = True
        elif kind == "message_delta" and self._message is not None:
            self._update(self._message, chunk)
        elif kind == "message_stop":
            self._stopped = self._ended = True
        elif kind in _BLOCK_EVENTS:
            raise Unassembled("a block out of order")
        elif kind != "ping":  # as clients are told to read events that they do not know
            self.found.note("an event of an unknown type")

    def _update(self, message: dict[str, Any], event: dict[str, Any]) -> None:
        message["usage"] = {**(message.get("usage") or {}), **(event.pop("usage", None) or {})}
        message |= {**event.pop("delta")}  # of a mapping alone, unlike `|=`
        message |= {name: value for name, value in event.items() if name != "type"}

    def _assembled(self, counted: Counted | None) -> bytes:
        message = self._message
        if message is None or not self._stopped or not message.get("stop_reason"):
            raise Unassembled("the stream ends before its end")
        if not all(block.closed for block in self._blocks):
            self.found.note("a block without an end")
        was_cut = message["stop_reason"] in _CUT
        content = [block.assembled(was_cut=was_cut) for block in self._blocks]
        return encode({**message, "content": content, "usage": self._usage(message.get("usage"), counted)})

    def _usage(self, reported: Any, counted: Counted | None) -> Any:
        """The usage, with the gateway's own counts where the server tells none."""
        known = reported if isinstance(reported, dict) else {}
        if counted is None or all(type(known.get(name)) in (int, float) for name in _COUNTED):
            return reported
        self.found.note("no usage in the stream")
        return {
            **dict(zip(_COUNTED, counted(), strict=True)),
            **{name: n for name, n in known.items() if n is not None},
        }

    def _forget(self) -> None:
        self._message, self._blocks = None, []


class _AssembledBlock:
    """A block of the content so far."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.closed = False
        self._start = start
        self._texts: dict[str, list[str]] = {}
        self._citations: list[Any] = []

    def add(self, delta: dict[str, Any]) -> None:
        kind = delta["type"]
        if kind in _TEXT_DELTAS:
            self._add_text(_TEXT_DELTAS[kind], delta[_TEXT_DELTAS[kind]])
        elif kind == "input_json_delta":
            self._add_text("input", delta["partial_json"])
        elif kind == "citations_delta":
            self._citations.append(delta["citation"])
        else:
            raise Unassembled(f"a delta '{kind}'")

    def _add_text(self, name: str, text: Any) -> None:
        if self.closed or not isinstance(text, str):
            raise Unassembled("a delta of unknown form")
        self._texts.setdefault(name, []).append(text)

    def assembled(self, *, was_cut: bool) -> dict[str, Any]:
        """`was_cut`: the model did not come to the end of what it wrote."""
        block, texts = {**self._start}, {name: "".join(parts) for name, parts in self._texts.items()}
        if arguments := texts.pop("input", ""):
            try:
                block["input"] = msgspec.json.decode(arguments)
            except ValueError:
                if not was_cut:
                    raise Unassembled("half the input of a tool", of_calls=True) from None
        block |= {name: (block.get(name) or "") + text for name, text in texts.items()}
        if self._citations:
            block["citations"] = [*(block.get("citations") or ()), *self._citations]
        return block


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
