"""Facts: what a server accepts of a request for one model, what it wants returned, and what it means by its ends.

A row of `models.yaml` is of a model family, one of `apis.yaml` is of an API whatever the model; a pool's `accepts`
overrides both, and a lesson of a refusal overrides what nobody has written. No row refuses a request: an unknown model
of a known API has the API's row and the family's newest, any other accepts everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Sampling(Enum):
    """What is accepted of `temperature`, `top_p` and `top_k`."""

    FREE = "free"
    WHEN_OFF = "when_off"  # while the model does not think
    ONE = "one"  # a temperature or a `top_p`, not both
    IDLE = "idle"  # taken, without effect
    NONE = "none"  # no value but the default
    FIXED = "fixed"  # the default is the server's to know: no value is sent


class ToolsAt(Enum):
    """Where function tools are accepted."""

    ANY = "any"
    EFFORT_NONE = "none"  # over chat completions: beside the effort `none` alone
    RESPONSES = "responses"  # over Responses alone


class Forced(Enum):
    """Whether a tool call may be forced."""

    OK = "ok"
    REFUSED = "refused"
    THINKING = "thinking"  # not while the model thinks


class Reasoning(Enum):
    """What becomes of the reasoning of earlier turns."""

    ANY = "any"  # not known: sent where the caller has written it, left out where a translation has
    RETURNED = "returned"  # wanted back with the turns of a tool loop
    REFUSED = "refused"


class System(Enum):
    """Where messages of the role `system` may stand."""

    ANYWHERE = "anywhere"
    FIRST = "first"  # at the beginning, any number of them
    ONE = "one"  # one, at the beginning


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a model at an API. Paths are those of the body as sent, without indices: `messages.reasoning_content`."""

    refused: frozenset[str] = frozenset()  # paths of members that can be left out and that the server refuses
    renamed: Mapping[str, str] = field(default_factory=dict)  # members by their other names
    limit: str = ""  # the member that limits a chat's output; empty: as the caller has named it
    efforts: tuple[str, ...] | None = None  # in chat completions and Messages, in order; None: not known
    efforts_responses: tuple[str, ...] | None = None  # where Responses has others
    default_effort: str = ""
    thinking: tuple[str, ...] | None = None  # types of `thinking` in Messages; None: not known
    thinking_off: str | None = "any"  # how thinking is switched off; None: it cannot be
    off_with_efforts: tuple[str, ...] | None = None  # efforts beside which it may be switched off; None: all
    thinks_unasked: bool = False  # where a request says nothing of thinking
    sampling: Sampling = Sampling.FREE
    tools: ToolsAt = ToolsAt.ANY
    forced_tools: Forced = Forced.OK
    tool_choices: tuple[str, ...] | None = None  # forms of `tool_choice`; None: all
    custom_tools: bool = True  # tools of the type `custom`
    parallel_tool_calls: bool = True  # knows the member
    most_tools: int | None = None
    tool_name: str = ""  # pattern of names of functions
    call_id: str = ""  # pattern of ids of tool calls
    schema: str = ""  # the subset of JSON schema of tools and of `response_format`, a row of `schemas` in apis.yaml
    json_object: bool = True  # `response_format: json_object`
    json_schema: bool = True
    developer: bool = True  # knows the role `developer`
    system: System = System.ANYWHERE
    prefill: bool = True  # the last message may be the assistant's
    reasoning: Reasoning = Reasoning.ANY
    reasoning_member: str = "reasoning_content"
    bound_to: str = ""  # what a block of thinking is bound to: "", prefix, prefix+account
    stops: int | None = None  # most sequences of `stop`; 0: refused
    metadata: tuple[int, int, int] | None = None  # most pairs, characters of a key, of a value
    user_length: int | None = None
    media: frozenset[str] | None = None  # media types of images; None: all
    image_urls: bool = True  # pictures by URL
    files: bool = True  # content parts of the type `file`
    details: tuple[str, ...] | None = None  # of `image_url.detail`
    unknown_members: str = "ignored"  # refused: at the top; refused_in_messages: also there
    ends: Mapping[str, str] | None = None  # the server's finish reasons by the dialect's; None: the dialect's alone
    context: int | None = None  # tokens
    output: int | None = None  # tokens
    shutdown: str = ""  # YYYY-MM-DD, or "gone"
    routed_to: str = ""  # the model that answers from then on
    ttft: Mapping[str, float] | None = None  # prior, s, by class of effort; `""`: of all others
    size: float | None = None  # order among the models of an API: larger is larger
