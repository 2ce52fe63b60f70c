"""Leaves out members that a server is known to refuse or not to know, at any path, and notes the loss.

- Tools, a schema or a forced call change the answer: a server that refuses these is skipped.
- A member unknown to all rows and dialects may be newer than the rows: the server decides.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from backends.fitting.target import Author, Target
from backends.fitting.thinking import is_forced
from backends.member_paths import ABSENT, Absent, Json, altered, opened, path_of, value_at, without
from backends.translation.omissions import Omissions
from backends.translation.request_members import refuse

_NEEDED = frozenset({"model", "messages", "input", "system", "instructions", "stream", "store", "messages.content"})
_MEANT = frozenset({"tools", "response_format", "response_format.json_schema", "text.format", "output_config.format"})
# Of a chat: members of the dialect and of engines without which the answer is nearly the same.
_OF_DIALECT = frozenset(
    "store metadata service_tier logit_bias verbosity prediction user safety_identifier prompt_cache_key "
    "prompt_cache_retention prompt_cache_options moderation stream_options seed top_k top_a min_p typical_p "
    "repetition_penalty presence_penalty frequency_penalty parallel_tool_calls thinking enable_thinking "
    "thinking_budget chat_template_kwargs reasoning reasoning_effort include_reasoning reasoning_format".split()
)
# Hints that one server or router knows besides the dialect, and no translation takes.
_OF_SERVERS = frozenset(
    "min_p typical_p top_a repetition_penalty length_penalty min_tokens ignore_eos skip_special_tokens "
    "include_stop_str_in_output mm_processor_kwargs thinking enable_thinking thinking_budget chat_template_kwargs "
    "reasoning include_reasoning reasoning_format provider models route transforms usage".split()
)
HINTS = _OF_DIALECT | _OF_SERVERS
_OFF = "none"
_SWITCHES = ((("reasoning", "enabled"), False), (("thinking", "type"), "disabled"), (("enable_thinking",), False))
_MEANT_OF_CHAT = frozenset({"audio", "functions", "web_search_options"})
_SAYS_NOTHING = {"store": False, "verbosity": "medium", "service_tier": "auto"}
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_path = lru_cache(1024)(path_of)


def fit_members(body: Json, target: Target, told: Omissions) -> Json:
    for name in target.facts.refused:
        if name not in _NEEDED:
            body = _without(body, name, target, told)
    return body


def _without(body: Json, name: str, target: Target, told: Omissions) -> Json:
    said: list[Any] = []

    def leave_out(value: Any) -> Absent:
        said.append(value)
        return ABSENT

    found: Json = altered(body, _path(name), leave_out)
    if found is body or all(value in _NOTHING for value in said):
        return found
    if _is_meant(body, name):
        if target.author is Author.KNOWING:
            return body
        refuse(name, told, "the server does not take it")
    else:
        told.leave_out(name)
    return found


def _is_meant(body: Json, name: str) -> bool:
    if name == "response_format" and opened(opened(body[name]).get("type")) == "text":
        return False
    return name in _MEANT or (name == "tool_choice" and is_forced(body))


def unknown_members(known: frozenset[str]) -> frozenset[str]:
    """Members of a chat outside `known`: hints to be left out, and meaningful members to be refused by name."""
    return (HINTS | _MEANT_OF_CHAT) - known


def fit_known_members(body: Json, target: Target, told: Omissions) -> Json:
    """Fit the members of a chat to a server that rejects unknown members."""
    found = body
    for name in sorted(unknown_members(target.facts.members or frozenset()) & body.keys()):
        if name in HINTS:
            if body[name] not in _NOTHING and _SAYS_NOTHING.get(name, body) != body[name]:
                told.leave_out(name)
        elif target.author is Author.KNOWING:
            continue
        else:
            refuse(name, told, "the server does not know it")
        found = without(found, name)
    return found


def without_others(body: Json, told: Omissions) -> Json:
    """A chat on its way to another dialect: an effort in another server's member is the dialect's own, and hints of
    other servers are left out."""
    others = _OF_SERVERS & body.keys()
    if not others:
        return body
    found = without(body, *others)
    member, effort = _effort_elsewhere(body)
    if member and body.get("reasoning_effort") is None:
        found["reasoning_effort"] = effort
        others -= {member}
    for name in sorted(others):
        if body[name] not in _NOTHING:
            told.leave_out(name)
    return found


def _effort_elsewhere(body: Json) -> tuple[str, str]:
    """A server's member and the effort that it stands for; empty: there is none."""
    effort = value_at(body, ("reasoning", "effort"))
    if isinstance(effort, str):
        return "reasoning", effort
    for path, value in _SWITCHES:
        if value_at(body, path) == value:
            return path[0], _OFF
    return "", ""


def fit_names_of_members(body: Json, target: Target, told: Omissions) -> Json:
    """Members by the server's names. Of two spellings in a body, the server's own counts."""
    facts, found = target.facts, body
    for name, known in facts.renamed.items():
        if name in found:
            found = {known: found[name], **{each: value for each, value in found.items() if each != name}}
    return found
