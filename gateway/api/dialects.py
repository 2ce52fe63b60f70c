"""Dialects of callers by operation: bodies read, errors and descriptions of models written.

- Anthropic's Messages have the shapes of docs.anthropic.com (API reference: Messages, Errors; November 2026).
- OpenAI's Responses have those of platform.openai.com/docs/api-reference/responses (November 2026), and error replies
  in OpenAI's envelope.
- Operations without generated text (embeddings, rerank, score, tokenize) pass through to pools that serve them; the
  gateway reads the model and the text.

Models are described as OpenAI does, or as Anthropic for callers that send `anthropic-version`. A gateway knows no dates
of its routes: `created` is 0, and `created_at` the epoch, as Anthropic's API gives an unknown date (anthropic-python
2.12, types/model_info.py, November 2026). A context window has the names that vLLM (`max_model_len`) and Anthropic
(`max_input_tokens`) give it; an unknown one is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from backends.interface import Failure, Operation
from backends.translation.messages_to_chat.answer import ERROR_TYPES
from backends.translation.messages_to_chat.answer import error_event as messages_error_event
from gateway.api.api_error import ApiError, bad_request, envelope
from gateway.api.parsed_body import (
    MessageShape,
    Parameters,
    ParsedBody,
    checked,
    decode_object,
    output_limit,
    translated_prompt,
)
from gateway.strict_json import encode
from gateway.tokenize.prompt import prompt_of

OVERLOADED = 529  # Anthropic's status for a server without capacity

_IMAGE = "image"
_DETAILED = frozenset(  # codes of errors after which clients go on in another way
    {
        "thread_not_found",
        "thread_already_continued",
        "thread_continue_in_flight",
        "thread_fingerprint_mismatch",
        "thread_unsupported_request",
    }
)


class _Turn(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class _Counted(msgspec.Struct):
    """Fields read or type-checked by the gateway."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    messages: Annotated[list[_Turn], msgspec.Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    output_config: dict[str, Any] | None = None
    stream: bool | None = None


class _Messages(_Counted, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None


def read_messages(operation: Operation, raw: bytes) -> ParsedBody:
    """Raises ApiError (400)."""
    body = decode_object(raw)
    valid = checked(body, _Messages if operation is Operation.MESSAGES else _Counted)
    kinds = [
        {str(part.get("type")) for part in turn.content} if type(turn.content) is list else set()
        for turn in valid.messages
    ]
    asking = [
        turn.role == "user" and found != {"tool_result"} for turn, found in zip(valid.messages, kinds, strict=True)
    ]
    return ParsedBody(
        members=body,
        prompt=translated_prompt(Operation.MESSAGES, body),
        parameters=Parameters(
            model=valid.model,
            stream=bool(valid.stream) and operation is Operation.MESSAGES,
            wants_usage=True,
            max_tokens=output_limit(valid.max_tokens) if isinstance(valid, _Messages) else 1,
            tools=bool(valid.tools),
            json_schema=bool(valid.output_config and valid.output_config.get("format")),
        ),
        user_turns=sum(asking) or 1,
        images=any(_IMAGE in found for found in kinds),
    )


def speaks_messages(path: str, headers: Mapping[str, str]) -> bool:
    """A caller of Anthropic's API, by the path or by the header of every Anthropic client."""
    return path.startswith(Operation.MESSAGES.value) or "anthropic-version" in headers


def messages_status(error: ApiError) -> int:
    """Status as Anthropic's clients know it."""
    return OVERLOADED if error.status == 503 else error.status


def messages_error_body(error: ApiError, request_id: str = "") -> bytes:
    kind = ERROR_TYPES.get(messages_status(error), "invalid_request_error" if error.status < 500 else "api_error")
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": error.message}}
    if error.code in _DETAILED:
        body["error"]["details"] = {"error_code": error.code}
    return encode(body | {"request_id": request_id or None})


RESPONSES_OPERATIONS = (Operation.RESPONSES, Operation.COMPACT, Operation.INPUT_TOKENS)


class _Responses(msgspec.Struct):
    """Fields read or type-checked by the gateway."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    input: str | list[dict[str, Any]] | None = None
    instructions: str | list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    temperature: float | None = None
    top_p: float | None = None


def read_responses(operation: Operation, raw: bytes) -> ParsedBody:
    """Raises ApiError (400)."""
    body = decode_object(raw)
    valid = checked(body, _Responses)
    if valid.background:
        raise bad_request("'background': responses in the background are not served here.", "background")
    items = valid.input if isinstance(valid.input, list) else []
    text_format = (valid.text or {}).get("format")
    return ParsedBody(
        members=body,
        prompt=translated_prompt(Operation.RESPONSES, body),
        parameters=Parameters(
            model=valid.model,
            stream=bool(valid.stream) and operation is Operation.RESPONSES,
            wants_usage=True,
            max_tokens=1 if operation is Operation.INPUT_TOKENS else output_limit(valid.max_output_tokens),
            tools=bool(valid.tools),
            json_schema=isinstance(text_format, dict) and text_format.get("type") in ("json_schema", "json_object"),
        ),
        user_turns=sum(item.get("role") == "user" for item in items) or 1,
        images=any(_holds_image(item) for item in items),
    )


def _holds_image(item: dict[str, Any]) -> bool:
    content = item.get("content")
    parts = content if isinstance(content, list) else ()
    return any(isinstance(part, dict) and part.get("type") == "input_image" for part in parts)


def responses_error_event(failure: Failure) -> bytes:
    """The event that ends an untranslated stream by an error; the number of the last event is not known here."""
    event = {"type": "error", "code": failure.code or failure.type, "message": failure.message, "param": failure.param}
    return b"event: error\ndata: " + encode({**event, "sequence_number": 0}) + b"\n\n"


_TEXTS = ("input", "query", "documents", "text_1", "text_2", "queries", "prompt")  # members rendered into prompts


class _Pooling(msgspec.Struct):
    model: Annotated[str, msgspec.Meta(min_length=1)]
    messages: list[MessageShape] | None = None


class _Embeddings(_Pooling):
    input: str | list[Any] | None = None


class _Rerank(_Pooling, kw_only=True):
    query: str | dict[str, Any]
    documents: list[Any]


_SHAPES: Mapping[Operation, type[_Pooling]] = {Operation.EMBEDDINGS: _Embeddings, Operation.RERANK: _Rerank}


def read_pooling(operation: Operation, raw: bytes) -> ParsedBody:
    """Raises ApiError (400)."""
    body = decode_object(raw)
    valid = checked(body, _SHAPES.get(operation, _Pooling))
    if isinstance(valid, _Embeddings) and not valid.input and not valid.messages:
        raise bad_request("'input' is required and must not be empty.", "input")
    texts = [text for name in _TEXTS for text in _strings(body.get(name))]
    ids = body.get("input")
    if not texts and isinstance(ids, list) and all(_is_ids(each) for each in ids):
        texts = ids
    if valid.messages:
        prompt = prompt_of(Operation.CHAT, {"messages": body["messages"]})
    else:
        prompt = prompt_of(Operation.COMPLETION, {"prompt": texts or ""})
    parameters = Parameters(
        model=valid.model, stream=False, wants_usage=True, max_tokens=1, tools=False, json_schema=False
    )
    return ParsedBody(members=body, prompt=prompt, parameters=parameters)


def _is_ids(value: Any) -> bool:
    """A token, or the tokens of a text."""
    return isinstance(value, int) or (isinstance(value, list) and all(isinstance(each, int) for each in value))


def _strings(value: Any) -> Iterator[str]:
    """All texts of a member: a text, a list of texts, or of objects with a text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
    elif isinstance(value, dict):
        yield from _strings(value.get("text") or value.get("content"))


EPOCH = "1970-01-01T00:00:00Z"

Described = dict[str, object]


def model_list(windows: Mapping[str, int | None], headers: Mapping[str, str]) -> Described:
    """All on one page. `windows`: context window by name."""
    data = [model_object(name, window, headers) for name, window in windows.items()]
    if not _anthropic(headers):
        return {"object": "list", "data": data}
    names = list(windows)
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def model_object(name: str, window: int | None, headers: Mapping[str, str]) -> Described:
    if not _anthropic(headers):
        known = {} if window is None else {"max_model_len": window}
        return {"id": name, "object": "model", "created": 0, "owned_by": "firsttoken", **known}
    known = {} if window is None else {"max_input_tokens": window}
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": EPOCH,
        "lifecycle": "active",
        **known,
    }


def _anthropic(headers: Mapping[str, str]) -> bool:
    return "anthropic-version" in headers


READERS: Mapping[Operation, Callable[[Operation, bytes], ParsedBody]] = {
    **dict.fromkeys(RESPONSES_OPERATIONS, read_responses),
    Operation.MESSAGES: read_messages,
    Operation.COUNT_TOKENS: read_messages,
    Operation.EMBEDDINGS: read_pooling,
    Operation.RERANK: read_pooling,
    Operation.SCORE: read_pooling,
    Operation.TOKENIZE: read_pooling,
}


def error_reply(error: ApiError, path: str, headers: Mapping[str, str], request_id: str = "") -> tuple[int, bytes]:
    """Status and body of an error in the caller's dialect."""
    if speaks_messages(path, headers):
        return messages_status(error), messages_error_body(error, request_id)
    return error.status, error.body()


def error_event(failure: Failure, path: str) -> bytes:
    """The event that ends a stream by an error, in the caller's dialect."""
    if path == Operation.MESSAGES.value:
        return messages_error_event(failure)
    if path == Operation.RESPONSES.value:
        return responses_error_event(failure)
    return b"data: " + encode(envelope(failure.message, failure.type, failure.code, None)) + b"\n\n"
