"""Replies as bytes, in two dialects: vLLM's and the OpenAI API's.

What differs (as seen in vLLM 0.32 and in the OpenAI reference):
- vLLM puts `finish_reason` on the last content chunk, OpenAI on a chunk of its own;
- vLLM adds `metrics` to the usage chunk and to whole replies (--enable-per-request-metrics);
- OpenAI has `usage: null` in every other chunk when usage was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from backends.simulated.reply import SimulatedReply

DONE = b"data: [DONE]\n\n"
GARBAGE = b'data: {"id": "chatcmpl-\n\n'
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one answer, for vLLM's `metrics`."""

    ttft: float
    queue: float
    generation: float
    tokens: int

    def metrics(self) -> dict[str, float]:
        """In vLLM's names and milliseconds; its time to the first token leaves the queue out."""
        gaps = max(self.tokens - 1, 1)
        return {
            "time_to_first_token_ms": (self.ttft - self.queue) * 1e3,
            "queue_time_ms": self.queue * 1e3,
            "generation_time_ms": self.generation * 1e3,
            "mean_itl_ms": self.generation * 1e3 / gaps,
            "tokens_per_second": gaps / self.generation if self.generation > 0 else 0.0,
        }


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """The usage object of both dialects."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass(frozen=True, slots=True)
class Style:
    """How one reply is written. `usage`: a usage chunk was asked for; `done`: the stream ends as it should."""

    chat: bool
    vllm: bool
    usage: bool = False
    done: bool = True


class ReplyWriter:
    """Writes one reply, as events or whole."""

    def __init__(self, reply: SimulatedReply, *, id: str, model: str, created: int, style: Style) -> None:
        self._reply = reply
        self._style = style
        self._vllm, self._chat = style.vllm, style.chat
        self._last = len(reply.pieces) - 1
        self._call_id = ("chatcmpl-tool-" if style.vllm else "call_") + id.rpartition("-")[2]
        self._envelope: dict[str, Any] = {"id": id, "object": "", "created": created, "model": model}
        if not style.vllm:
            self._envelope["system_fingerprint"] = "fp_simulated"
        self._envelope["object"] = "chat.completion.chunk" if style.chat else "text_completion"
        tail = b',"usage":null' if style.usage and not style.vllm else b""
        self._head = b"data: " + _encode(self._envelope)[:-1] + b',"choices":[{"index":0,'
        self._tail = b',"logprobs":null,"finish_reason":null}]' + tail + b"}\n\n"
        self._finish = b',"logprobs":null,"finish_reason":' + _encode(reply.finish) + b"}]" + tail + b"}\n\n"
        opening, self._close = (b'"delta":{"content":', b"}") if style.chat else (b'"text":', b"")
        if reply.tool is not None:
            opening, self._close = b'"delta":{"tool_calls":[{"index":0,"function":{"arguments":', b"}}]}"
        self._open = self._head + opening

    def token(self, index: int) -> bytes:
        """The event of token `index`; the role chunk goes before the first, the finish reason with the last."""
        event = self._open + _encode(self._reply.pieces[index]) + self._close
        if index == 0:
            event = self._first(event)
        if index < self._last:
            return event + self._tail
        if self._vllm:
            return event + self._finish
        return event + self._tail + self._head + (b'"delta":{}' if self._chat else b'"text":""') + self._finish

    def ending(self, usage: Mapping[str, Any], timing: Timing) -> bytes:
        """What follows the last token: the usage chunk, which has no choices, and the end of the stream."""
        chunk = {**self._envelope, "choices": [], "usage": usage}
        if self._vllm:
            chunk["metrics"] = timing.metrics()
        reported = b"data: " + _encode(chunk) + b"\n\n" if self._style.usage else b""
        return reported + (DONE if self._style.done else b"")

    def whole(self, usage: Mapping[str, Any], timing: Timing) -> bytes:
        """The reply that is not streamed."""
        reply = self._reply
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reply.finish}
        if not self._chat:
            choice["text"] = reply.text
        elif reply.tool is None:
            choice["message"] = {"role": "assistant", "content": reply.text}
        else:
            call = self._call()
            call["function"]["arguments"] = reply.arguments
            choice["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
        body = {**self._envelope, "choices": [choice], "usage": usage}
        if self._chat:
            body["object"] = "chat.completion"
        return _encode({**body, "metrics": timing.metrics()} if self._vllm else body)

    def _first(self, event: bytes) -> bytes:
        if not self._chat:
            return event
        if self._reply.tool is not None:
            event = self._head + b'"delta":{"tool_calls":[' + _encode(self._call(index=0)) + b"]}"
        return self._head + b'"delta":{"role":"assistant","content":""}' + self._tail + event

    def _call(self, **index: int) -> dict[str, Any]:
        function = {"name": self._reply.tool, "arguments": ""}
        return {**index, "id": self._call_id, "type": "function", "function": function}
