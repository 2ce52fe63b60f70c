"""An inference request, parsed from body and headers; other members of the body are passed through untouched.

Two ways with the same result:
- `_parse_chat` decodes only new text of a chat. Messages sent before with the same key are recognised by a digest of
  their JSON, and so is the set of all other fields; the rest is decoded strictly. The next turn of a conversation costs
  only new messages. All forwarded text was accepted by `gateway.strict_json`, now or earlier.
- `parse_full` decodes the whole of a completion or of an unusual body, and reports errors.

Digests are keyed by the process (Python's SipHash): no caller can write two texts with one digest. API keys share no
digests: response times would tell one tenant what another has sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import Raw

from backends.body_changes import BodyChange
from backends.engine_members import ENGINE_ANY, without_engine_members
from backends.interface import Operation
from backends.translation.translation import Translation
from gateway.api.api_error import ApiError, bad_request
from gateway.api.dialects import READERS
from gateway.api.parsed_body import (
    EFFORT_MEMBERS,
    ChatShape,
    CompletionShape,
    MessageShape,
    Parameters,
    ParsedBody,
    checked,
    decode_object,
    output_limit,
    reasoning_effort,
)
from gateway.api.request_headers import DEADLINE_HEADER, START_HEADER, deadline_by, sent_at
from gateway.caches import GenerationalCache
from gateway.strict_json import (
    MAX_DEPTH,
    MAX_MEMBERS,
    MAX_VALUES,
    SHORT,
    UNREADABLE,
    decode,
    element,
    encode,
    members,
    too_many_elements,
)
from gateway.tokenize.prefix_breakers import IN_BODY, without_breakers
from gateway.tokenize.prompt import Prompt, definitions, digest_of, prompt_of
from policies.routes.when import EFFORT, class_of
from policies.types import RequestView

GATEWAY_KEY = "x-firsttoken-key"  # the gateway's own key, where the others have a key of the caller's
KEY_HEADERS = ("authorization", "x-api-key", "api-key", GATEWAY_KEY)  # OpenAI's, Anthropic's, Azure's and ours
KNOWN_MESSAGES, KNOWN_PARAMETERS = 100_000, 4_000  # entries; 100 and 500 bytes each

_MAX_NAME = 256  # characters of a model name cached
_USER, _MEDIA, _IMAGES = 1, 2, 4  # flags of a message: from the user, with more than text, with an image
_USERS = tuple(_USER | more for more in (0, _MEDIA, _MEDIA | _IMAGES))
_IMAGE_TYPES, _TEXT_TYPES = ("image_url", "input_image"), {"text", "refusal"}
_MESSAGE_DEPTH = MAX_DEPTH - 2  # a message is an element of an array of an object


_messages: GenerationalCache[int] = GenerationalCache(KNOWN_MESSAGES)  # flags by digest
_parameters: GenerationalCache[Parameters] = GenerationalCache(KNOWN_PARAMETERS)
_SHAPES: Mapping[Operation, type[ChatShape | CompletionShape]] = {
    Operation.CHAT: ChatShape,
    Operation.COMPLETION: CompletionShape,
}


def read(operation: Operation, raw: bytes, key: Hashable) -> ParsedBody:
    """Raises ApiError (400) with the name of the field. Callers with different `key` share nothing known."""
    stripped = without_breakers(operation, raw) if IN_BODY in raw else raw
    if operation is Operation.CHAT:
        try:
            parsed = _parse_chat(stripped, hash(key))
        except UNREADABLE:
            parsed = parse_full(operation, stripped)
    else:
        parsed = READERS.get(operation, parse_full)(operation, stripped)
    if stripped is not raw:
        parsed.verbatim = decode(raw)
    return parsed


# -- cached: anything unusual raises UNREADABLE --------------------------------------------------


def _parse_chat(raw: bytes, key: int) -> ParsedBody:
    body = members(raw)
    rest = body.copy()
    messages = rest.pop("messages", None)
    if type(messages) is not list or not messages:
        raise ValueError("no messages")
    parameters = _known_parameters(rest, key)
    digests = list(map(hash, map(bytes, messages)))
    keys = [*map(key.__xor__, digests)]
    flags = _messages.get_all(keys)
    decoded = _decode_new(messages, keys, flags) if None in flags else {}
    sources = messages
    if parameters.definitions:
        sources = [*map(body.__getitem__, definitions(body)), *messages]
        digests[:0] = parameters.definitions
    most = max(filter(None, flags), default=0)
    return ParsedBody(
        members=without_cost_option(body) if "usage" in body else body,
        prompt=Prompt(sources, digests, len(messages), len(raw), decoded, media=most >= _MEDIA),
        parameters=parameters,
        user_turns=sum(map(flags.count, _USERS)) or 1,
        images=most >= _IMAGES,
    )


def _known_parameters(rest: dict[str, Any], key: int) -> Parameters:
    """Look up all fields beside the messages, or decode and validate them."""
    written = encode(rest)
    digest = hash(written) ^ key
    known = _parameters.get(digest)
    if known is None:
        fields = decode(written)
        known = _parameters_of(msgspec.convert({**fields, "messages": [{"role": "user"}]}, ChatShape), fields)
        known.definitions = tuple(digest_of(name, rest[name]) for name in definitions(rest))
        if len(known.model) <= _MAX_NAME:
            _parameters.put(digest, known)
    return known


def _decode_new(messages: list[Raw], keys: list[int], flags: list[int | None]) -> dict[int, Any]:
    """Complete `flags` of unknown messages. Returns the decoded messages by index.

    Nothing is remembered of a body with an invalid message.
    """
    decoded: dict[int, Any] = {}
    for index, known in enumerate(flags):
        if known is None:
            decoded[index] = message = element(messages[index], _MESSAGE_DEPTH)
            flags[index] = _message_flags(msgspec.convert(message, MessageShape))
    for index in decoded:
        _messages.put(keys[index], flags[index] or 0)
    return decoded


# -- full ------------------------------------------------------------------------------------


def parse_full(operation: Operation, raw: bytes) -> ParsedBody:
    """Raises ApiError (400)."""
    body = decode_object(raw)
    valid = checked(body, _SHAPES[operation])
    flags = [_message_flags(message) for message in valid.messages] if isinstance(valid, ChatShape) else []
    return ParsedBody(
        members=without_cost_option(body),
        prompt=prompt_of(operation, body),
        parameters=_parameters_of(valid, body),
        user_turns=sum(flag & _USER for flag in flags) or 1,
        images=any(flag & _IMAGES for flag in flags),
    )


# -- parameters --------------------------------------------------------------------------------


def _parameters_of(valid: ChatShape | CompletionShape, body: Mapping[str, Any]) -> Parameters:
    response_format = body.get("response_format")  # may be anything in a completion: the engine judges it
    max_tokens = valid.max_tokens
    if isinstance(valid, ChatShape) and valid.max_completion_tokens is not None:
        max_tokens = valid.max_completion_tokens
    usage = body.get("usage")
    wants_cost = isinstance(usage, dict) and usage.get("include") is True
    return Parameters(
        model=valid.model,
        stream=bool(valid.stream),
        wants_usage=wants_cost or bool(valid.stream_options and valid.stream_options.include_usage),
        wants_cost=wants_cost,
        max_tokens=output_limit(max_tokens),
        tools=bool(body.get("tools")),
        json_schema=isinstance(response_format, dict) and response_format.get("type") in ("json_schema", "json_object"),
        choices=max(valid.n or 1, valid.best_of or 1)
        * (_prompts(valid.prompt) if isinstance(valid, CompletionShape) else 1),
    )


def without_cost_option(body: dict[str, Any]) -> dict[str, Any]:
    """The body without OpenRouter's `usage: {include: true}`, which the gateway answers: OpenAI refuses the member."""
    if not isinstance(body.get("usage"), dict):
        return body
    return {name: value for name, value in body.items() if name != "usage"}


def _prompts(prompt: str | list[str | int | list[int]]) -> int:
    """Number of prompts: a list of texts or of lists of ids is several; a list of ids is one."""
    return 1 if isinstance(prompt, str) else max(sum(type(each) is not int for each in prompt), 1)


def _message_flags(message: MessageShape) -> int:
    flags = _USER if message.role == "user" else 0
    if type(message.content) is list:
        kinds = {str(part.get("type")) for part in message.content}
        if not kinds <= _TEXT_TYPES:
            flags |= _MEDIA if kinds.isdisjoint(_IMAGE_TYPES) else _MEDIA | _IMAGES
    return flags


@dataclass(slots=True)
class TranslatedBody:
    """The body of a request in the dialect of a pool. `before`: the bodies that each translation was made of.
    `left_out`: members lost on the way, as the caller is told, with the label of the metric. `maker`: digest of who
    writes the answer."""

    operation: Operation
    body: Mapping[str, Any]
    translations: tuple[Translation, ...]
    before: tuple[Mapping[str, Any], ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    maker: str = ""


class ReadsAttribution(Protocol):
    """Servers that may read a client's attribution line at the head of the prompt."""

    @property
    def reads_attribution(self) -> bool: ...


@dataclass(slots=True, kw_only=True)
class InferenceRequest(RequestView):
    """A valid request. `body` is forwarded and must not be changed in place; nested values may be `msgspec.Raw`: JSON
    as sent, known to be strict."""

    operation: Operation
    body: Mapping[str, Any]
    prompt: Prompt
    model: str
    wants_usage: bool  # the caller requested the usage chunk
    wants_cost: bool  # and the cost in it
    traceparent: str
    baggage: str
    request_id: str
    size: int  # bytes of body
    prompt_changes: Sequence[str] = ()  # rules that changed the prompt
    is_conversation: bool = False  # `session` names a conversation; else a user, with several at a time
    verbatim: Mapping[str, Any] | None = None  # the body with prefix breakers, if any
    dialect_headers: Mapping[str, str] = field(default_factory=dict)  # the caller's, for backends of the same dialect
    cache_groups: Mapping[str, str] = field(default_factory=dict)  # by pool, where different from the key's group
    translated: Mapping[str, TranslatedBody] = field(default_factory=dict)  # by pool; else the body is sent as it is
    has_turn_state: bool = False  # `body` has sealed turn state
    sent_at: float | None = None  # Unix time, by the clock of the client or of a proxy in front
    withheld: tuple[str, ...] = ()  # caller's members sent to no server (`backends.engine_members`)
    changes: Mapping[str, tuple[BodyChange, ...]] = field(default_factory=dict)  # changes of the body sent, by pool

    def sent_to(self, server: ReadsAttribution) -> Mapping[str, Any]:
        """The body for a server of the caller's own dialect."""
        return self.verbatim if self.verbatim is not None and server.reads_attribution else self.body


def with_model(raw: bytes, model: str) -> bytes:
    """Set the model named in the path (Azure), whatever model the body names. A body with too many elements, or not a
    JSON object, is returned unchanged for the parser to refuse."""
    if too_many_elements(raw):
        return raw
    try:
        return encode({**members(raw), "model": model})
    except UNREADABLE:
        return raw


def parse(
    operation: Operation,
    raw: bytes,
    headers: Mapping[str, str],
    arrival: float,
    request_id: str,
    wanted: frozenset[str] = frozenset(),
) -> InferenceRequest:
    """Raises ApiError: 400 with the name of the field, 413. `wanted`: headers read by conditions of routes."""
    if len(raw) > SHORT and too_many_elements(raw):
        raise _too_many_elements()
    parsed = read(operation, raw, tuple(map(headers.get, KEY_HEADERS)))
    parameters, hinted = parsed.parameters, not _HINTS.isdisjoint(headers)
    body, verbatim = parsed.members, parsed.verbatim
    withheld: tuple[str, ...] = ()
    if has_rare := not _RARE.isdisjoint(body):
        body, withheld = without_engine_members(body)
        verbatim = None if verbatim is None else without_engine_members(verbatim)[0]
    session, is_conversation = "", False
    if not (headers.keys().isdisjoint(_SESSION_HEADERS) and _SESSION_MEMBERS.isdisjoint(parsed.members)):
        session, is_conversation = _session(headers, parsed.members)
    effort = reasoning_effort(body) if has_rare else ""
    traceparent = headers.get("traceparent", "")[:128]
    return InferenceRequest(
        operation=operation,
        body=body,
        withheld=withheld,
        verbatim=verbatim,
        prompt_changes=() if verbatim is None else STRIPPED,
        prompt=parsed.prompt,
        model=parameters.model,
        stream=parameters.stream,
        wants_usage=parameters.wants_usage,
        wants_cost=parameters.wants_cost,
        max_tokens=parameters.max_tokens,
        choices=parameters.choices,
        tools=parameters.tools,
        json_schema=parameters.json_schema,
        user_turns=parsed.user_turns,
        images=parsed.images,
        members={EFFORT: effort} if effort else {},
        job_class=effort and class_of(effort),
        priority=_integer(headers, "x-priority") if hinted else 0,
        traceparent=traceparent,
        baggage=_baggage(headers.get("baggage", "")) if traceparent else "",
        session=session,
        is_conversation=is_conversation,
        ttft_budget=_budget(headers, *_TTFT_HEADERS) if hinted else None,
        tpot_budget=_budget(headers, *_TPOT_HEADERS) if hinted else None,
        by=deadline_by(headers, arrival) if hinted else None,
        headers={name: headers[name] for name in wanted if name in headers} if wanted else {},
        arrival=arrival,
        request_id=request_id,
        size=len(raw),
        dialect_headers=_dialect_headers(headers) if operation in _WITH_HEADERS else {},
        sent_at=sent_at(headers.get(START_HEADER)) if hinted else None,
    )


def _baggage(value: str) -> str:
    """The W3C Baggage header as sent; "" if not valid in a header, or longer than servers must accept."""
    sendable = len(value) <= MAX_BAGGAGE and value.isascii() and value.isprintable()
    return value if sendable else ""


MAX_BAGGAGE = 8_192  # bytes; W3C Baggage, 3.3.2
_TTFT_HEADERS, _TPOT_HEADERS = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"), ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
_HINTS = frozenset(("x-priority", START_HEADER, DEADLINE_HEADER, *_TTFT_HEADERS, *_TPOT_HEADERS))


def _too_many_elements() -> ApiError:
    message = (
        f"The body has too many elements: at most {MAX_MEMBERS} objects, arrays and members of objects,"
        f" and {MAX_VALUES} values."
    )
    return ApiError(413, message, code="request_too_large")


_RARE = EFFORT_MEMBERS | ENGINE_ANY  # members that most bodies lack
STRIPPED = ("strip_cch",)  # removed attribution line: `gateway.tokenize.prefix_breakers`

# Names of a conversation from clients: OpenAI's `prompt_cache_key` (Codex, OpenCode); headers of Codex (session-id,
# before 0.120 session_id and conversation_id), Claude Code and OpenCode; the Responses API's `conversation`;
# Anthropic's `metadata.user_id`, into which Claude Code writes its session.
_SESSION_HEADERS = (
    *("x-session-id", "session-id", "session_id", "x-claude-code-session-id", "conversation_id"),
    *("x-opencode-session", "x-session-affinity"),
)
_SESSION_MEMBERS = frozenset(("prompt_cache_key", "conversation", "metadata", "safety_identifier", "user"))
_OF_A_SESSION = "session"  # in a `metadata.user_id`


def _session(headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str, bool]:
    """A name for requests with a common beginning, and whether it names a conversation, or else a user; empty: the
    caller has given none."""
    if (key := body.get("prompt_cache_key")) and isinstance(key, str):
        return key[:_MAX_NAME], True
    for name in _SESSION_HEADERS:
        if name in headers:
            return headers[name][:_MAX_NAME], True
    conversation = body.get("conversation")
    found = conversation if isinstance(conversation, str) else _member(conversation, "id")
    if found and isinstance(found, str):
        return found[:_MAX_NAME], True
    for value in (_member(body.get("metadata"), "user_id"), body.get("safety_identifier"), body.get("user")):
        if value and isinstance(value, str):
            return value[:_MAX_NAME], _OF_A_SESSION in value
    return "", False


def _member(value: Any, name: str) -> Any:
    found = value.get(name) if isinstance(value, dict) else None
    return msgspec.json.decode(found) if isinstance(found, Raw) else found


_WITH_HEADERS = (Operation.MESSAGES, Operation.COUNT_TOKENS)


def _dialect_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("anthropic-")}


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
