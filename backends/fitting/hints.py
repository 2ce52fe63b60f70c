"""Fits members besides the prompt: output limit by the server's name, stop sequences, lengths of labels.

A user name that is too long is replaced by a hash, which distinguishes users as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from backends.fitting.target import Target
from backends.interface import Operation
from backends.member_paths import ABSENT, Json, altered, opened, put, value_at, without
from backends.translation.omissions import Omissions
from backends.translation.request_members import refuse

SPEEDS = ("service_tier", "speed")
_SYNONYMS = {"fast": "priority", "priority": "fast"}
_STANDARD = ("auto", "default", "on_demand", "standard", "standard_only")
LIMITS = ("max_completion_tokens", "max_tokens")
_OUTPUTS: Mapping[Operation, tuple[str, ...]] = {
    Operation.CHAT: LIMITS,
    Operation.MESSAGES: ("max_tokens",),
    Operation.RESPONSES: ("max_output_tokens",),
}
_BUDGET = ("thinking", "budget_tokens")  # below the output limit, of Messages
_USERS = ("user", "safety_identifier")
_A_PERSON = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+|\+?[\d ()/-]{7,}")  # an e-mail address, a number of a telephone
_STOPS: Mapping[Operation, str] = {Operation.CHAT: "stop", Operation.MESSAGES: "stop_sequences"}


def fit_limit(body: Json, target: Target, told: Omissions) -> Json:
    """Of a chat: the limit of the output by the name that the server knows. Of two, the smaller."""
    limit, given = target.facts.limit, [body[name] for name in LIMITS if body.get(name) is not None]
    if not given or limit not in LIMITS or (len(given) == 1 and limit in body):
        return body
    return {**without(body, *LIMITS), limit: min(given) if all(type(each) is int for each in given) else given[0]}


def fit_output(body: Json, target: Target, told: Omissions) -> Json:
    """The limit of the output within what the model can write and the server takes."""
    most, found = target.facts.output, body
    least = target.facts.least_output if target.operation is Operation.RESPONSES else None
    for name in _OUTPUTS[target.operation]:
        given = body.get(name)
        if type(given) is not int or given <= 0:
            continue
        fitted = max(given, least or given) if most is None else min(max(given, least or given), most)
        if fitted != given:
            told.leave_out(name)
            found = _with_budget({**found, name: fitted}, fitted)
    return found


def _with_budget(body: Json, limit: int) -> Json:
    """Thinking within the limit, where it has a budget of its own."""
    budget = value_at(body, _BUDGET)
    return put(body, _BUDGET, limit - 1) if type(budget) is int and budget >= limit else body


def fit_stops(body: Json, target: Target, told: Omissions) -> Json:
    facts, name = target.facts, _STOPS.get(target.operation, "")
    stops = opened(body.get(name))
    if not stops or (facts.stops is None and facts.stop_bytes is None and facts.blank_stops):
        return body
    given = [stops] if isinstance(stops, str) else [opened(stop) for stop in stops]
    kept = [stop for stop in given if facts.stop_bytes is None or len(str(stop).encode()) <= facts.stop_bytes]
    kept = [stop for stop in kept if facts.blank_stops or str(stop).strip()]
    kept = kept if facts.stops is None else kept[: facts.stops]
    if len(kept) == len(given):
        return body
    told.leave_out(name)
    return {**body, name: kept} if kept else without(body, name)


def fit_speed(body: Json, target: Target, told: Omissions) -> Json:
    """The speed by the name at which the server sells it; left out where the server does not sell it. Where nothing is
    known, a tier of a chat is the server's to judge, and the speed of a message has no counterpart."""
    sold = target.facts.speeds or {}
    for name in SPEEDS:
        speed, is_open = body.get(name), target.facts.speeds is None and name == "service_tier"
        if is_open or not isinstance(speed, str) or speed in sold or speed in _STANDARD:
            continue
        if (known := _SYNONYMS.get(speed)) in sold:
            body = {**body, name: known}
        else:
            told.leave_out(name)
            body = without(body, name)
    return body


def asked_speeds(body: Mapping[str, Any]) -> tuple[str, ...]:
    """All names at which a server may serve the speed that a caller asks for."""
    asked = [speed for name in SPEEDS if isinstance(speed := body.get(name), str)]
    return (*asked, *(_SYNONYMS[speed] for speed in asked if speed in _SYNONYMS))


def fit_choices(body: Json, target: Target, told: Omissions) -> Json:
    n, most = body.get("n"), target.facts.choices
    if type(n) is int and most is not None and n > most:
        refuse("n", told, f"the server gives {most} choice{'s' * (most > 1)} at most")
        return without(body, "n")
    return body


def fit_labels(body: Json, target: Target, told: Omissions) -> Json:
    """Names of users, and metadata, in the lengths that the server takes."""
    facts = target.facts
    if facts.user_length is not None:
        for name in _USERS:
            user = body.get(name)
            if isinstance(user, str) and len(user) > facts.user_length:
                body = {**body, name: _hashed(user, facts.user_length)}
    metadata = opened(body.get("metadata"))
    if facts.metadata is not None and isinstance(metadata, Mapping) and not _fits(metadata, *facts.metadata):
        told.leave_out("metadata")
        body = without(body, "metadata")
    return body


def _hashed(user: str, most: int) -> str:
    return sha256(user.encode()).hexdigest()[:most]


def _fits(metadata: Mapping[str, Any], pairs: int, key: int, value: int) -> bool:
    return len(metadata) <= pairs and all(
        len(name) <= key and isinstance(text := opened(each), str) and len(text) <= value
        for name, each in metadata.items()
    )


def without_persons(body: Json, target: Target, told: Omissions) -> Json:
    """Hash a `user_id` that names a person in a translated Messages body: the API asks for opaque ids."""
    user = value_at(body, ("metadata", "user_id"))
    if not isinstance(user, str) or _A_PERSON.fullmatch(user) is None:
        return body
    return put(body, ("metadata", "user_id"), sha256(user.encode()).hexdigest())


def fit_breakpoints(body: Json, target: Target, told: Omissions) -> Json:
    """Keep the last cache breakpoints, up to the server's limit: each covers the whole prompt before."""
    most = target.facts.cache_controls
    places = (("tools",), ("system",), ("messages", "content"))
    marks = 0

    def count(blocks: Any) -> Any:
        nonlocal marks
        if isinstance(blocks, list):
            marks += sum(isinstance(opened(block), Mapping) and "cache_control" in opened(block) for block in blocks)
        return blocks

    for place in places:
        altered(body, place, count)
    if most is None or marks <= most:
        return body
    left = marks - most

    def leave_out(_: Any) -> Any:
        nonlocal left
        left -= 1
        return ABSENT if left >= 0 else _

    for place in places:
        body = altered(body, (*place, "cache_control"), leave_out)
    return body


def fit_top_logprobs(body: Json, target: Target, told: Omissions) -> Json:
    top, most = body.get("top_logprobs"), target.facts.top_logprobs
    if type(top) is not int or most is None or top <= most:
        return body
    told.leave_out("top_logprobs")
    return {**body, "top_logprobs": most}
