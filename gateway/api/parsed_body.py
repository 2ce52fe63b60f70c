"""A request body with the parts that the gateway reads, whatever the dialect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from backends.interface import Operation
from backends.translation.registry import as_chat
from backends.translation.reply_translation import SHAPE_ERRORS
from gateway.api.api_error import ApiError, bad_request
from gateway.api.openai_shapes import MessageShape
from gateway.strict_json import BadJson, decode
from gateway.tokenize.prompt import Prompt, prompt_of

_JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_PYTHON_TYPE = re.compile(r"\b(str|int|float|bool)\b")
Shape = TypeVar("Shape")

MAX_INTEGER = 1 << 53  # that a double holds exactly


@dataclass(slots=True)
class Parameters:
    """The members of a body with a meaning for the gateway, except the prompt."""

    model: str
    stream: bool
    wants_usage: bool
    max_tokens: int | None
    tools: bool
    json_schema: bool
    choices: int = 1
    wants_cost: bool = False
    definitions: tuple[int, ...] = field(default=(), compare=False)  # digests of fields rendered before the messages


@dataclass(slots=True)
class ParsedBody:
    """A valid body. In `members`, elements of arrays and members of objects may be `Raw` JSON."""

    members: Mapping[str, Any]
    prompt: Prompt
    parameters: Parameters
    user_turns: int = 1
    images: bool = False
    verbatim: Mapping[str, Any] | None = None  # the members with prefix breakers, if any


def decode_object(raw: bytes) -> dict[str, Any]:
    """Decode a body. Raises ApiError (400)."""
    try:
        body = decode(raw)
    except BadJson as error:
        raise bad_request(f"The body is not valid JSON: {error}.", logged="the body is not valid JSON") from None
    if type(body) is not dict:
        raise bad_request("The body must be a JSON object.")
    return body


def checked(body: Mapping[str, Any], shape: type[Shape]) -> Shape:
    """Convert the members of a shape. Raises ApiError (400) with the name of the member."""
    try:
        return msgspec.convert(body, shape)
    except msgspec.ValidationError:
        pass
    try:
        return msgspec.convert(_with_integers(body), shape)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


def _with_integers(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The members with `1.0` read as the integer that JSON Schema takes it for."""
    return {
        name: int(value) if type(value) is float and value.is_integer() and abs(value) < MAX_INTEGER else value
        for name, value in body.items()
    }


def output_limit(asked: int | None) -> int | None:
    """The limit of an answer, for forecasts and quotas. Below 1 is none: -1 is unlimited to many engines, 0 asks for
    log probabilities of the prompt."""
    return asked if asked is not None and asked > 0 else None


def translated_prompt(operation: Operation, body: Mapping[str, Any]) -> Prompt:
    """The prompt of a body in a dialect other than chat. Raises ApiError (400) for members of no known shape."""
    try:
        chat = as_chat(operation, body)
        msgspec.convert(chat["messages"], list[MessageShape])
        return prompt_of(Operation.CHAT, chat)
    except SHAPE_ERRORS as error:
        raise bad_request("The messages of this request have no known shape.", logged=type(error).__name__) from None


def _invalid(error: str) -> ApiError:
    """The reply for an error of msgspec, with JSON's names of types."""
    message, _, place = error.partition(" - at `$.")
    param = place.rstrip("`") or None
    if message.startswith("Object missing required field") and param is None:
        param = message.split("`")[1]
    named = _PYTHON_TYPE.sub(lambda found: _JSON_TYPES[found[0]], message)
    named = named.replace("`", "'").replace("Expected", "expected", 1)
    return bad_request(f"'{param}': {named}." if param else f"{named}.", param)
