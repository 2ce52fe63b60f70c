"""What a request's body says, and the prompt that it holds. Everything else in it passes through untouched.

A body is read in one of two ways, with the same result:
- Glanced at. Its own members are read. A message is known by the digest of its text where the same key has sent it
  before, and so are all other fields together; what is new is decoded strictly. So a conversation's next turn costs
  its new messages. What is passed on is as it was written, and all of it was accepted by `gateway.api.strict_json`,
  now or
  earlier.
- Spelled out, where there is anything unusual: decoded whole, which also says what is wrong.

Digests are keyed by the process (Python's SipHash), so that nobody can write two texts that look like one. What one
API key has sent is not known of another's: the time it takes would tell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Raw

from backends.interface import Operation
from gateway.api.api_error import bad_request
from gateway.api.strict_json import MAX_DEPTH, UNREADABLE, BadJson, decode, element, encode, members
from gateway.tokenize.generational_cache import GenerationalCache
from gateway.tokenize.prompt import Prompt, definitions, digest_of, prompt_of

KNOWN_MESSAGES, KNOWN_PARAMETERS = 100_000, 4_000  # entries; 100 and 500 bytes each

_NAME = 256  # characters of a model's name that are kept
_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_TYPE = re.compile(r"\b(str|int|float|bool)\b")
_TOKENS = Annotated[int, msgspec.Meta(ge=1)]
_USER, _IMAGES = 1, 2  # what is kept of a message: whether it is the user's, whether it shows something
_PICTURES = ("image_url", "input_image")
_MESSAGE_DEPTH = MAX_DEPTH - 2  # a message is an element of an array of an object


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


class Parameters(NamedTuple):
    """What a body says besides its prompt."""

    model: str
    stream: bool
    wants_usage: bool
    max_tokens: int | None
    tools: bool
    json_schema: bool


class Reading(NamedTuple):
    """A body that was understood. In `members`, what lies within arrays and objects may be `Raw`."""

    members: Mapping[str, Any]
    prompt: Prompt
    parameters: Parameters
    turns: int = 1
    images: bool = False


class _Known(NamedTuple):
    """Of a body's other fields: what they say, and the digests of those that are rendered before the messages."""

    parameters: Parameters
    definitions: tuple[int, ...]


_NOTHING: Mapping[int, Any] = {}
_messages: GenerationalCache[int] = GenerationalCache(KNOWN_MESSAGES)
_parameters: GenerationalCache[_Known] = GenerationalCache(KNOWN_PARAMETERS)
_SHAPES: Mapping[Operation, type[_Chat | _Completion]] = {Operation.CHAT: _Chat, Operation.COMPLETION: _Completion}
_LEAST: Mapping[str, tuple[type[_Chat | _Completion], Any]] = {  # a prompt, where only the other fields are judged
    "messages": (_Chat, [{"role": "user"}]),
    "prompt": (_Completion, ""),
}


def read(operation: Operation, raw: bytes, key: str | None) -> Reading:
    """Raises Refusal (400) that names the field. `key`: whose requests are known to have been sent before."""
    try:
        return (parse_cached if operation is Operation.CHAT else _glance_at_text)(raw, hash(key))
    except UNREADABLE:
        return parse_full(operation, raw)


# -- glanced at: whatever is unusual raises UNREADABLE -----------------------------------------


def parse_cached(raw: bytes, key: int) -> Reading:
    body = members(raw)
    rest = body.copy()
    messages = rest.pop("messages", None)
    if type(messages) is not list or not messages:
        raise ValueError("no messages")
    parameters, before = _recall("messages", rest, key)
    digests = list(map(hash, map(bytes, messages)))
    keys = [digest ^ key for digest in digests]
    marks = _messages.get_all(keys)
    new = _learn(messages, keys, marks) if None in marks else _NOTHING
    sources = [*map(body.__getitem__, definitions(body)), *messages] if before else messages
    prompt = Prompt(sources, [*before, *digests], len(messages), len(raw), new)
    turns = marks.count(_USER) + marks.count(_USER | _IMAGES)
    return Reading(body, prompt, parameters, turns or 1, _IMAGES in marks or _USER | _IMAGES in marks)


def _glance_at_text(raw: bytes, key: int) -> Reading:
    body = members(raw)
    rest = body.copy()
    prompt = rest.pop("prompt", None)
    if type(prompt) is not str:
        raise ValueError("not one text")
    parameters, _ = _recall("prompt", rest, key)
    return Reading(body, Prompt((prompt,), (digest_of("prompt", prompt),), 0, len(raw)), parameters)


def _recall(field: str, rest: dict[str, Any], key: int) -> _Known:
    """What a body says but for its prompt, which is in this field."""
    written = encode(rest)
    digest = hash((field, written)) ^ key
    known = _parameters.get(digest)
    if known is None:
        plain, (shape, least) = decode(written), _LEAST[field]
        found = msgspec.convert({**plain, field: least}, shape)
        before = tuple(digest_of(name, rest[name]) for name in definitions(rest))
        known = _Known(_parameters_of(found, plain), before)
        if len(found.model) <= _NAME:
            _parameters.put(digest, known)
    return known


def _learn(messages: list[Raw], keys: list[int], marks: list[int | None]) -> dict[int, Any]:
    """Fills in what is not known of these messages. Gives back, by number, those that had to be decoded for it."""
    decoded: dict[int, Any] = {}
    learned: dict[int, int] = {}
    for number, mark in enumerate(marks):
        if mark is None:
            decoded[number] = message = element(messages[number], _MESSAGE_DEPTH)
            learned[keys[number]] = marks[number] = _mark(msgspec.convert(message, _Message))
    for key, mark in learned.items():
        _messages.put(key, mark)
    return decoded


# -- spelled out ----------------------------------------------------------------------------


def parse_full(operation: Operation, raw: bytes) -> Reading:
    """Raises Refusal (400)."""
    try:
        body = decode(raw)
    except BadJson as error:
        raise bad_request(f"The body is not valid JSON: {error}.", logged="the body is not valid JSON") from None
    if type(body) is not dict:
        raise bad_request("The body must be a JSON object.")
    shape = _shape(operation, body)
    marks = [_mark(message) for message in shape.messages] if isinstance(shape, _Chat) else []
    turns = sum(mark & _USER for mark in marks)
    images = any(mark & _IMAGES for mark in marks)
    return Reading(body, prompt_of(operation, body), _parameters_of(shape, body), turns or 1, images)


def _shape(operation: Operation, body: dict[str, Any]) -> _Chat | _Completion:
    try:
        return msgspec.convert(body, _SHAPES[operation])
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


# -- what is understood ------------------------------------------------------------------------


def _parameters_of(shape: _Chat | _Completion, body: Mapping[str, Any]) -> Parameters:
    wanted = body.get("response_format")  # of a completion, anything: the engine's business
    return Parameters(
        model=shape.model,
        stream=bool(shape.stream),
        wants_usage=bool(shape.stream_options and shape.stream_options.include_usage),
        max_tokens=_max_tokens(shape),
        tools=bool(body.get("tools")),
        json_schema=isinstance(wanted, dict) and wanted.get("type") in ("json_schema", "json_object"),
    )


def _max_tokens(shape: _Chat | _Completion) -> int | None:
    if isinstance(shape, _Chat) and shape.max_completion_tokens is not None:
        return shape.max_completion_tokens
    return shape.max_tokens


def _mark(message: _Message) -> int:
    mark = _USER if message.role == "user" else 0
    if type(message.content) is list and any(part.get("type") in _PICTURES for part in message.content):
        mark |= _IMAGES
    return mark
