"""Facts of a model at an API: accepted members, forms and orders, state to return, meaning of finish reasons.

A row of `models.yaml` describes a model family, a row of `apis.yaml` an API with any model. A pool's `accepts`
overrides both, and a lesson of a refusal overrides facts not stated in the configuration. No row refuses a request: a
newer version has the row of the newest known version, and an unknown model accepts what the API accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
Length = Annotated[int, Meta(ge=1)]
Factor = Annotated[float, Meta(gt=0, le=1000)]
Seconds = Annotated[float, Meta(gt=0, le=3600)]  # to a first token, whose logarithm is taken
Lifetime = Annotated[float, Meta(gt=0, le=7 * 86_400)]  # s


class Sampling(Enum):
    """Use of `temperature`, `top_p` and `top_k`."""

    FREE = "free"
    WHEN_OFF = "when_off"  # while the model does not think
    ONE = "one"  # a temperature or a `top_p`, not both
    IDLE = "idle"  # taken, without effect
    NONE = "none"  # no value but the default
    FIXED = "fixed"  # the default is the server's to know: no value is sent


class ToolsAt(Enum):
    """Operations that accept function tools."""

    ANY = "any"
    EFFORT_NONE = "none"  # over chat completions: beside the effort `none` alone
    RESPONSES = "responses"  # over Responses alone


class Forced(Enum):
    """Use of a forced tool call."""

    OK = "ok"
    REFUSED = "refused"
    THINKING = "thinking"  # not while the model thinks


class Caching(Enum):
    """Prompts kept in the cache of an API."""

    IMPLICIT = "implicit"  # all from `cache_from` tokens on
    MARKED = "marked"  # up to the breakpoints of a request


class UnknownMembers(Enum):
    """Fate of members that the server does not know."""

    IGNORED = "ignored"
    TOP = "top"  # refused at the top of a body, ignored in messages
    EVERYWHERE = "everywhere"  # refused at the top and in messages


class Reasoning(Enum):
    """Use of the reasoning of earlier turns."""

    ANY = "any"  # not known: sent where the caller has written it, left out where a translation has
    READ = "read"  # taken, and not missed
    RETURNED = "returned"  # wanted back with the turns of a tool loop
    REFUSED = "refused"


class System(Enum):
    """Places of messages with the role `system`."""

    ANYWHERE = "anywhere"
    FIRST = "first"  # several, all at the beginning
    ONE = "one"  # one, at the beginning


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a model at an API. Paths refer to the body as sent, without indices: `messages.reasoning_content`."""

    refused: frozenset[str] = frozenset()  # paths of optional members that the server refuses
    members: frozenset[str] | None = None  # known members of a chat's body; None: all are accepted
    renamed: Mapping[str, str] = field(default_factory=dict)  # members by their other names
    limit: str = ""  # the member that limits a chat's output; empty: as the caller has named it
    efforts: tuple[str, ...] | None = None  # in chat completions and Messages, in order; None: not known
    efforts_responses: tuple[str, ...] | None = None  # in Responses, if different
    default_effort: str = ""
    reasoning_items: bool = True  # has reasoning to give over Responses
    thinking: tuple[str, ...] | None = None  # types of `thinking` in Messages; None: not known
    # How thinking is switched off: `none` (the effort), `disabled` (the type of `thinking`), `enable_thinking` and
    # `reasoning.enabled` (members that are false then), `any`: not known; None: always on.
    thinking_off: str | None = "any"
    off_with_efforts: tuple[str, ...] | None = None  # efforts that allow thinking to be switched off; None: all
    thinks_unasked: bool = False  # by default, if the request does not mention thinking
    sampling: Sampling = Sampling.FREE
    sampling_members: frozenset[str] = frozenset({"temperature", "top_p", "top_k"})  # members that `sampling` governs
    temperature: tuple[float, float] | None = None  # least and most; None: not known
    top_logprobs: Count | None = None  # at most
    choices: Length | None = None  # most of `n`
    tools: ToolsAt = ToolsAt.ANY
    forced_tools: Forced = Forced.OK
    tool_choices: tuple[str, ...] | None = None  # forms of `tool_choice`; None: all
    custom_tools: bool = True  # tools of the type `custom`
    parallel_tool_calls: bool = True  # knows the member
    most_tools: Count | None = None
    empty_tools: bool = True  # takes a list of no tools
    tool_name: str = ""  # pattern of names of functions
    call_id: str = ""  # pattern of ids of tool calls
    json_arguments: bool = False  # calls whose arguments are no JSON object are refused
    provider_blocks: bool = True  # blocks that tools of a provider leave in Messages
    schema: str = ""  # subset of JSON schema of a tool's parameters: a row of `schemas` in apis.yaml; empty: any
    strict_schema: str = ""  # the same, of `response_format` and of tools that are `strict`
    json_object: bool = True  # `response_format: json_object`
    json_schema: bool = True
    json_thinking: bool = True  # answers of these forms while the model thinks
    developer: bool = True  # knows the role `developer`
    system: System = System.ANYWHERE
    alternation: bool = False  # user and assistant have to take turns, as a template demands
    user_first: bool = False  # the first turn has to be the user's
    user_after_results: bool = True  # a turn of the user may follow results of calls
    empty_turns: bool = True  # turns of the assistant without text and calls
    prefill: bool = True  # the last message may be the assistant's
    prefill_member: str = ""  # of such a message in a chat, true where the server is to continue it
    user_turn: bool = False  # one message at least has to be the user's
    empty_texts: bool = True  # texts without a character that is no white space
    reasoning: Reasoning = Reasoning.ANY
    reasoning_member: str = "reasoning_content"
    thinking_parts: bool = True  # content parts of the type `thinking`, as reasoning of earlier turns
    call_state: str = ""  # path, in a tool call, of the state to return
    call_state_placeholder: str = ""  # accepted value if the state is unknown
    detail_placeholder: Mapping[str, str] = field(default_factory=dict)  # the same, in `reasoning_details`
    stops: Count | None = None  # most sequences of `stop`; 0: refused
    stop_bytes: Length | None = None  # of a sequence
    blank_stops: bool = True  # sequences of white space
    cache_controls: Count | None = None  # most breakpoints of a request
    caching: Caching | None = None  # None: not known
    cache_ttl: Lifetime | None = None  # s that a prompt is kept after its latest use; None: not known
    cache_from: Count | None = None  # tokens of the shortest prefix that is kept
    metadata: tuple[Count, Count, Count] | None = None  # most pairs, characters of a key, of a value
    user_length: Length | None = None
    media: frozenset[str] | None = None  # media types of images; None: all
    image_urls: bool = True  # pictures by URL
    most_images: Count | None = None
    files: bool = True  # content parts of the type `file`
    files_responses: bool | None = None  # the same in Responses, if different
    details: tuple[str, ...] | None = None  # of `image_url.detail`
    unknown_members: UnknownMembers = UnknownMembers.IGNORED
    context: Length | None = None  # tokens
    output: Length | None = None  # tokens
    least_output: Count | None = None  # tokens, of the limit in Responses
    shutdown: str = ""  # YYYY-MM-DD, or "gone"
    routed_to: str = ""  # the model that answers after the shutdown
    ttft: Mapping[str, Seconds] | None = None  # prior, s, by class of effort; `""`: of all others
    speeds: Mapping[str, Factor] | None = None  # factors of the prices, by speeds sold; None: not known
    size: float | None = None  # order among the models of an API: larger is larger


@dataclass(frozen=True, slots=True)
class SchemaRules:
    """A subset of JSON schema: a row of `schemas` in apis.yaml."""

    root_object: bool = False  # the root has `type: object` and `properties`
    root_without: frozenset[str] = frozenset()  # keywords refused at the root
    refused: frozenset[str] = frozenset()  # keywords refused anywhere
    all_required: bool = False  # every property is in `required`
    closed: bool = False  # every object has `additionalProperties: false`
    one_of_as_any_of: bool = False  # `oneOf` is refused, `anyOf` is not
    most_min_items: Count | None = None  # largest `minItems`
    formats: frozenset[str] | None = None  # of `format`; None: all
    type_lists: bool = True  # `type` may be a list
    typed_properties: bool = False  # each property has a `type`; beside `anyOf` it stands in the items
    local_refs: bool = False  # `$ref` to `#/$defs/` alone
