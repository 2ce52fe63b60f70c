"""Turns replies and events of chat completions into Anthropic's Messages.

The order of events is Anthropic's (platform.claude.com/docs, streaming, November 2026): message_start; for each block
content_block_start, content_block_delta..., content_block_stop; message_delta; message_stop. A chat tells its usage
after the end of the answer: message_start has no counts, message_delta has them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends import failures
from backends.interface import Failure
from backends.stream.sse import ServerSentEvent
from backends.translation.messages_to_chat.message_blocks import MessageBlocks
from backends.translation.streamed_calls import CallDelta, StreamedCalls, call_delta
from backends.translation.tool_arguments import as_object, parsed_object
from backends.translation.translation import EventTranslator, Json, decode_event, sse

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
ERROR_TYPES = {
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
_CUT = ("length", "content_filter")  # finish reasons of an answer that has ended too soon
_NO_THINKING = {"thinking": "", "signature": ""}


def message_from_chat(reply: Json, body: Mapping[str, Any]) -> Json:
    """The message of a whole reply."""
    choice = reply["choices"][0]
    content = _content(choice["message"], body, choice.get("finish_reason") in _CUT)
    return {
        **_head(reply),
        "content": content,
        **_stop(choice, any(block["type"] == "tool_use" for block in content), bool(choice["message"].get("refusal"))),
        "usage": _usage(reply.get("usage") or {}),
    }


def _head(reply: Json) -> Json:
    head = {"id": reply.get("id") or "", "type": "message", "role": "assistant", "model": reply.get("model") or ""}
    return {**head, "content": [], "stop_reason": None, "stop_sequence": None}


def _content(answer: Mapping[str, Any], body: Mapping[str, Any], is_cut: bool) -> list[Json]:
    blocks = _thinking(answer) if _shows_thinking(body) else []
    blocks += [{"type": "text", "text": text} for text in (_text(answer), answer.get("refusal")) if text]
    calls = [call_delta(call, place) for place, call in enumerate(answer.get("tool_calls") or ())]
    return blocks + [_tool_use(call, number, is_cut and number == len(calls) - 1) for number, call in enumerate(calls)]


def _tool_use(call: CallDelta, number: int, is_cut: bool) -> Json:
    """A tool call. Of half JSON there is nothing to be read: a call that was cut has no input then."""
    if not call.name:
        raise ValueError("a tool call has no name")
    found = (parsed_object(call.text) or {}) if is_cut else as_object(call.text)
    return {"type": "tool_use", "id": call.identity or f"call_{number}", "name": call.name, "input": found}


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
    """The event that ends a stream by an error."""
    kind = ERROR_TYPES.get(failure.status, "api_error")
    return sse({"type": "error", "error": {"type": kind, "message": failure.message}}, "error")


class MessagesFromChatStream(EventTranslator):
    """Chunks of a chat, as the events of a message."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__()
        self._shows_thinking = _shows_thinking(body)
        self._begun = False
        self._over = False
        self._blocks = MessageBlocks(self._kept)
        self._calls = StreamedCalls()
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
                self._stop = _stop(choice, bool(self._calls.all), self._refused)
        return written + (self._finish() if self._stop is not None and isinstance(usage, dict) else b"")

    def _read_delta(self, delta: Json) -> bytes:
        written = b""
        if self._shows_thinking and (thought := reasoning(delta)):
            written += self._text("thinking", _NO_THINKING, "thinking_delta", "thinking", thought)
        if self._shows_thinking and delta.get("reasoning_details"):
            written += b"".join(map(self._sign, delta["reasoning_details"]))
        for text, refused in ((_text(delta), False), (delta.get("refusal"), True)):
            if text:
                self._refused = self._refused or refused
                written += self._text("text", {"text": ""}, "text_delta", "text", text)
        for place, call in enumerate(delta.get("tool_calls") or ()):
            written += self._tool(call, place)
        return written

    def _text(self, block: str, empty: Json, delta: str, member: str, text: str) -> bytes:
        return self._blocks.add_text(block, empty, {"type": delta, member: text}, text)

    def _sign(self, detail: Json) -> bytes:
        """The end of a block of thinking with a signature; or a block of thinking in cipher."""
        if detail.get("type") == "reasoning.encrypted":
            return self._blocks.add_whole("redacted_thinking", {"data": detail["data"]})
        if not (signature := detail.get("signature")):
            return b""
        delta = {"type": "signature_delta", "signature": signature}
        return self._blocks.add_text("thinking", _NO_THINKING, delta, signature, is_last=True)

    def _tool(self, call: Mapping[str, Any], place: int) -> bytes:
        delta = call_delta(call, place)
        return self._blocks.add_arguments(self._calls.add(delta), delta.text)

    def _finish(self) -> bytes:
        if self._over:
            return b""
        self._over = True
        stop = self._stop or _stop({}, bool(self._calls.all), self._refused)
        end = {"type": "message_delta", "delta": stop, "usage": _usage(self._usage)}
        return self._blocks.finish() + sse(end, "message_delta") + sse({"type": "message_stop"}, "message_stop")
