"""Anthropic's Messages dialect towards callers: bodies read, errors written.

The shapes are those of docs.anthropic.com (API reference: Messages, Errors; November 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from backends.interface import Operation
from backends.translation.messages_to_chat.answer import ERROR_TYPES
from gateway.api.api_error import ApiError
from gateway.api.parsed_body import Parameters, ParsedBody, checked, decode_object, output_limit, translated_prompt
from gateway.strict_json import encode

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


def read(operation: Operation, raw: bytes) -> ParsedBody:
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


def speaks(path: str, headers: Mapping[str, str]) -> bool:
    """A caller of Anthropic's API, by the path or by the header of every Anthropic client."""
    return path.startswith(Operation.MESSAGES.value) or "anthropic-version" in headers


def status_of(error: ApiError) -> int:
    """Status as Anthropic's clients know it."""
    return OVERLOADED if error.status == 503 else error.status


def error_body(error: ApiError, request_id: str = "") -> bytes:
    kind = ERROR_TYPES.get(status_of(error), "invalid_request_error" if error.status < 500 else "api_error")
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": error.message}}
    if error.code in _DETAILED:
        body["error"]["details"] = {"error_code": error.code}
    return encode(body | {"request_id": request_id or None})
