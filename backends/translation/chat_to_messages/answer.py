"""Turns replies and events of Anthropic's Messages into chat completions.

Reasoning becomes `reasoning_content`, the name that most clients read, and `reasoning_details` with Anthropic's
signature, sealed with the maker, which a caller returns in the next turn (openrouter.ai/docs, reasoning tokens). A chat
can neither express nor request citations and results of the provider's own tools.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backends import failures
from backends.stream.event_shapes import End, end_of, failure_of_end
from backends.stream.sse import ServerSentEvent
from backends.translation.tool_arguments import as_object, reasoning_detail
from backends.translation.translation import NO_CONTEXT, AnswerContext, ChatEvents, Json, decode_event, sse
from backends.translation.turn_state.call_ids import made_id
from backends.translation.turn_state.seals import sealed

_FINISH_REASONS = {
    End.STOP: "stop",
    End.PAUSED: "stop",  # a chat has no way to go on
    End.LENGTH: "length",
    End.CALLS: "tool_calls",
    End.FILTERED: "content_filter",
}
_THINKING = ("thinking", "redacted_thinking")
_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def chat_from_message(reply: Json, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> Json:
    """The completion of a whole reply."""
    choice = {"index": 0, "message": _message(reply, context.maker), "logprobs": None, **_finish(reply)}
    head = {"id": reply.get("id") or made_id("chatcmpl-"), "object": "chat.completion", "created": int(time.time())}
    usage = reply.get("usage")
    model = {"model": reply.get("model") or ""}
    return {**head, **model, "choices": [choice], **_service_tier(usage), "usage": _usage(usage)}


def _message(reply: Json, maker: str) -> Json:
    blocks = reply["content"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block for block in blocks if block["type"] in _THINKING]
    details = [_detail(block, place, maker) for place, block in enumerate(thoughts)]
    thought = "".join(detail.get("text", "") for detail in details)
    calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
    refusal = (reply.get("stop_details") or {}).get("explanation")
    message: Json = {"role": "assistant", "content": "".join(texts) if texts else None, "refusal": refusal}
    members = {"reasoning_content": thought, "reasoning_details": details, "tool_calls": calls}
    return message | {name: value for name, value in members.items() if value}


def _detail(block: Mapping[str, Any], place: int, maker: str) -> Json:
    """Convert a thinking block to a reasoning detail, with signature or encrypted data sealed for the maker."""
    detail = reasoning_detail(block, place)
    sealable = {name: sealed(maker, detail[name]) for name in ("signature", "data") if maker and detail.get(name)}
    return {**detail, **sealable}


def _call(block: Mapping[str, Any]) -> Json:
    function = {"name": block["name"], "arguments": _encode(as_object(block.get("input"))).decode()}
    return {"id": block["id"], "type": "function", "function": function}


def _finish(stop: Mapping[str, Any]) -> Json:
    """Finish reason, and the matched stop sequence in vLLM's member. Raises ValueError for an unknown or failed end."""
    end = end_of(stop.get("stop_reason") or "stop")
    if end not in _FINISH_REASONS:
        raise ValueError("an unknown end")
    reason = {"finish_reason": _FINISH_REASONS[end]}
    sequence = stop.get("stop_sequence")
    return reason if sequence is None else {**reason, "stop_reason": sequence}


def _usage(usage: Any) -> Json | None:
    """Usage of a chat: prompt tokens include tokens read from a cache and tokens written to a cache. None: not
    reported."""
    if not isinstance(usage, dict) or not usage:
        return None
    read, written = usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens")
    prompt = (usage.get("input_tokens") or 0) + (read or 0) + (written or 0)
    output = usage.get("output_tokens") or 0
    counts: Json = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    details = {"cached_tokens": read, "cache_write_tokens": written}
    if read is not None or written is not None:
        counts["prompt_tokens_details"] = {name: count for name, count in details.items() if count is not None}
    thought = (usage.get("output_tokens_details") or {}).get("thinking_tokens")
    if thought is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": thought}
    return counts


def _service_tier(usage: Any) -> Json:
    """The tier of a chat by the speed of the message."""
    return {"service_tier": "priority"} if isinstance(usage, dict) and usage.get("speed") == "fast" else {}


@dataclass(slots=True)
class _OpenBlock:
    """A content block in progress. `call`: number of its tool call; `thought`: thinking text before the signature."""

    start: Json = field(default_factory=dict)
    call: int | None = None
    has_arguments: bool = False
    thought: list[str] = field(default_factory=list)


class ChatFromMessagesStream(ChatEvents):
    """Events of a message, as the chunks of a chat. Blocks that come in turns are told apart by their index."""

    def __init__(self, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> None:
        super().__init__()
        self._maker = context.maker
        head = {"id": made_id("chatcmpl-"), "object": "chat.completion.chunk"}
        self._head: Json = {**head, "created": int(time.time()), "model": ""}
        self._blocks: dict[Any, _OpenBlock] = {}  # by index
        self._thoughts = 0
        self._calls = 0
        self._usage: Json = {}
        self._stopped = False  # a stop reason was seen
        self._readers = {
            "message_start": self._start,
            "content_block_start": self._start_block,
            "content_block_delta": self._read_delta,
            "content_block_stop": self._stop_block,
            "message_delta": self._end,
            "message_stop": self._finish,
        }

    def translate(self, event: ServerSentEvent) -> bytes:
        read = decode_event(event.data)
        if self.ended or not isinstance(read, dict):
            return b""
        kind = read.get("type")
        if kind == "error" or event.name == b"error":
            return self.error(failures.of_event(read.get("error")))
        reader = self._readers.get(kind) if isinstance(kind, str) else None
        return reader(read) if reader is not None else b""

    def close(self) -> bytes:
        return super().close() + (self._finish({}) if self._stopped else b"")

    def _start(self, event: Json) -> bytes:
        message = event["message"]
        self._head |= {"id": message.get("id") or self._head["id"], "model": message.get("model") or ""}
        self._usage |= message.get("usage") or {}
        return self._chunk({"role": "assistant", "content": ""})

    def _start_block(self, event: Json) -> bytes:
        start = event["content_block"]
        block = self._blocks[event.get("index")] = _OpenBlock(start)
        if start["type"] == "tool_use":
            block.call = self._calls
            self._calls += 1
            function = {"name": start["name"], "arguments": ""}
            opened = self._call(block, {"id": start["id"], "type": "function", "function": function})
            given = start.get("input")
            return opened + (self._arguments(block, _encode(as_object(given)).decode()) if given else b"")
        if start["type"] == "redacted_thinking":
            return self._thought(start)
        return self._text(block, start.get("text") or "", start.get("thinking") or "")

    def _read_delta(self, event: Json) -> bytes:
        delta, block = event["delta"], self._blocks.get(event.get("index")) or _OpenBlock()
        if delta["type"] == "input_json_delta":
            return self._arguments(block, delta["partial_json"])
        if delta["type"] == "signature_delta":
            thought, block.thought = "".join(block.thought), []
            return self._thought({**block.start, "thinking": thought, "signature": delta["signature"]})
        return self._text(block, delta.get("text") or "", delta.get("thinking") or "")

    def _text(self, block: _OpenBlock, text: str, thinking: str) -> bytes:
        if thinking:
            self._kept.take(thinking)
            block.thought.append(thinking)
            return self._chunk({"reasoning_content": thinking})
        return self._chunk({"content": text}) if text else b""

    def _thought(self, block: Json) -> bytes:
        self._thoughts += 1
        return self._chunk({"reasoning_details": [_detail(block, self._thoughts - 1, self._maker)]})

    def _arguments(self, block: _OpenBlock, text: str) -> bytes:
        """A block without a call is of a tool that the provider runs."""
        if not text or block.call is None:
            return b""
        block.has_arguments = True
        return self._call(block, {"function": {"arguments": text}})

    def _call(self, block: _OpenBlock, call: Json) -> bytes:
        return self._chunk({"tool_calls": [{"index": block.call, **call}]})

    def _stop_block(self, event: Json) -> bytes:
        """Arguments of a call without any are an empty object to OpenAI's clients, and no text to Anthropic's."""
        block = self._blocks.pop(event.get("index"), None) or _OpenBlock()
        return b"" if block.has_arguments else self._arguments(block, "{}")

    def _end(self, event: Json) -> bytes:
        self._usage |= {name: count for name, count in (event.get("usage") or {}).items() if count is not None}
        delta = event["delta"]
        if delta.get("stop_reason") is None:
            return b""
        if (failure := failure_of_end(delta["stop_reason"])) is not None:
            return self.error(failure)
        self._stopped = True
        refusal = (delta.get("stop_details") or {}).get("explanation")
        said = self._chunk({"refusal": refusal}) if refusal else b""
        return said + self._chunk({}, _finish(delta))

    def _finish(self, event: Json) -> bytes:
        if self.ended:
            return b""
        self.ended = True
        return sse({**self._head, "choices": [], **_service_tier(self._usage), "usage": _usage(self._usage)}) + _DONE

    def _chunk(self, delta: Json, finish: Json | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, **(finish or {"finish_reason": None})}
        return sse({**self._head, "choices": [choice]})
