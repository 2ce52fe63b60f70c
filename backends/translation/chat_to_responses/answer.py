"""Turns replies and events of OpenAI's Responses into chat completions.

Texts of several messages of one response are joined: a chat completion has one message. Results of tools run by the
provider are left out; no translated request asks for such tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from backends import failures
from backends.stream.sse import ServerSentEvent
from backends.translation.reply_members import as_count, as_object, as_objects, decoded
from backends.translation.translation import NO_CONTEXT, AnswerContext, ChatEvents, Json, sse
from backends.translation.turn_state.seals import sealed

_CALLS = {"function_call": "function", "custom_tool_call": "custom"}  # kinds of calls, by type of the item
_TEXT_OF_CALL = {"function": "arguments", "custom": "input"}
ITEM_FORMAT = "openai-responses-v1"  # of details of reasoning that hold an item (openrouter.ai/docs, reasoning tokens)
_STATEFUL = ("reasoning",)  # types of items whose `encrypted_content` the server wants back
_REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}  # finish_reason by incomplete_details


class ChatFromResponsesStream(ChatEvents):
    """Stream of a response, for a caller of chat completions."""

    def __init__(self, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> None:
        super().__init__()
        self._maker = context.maker
        self._thoughts = 0  # items of reasoning with state
        self._wants_usage = as_object(body.get("stream_options")).get("include_usage") is True
        self._head: Json = {}  # members of all chunks
        self._calls: dict[Any, int] = {}  # number of a call by output_index
        self._kinds: list[str] = []  # of the calls
        self._has_text: set[Any] = set()  # output_index of calls whose text has begun

    def translate(self, event: ServerSentEvent) -> bytes:
        if self.ended:
            return b""
        data = decoded(event.data)
        kind = data.get("type")
        if not isinstance(kind, str):
            return self.error(failures.of_event(data["error"])) if data.get("error") else b""
        if kind.endswith(".delta"):
            return self._delta(kind, data)
        read = _EVENTS.get(kind)
        return b"" if read is None else read(self, data)

    # -- events --------------------------------------------------------------------------

    def _delta(self, kind: str, data: Mapping[str, Any]) -> bytes:
        text = data.get("delta")
        if not isinstance(text, str):
            return b""
        if (name := _DELTAS.get(kind)) is not None:
            logprobs = data.get("logprobs") or None
            return self._chunk({name: text}, logprobs={"content": logprobs} if logprobs else None)
        if kind in _CALL_DELTAS:
            return self._call_text(data.get("output_index"), text)
        return b""

    def _on_created(self, data: Mapping[str, Any]) -> bytes:
        if self._head:
            return b""
        self._head = _head(as_object(data.get("response")), "chat.completion.chunk")
        return self._chunk({"role": "assistant", "content": ""})

    def _on_item(self, data: Mapping[str, Any]) -> bytes:
        item = as_object(data.get("item"))
        kind = _CALLS.get(str(item.get("type")))
        if kind is None:
            return b""
        index = self._calls[str(data.get("output_index"))] = len(self._kinds)
        self._kinds.append(kind)
        call = {"name": item.get("name", ""), _TEXT_OF_CALL[kind]: ""}
        return self._chunk({"tool_calls": [{"index": index, "id": item.get("call_id"), "type": kind, kind: call}]})

    def _call_text(self, output_index: Any, text: str) -> bytes:
        index = self._calls.get(str(output_index))
        if index is None or not text:
            return b""
        self._has_text.add(index)
        kind = self._kinds[index]
        return self._chunk({"tool_calls": [{"index": index, kind: {_TEXT_OF_CALL[kind]: text}}]})

    def _on_item_done(self, data: Mapping[str, Any]) -> bytes:
        """State of reasoning; the text of a call whose server has sent no deltas."""
        item = as_object(data.get("item"))
        if item.get("type") in _STATEFUL and item.get("encrypted_content"):
            self._thoughts += 1
            return self._chunk({"reasoning_details": [_detail(item, self._thoughts - 1, self._maker)]})
        index = self._calls.get(str(data.get("output_index")))
        if index is None or index in self._has_text:
            return b""
        text = item.get(_TEXT_OF_CALL[self._kinds[index]])
        return self._call_text(data.get("output_index"), text) if isinstance(text, str) else b""

    def _on_summary_part(self, data: Mapping[str, Any]) -> bytes:
        return self._chunk({"reasoning": "\n\n"}) if data.get("summary_index") else b""

    def _on_annotation(self, data: Mapping[str, Any]) -> bytes:
        return self._chunk({"annotations": [_annotation(as_object(data.get("annotation")))]})

    def _on_end(self, data: Mapping[str, Any]) -> bytes:
        response = as_object(data.get("response"))
        tier = {"service_tier": response["service_tier"]} if response.get("service_tier") else {}
        end = self._chunk({}, _finish_reason(response, bool(self._kinds)), **tier)
        if self._wants_usage:
            end += sse({**self._head, "choices": [], "usage": _usage(response.get("usage"))})
        self.ended = True
        return end + b"data: [DONE]\n\n"

    def _on_failed(self, data: Mapping[str, Any]) -> bytes:
        response = as_object(data.get("response"))
        return self.error(failures.of_event(response.get("error") or data.get("error") or data))

    def _chunk(self, delta: Json, finish_reason: str | None = None, logprobs: Any = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse({**self._head, **more, "choices": [choice]})


_DELTAS = {
    "response.output_text.delta": "content",
    "response.refusal.delta": "refusal",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
}
_CALL_DELTAS = ("response.function_call_arguments.delta", "response.custom_tool_call_input.delta")
_EVENTS = {
    "response.created": ChatFromResponsesStream._on_created,
    "response.in_progress": ChatFromResponsesStream._on_created,
    "response.output_item.added": ChatFromResponsesStream._on_item,
    "response.output_item.done": ChatFromResponsesStream._on_item_done,
    "response.reasoning_summary_part.added": ChatFromResponsesStream._on_summary_part,
    "response.output_text.annotation.added": ChatFromResponsesStream._on_annotation,
    "response.completed": ChatFromResponsesStream._on_end,
    "response.incomplete": ChatFromResponsesStream._on_end,
    "response.failed": ChatFromResponsesStream._on_failed,
    "error": ChatFromResponsesStream._on_failed,
}


# -- whole replies -----------------------------------------------------------------------------


def chat_from_response(reply: Json, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> Json:
    """The chat completion for a whole response."""
    items = as_objects(reply.get("output"))
    parts = [part for item in items if item.get("type") == "message" for part in as_objects(item.get("content"))]
    calls = [_call(item) for item in items if item.get("type") in _CALLS]
    message: Json = {
        "role": "assistant",
        "content": _joined(parts, "output_text", "text"),
        "refusal": _joined(parts, "refusal", "refusal"),
    }
    if reasoning := "".join(_reasoning(item) for item in items if item.get("type") == "reasoning"):
        message["reasoning"] = reasoning
    thoughts = [item for item in items if item.get("type") in _STATEFUL and item.get("encrypted_content")]
    if details := [_detail(item, place, context.maker) for place, item in enumerate(thoughts)]:
        message["reasoning_details"] = details
    if annotations := [_annotation(each) for part in parts for each in as_objects(part.get("annotations"))]:
        message["annotations"] = annotations
    if calls:
        message["tool_calls"] = calls
    logprobs = [each for part in parts for each in as_objects(part.get("logprobs"))]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
        "finish_reason": _finish_reason(reply, bool(calls)),
    }
    tier = {"service_tier": reply["service_tier"]} if reply.get("service_tier") else {}
    return {**_head(reply, "chat.completion"), **tier, "choices": [choice], "usage": _usage(reply.get("usage"))}


def _joined(parts: list[Mapping[str, Any]], kind: str, key: str) -> str | None:
    texts = [text for part in parts if part.get("type") == kind and isinstance(text := part.get(key), str)]
    return "".join(texts) if texts else None


def _reasoning(item: Mapping[str, Any]) -> str:
    """Text of a reasoning item; its summary where the text is hidden."""
    text = _joined(list(as_objects(item.get("content"))), "reasoning_text", "text")
    return text or "\n\n".join(str(part.get("text", "")) for part in as_objects(item.get("summary")))


def _detail(item: Mapping[str, Any], place: int, maker: str) -> Json:
    """Wrap a whole encrypted reasoning item in a reasoning detail: the server requires the unchanged item back."""
    state = {"item": dict(item)}
    detail = {"type": "reasoning.encrypted", "data": sealed(maker, state) if maker else state, "index": place}
    return {**detail, "format": ITEM_FORMAT, "id": item.get("id")}


def _call(item: Mapping[str, Any]) -> Json:
    kind = _CALLS[item["type"]]
    text = _TEXT_OF_CALL[kind]
    return {"id": item.get("call_id"), "type": kind, kind: {"name": item.get("name"), text: item.get(text, "")}}


def _annotation(annotation: Mapping[str, Any]) -> Json:
    members = {name: value for name, value in annotation.items() if name != "type"}
    return {"type": annotation.get("type"), str(annotation.get("type")): members}


def _finish_reason(response: Mapping[str, Any], calls: bool) -> str:
    if response.get("status") == "incomplete":
        return _REASONS.get(str(as_object(response.get("incomplete_details")).get("reason")), "length")
    return "tool_calls" if calls else "stop"


def _head(response: Mapping[str, Any], kind: str) -> Json:
    created = response.get("created_at")
    return {
        "id": "chatcmpl-" + str(response.get("id", "")).removeprefix("resp_"),
        "object": kind,
        "created": int(created) if isinstance(created, int | float) and isfinite(created) else 0,
        "model": response.get("model", ""),
    }


def _usage(usage: Any) -> Json | None:
    """Usage of a chat completion; None: not reported."""
    if not isinstance(usage, Mapping):
        return None
    details, output_details = as_object(usage.get("input_tokens_details")), usage.get("output_tokens_details")
    prompt, completion = as_count(usage.get("input_tokens")), as_count(usage.get("output_tokens"))
    cached = {name: as_count(details.get(name)) for name in ("cached_tokens", "cache_write_tokens")}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": as_count(usage.get("total_tokens")) or prompt + completion,
        "prompt_tokens_details": cached,
        "completion_tokens_details": {"reasoning_tokens": as_count(as_object(output_details).get("reasoning_tokens"))},
    }
