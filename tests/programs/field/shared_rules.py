"""Rules that the dialects share: members, sampling, efforts, and whether a model thinks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from tests.programs.field.rules import Target, Violation, is_meaning

Body = Mapping[str, Any]


@cache
def pattern(text: str) -> re.Pattern[str]:
    return re.compile(text)


def fits(text: Any, wanted: str | None) -> bool:
    return wanted is None or (isinstance(text, str) and pattern(wanted).fullmatch(text) is not None)


def unknown_members(target: Target, dialect: str, body: Body) -> Iterator[Violation]:
    known = (target.rule("members") or {}).get(dialect)
    for name in sorted(body.keys() - set(known)) if known is not None else ():
        yield Violation(f"member {name}", name, f"Unknown parameter: '{name}'.", "unknown_parameter", is_meaning(name))
    for name in target.rule("refused") or ():
        if body.get(name) is not None:
            yield Violation(f"member {name}", name, f"Argument not supported on this model: {name}")


def thinks(target: Target, body: Body, effort: Any, switch: Mapping[str, Any] | None = None) -> bool:
    """`switch`: a member `thinking` of the body."""
    kind = target.rule("thinks")
    if kind in ("always", "never", None):
        return kind == "always"
    if (switch or {}).get("type") == "disabled" or effort == "none" or body.get("enable_thinking") is False:
        return False
    asked = effort is not None or (switch or {}).get("type") in ("enabled", "adaptive") or body.get("enable_thinking")
    return kind == "unasked" or bool(asked)


def sampling(target: Target, body: Body, thinking: bool) -> Iterator[Violation]:
    """Temperature, `top_p`, `top_k` and what goes with them."""
    given = {name: body[name] for name in ("temperature", "top_p", "top_k") if body.get(name) is not None}
    rule = target.rule("sampling")
    if rule == "none" or (rule == "when_off" and thinking):
        for name, value in given.items():
            if name == "top_k" or value != 1:
                message = f"Unsupported value: '{name}' does not support {value}. Only the default is supported."
                yield Violation(f"member {name}", name, message, "unsupported_value")
        for name in ("logprobs", "top_logprobs"):
            if body.get(name):
                message = f"Unsupported parameter: '{name}' is not supported with this model."
                yield Violation(f"member {name}", name, message, "unsupported_parameter", is_meaning("logprobs"))
    if rule == "one" and {"temperature", "top_p"} <= given.keys():
        yield Violation(
            "temperature beside top_p",
            "top_p",
            "`temperature` and `top_p` cannot both be specified for this model. Please use only one.",
        )
    low, high = target.rule("temperature") or (None, None)
    if low is not None and "temperature" in given and not low <= given["temperature"] <= high:
        message = f"temperature: Input should be less than or equal to {high}"
        yield Violation("value of temperature", "temperature", message)
    most = target.rule("most_logprobs")
    if most is not None and (body.get("top_logprobs") or 0) > most:
        yield Violation("value of top_logprobs", "top_logprobs", f"top_logprobs must be between 0 and {most}")
    for name, values in (target.rule("fixed") or {}).items():
        only = values["thinking" if thinking else "still"]
        if body.get(name) not in (None, only):
            yield Violation(f"value of {name}", name, f"invalid {name}: only {only} is allowed for this model")


def efforts(target: Target, dialect: str, effort: Any, at: str) -> Iterator[Violation]:
    if effort is None:
        return
    known = target.rule("efforts", dialect)
    if target.rule("effort_refused"):
        yield Violation("member of effort", at, f"Model {target.model} does not support parameter reasoningEffort.")
    elif known is not None and not known:
        message = f"Unsupported parameter: '{at}' is not supported with this model."
        yield Violation("member of effort", at, message, "unsupported_parameter")
    elif known is not None and effort not in known:
        values = ", ".join(f"'{value}'" for value in known)
        message = (
            f"Unsupported value: '{at}' does not support '{effort}' with this model. Supported values are: {values}."
        )
        yield Violation(f"effort {effort}", at, message, "unsupported_value")


def stops(target: Target, stop: Any, at: str) -> Iterator[Violation]:
    given = [stop] if isinstance(stop, str) else stop or []
    if given and target.rule("stop") == "refused":
        message = f"Unsupported parameter: '{at}' is not supported with this model."
        yield Violation(f"member {at}", at, message, "unsupported_parameter")
    if target.rule("blank_stops") == "refused" and any(not each.strip() for each in given):
        yield Violation(f"blank {at}", at, f"{at}: each stop sequence must contain non-whitespace")
    most, size = target.rule("stops"), target.rule("stop_bytes")
    if most is not None and len(given) > most:
        message = f"Invalid '{at}': array too long. Expected an array with maximum length {most}."
        yield Violation(f"number of {at}", at, message, "array_above_max_length")
    if size is not None and any(len(each.encode()) > size for each in given):
        yield Violation(f"length of {at}", at, f"invalid {at}: longer than {size} bytes")


def longest_output(target: Target, body: Body, names: Iterable[str]) -> Iterator[Violation]:
    most = target.rule("most_output")
    for name in names:
        given = body.get(name)
        if most is not None and type(given) is int and given > most:
            message = (
                f"{name} is too large: {given}. This model supports at most {most} completion tokens, whereas you "
                f"provided {given}."
            )
            yield Violation(f"value of {name}", name, message, "invalid_value")


def labels(target: Target, body: Body) -> Iterator[Violation]:
    """The user's name and metadata."""
    longest = target.rule("user_length")
    for name in ("user", "safety_identifier"):
        if longest is not None and len(str(body.get(name) or "")) > longest:
            message = f"Invalid '{name}': string too long. Expected a string with maximum length {longest}."
            yield Violation(f"length of {name}", name, message, "string_above_max_length")
    if target.rule("metadata") and isinstance(body.get("metadata"), dict):
        pairs, key, value = target.rule("metadata")
        given = body["metadata"]
        if len(given) > pairs or any(len(k) > key or len(str(v)) > value for k, v in given.items()):
            yield Violation("metadata", "metadata", "Invalid 'metadata'.", "string_above_max_length")
        if any(not isinstance(v, str) for v in given.values()):
            yield Violation("metadata", "metadata", "Invalid type for 'metadata': expected a string.", "invalid_type")
    tiers = target.rule("service_tiers")
    if tiers and body.get("service_tier") not in (None, *tiers):
        yield Violation("value of service_tier", "service_tier", f"Invalid value: '{body['service_tier']}'.")


def names(target: Target, given: Iterable[Any], at: str) -> Iterator[Violation]:
    """Names of tools, once per request."""
    wrong = [name for name in given if not fits(name, target.rule("tool_name"))]
    if wrong:
        wanted = target.rule("tool_name")
        length = len(str(wrong[0])) > 64 and pattern(wanted).fullmatch(str(wrong[0])[:64])
        message = (
            f"Invalid '{at}': string does not match pattern. Expected a string that matches the pattern '^{wanted}$'."
        )
        yield Violation(f"{'length' if length else 'alphabet'} of a tool's name", at, message, "invalid_value")
    listed = list(given)
    if len({*map(str, listed)}) < len(listed):
        yield Violation("two tools of one name", at, "Tool names must be unique.")
