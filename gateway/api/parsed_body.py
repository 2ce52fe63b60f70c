"""A request body with the parts that the gateway reads, whatever the dialect.

Shapes are of OpenAI's chat completions and completions: the fields read or type-checked by the gateway.

The effort of reasoning has the words of its dialect. Chat completions: `reasoning_effort`. Responses, OpenRouter:
`reasoning.effort` or `.max_tokens`. Messages:
`thinking.budget_tokens`, and `output_config.effort` where thinking is adaptive. Gemini's chat completions: a level or a
budget in `extra_body.google.thinking_config`. Qwen and other open models: `enable_thinking` and `thinking_budget`, or
a switch of the chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Raw

from backends.interface import Operation
from backends.translation.registry import as_chat
from backends.translation.reply_translation import SHAPE_ERRORS
from gateway.api.api_error import ApiError, bad_request
from gateway.strict_json import BadJson, decode
from gateway.tokenize.prompt import Prompt, prompt_of
from policies.routes.when import EFFORTS

Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class MessageShape(msgspec.Struct):
    """A message of a chat, as far as a prompt is made of it."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _OpenAIShape(msgspec.Struct):
    model: Annotated[str, msgspec.Meta(min_length=1)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None  # any: the engine judges the value
    n: Choices | None = None
    best_of: Choices | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    user: str | None = None


class ChatShape(_OpenAIShape, kw_only=True):
    messages: Annotated[list[MessageShape], msgspec.Meta(min_length=1)]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None


class CompletionShape(_OpenAIShape, kw_only=True):
    prompt: str | list[str | int | list[int]]


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


MOST = 10_000_000  # tokens, beyond which a budget is none
SWITCHED_ON = "medium"  # of thinking that is switched on without an effort or a budget: OpenAI's default

_GEMINI, _TEMPLATE = ("extra_body", "google", "thinking_config"), "chat_template_kwargs"
_SWITCHES = (("enable_thinking",), (_TEMPLATE, "enable_thinking"), (_TEMPLATE, "thinking"))
_BUDGETS = (
    ("thinking", "budget_tokens"),
    ("reasoning", "max_tokens"),
    (*_GEMINI, "thinking_budget"),
    ("thinking_budget",),
)
_NAMED = ("reasoning_effort",), ("reasoning", "effort"), ("output_config", "effort"), (*_GEMINI, "thinking_level")
EFFORT_MEMBERS = frozenset(path[0] for path in (*_SWITCHES, *_BUDGETS, *_NAMED))  # a body without these names none
_WORDS = frozenset(EFFORTS)


def reasoning_effort(body: Mapping[str, Any]) -> str:
    """One of EFFORTS, or a budget as `8192 tokens`; empty: none is named that is known. No other text of a caller."""
    switches = [_at(body, path) for path in _SWITCHES]
    if _at(body, ("thinking", "type")) == "disabled" or any(switch is False for switch in switches):
        return "none"
    for path in _BUDGETS:
        if type(tokens := _at(body, path)) is int and 0 <= tokens <= MOST:
            return f"{tokens} tokens" if tokens else "none"
    for path in _NAMED:
        if isinstance(effort := _at(body, path), str) and effort in _WORDS:
            return effort
    return SWITCHED_ON if any(switch is True for switch in switches) else ""


def _at(body: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The member at the path; None: there is none."""
    found: Any = body
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
        found = decode(found) if isinstance(found, Raw) else found
    return found
