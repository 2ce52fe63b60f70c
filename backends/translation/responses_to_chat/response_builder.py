"""Builds a response of OpenAI's Responses, whole and as events, of the deltas of a chat completion.

- A whole reply is the last event of a stream: both are built by `ResponseBuilder`.
- Ids of items are made of the chat completion's id, so a stream's bytes do not depend on the clock, nor on the reads
  that brought its chunks; where the server gives none, of random characters.
- Provider state of the turn is sealed: into `encrypted_content` of the reasoning item, state of a call into `call_id`.
- A function of a namespace returns with the caller's two names.
- Calls stay open to the end: a server may send the arguments of parallel calls in turns.
- Reasoning is also sent as summary on request (`reasoning.summary`): most clients show summaries only.

Event names and members: openai-python 3.54, types/responses (2026-11).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.interface import Failure
from backends.stream.event_shapes import End, end_of, failure_of_end
from backends.translation.reply_members import as_count, as_object, as_objects
from backends.translation.responses_to_chat.namespaces import Namespaces
from backends.translation.streamed_calls import CallDelta, StreamedCall, StreamedCalls, call_delta
from backends.translation.translation import NO_CONTEXT, AnswerContext, Json, KeptTexts, sse
from backends.translation.turn_state.call_ids import CallIds, made_id
from backends.translation.turn_state.chat_state import ChatState, details_of, details_text, is_thought
from backends.translation.turn_state.seals import sealed

_INCOMPLETE = {End.LENGTH: "max_output_tokens", End.FILTERED: "content_filter"}
_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}  # of OpenAI, by status; else server_error


@dataclass(frozen=True, slots=True)
class _PartKind:
    """A kind of streamed text: type of the item, type of the part, prefix of the events."""

    item: str
    part: str
    key: str  # member of the part that holds the text
    prefix: str
    place: str = "content"  # member of the item that holds the part
    part_prefix: str = "response.content_part"  # of the events of the part


_REASONING = _PartKind("reasoning", "reasoning_text", "text", "response.reasoning_text")
_SUMMARY = _PartKind(
    "reasoning",
    "summary_text",
    "text",
    "response.reasoning_summary_text",
    place="summary",
    part_prefix="response.reasoning_summary_part",
)
_TEXT = _PartKind("message", "output_text", "text", "response.output_text")
_REFUSAL = _PartKind("message", "refusal", "refusal", "response.refusal")


@dataclass(frozen=True, slots=True)
class _CallKind:
    """A kind of call: type and id prefix of the item, member with the text, prefix of the events."""

    item: str
    id_prefix: str
    key: str
    prefix: str


_FUNCTION = _CallKind("function_call", "fc", "arguments", "response.function_call_arguments")
_CUSTOM = _CallKind("custom_tool_call", "ctc", "input", "response.custom_tool_call_input")


@dataclass(slots=True)
class _Call:
    """A call under construction. `item`: empty until the caller is told of the call."""

    streamed: StreamedCall
    pieces: list[str] = field(default_factory=list)
    output_index: int = -1
    item: Json = field(default_factory=dict)

    @property
    def kind(self) -> _CallKind:
        return _CUSTOM if self.streamed.is_custom else _FUNCTION


class ResponseBuilder:
    """Builds a response and its events. `events` collects the bytes to be taken. `body`: the caller's request."""

    def __init__(self, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> None:
        self._maker = context.maker
        self._ids = CallIds(body, context)
        self._namespaces = Namespaces(body)
        self._kept = KeptTexts()
        self._state = ChatState(self._kept)  # not sealed yet
        self._has_reasoning = False  # the text of details is that of the reasoning
        self.response: Json = {}  # once begun
        self.ended = False
        self.events: list[bytes] = []
        self._body = body
        self._reasoning = _SUMMARY if as_object(body.get("reasoning")).get("summary") else _REASONING
        self._suffix = ""  # of all ids
        self._sequence = 0
        self._output: list[Json] = []
        self._item: Json = {}  # the open reasoning or message
        self._kind: _PartKind | None = None  # of the open part
        self._pieces: list[str] = []  # of the open part
        self._logprobs: list[Any] = []
        self._annotations: list[Mapping[str, Any]] = []
        self._streamed = StreamedCalls(self._kept)
        self._calls: list[_Call] = []
        self._opened = 0  # calls that the caller was told of

    def take(self) -> bytes:
        """Return the new events."""
        events, self.events = b"".join(self.events), []
        return events

    # -- life of the response ------------------------------------------------------------

    def begin(self, chat_id: Any, created: Any, model: Any) -> None:
        self._suffix = str(chat_id or made_id("")).removeprefix("chatcmpl-")
        self.response = {
            "id": f"resp_{self._suffix}",
            "object": "response",
            "created_at": created if type(created) in (int, float) else 0,
            "model": model if isinstance(model, str) else self._body.get("model", ""),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **echoed_members(self._body),
        }
        self._emit("response.created", response=self.response)
        self._emit("response.in_progress", response=self.response)

    def finish(self, reason: str, usage: Any, service_tier: Any) -> None:
        """End the response by the finish_reason of the chat completion; by an error, where that says nothing good."""
        if reason and (failure := failure_of_end(reason)) is not None:
            return self.fail(failure)
        incomplete = _INCOMPLETE.get(end_of(reason))
        status = "completed" if incomplete is None else "incomplete"
        for call in self._calls[self._opened :]:
            self._open_call(call)
        self._close_item(status)
        self._seal_rest()
        self._close_calls(status)
        details = None if incomplete is None else {"reason": incomplete}
        tier = {"service_tier": service_tier} if service_tier else {}
        return self._end(status, incomplete_details=details, usage=_usage_of_chat(usage), **tier)

    def fail(self, failure: Failure) -> None:
        """End the response with an error. Earlier items stay incomplete."""
        if not self.response:
            self.begin(None, None, None)
        code = _ERROR_CODES.get(failure.status, "server_error")
        self._end("failed", error={"code": code, "message": failure.message})

    def _end(self, status: str, **members: Any) -> None:
        self.ended = True
        self.response |= {"status": status, "output": self._output, **members}
        self._emit(f"response.{status}", response=self.response)

    # -- text ----------------------------------------------------------------------------

    def add(self, delta: Mapping[str, Any], logprobs: Any = None) -> None:
        """Add a chat completion's delta, or its whole message."""
        text, reasoning = _texts(delta.get("content"))
        if "extra_content" in delta and is_thought(delta):
            text, reasoning = None, text
        if self._maker:
            self._state.add(delta)
        thought = reasoning or delta.get("reasoning") or delta.get("reasoning_content")
        self._has_reasoning = self._has_reasoning or bool(thought)
        self._add_text(self._reasoning, thought if self._has_reasoning else details_text(details_of(delta)))
        self._add_text(_TEXT, text, logprobs)
        for annotation in as_objects(delta.get("annotations")):
            self._annotate(annotation)
        self._add_text(_REFUSAL, delta.get("refusal"))
        for place, call in enumerate(as_objects(delta.get("tool_calls"))):
            self._add_call(call_delta(call, place))

    def _add_text(self, kind: _PartKind, text: Any, logprobs: Any = None) -> None:
        if not isinstance(text, str) or not text:
            return
        if self._kind is not kind:
            self._open_part(kind)
        self._kept.take(text)
        self._pieces.append(text)
        members = {} if kind is not _TEXT else {"logprobs": self._take_logprobs(logprobs)}
        self._emit(f"{kind.prefix}.delta", **self._place(), delta=text, **members)

    def _take_logprobs(self, logprobs: Any) -> list[Any]:
        entries = logprobs.get("content") if isinstance(logprobs, Mapping) else None
        if not isinstance(entries, list):
            return []
        self._logprobs += entries
        return entries

    def _annotate(self, annotation: Mapping[str, Any]) -> None:
        """A citation of the text so far. Chat completions nest its members."""
        if self._kind is not _TEXT:
            self._open_part(_TEXT)
        if nested := as_object(annotation.get("url_citation")):
            annotation = {"type": "url_citation", **nested}
        number = len(self._annotations)
        self._annotations.append(annotation)
        self._emit(
            "response.output_text.annotation.added", **self._place(), annotation_index=number, annotation=annotation
        )

    def _open_part(self, kind: _PartKind) -> None:
        self._close_part()
        if self._item.get("type") != kind.item:
            self._close_item("completed")
            self._open_item(kind.item)
        self._kind, self._pieces = kind, []
        self._logprobs, self._annotations = [], []
        self._item[kind.place].append(None)  # counted in `_place`
        self._emit(f"{kind.part_prefix}.added", **self._place(), part=self._part(""))

    def _open_item(self, kind: str) -> None:
        place = len(self._output)
        if kind == "reasoning":
            self._item = {"id": f"rs_{self._suffix}_{place}", "type": kind, "summary": [], "content": []}
        else:
            member = {"role": "assistant", "status": "in_progress", "content": []}
            self._item = {"id": f"msg_{self._suffix}_{place}", "type": kind, **member}
        self._output.append(self._item)
        self._emit("response.output_item.added", output_index=place, item=self._item)

    def _place(self) -> Json:
        assert self._kind is not None
        item, within = self._item, self._kind.place
        place = len(self._output) - 1  # the open item is the last one
        return {"item_id": item["id"], "output_index": place, f"{within}_index": len(item[within]) - 1}

    def _part(self, text: str) -> Json:
        assert self._kind is not None
        part: Json = {"type": self._kind.part, self._kind.key: text}
        if self._kind is _TEXT:
            part |= {"annotations": self._annotations, "logprobs": self._logprobs}
        return part

    def _close_part(self) -> None:
        if self._kind is None:
            return
        text = "".join(self._pieces)
        part = self._item[self._kind.place][-1] = self._part(text)
        members = {self._kind.key: text, **({"logprobs": self._logprobs} if self._kind is _TEXT else {})}
        self._emit(f"{self._kind.prefix}.done", **self._place(), **members)
        self._emit(f"{self._kind.part_prefix}.done", **self._place(), part=part)
        self._kind = None

    def _close_item(self, status: str) -> None:
        if not self._item:
            return
        self._close_part()
        if "status" in self._item:
            self._item["status"] = status
        elif self._maker and "encrypted_content" not in self._item:  # even without state: names the maker
            self._item["encrypted_content"] = sealed(self._maker, self._state.take(reasoning_text(self._item)))
        self._emit("response.output_item.done", output_index=len(self._output) - 1, item=self._item)
        self._item = {}

    def _seal_rest(self) -> None:
        """State beside which no reasoning has come."""
        if self._maker and (state := self._state.take()):
            self._open_item("reasoning")
            self._item["encrypted_content"] = sealed(self._maker, state)
            self._close_item("completed")

    # -- calls ---------------------------------------------------------------------------

    def _add_call(self, delta: CallDelta) -> None:
        streamed = self._streamed.add(delta)
        if streamed.number == len(self._calls):
            self._calls.append(_Call(streamed))
        call = self._calls[streamed.number]
        if delta.state and call.item and self._maker:
            self._state.add_late(call.item["call_id"], delta.state)
        if delta.text:
            self._kept.take(delta.text)
            call.pieces.append(delta.text)
            if call.item:
                self._add_call_text(call, delta.text)
        while self._opened < len(self._calls) and self._calls[self._opened].streamed.is_ready:
            self._open_call(self._calls[self._opened])
            self._opened += 1

    def _open_call(self, call: _Call) -> None:
        self._close_item("completed")
        kind, place = call.kind, len(self._output)
        call.output_index = place
        call.item = {"id": f"{kind.id_prefix}_{self._suffix}_{place}", "type": kind.item, "status": "in_progress"}
        call_id = self._ids.given(call.streamed.identity, call.streamed.state)
        call.item |= {"call_id": call_id, **self._namespaces.named(call.streamed.name), kind.key: ""}
        self._output.append(call.item)
        self._emit("response.output_item.added", output_index=place, item=call.item)
        if call.pieces:
            self._add_call_text(call, "".join(call.pieces))

    def _add_call_text(self, call: _Call, text: str) -> None:
        place = {"item_id": call.item["id"], "output_index": call.output_index}
        self._emit(f"{call.kind.prefix}.delta", **place, delta=text)

    def _close_calls(self, status: str) -> None:
        for call in self._calls:
            kind, text = call.kind, "".join(call.pieces)
            call.item |= {kind.key: text, "status": status}
            place = {"item_id": call.item["id"], "output_index": call.output_index}
            self._emit(f"{kind.prefix}.done", **place, **{kind.key: text})
            self._emit("response.output_item.done", output_index=call.output_index, item=call.item)

    def _emit(self, kind: str, **members: Any) -> None:
        self.events.append(sse({"type": kind, "sequence_number": self._sequence, **members}, kind))
        self._sequence += 1


def _usage_of_chat(usage: Any) -> Json | None:
    """Usage of a response; None: not reported."""
    if not isinstance(usage, Mapping):
        return None
    prompt, completion = as_count(usage.get("prompt_tokens")), as_count(usage.get("completion_tokens"))
    details, output_details = as_object(usage.get("prompt_tokens_details")), usage.get("completion_tokens_details")
    cached = details.get("cached_tokens", usage.get("prompt_cache_hit_tokens"))  # the second is DeepSeek's
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": as_count(cached),
            "cache_write_tokens": as_count(details.get("cache_write_tokens")),
        },
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": as_count(as_object(output_details).get("reasoning_tokens"))},
        "total_tokens": as_count(usage.get("total_tokens")) or prompt + completion,
    }


def reasoning_text(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item; its summary where there is no other."""
    contents, summaries = ([part.get("text") for part in as_objects(item.get(name))] for name in ("content", "summary"))
    return _concatenated(contents) or "\n\n".join(text for text in summaries if isinstance(text, str))


def _texts(content: Any) -> tuple[Any, Any]:
    """Text and reasoning of a delta's content. Mistral sends a list of parts while its model thinks."""
    if not isinstance(content, list):
        return content, None
    texts = [part.get("text") for part in as_objects(content)]
    thoughts = [_texts(part.get("thinking"))[0] for part in as_objects(content)]
    return _concatenated(texts), _concatenated(thoughts)


def _concatenated(texts: Iterable[Any]) -> str:
    return "".join(text for text in texts if isinstance(text, str))


# -- members that repeat the request ---------------------------------------------------------------
#
# Members of a response that repeat the request or are constant.
#
# Open Responses (2026-04-24) asks for all of them, and for numbers and names where OpenAI's API has null or nothing: a
# member that the caller has not set has OpenAI's default. `completed_at` is the exception, null in every response: a
# chat completion does not say when it ended, and the bytes of an answer do not depend on the gateway's clock.


_DEFAULTS: Mapping[str, Any] = {
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "prompt_cache_key": None,
    "reasoning": {},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": 1.0,
    "text": {},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
_FIXED: Json = {
    "background": False,
    "completed_at": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "store": False,
}
_NO_REASONING: Json = {"effort": None, "summary": None}
_PLAIN_TEXT: Json = {"format": {"type": "text"}}
_BARE_FUNCTION: Json = {"description": None, "parameters": None, "strict": None}


def echoed_members(body: Mapping[str, Any]) -> Json:
    """The members of the response to the request `body`."""
    given = {name: body.get(name) for name in _DEFAULTS}
    echo = {name: _DEFAULTS[name] if value is None else value for name, value in given.items()}
    echo["reasoning"] = {**_NO_REASONING, **as_object(echo["reasoning"])}
    echo["text"] = {**_PLAIN_TEXT, **as_object(echo["text"])}
    echo["tools"] = [_tool(tool) for tool in as_objects(echo["tools"])]
    return echo | _FIXED


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_BARE_FUNCTION, **tool} if tool.get("type") == "function" else tool
