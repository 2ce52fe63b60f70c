"""Turns replies and events of chat completions into Anthropic's Messages.

The order of events is Anthropic's (platform.claude.com/docs, streaming, November 2026): message_start; for each block
content_block_start, content_block_delta..., content_block_stop; message_delta; message_stop. A chat tells its usage
after the end of the answer: message_start has no counts, message_delta has them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from backends import failures
from backends.interface import Failure
from backends.stream.sse import ServerSentEvent
from backends.translation.translation import EventTranslator, Json, decode_event, sse

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_decode = msgspec.json.Decoder().decode


def message(reply: Json, body: Mapping[str, Any]) -> Json:
    """The message of a whole reply."""
    choice = reply["choices"][0]
    content = _content(choice["message"], body)
    return {
        **_head(reply),
        "content": content,
        **_stop(choice, any(block["type"] == "tool_use" for block in content), bool(choice["message"].get("refusal"))),
        "usage": _usage(reply.get("usage") or {}),
    }


def _head(reply: Json) -> Json:
    head = {"id": reply.get("id") or "", "type": "message", "role": "assistant", "model": reply.get("model") or ""}
    return {**head, "content": [], "stop_reason": None, "stop_sequence": None}


def _content(answer: Mapping[str, Any], body: Mapping[str, Any]) -> list[Json]:
    blocks = _thinking(answer) if _shows_thinking(body) else []
    blocks += [{"type": "text", "text": text} for text in (_text(answer), answer.get("refusal")) if text]
    for number, call in enumerate(answer.get("tool_calls") or ()):
        function = call["function"]
        arguments = _decode(function.get("arguments") or "{}")
        identity = {"id": call.get("id") or f"call_{number}", "name": function["name"]}
        blocks.append({"type": "tool_use", **identity, "input": arguments})
    return blocks


def _thinking(answer: Mapping[str, Any]) -> list[Json]:
    """Blocks with signatures, if the reply has signatures; else the text."""
    blocks: list[Json] = []
    for detail in answer.get("reasoning_details") or ():
        if detail.get("type") == "reasoning.text":
            signature = detail.get("signature") or ""
            blocks.append({"type": "thinking", "thinking": detail.get("text") or "", "signature": signature})
        elif detail.get("type") == "reasoning.encrypted":
            blocks.append({"type": "redacted_thinking", "data": detail["data"]})
    thought = reasoning(answer)
    return blocks or ([{"type": "thinking", "thinking": thought, "signature": ""}] if thought else [])


def reasoning(answer: Mapping[str, Any]) -> str:
    """Text of the reasoning, by the name of DeepSeek, SGLang and llama.cpp, or that of vLLM and OpenRouter;
    Mistral's is in the content."""
    text = answer.get("reasoning_content") or answer.get("reasoning")
    return text if isinstance(text, str) else "".join(map(_texts, _parts(answer, "thinking")))


def _text(answer: Mapping[str, Any]) -> str:
    content = answer.get("content")
    return content if isinstance(content, str) else "".join(map(_texts, _parts(answer, "text")))


def _parts(answer: Mapping[str, Any], kind: str) -> list[Any]:
    """Texts of a content in parts, as Mistral's reasoning models answer: a part of thinking has parts of its own."""
    content = answer.get("content")
    listed = content if isinstance(content, list) else ()
    return [part.get(kind) for part in listed if part["type"] == kind]


def _texts(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())


def _shows_thinking(body: Mapping[str, Any]) -> bool:
    return (body.get("thinking") or {}).get("display") != "omitted"


def _stop(choice: Mapping[str, Any], called: bool, refused: bool) -> Json:
    """Stop reason and sequence. vLLM names the sequence; it ends a forced call by `stop`."""
    finish, sequence = choice.get("finish_reason"), choice.get("stop_reason")
    if refused:
        return {"stop_reason": "refusal", "stop_sequence": None}
    if finish == "stop" and called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if finish == "stop" and isinstance(sequence, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": _STOP_REASONS.get(finish or "stop", "end_turn"), "stop_sequence": None}


def _usage(usage: Mapping[str, Any]) -> Json:
    """Usage of Anthropic: `input_tokens` excludes tokens read from or written to a cache."""
    details = usage.get("prompt_tokens_details") or {}
    read = details.get("cached_tokens")
    written = details.get("cache_write_tokens", details.get("created_cache_tokens"))  # OpenAI's name, and vLLM's
    counts: Json = {
        "input_tokens": max((usage.get("prompt_tokens") or 0) - (read or 0) - (written or 0), 0),
        "output_tokens": usage.get("completion_tokens") or 0,
    }
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    if written is not None:
        counts["cache_creation_input_tokens"] = written
    if read is not None:
        counts["cache_read_input_tokens"] = read
    if thought is not None:
        counts["output_tokens_details"] = {"thinking_tokens": thought}
    return counts


def error_event(failure: Failure) -> bytes:
    kind = _ERROR_TYPES.get(failure.status, "api_error")
    return sse({"type": "error", "error": {"type": kind, "message": failure.message}}, "error")


class MessagesEvents(EventTranslator):
    """Chunks of a chat, as the events of a message."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__()
        self._shows_thinking = _shows_thinking(body)
        self._begun = False
        self._over = False
        self._block = ""  # type of the open block; empty: none is open
        self._index = -1  # of the open or last block
        self._call: tuple[Any, Any] = (None, None)  # index and id of the open tool call
        self._calls: set[tuple[Any, Any]] = set()
        self._refused = False
        self._stop: Json | None = None
        self._usage: Json = {}

    def translate(self, event: ServerSentEvent) -> bytes:
        if event.data.startswith(b"[DONE]"):
            return (b"" if self._begun else self._start({})) + self._finish()
        chunk = decode_event(event.data)
        if self._over or not isinstance(chunk, dict):
            return b""
        if chunk.get("error") or event.name == b"error":
            return self.error(failures.of_event(chunk.get("error") or chunk))
        start = b"" if self._begun else self._start(chunk)
        return start + self._read(chunk)

    def close(self) -> bytes:
        return super().close() + (self._finish() if self._stop is not None else b"")

    def error(self, failure: Failure) -> bytes:
        if self._over:
            return b""
        self._over = True
        return error_event(failure)

    def _start(self, chunk: Json) -> bytes:
        self._begun = True
        opening = {**_head(chunk), "usage": {"input_tokens": 0, "output_tokens": 0}}
        return sse({"type": "message_start", "message": opening}, "message_start")

    def _read(self, chunk: Json) -> bytes:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        written = b""
        for choice in chunk.get("choices") or ():
            if choice.get("index") in (None, 0):
                written += self._read_delta(choice.get("delta") or {})
            if choice.get("finish_reason"):
                self._stop = _stop(choice, bool(self._calls), self._refused)
        return written + (self._finish() if self._stop is not None and isinstance(usage, dict) else b"")

    def _read_delta(self, delta: Json) -> bytes:
        written = b""
        if self._shows_thinking and (thought := reasoning(delta)):
            written += self._text("thinking", {"thinking": "", "signature": ""}, "thinking_delta", "thinking", thought)
        if self._shows_thinking and delta.get("reasoning_details"):
            written += b"".join(map(self._sign, delta["reasoning_details"]))
        for text, refused in ((_text(delta), False), (delta.get("refusal"), True)):
            if text:
                self._refused = self._refused or refused
                written += self._text("text", {"text": ""}, "text_delta", "text", text)
        for call in delta.get("tool_calls") or ():
            written += self._tool(call)
        return written

    def _text(self, block: str, empty: Json, delta: str, member: str, text: str) -> bytes:
        opened = b"" if self._block == block else self._open(block, empty)
        return opened + self._delta({"type": delta, member: text})

    def _sign(self, detail: Json) -> bytes:
        """The end of a block of thinking with a signature; or a block of thinking in cipher."""
        if detail.get("type") == "reasoning.encrypted":
            return self._open("redacted_thinking", {"data": detail["data"]})
        if not detail.get("signature"):
            return b""
        opened = b"" if self._block == "thinking" else self._open("thinking", {"thinking": "", "signature": ""})
        return opened + self._delta({"type": "signature_delta", "signature": detail["signature"]}) + self._stop_block()

    def _tool(self, call: Json) -> bytes:
        function, opened = call.get("function") or {}, b""
        index, identity = call.get("index", 0), call.get("id")
        if self._block != "tool_use" or index != self._call[0] or identity not in (None, "", self._call[1]):
            self._call = index, identity or f"call_{len(self._calls)}"
            if not function.get("name") or self._call in self._calls:  # more of a call whose block has ended
                raise ValueError("the arguments of several tool calls are mixed")
            self._calls.add(self._call)
            opened = self._open("tool_use", {"id": self._call[1], "name": function["name"], "input": {}})
        arguments = function.get("arguments")
        return opened + (self._delta({"type": "input_json_delta", "partial_json": arguments}) if arguments else b"")

    def _open(self, block: str, members: Json) -> bytes:
        closed = self._stop_block()
        self._block, self._index = block, self._index + 1
        content = {"type": block, **members}
        start = {"type": "content_block_start", "index": self._index, "content_block": content}
        return closed + sse(start, "content_block_start")

    def _delta(self, delta: Json) -> bytes:
        return sse({"type": "content_block_delta", "index": self._index, "delta": delta}, "content_block_delta")

    def _stop_block(self) -> bytes:
        if not self._block:
            return b""
        self._block = ""
        return sse({"type": "content_block_stop", "index": self._index}, "content_block_stop")

    def _finish(self) -> bytes:
        if self._over:
            return b""
        self._over = True
        stop = self._stop or _stop({}, bool(self._calls), self._refused)
        end = {"type": "message_delta", "delta": stop, "usage": _usage(self._usage)}
        return self._stop_block() + sse(end, "message_delta") + sse({"type": "message_stop"}, "message_stop")
