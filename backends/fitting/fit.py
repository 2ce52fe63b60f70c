"""Fits a body in the server's dialect to the facts of the model there.

- A plan holds the rules required by the facts, and the body members that the rules read: a body without these members
  stays unchanged.
- Members left out are reported to the caller. Content that determines the answer (tools, schemas, images, a forced
  call) is never left out: the body is refused by name, and another server is tried.
- A body in the caller's own dialect is changed if the gateway has chosen among several servers, or if no content is
  lost (state of other models, equivalent forms). The server decides on all else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from backends.facts.fact_rows import schema_rules
from backends.facts.model_facts import Facts, Forced, SchemaRules, System
from backends.fitting.hints import (
    LIMITS,
    SPEEDS,
    fit_breakpoints,
    fit_choices,
    fit_labels,
    fit_limit,
    fit_output,
    fit_speed,
    fit_stops,
    fit_top_logprobs,
    without_persons,
)
from backends.fitting.media_limits import fit_media
from backends.fitting.members import (
    fit_known_members,
    fit_members,
    fit_names_of_members,
    unknown_members,
    without_others,
)
from backends.fitting.names import fit_ids, fit_names, names_in_the_way
from backends.fitting.names_in_answers import names_back
from backends.fitting.past_turns import fit_history, fit_reasoning_items, refuses_reasoning, wants_history
from backends.fitting.provider_tools import fit_provider_blocks
from backends.fitting.roles import (
    fit_first_turn,
    fit_items,
    fit_roles,
    fit_texts,
    fit_turns,
    fit_user_turn,
    results_after_calls,
)
from backends.fitting.sampling import fit_sampling
from backends.fitting.schemas import fit_form, fit_schemas
from backends.fitting.target import Author, Rule, Target
from backends.fitting.thinking import efforts_of, fit_reasoning_wishes, fit_thinking
from backends.fitting.tools import fit_empty_tools, fit_leaning, fit_parallel, fit_tools, sign_of_chat
from backends.fitting.turn_order import fit_arguments, fit_order
from backends.interface import Operation
from backends.member_paths import Json
from backends.translation.omissions import Omissions
from backends.translation.translation import Translation

_CHAT, _MESSAGES, _RESPONSES = Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES
FITTED = frozenset({_CHAT, _MESSAGES, _RESPONSES})  # operations with fitted bodies
_NOTHING_KNOWN = Facts()
_encode = msgspec.json.Encoder().encode

Wanted = Callable[[Target], bool]
Words = Callable[[Target], tuple[bytes, ...]]


def _no_words(target: Target) -> tuple[bytes, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class _Row:
    """A fitting rule, the body members it reads, and a predicate on the facts that enables the rule. `is_mending`: the
    rule loses no content, so it applies to every author's bodies. `words`: a body as written that holds none of these
    stays unchanged by the rule; empty: the members alone decide."""

    rule: Rule
    members: frozenset[str]
    wanted: Wanted
    operations: frozenset[Operation] = FITTED
    is_mending: bool = False
    of_gateway: bool = False  # only for bodies written by a translation
    words: Words = _no_words


def _differs(*names: str) -> Wanted:
    """Predicate: at least one named fact differs from the facts of an unknown model."""

    def wanted(target: Target) -> bool:
        return any(getattr(target.facts, name) != getattr(_NOTHING_KNOWN, name) for name in names)

    return wanted


def _always(target: Target) -> bool:
    return True


def _wants_thinking(target: Target) -> bool:
    facts = target.facts
    known = efforts_of(target) is not None or facts.thinking_off != "any" or facts.forced_tools is not Forced.OK
    known = known or not facts.json_thinking
    return known or facts.thinking is not None


def _wants_roles(target: Target) -> bool:
    is_written = target.author is Author.GATEWAY
    return is_written or not target.facts.developer or target.facts.system is not System.ANYWHERE


def _row(
    rule: Rule,
    members: str,
    wanted: Wanted,
    *operations: Operation,
    is_mending: bool = False,
    of_gateway: bool = False,
    words: Words = _no_words,
) -> _Row:
    of = frozenset(operations) or FITTED
    return _Row(rule, frozenset(members.split()), wanted, of, is_mending, of_gateway, words)


def _of_roles(target: Target) -> tuple[bytes, ...]:
    is_elsewhere = target.author is Author.GATEWAY or target.facts.system is not System.ANYWHERE
    return () if is_elsewhere and target.operation is _CHAT else (b'"developer"',)


def _of_media(target: Target) -> tuple[bytes, ...]:
    file, image = _MEDIA[target.operation]
    return (file, image) if _differs(*_IMAGES)(target) else (file,)


def _of_calls(target: Target) -> tuple[bytes, ...]:
    return (b'"tool_calls"',)


def _of_providers(target: Target) -> tuple[bytes, ...]:
    return (b'_tool_use"', b'_tool_result"', b'"search_result"', b'"compaction"')


def _fit_schemas(body: Json, target: Target, told: Omissions) -> Json:
    return fit_schemas(body, target, told, schema_rules_of)


def schema_rules_of(name: str) -> SchemaRules:
    return schema_rules(name)


_MEDIA: Mapping[Operation, tuple[bytes, bytes]] = {  # types of files and images
    _CHAT: (b'"file"', b'"image_url"'),
    _MESSAGES: (b'"document"', b'"image"'),
    _RESPONSES: (b'"input_file"', b'"input_image"'),
}
_IMAGES = ("media", "image_urls", "details", "most_images")
_ORDERS = ("alternation", "user_first", "user_after_results", "empty_turns", "prefill_member")
_SAMPLING = "temperature top_p top_k logprobs top_logprobs presence_penalty frequency_penalty"
_THINKING = "reasoning_effort reasoning thinking output_config tool_choice response_format"
_ROWS = (
    _row(fit_names_of_members, "", _differs("renamed"), is_mending=True),
    _row(fit_limit, " ".join(LIMITS), _differs("limit"), _CHAT, is_mending=True),
    _row(fit_output, "max_completion_tokens max_tokens max_output_tokens", _differs("output", "least_output")),
    _row(fit_members, "", _differs("refused"), is_mending=True),
    _row(fit_known_members, "", _differs("members"), _CHAT, is_mending=True),
    _row(fit_history, "messages", wants_history, _CHAT, is_mending=True),
    _row(fit_roles, "messages", _wants_roles, _CHAT, is_mending=True, words=_of_roles),
    _row(fit_user_turn, "messages", _differs("user_turn"), _CHAT),
    _row(fit_items, "input", _differs("developer"), _RESPONSES, is_mending=True, words=_of_roles),
    _row(fit_reasoning_items, "input", refuses_reasoning, _RESPONSES, is_mending=True),
    _row(results_after_calls, "messages", _always, _CHAT, of_gateway=True),
    _row(fit_order, "messages", _differs(*_ORDERS), _CHAT, is_mending=True),
    _row(fit_arguments, "messages", _differs("json_arguments"), _CHAT, words=_of_calls),
    _row(
        fit_provider_blocks,
        "messages",
        _differs("provider_blocks"),
        _MESSAGES,
        is_mending=True,
        words=_of_providers,
    ),
    _row(fit_texts, "messages", _differs("empty_texts"), _MESSAGES, is_mending=True),
    _row(fit_turns, "messages", _differs("system", "prefill"), _MESSAGES),
    _row(fit_first_turn, "messages", _differs("user_first"), _MESSAGES),
    _row(fit_empty_tools, "tools", _differs("empty_tools"), _CHAT, is_mending=True),
    _row(fit_reasoning_wishes, "reasoning include", _differs("reasoning_items"), _RESPONSES, is_mending=True),
    _row(sign_of_chat, "messages input", _differs("alternation"), _MESSAGES, _RESPONSES, is_mending=True),
    _row(fit_tools, "tools", _differs("most_tools", "tools", "tool_choices")),
    _row(fit_parallel, "parallel_tool_calls", _differs("parallel_tool_calls")),
    _row(fit_thinking, _THINKING, _wants_thinking),
    _row(fit_sampling, _SAMPLING, _differs("sampling", "temperature")),
    _row(fit_top_logprobs, "top_logprobs", _differs("top_logprobs")),
    _row(fit_form, "response_format output_config text", _differs("json_schema", "json_object")),
    _row(_fit_schemas, "tools response_format output_config text", _differs("schema", "strict_schema")),
    _row(fit_media, "messages input", _differs(*_IMAGES, "files"), words=_of_media),
    _row(fit_stops, "stop stop_sequences", _differs("stops", "stop_bytes", "blank_stops")),
    _row(fit_choices, "n", _differs("choices"), _CHAT),
    _row(fit_speed, " ".join(SPEEDS), _differs("speeds")),
    _row(fit_labels, "user safety_identifier metadata", _differs("user_length", "metadata"), _CHAT, _RESPONSES),
    _row(without_persons, "metadata", _always, _MESSAGES, of_gateway=True),
    _row(fit_breakpoints, "messages system tools", _differs("cache_controls"), _MESSAGES, of_gateway=True),
    _row(fit_leaning, "tool_choice parallel_tool_calls tools", _always, of_gateway=True),
    _row(fit_names, "tools", _differs("tool_name")),
    _row(fit_ids, "messages input", _differs("call_id"), is_mending=True),
)


@dataclass(frozen=True, slots=True)
class Concerns:
    """Signs that a body may have to be changed: one of the members, or one of the words in the body as written."""

    members: frozenset[str] = frozenset()
    words: frozenset[bytes] = frozenset()

    def holds(self, body: Mapping[str, Any], written: bytes) -> bool:
        return not self.members.isdisjoint(body) or any(word in written for word in self.words)

    def __or__(self, other: Concerns) -> Concerns:
        return Concerns(self.members | other.members, self.words | other.words)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Rules for bodies of an author at a target. `words`: of each rule, one of which a prompt holds that the rule may
    change; none: any. `members`: body members that any rule reads. `concerns`: the bodies that a rule may change."""

    target: Target
    rules: tuple[Rule, ...]
    words: tuple[tuple[bytes, ...], ...]
    members: frozenset[str]
    concerns: Concerns

    def reads(self, body: Mapping[str, Any]) -> bool:
        return not self.members.isdisjoint(body)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fitted body. `answer`: restores the caller's tool names in the answer, if any were substituted."""

    body: Mapping[str, Any]
    answer: Translation | None = None


def plan(operation: Operation, facts: Facts, author: Author) -> Plan:
    target = Target(operation, facts, author)
    rows = [row for row in _ROWS if operation in row.operations and row.wanted(target) and _holds_for(row, author)]
    members = frozenset[str]().union(*(row.members for row in rows))
    more = _named_by_facts(rows, facts)
    words = tuple(row.words(target) if author is not Author.GATEWAY else () for row in rows)
    return Plan(target, tuple(row.rule for row in rows), words, members | more, _concerns(rows, target, more))


def _concerns(rows: Sequence[_Row], target: Target, members: frozenset[str]) -> Concerns:
    found = Concerns(members)
    for row in rows:
        words = row.words(target)
        found |= Concerns(words=frozenset(words)) if words else Concerns(row.members)
    return found


def _named_by_facts(rows: Sequence[_Row], facts: Facts) -> frozenset[str]:
    """Members that no row names, but the facts."""
    members = frozenset[str]()
    if any(row.rule is fit_members for row in rows):
        members |= {name.partition(".")[0] for name in facts.refused}
    if any(row.rule is fit_known_members for row in rows):
        members |= unknown_members(facts.members or frozenset())
    if any(row.rule is fit_names_of_members for row in rows):
        members |= facts.renamed.keys()
    return members


def _holds_for(row: _Row, author: Author) -> bool:
    if row.of_gateway:
        return author is Author.GATEWAY
    return row.is_mending or author is not Author.KNOWING


def fit_for_translation(body: Json, operation: Operation, facts: Facts, told: Omissions) -> Json:
    """Remove members that the model refuses before a translation. The target dialect may lack such a member, and the
    translation would then refuse a request that the server can answer."""
    target = Target(operation, facts)
    if operation is Operation.CHAT:
        body = without_others(body, told)
    return fit_speed(fit_stops(body, target, told), target, told)


def fit(body: Mapping[str, Any], plan: Plan, told: Omissions) -> Fitted:
    """Raises UntranslatableError for what is meant and the server does not take."""
    target = plan.target
    names = names_in_the_way(dict(body), target) if fit_names in plan.rules and body.get("tools") else {}
    found = dict(body)
    prompt = _encode([body.get("messages"), body.get("input")]) if any(plan.words) else b""
    for rule, words in zip(plan.rules, plan.words, strict=True):
        if not words or any(word in prompt for word in words):
            found = rule(found, target, told)
    return Fitted(found, names_back(target.operation, names) if names else None)
