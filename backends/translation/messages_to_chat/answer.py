"""Turns replies and events of chat completions into Anthropic's Messages.

The order of events is Anthropic's (platform.claude.com/docs, streaming, November 2026): message_start; for each block
content_block_start, content_block_delta..., content_block_stop; message_delta; message_stop. A chat tells its usage
after the end of the answer: message_start has the gateway's estimate of the prompt, message_delta has all counts.

Provider state of the turn is sealed (`turn_state.seals`): into the signature of the thinking block received with the
state, or else into a redacted thinking block; state of a call into the call's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends import failures
from backends.interface import Failure
from backends.stream.event_shapes import End, end_of, failure_of_end
from backends.stream.sse import ServerSentEvent
from backends.translation.messages_to_chat.message_blocks import MessageBlocks
from backends.translation.streamed_calls import CallDelta, StreamedCall, StreamedCalls, call_delta
from backends.translation.tool_arguments import as_object, parsed_object
from backends.translation.translation import (
    NO_CONTEXT,
    AnswerContext,
    EventTranslator,
    Json,
    KeptTexts,
    decode_event,
    sse,
)
from backends.translation.turn_state.call_ids import CallIds, made_id
from backends.translation.turn_state.chat_state import (
    MEMBERS,
    ChatState,
    details_of,
    details_text,
    is_thought,
    members_of,
    text_member,
)
from backends.translation.turn_state.seals import sealed

_STOP_REASONS = {
    End.STOP: "end_turn",
    End.LENGTH: "max_tokens",
    End.CALLS: "tool_use",
    End.FILTERED: "refusal",
    End.PAUSED: "pause_turn",
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
_CUT = (End.LENGTH, End.FILTERED)  # ends of an answer that has ended too soon
_WINDOW = "model_context_window_exceeded"
_FAST = ("fast", "priority")  # names of one tier
_NO_THINKING = {"thinking": "", "signature": ""}


def message_from_chat(reply: Json, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> Json:
    """The message of a whole reply."""
    choice = reply["choices"][0]
    is_cut = end_of(choice.get("finish_reason")) in _CUT
    content = _content(choice["message"], body, is_cut, context)
    return {
        **_head(reply),
        "content": content,
        **_stop(choice, any(block["type"] == "tool_use" for block in content), bool(choice["message"].get("refusal"))),
        "usage": _usage(reply.get("usage"), context) | _speed(reply),
    }


def _head(reply: Json) -> Json:
    identity = reply.get("id") or made_id("msg_")
    head = {"id": identity, "type": "message", "role": "assistant", "model": reply.get("model") or ""}
    return {**head, "content": [], "stop_reason": None, "stop_sequence": None}


def _content(answer: Mapping[str, Any], body: Mapping[str, Any], is_cut: bool, context: AnswerContext) -> list[Json]:
    blocks = _thinking(answer, context.maker, _shows_thinking(body))
    blocks += [{"type": "text", "text": text} for text in (_text(answer), answer.get("refusal")) if text]
    calls = [call_delta(call, place) for place, call in enumerate(answer.get("tool_calls") or ())]
    ids = CallIds(body, context)
    last = len(calls) - 1
    return blocks + [_tool_use(call, ids, is_cut and number == last) for number, call in enumerate(calls)]


def _tool_use(call: CallDelta, ids: CallIds, is_cut: bool) -> Json:
    """A tool call. Of half JSON there is nothing to be read: a call that was cut has no input then."""
    if not call.name:
        raise ValueError("a tool call has no name")
    found = (parsed_object(call.text) or {}) if is_cut else as_object(call.text)
    return {"type": "tool_use", "id": ids.given(call.identity, call.state), "name": call.name, "input": found}


def _thinking(answer: Mapping[str, Any], maker: str, is_shown: bool) -> list[Json]:
    """Blocks with signatures, if the reply has signatures; else the text. `is_shown`: else state alone."""
    details, members, thought = details_of(answer), members_of(answer) if maker else {}, reasoning(answer)
    if not is_shown:
        state = {"details": details, "message": members}
        return [_cipher(sealed(maker, state))] if maker and (details or members) else []
    blocks = [block for detail in details if (block := _signed(detail, maker))]
    if thought and not any(block["type"] == "thinking" for block in blocks):
        blocks.insert(0, {"type": "thinking", **_NO_THINKING, "thinking": thought})
    if members:
        blocks.append(_cipher(sealed(maker, {"message": members})))
    return blocks


def _signed(detail: Json, maker: str) -> Json:
    """A block for a detail of the reasoning; empty: Messages has none. `maker`: seals the detail; empty: as it is."""
    text = str(detail.get(text_member(detail)) or "")
    if maker:
        state = ChatState(KeptTexts())
        state.add({"reasoning_details": [detail]})
        seal = sealed(maker, state.take(text))
        return {"type": "thinking", "thinking": text, "signature": seal} if text else _cipher(seal)
    if detail.get("type") == "reasoning.text":
        return {"type": "thinking", "thinking": text, "signature": detail.get("signature") or ""}
    return _cipher(detail["data"]) if detail.get("type") == "reasoning.encrypted" else {}


def _cipher(data: Any) -> Json:
    return {"type": "redacted_thinking", "data": data}


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
    """Stop reason and sequence. vLLM names the sequence; it ends a forced call by `stop`. Raises ValueError for an end
    that is not known to be good."""
    finish, sequence = choice.get("finish_reason") or "stop", choice.get("stop_reason")
    end = end_of(finish)
    if end not in _STOP_REASONS:
        raise ValueError("an unknown end")
    if refused:
        return {"stop_reason": "refusal", "stop_sequence": None}
    if end is End.STOP and called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if end is End.STOP and isinstance(sequence, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": finish if finish == _WINDOW else _STOP_REASONS[end], "stop_sequence": None}


def _usage(reported: Any, context: AnswerContext) -> Json:
    """Usage of Anthropic: `input_tokens` excludes tokens read from or written to a cache. Without a report, the
    estimate of the prompt: the dialect cannot do without."""
    usage: Json = reported if isinstance(reported, dict) else {"prompt_tokens": context.prompt_tokens}
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


def _speed(reply: Json) -> Json:
    """Speed of the message by the tier of the chat; empty: the standard, or not reported."""
    return {"speed": "fast"} if reply.get("service_tier") in _FAST else {}


def error_event(failure: Failure) -> bytes:
    """The event that ends a stream by an error."""
    kind = ERROR_TYPES.get(failure.status, "api_error")
    return sse({"type": "error", "error": {"type": kind, "message": failure.message}}, "error")


class MessagesFromChatStream(EventTranslator):
    """Chunks of a chat, as the events of a message."""

    def __init__(self, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> None:
        super().__init__()
        self._context = context
        self._shows_thinking = _shows_thinking(body)
        self._begun = False
        self._over = False
        self._ids = CallIds(body, context)
        self._given: dict[int, str] = {}  # ids of calls that the caller knows, by number
        self._blocks = MessageBlocks(self._kept, self._given_id)
        self._calls = StreamedCalls(self._kept)
        self._state = ChatState(self._kept)  # not sealed yet
        self._thought: list[str] = []  # of the open block of thinking
        self._has_reasoning = False  # the text of details is that of the reasoning
        self._refused = False
        self._stop: Json | None = None
        self._usage: Json | None = None
        self._speed: Json = {}

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
        opening = {**_head(chunk), "usage": {"input_tokens": self._context.prompt_tokens or 0, "output_tokens": 0}}
        return sse({"type": "message_start", "message": opening}, "message_start")

    def _read(self, chunk: Json) -> bytes:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        self._speed = _speed(chunk) or self._speed
        written = b""
        for choice in chunk.get("choices") or ():
            if choice.get("index") in (None, 0):
                written += self._read_delta(choice.get("delta") or {})
            if finish := choice.get("finish_reason"):
                if (failure := failure_of_end(finish)) is not None:
                    return written + self.error(failure)
                self._stop = _stop(choice, bool(self._calls.all), self._refused)
        return written + (self._finish() if self._stop is not None and isinstance(usage, dict) else b"")

    def _read_delta(self, delta: Json) -> bytes:
        written = self._think(delta)
        marked = "extra_content" in delta and is_thought(delta)
        for text, refused in ((None if marked else _text(delta), False), (delta.get("refusal"), True)):
            if text:
                self._refused = self._refused or refused
                written += self._text("text", {"text": ""}, "text_delta", "text", text)
        for place, call in enumerate(delta.get("tool_calls") or ()):
            written += self._tool(call, place)
        return written

    # -- thinking ------------------------------------------------------------------------

    def _think(self, delta: Json) -> bytes:
        """Reasoning of a delta, and state beside it."""
        details = delta.get("reasoning_details")
        has_state = bool(details) or (bool(self._context.maker) and not _MEMBERS.isdisjoint(delta))
        written = b""
        if self._shows_thinking and (thought := self._thought_of(delta)):
            if has_state or self._context.maker:
                self._kept.take(thought)
                self._thought.append(thought)
            member = {"type": "thinking_delta", "thinking": thought}
            written = self._blocks.add_text("thinking", _NO_THINKING, member, thought, ending=self._seal_thought)
        if not has_state:
            return written
        if not self._context.maker:
            return written + (b"".join(map(self._sign, details or ())) if self._shows_thinking else b"")
        self._state.add(delta)
        is_signed = any(each.get("signature") for each in details_of(delta))
        return written + (self._blocks.close_last("thinking") if is_signed else b"")

    def _thought_of(self, delta: Json) -> str:
        """The reasoning of a delta, also where its details alone hold the text, or a mark beside the content."""
        if "extra_content" in delta and is_thought(delta):
            return _text(delta)
        if thought := reasoning(delta):
            self._has_reasoning = True
            return thought
        return details_text(details_of(delta)) if "reasoning_details" in delta and not self._has_reasoning else ""

    def _seal_thought(self) -> list[Json]:
        """Deltas that end a thinking block: a signature that seals the provider state received with the block."""
        thought, self._thought = "".join(self._thought), []
        if not self._context.maker or not (state := self._state.take(thought)):
            return []
        return [{"type": "signature_delta", "signature": sealed(self._context.maker, state)}]

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

    # -- calls ---------------------------------------------------------------------------

    def _tool(self, call: Mapping[str, Any], place: int) -> bytes:
        delta = call_delta(call, place)
        known = self._calls.add(delta)
        if delta.state and known.number in self._given and self._context.maker:
            self._state.add_late(self._given[known.number], delta.state)
        return self._blocks.add_arguments(known, delta.text)

    def _given_id(self, call: StreamedCall) -> str:
        self._given[call.number] = given = self._ids.given(call.identity, call.state)
        return given

    def _finish(self) -> bytes:
        if self._over:
            return b""
        self._over = True
        stop = self._stop or _stop({}, bool(self._calls.all), self._refused)
        end = {"type": "message_delta", "delta": stop, "usage": _usage(self._usage, self._context) | self._speed}
        written = self._blocks.finish()
        if state := self._state.take():
            written += self._blocks.add_whole("redacted_thinking", {"data": sealed(self._context.maker, state)})
        return written + sse(end, "message_delta") + sse({"type": "message_stop"}, "message_stop")


_MEMBERS = frozenset(MEMBERS)
