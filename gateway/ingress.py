"""HTTP to an InferenceRequest: read, refuse what is hostile, validate what decisions read.

Everything else in the body passes through untouched. What was parsed is what is forwarded:
nothing behind this module sees the caller's bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import count
from typing import Annotated, Any

import msgspec

from backends.interface import Operation
from gateway.refusal import bad_request
from gateway.strictjson import BadJson, decode
from policies.value import value

_ID_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.:")
_PROCESS = os.urandom(8).hex()  # what tells our ids from those of other gateways and other times
_ordinals = count(1)
_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_TYPE = re.compile(r"\b(str|int|float|bool)\b")
_TOKENS = Annotated[int, msgspec.Meta(ge=1)]


@value
class InferenceRequest:
    """A request that was understood. `body` is what was parsed and must not be changed in place."""

    operation: Operation
    body: Mapping[str, Any]
    model: str
    stream: bool
    wants_usage: bool  # the caller itself asked for the usage chunk
    max_tokens: int | None
    turns: int
    tools: bool
    images: bool
    json_schema: bool
    priority: int
    arrival: float
    request_id: str
    traceparent: str
    session: str
    ttft_budget: float | None  # s, asked for by header
    tpot_budget: float | None
    headers: Mapping[str, str]  # those that a policy's `when` names
    size: int  # bytes of body


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Common(msgspec.Struct):
    """The fields whose type decides something here; all others are the engine's business."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _TOKENS | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    user: str | None = None


class _Chat(_Common, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: _TOKENS | None = None
    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None


class _Completion(_Common, kw_only=True):
    prompt: str | list[str | int | list[int]]


def parse(
    operation: Operation,
    raw: bytes,
    headers: Mapping[str, str],
    arrival: float,
    request_id: str,
    wanted: frozenset[str] = frozenset(),
) -> InferenceRequest:
    """Raises Refusal (400) that names the field. `wanted`: header names that policies look at."""
    try:
        body = decode(raw)
    except BadJson as error:
        raise bad_request(f"The body is not valid JSON: {error}.", logged="the body is not valid JSON") from None
    if type(body) is not dict:
        raise bad_request("The body must be a JSON object.")
    shape = _shape(operation, body)
    messages = shape.messages if isinstance(shape, _Chat) else []
    return InferenceRequest(
        operation=operation,
        body=body,
        model=shape.model,
        stream=bool(shape.stream),
        wants_usage=bool(shape.stream_options and shape.stream_options.include_usage),
        max_tokens=_max_tokens(shape),
        turns=sum(message.role == "user" for message in messages) or 1,
        tools=bool(body.get("tools")),
        images=_has_images(messages),
        json_schema=_asks_schema(body),
        priority=_integer(headers, "x-priority"),
        arrival=arrival,
        request_id=request_id,
        traceparent=headers.get("traceparent", "")[:128],
        session=headers.get("x-session-id", "")[:256],
        ttft_budget=_budget(headers, "x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"),
        tpot_budget=_budget(headers, "x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"),
        headers={name: headers[name] for name in wanted if name in headers},
        size=len(raw),
    )


def _shape(operation: Operation, body: dict[str, Any]) -> _Chat | _Completion:
    shape: type[_Chat | _Completion] = _Chat if operation is Operation.CHAT else _Completion
    try:
        return msgspec.convert(body, shape)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        param = place.rstrip("`") or None
        if message.startswith("Object missing required field") and param is None:
            param = message.split("`")[1]
        where = f"'{param}': " if param else ""
        raise bad_request(f"{where}{_plain(message)}.", param) from None


def _plain(message: str) -> str:
    """msgspec's words in JSON's terms."""
    return _TYPE.sub(lambda found: _TYPES[found[0]], message).replace("`", "'").replace("Expected", "expected", 1)


def _max_tokens(shape: _Chat | _Completion) -> int | None:
    if isinstance(shape, _Chat) and shape.max_completion_tokens is not None:
        return shape.max_completion_tokens
    return shape.max_tokens


def _has_images(messages: list[_Message]) -> bool:
    return any(
        type(m.content) is list and any(part.get("type") in ("image_url", "input_image") for part in m.content)
        for m in messages
    )


def _asks_schema(body: Mapping[str, Any]) -> bool:
    wanted = body.get("response_format")  # of a completion, anything: the engine's business
    return isinstance(wanted, dict) and wanted.get("type") in ("json_schema", "json_object")


def _integer(headers: Mapping[str, str], name: str) -> int:
    value = headers.get(name)
    if value is None:
        return 0
    try:
        return int(value)
    except ValueError:
        raise bad_request(f"The header {name} must be an integer.", name) from None


def _budget(headers: Mapping[str, str], *names: str) -> float | None:
    for name in names:
        if (value := headers.get(name)) is not None:
            try:
                millis = float(value)
            except ValueError:
                millis = -1.0
            if not 0 < millis < 1e9:
                raise bad_request(f"The header {name} must be a positive number of milliseconds.", name)
            return millis / 1e3
    return None


def request_id(headers: Mapping[str, str]) -> str:
    """The caller's, where it is short and plain (it is logged and sent on); otherwise a new one."""
    given = headers.get("x-request-id", "")
    if given and len(given) <= 128 and _ID_CHARACTERS.issuperset(given):
        return given
    return f"req_{_PROCESS}{next(_ordinals):08x}"
