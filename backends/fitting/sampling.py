"""Leaves out sampling members that the model does not accept, and notes the loss.

A default value is left out without a note.
"""

from __future__ import annotations

from collections.abc import Iterable

from backends.facts.model_facts import Sampling
from backends.fitting.target import Target
from backends.fitting.thinking import is_thinking
from backends.interface import Operation
from backends.member_paths import Json, without
from backends.translation.omissions import Omissions

_CHOOSING = ("temperature", "top_p", "top_k")
_PENALTIES = ("presence_penalty", "frequency_penalty")
_SAYS_NOTHING = {"temperature": 1, "top_p": 1, "logprobs": False, "top_logprobs": 0, **dict.fromkeys(_PENALTIES, 0)}
_LEAST_BESIDE_THINKING = {"temperature": 1, "top_p": 0.95}  # in Messages; 1 is the most


def fit_sampling(body: Json, target: Target, told: Omissions) -> Json:
    sampling, members = target.facts.sampling, sorted(target.facts.sampling_members)
    if sampling is Sampling.FIXED:
        return leave_out(body, (*members, *_PENALTIES), told)
    if sampling is Sampling.NONE or (sampling is Sampling.WHEN_OFF and is_thinking(body, target)):
        return leave_out(body, members, told)
    return _fit_temperature(_one(body, target, told) if sampling is Sampling.ONE else body, target, told)


def _fit_temperature(body: Json, target: Target, told: Omissions) -> Json:
    """The nearest temperature that the server takes."""
    bounds, given = target.facts.temperature, body.get("temperature")
    if bounds is None or not isinstance(given, int | float) or bounds[0] <= given <= bounds[1]:
        return body
    told.leave_out("temperature")
    return {**body, "temperature": min(max(given, bounds[0]), bounds[1])}


def _one(body: Json, target: Target, told: Omissions) -> Json:
    """A temperature or a `top_p`: the temperature, unless it says nothing. Beside thinking, little of either."""
    if target.operation is Operation.MESSAGES and is_thinking(body, target):
        least = _LEAST_BESIDE_THINKING
        others = [name for name in _CHOOSING if name in body and not least.get(name, 2) <= (body[name] or 0) <= 1]
        body = leave_out(body, others, told)
    if body.get("temperature") is None or body.get("top_p") is None:
        return body
    return leave_out(body, ("temperature",) if body["temperature"] == 1 else ("top_p",), told)


def leave_out(body: Json, names: Iterable[str], told: Omissions) -> Json:
    """The body without members, told where their value says something."""
    found = [name for name in names if name in body]
    for name in found:
        if body[name] is not None and not (name in _SAYS_NOTHING and body[name] == _SAYS_NOTHING[name]):
            told.leave_out(name)
    return without(body, *found) if found else body
