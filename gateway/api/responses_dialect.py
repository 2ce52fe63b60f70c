"""OpenAI's Responses dialect towards callers: bodies read, error events written.

Error replies have OpenAI's envelope. The shapes are those of platform.openai.com/docs/api-reference/responses (November
2026).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from backends.interface import Failure, Operation
from gateway.api.api_error import bad_request
from gateway.api.parsed_body import Parameters, ParsedBody, checked, decode_object, output_limit, translated_prompt
from gateway.strict_json import encode

OPERATIONS = (Operation.RESPONSES, Operation.COMPACT, Operation.INPUT_TOKENS)


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


def read(operation: Operation, raw: bytes) -> ParsedBody:
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


def error_event(failure: Failure) -> bytes:
    """The event that ends an untranslated stream by an error; the number of the last event is not known here."""
    event = {"type": "error", "code": failure.code or failure.type, "message": failure.message, "param": failure.param}
    return b"event: error\ndata: " + encode({**event, "sequence_number": 0}) + b"\n\n"
