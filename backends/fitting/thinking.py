"""Fits reasoning effort and thinking members to the efforts and forms that the model accepts.

- An unaccepted effort becomes the nearest accepted effort, on a tie the higher: no answer is worse than requested.
- Thinking that cannot be switched off gets the lowest effort.
- A thinking budget becomes an effort if the model accepts efforts only, and the reverse.
- A forced tool call switches thinking off if the model refuses the combination; so does an answer in JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.body_changes import EFFORTS
from backends.facts.model_facts import Forced
from backends.fitting.target import EFFORT, Target
from backends.interface import Operation
from backends.member_paths import ABSENT, Absent, Json, opened, put, value_at, without
from backends.translation.omissions import Omissions
from backends.translation.request_members import refuse

OFF = "none"
_BUDGETS = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16_384, "xhigh": 24_576, "max": 32_000}  # tokens
_LEAST_BUDGET = 1024  # tokens
_DISABLED = {"type": "disabled"}
_FORCED = ("required", "any")
_ENCRYPTED = "reasoning.encrypted_content"


def efforts_of(target: Target) -> tuple[str, ...] | None:
    facts = target.facts
    if target.operation is Operation.RESPONSES and facts.efforts_responses is not None:
        return facts.efforts_responses
    return facts.efforts


def nearest(effort: str, efforts: Sequence[str]) -> str | Absent:
    """The accepted effort nearest to an unaccepted effort; on a tie the higher. ABSENT: only OFF is accepted."""
    thinking = [each for each in efforts if each != OFF]
    known = [each for each in thinking if each in EFFORTS]
    if effort not in EFFORTS or not known:
        return thinking[0] if thinking else ABSENT
    place = EFFORTS.index(effort)
    return min(known, key=lambda each: (abs(EFFORTS.index(each) - place), -EFFORTS.index(each)))


def is_thinking(body: Json, target: Target) -> bool:
    """True where the model will think before the answer, as far as body and facts say."""
    facts, kind = target.facts, _type_of_thinking(body)
    if kind:
        return kind != "disabled"
    if target.operation is Operation.MESSAGES:
        return facts.thinks_unasked
    effort = value_at(body, EFFORT[target.operation])
    if effort is None or effort == "default":
        return facts.thinks_unasked or facts.default_effort not in ("", OFF)
    return bool(effort != OFF)


def fit_thinking(body: Json, target: Target, told: Omissions) -> Json:
    if target.operation is Operation.MESSAGES:
        body = _fit_types(body, target, told)
    body = _fit_effort(body, target, told)
    return _beside_json(_beside_forced_tools(body, target, told), target, told)


# -- chat completions and Responses, and the effort of Messages ---------------------------------------


def _fit_effort(body: Json, target: Target, told: Omissions) -> Json:
    path, efforts = EFFORT[target.operation], efforts_of(target)
    effort = value_at(body, path)
    if not isinstance(effort, str):
        return body
    if effort == OFF and target.operation is not Operation.MESSAGES:
        return _off(body, target, told)
    if efforts is None or effort in efforts:
        return body
    told.leave_out(".".join(path))
    return put(body, path, nearest(effort, efforts))


def _off(body: Json, target: Target, told: Omissions) -> Json:
    """Thinking switched off, as the model knows it."""
    path, efforts, off = EFFORT[target.operation], efforts_of(target), target.facts.thinking_off
    if off == "disabled":
        return {**put(body, path, ABSENT), "thinking": _DISABLED}
    if off == "enable_thinking":
        return {**put(body, path, ABSENT), "enable_thinking": False}
    if (efforts is None and off is not None) or (efforts is not None and OFF in efforts):
        return body
    return put(body, path, ABSENT) if efforts == () else _lowest(body, target, told)


def _lowest(body: Json, target: Target, told: Omissions) -> Json:
    path, efforts = EFFORT[target.operation], efforts_of(target)
    told.leave_out(".".join(path))
    return put(body, path, nearest(OFF, efforts or ()))


# -- forms of thinking in Messages ---------------------------------------------------------------------


def _type_of_thinking(body: Json) -> str:
    thinking = opened(body.get("thinking"))
    kind = opened(thinking.get("type")) if isinstance(thinking, dict) else None
    return kind if isinstance(kind, str) else ""


def _fit_types(body: Json, target: Target, told: Omissions) -> Json:
    kind, types = _type_of_thinking(body), target.facts.thinking
    if kind == "disabled" or (kind == "between_tools" and types is not None and kind not in types):
        return _fit_disabled(body, target, told)
    if kind == "between_tools":
        return _beside_off(body, target, told)
    if not kind or types is None or kind in types:
        return body
    if "adaptive" in types:
        return _as_adaptive(body, target, told)
    return _as_budget(body, told) if "enabled" in types else _no_thinking(body, told)


def _fit_disabled(body: Json, target: Target, told: Omissions) -> Json:
    facts = target.facts
    if facts.thinking_off is None and facts.thinking is not None:
        return _least_thinking(_no_thinking(body, told), facts.efforts)
    if facts.thinking is not None and "disabled" not in facts.thinking:
        return without(body, "thinking")  # the model does not think
    return _beside_off({**body, "thinking": _DISABLED}, target, told)


def _beside_off(body: Json, target: Target, told: Omissions) -> Json:
    """The effort beside thinking that is switched off, or off but between tools."""
    facts, effort = target.facts, value_at(body, EFFORT[Operation.MESSAGES])
    if effort is None or facts.off_with_efforts is None or effort in facts.off_with_efforts:
        return body
    told.leave_out("output_config.effort")
    return put(body, EFFORT[Operation.MESSAGES], nearest(effort, facts.off_with_efforts))


def _least_thinking(body: Json, efforts: Sequence[str] | None) -> Json:
    return put(body, EFFORT[Operation.MESSAGES], nearest(OFF, efforts or ()))


def _as_adaptive(body: Json, target: Target, told: Omissions) -> Json:
    """A budget as an effort."""
    thinking, path = opened(body["thinking"]), EFFORT[Operation.MESSAGES]
    budget = opened(thinking.get("budget_tokens"))
    kept = {name: value for name, value in thinking.items() if name == "display"}
    body = {**body, "thinking": {"type": "adaptive", **kept}}
    told.leave_out("thinking.budget_tokens")
    if value_at(body, path) is not None or type(budget) is not int or not target.facts.efforts:
        return body
    effort = next((each for each, most in _BUDGETS.items() if each != "minimal" and budget <= most), "high")
    return put(body, path, min(effort, "high", key=EFFORTS.index))


def _as_budget(body: Json, told: Omissions) -> Json:
    """An effort as a budget, which the limit of the output has to leave room for."""
    effort, limit = value_at(body, EFFORT[Operation.MESSAGES]), body.get("max_tokens")
    budget = _BUDGETS.get(effort if isinstance(effort, str) else "high", _BUDGETS["high"])
    if type(limit) is int:
        budget = min(budget, limit - 1)
    if budget < _LEAST_BUDGET:
        return _no_thinking(body, told)
    return {**body, "thinking": {"type": "enabled", "budget_tokens": budget}}


def _no_thinking(body: Json, told: Omissions) -> Json:
    told.leave_out("thinking")
    return without(body, "thinking")


# -- models without reasoning, over Responses ----------------------------------------------------------


def fit_reasoning_wishes(body: Json, target: Target, told: Omissions) -> Json:
    """Of Responses, for a model that has no reasoning to give: the members that ask for some."""
    if opened(body.get("reasoning")):
        told.leave_out("reasoning")
    include = opened(body.get("include"))
    if not isinstance(include, list) or _ENCRYPTED not in (wished := [opened(each) for each in include]):
        return without(body, "reasoning") if "reasoning" in body else body
    kept = [each for each in wished if each != _ENCRYPTED]
    return without(body, "reasoning", "include") | ({"include": kept} if kept else {})


# -- forced tool calls ---------------------------------------------------------------------------------


def is_forced(body: Json) -> bool:
    """The answer has to be a tool call."""
    choice = opened(body.get("tool_choice"))
    if not isinstance(choice, dict):
        return choice in _FORCED
    kind = opened(choice.get("type"))
    if kind == "allowed_tools":
        return bool(
            value_at(choice, ("allowed_tools", "mode")) == "required" or opened(choice.get("mode")) == "required"
        )
    return kind not in ("auto", "none")


def _beside_forced_tools(body: Json, target: Target, told: Omissions) -> Json:
    forced = target.facts.forced_tools
    if forced is Forced.OK or body.get("tool_choice") is None or not is_forced(body):
        return body
    if forced is Forced.THINKING and (not is_thinking(body, target) or _can_be_off(target)):
        return _switched_off(body, target, told) if is_thinking(body, target) else body
    refuse("tool_choice", told, "the model takes no forced tool calls")
    return without(body, "tool_choice")


def _beside_json(body: Json, target: Target, told: Omissions) -> Json:
    """The form of an answer is meant, thinking is not: of the two the form stays."""
    if target.facts.json_thinking or target.operation is not Operation.CHAT or not is_thinking(body, target):
        return body
    kind = value_at(body, ("response_format", "type"))
    return body if kind in (None, "text") or not _can_be_off(target) else _switched_off(body, target, told)


def _can_be_off(target: Target) -> bool:
    return target.facts.thinking_off is not None


def _switched_off(body: Json, target: Target, told: Omissions) -> Json:
    if target.operation is not Operation.MESSAGES:
        told.leave_out(".".join(EFFORT[target.operation]))
        return _off(put(body, EFFORT[target.operation], OFF), target, told)
    body = _no_thinking(body, told)
    return {**body, "thinking": _DISABLED} if target.facts.thinks_unasked else body
