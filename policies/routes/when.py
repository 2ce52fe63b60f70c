"""`when`: conditions for the use of a tier.

    - {pool: small, when: {prompt_tokens: "<= 8000", tools: false, header.x-team: web}}

Rules:
- All conditions must hold; an empty `when` always does.
- A count is compared: `<= 8000`, `> 2`, `== 3`, or `1000..8000` (both ends included). A bare number equals, but tokens
  need a comparison.
- A feature is `true` or `false`: the request has it, or not.
- A header is compared as text (`web`), as a number (`>= 2`), or as a flag (`true`: it says true, 1, yes or on;
  `false`: it says anything else, or is absent). An absent header fails the other comparisons.
- A count that the caller did not give (`output_tokens` is its max_tokens, capped by the route) fails its comparison.
- An effort of reasoning is compared by its order; one that the caller did not name fails.
- A reason names the condition and the value, but never a header's value, which may be confidential.

Efforts of reasoning:
- An effort is a word of `EFFORTS`, or a budget of thinking tokens: `8192 tokens`. Empty: the request names none.
- A budget counts as the effort that Messages are translated to (`backends.translation.messages_to_chat`).
- `class_of` gathers budgets of about the same size, by powers of two: what is learned by class has a bounded memory.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_serializer, model_validator

from policies.types import RequestView

EFFORT = "reasoning_effort"  # name of the condition, and of the member of a request
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_BUDGETS = ((2048, "low"), (8192, "medium"))  # tokens at most; more is high


def class_of(effort: str) -> str:
    """Job class of an effort: the same for budgets of about the same size."""
    tokens, _, unit = effort.partition(" ")
    return f"{int(tokens).bit_length()} bits" if unit else effort


def place_of(effort: str) -> int:
    """Position in EFFORTS. Raises ValueError with a suggestion."""
    tokens, _, unit = effort.partition(" ")
    word = next((word for most, word in _BUDGETS if int(tokens) <= most), "high") if unit == "tokens" else effort
    if word in EFFORTS:
        return EFFORTS.index(word)
    near = get_close_matches(word, EFFORTS, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(EFFORTS)}"
    raise ValueError(f"'{word}' is no effort of reasoning; {hint}")


_NUMBER = r"-?\d+(?:\.\d+)?"
_NUMERIC = re.compile(rf"\s*{_NUMBER}\s*")
_COMPARISON = re.compile(rf"\s*(<=|>=|==|<|>)\s*({_NUMBER})\s*")
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*")
_EFFORT = re.compile(r"\s*(<=|>=|==|<|>)?\s*([^\s<>=]+)\s*")
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_HEADER = "header."
_HEADER_NAME = re.compile(r"[a-z0-9_-]+")
_FLAGS = frozenset({"true", "1", "yes", "on"})


@dataclass(frozen=True, slots=True)
class Comparison:
    """Bounds of a number; `text` is the YAML form."""

    text: str
    bounds: tuple[tuple[str, float], ...]

    @property
    def limits(self) -> list[float]:
        return [limit for _, limit in self.bounds]

    def holds(self, value: float) -> bool:
        return all(_OPERATORS[sign](value, bound) for sign, bound in self.bounds)


def comparison(value: Any) -> Comparison:
    """Parses `<= 8000`, `1000..8000` or a bare number. Raises ValueError."""
    if isinstance(value, Comparison):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("write a comparison like '<= 8000', '1000..8000' or 3")
    text = str(value)
    if match := _COMPARISON.fullmatch(text):
        return Comparison(f"{match[1]} {match[2]}", ((match[1], float(match[2])),))
    if match := _RANGE.fullmatch(text):
        return _range(match[1], match[2])
    if _NUMERIC.fullmatch(text):
        return Comparison(f"== {text.strip()}", (("==", float(text)),))
    raise ValueError(f"'{text}' is not a comparison; write it like '<= 8000', '1000..8000' or 3")


def _token_comparison(value: Any) -> Comparison:
    """A comparison of tokens: nobody means an exact number of them by a bare one. Raises ValueError."""
    if isinstance(value, (int, float, str)) and not isinstance(value, bool) and _NUMERIC.fullmatch(text := str(value)):
        number = text.strip()
        raise ValueError(f"{number} needs a comparison; write '<= {number}' (or '== {number}' for exactly so many)")
    return comparison(value)


def _range(low: str, high: str) -> Comparison:
    if float(low) > float(high):
        raise ValueError(f"{low}..{high} holds for no number; write {high}..{low}")
    return Comparison(f"{low}..{high}", ((">=", float(low)), ("<=", float(high))))


@dataclass(frozen=True, slots=True)
class EffortTest:
    """Efforts of reasoning, by their places in EFFORTS; `text` is the YAML form."""

    text: str | tuple[str, ...]
    places: frozenset[int]

    def refusal(self, effort: str) -> str | None:
        wanted = self.text if isinstance(self.text, str) else " or ".join(self.text)
        if not effort:
            return f"reasoning_effort is not given, and must be {wanted}"
        return None if place_of(effort) in self.places else f"reasoning_effort {effort} is not {wanted}"


def _effort_test(value: Any) -> EffortTest:
    """Parses `high`, `>= medium` or a list of efforts. Raises ValueError."""
    if isinstance(value, EffortTest):
        return value
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(each, str) and _EFFORT.fullmatch(each) for each in value)
    ):
        return EffortTest(tuple(value), frozenset(map(place_of, value)))
    if not isinstance(value, str) or (match := _EFFORT.fullmatch(value)) is None:
        raise ValueError("write an effort like high, a comparison like '>= medium', or a list like [low, medium]")
    holds, bound = _OPERATORS[match[1] or "=="], place_of(match[2])
    if not (places := frozenset(place for place in range(len(EFFORTS)) if holds(place, bound))):
        raise ValueError(f"'{value}' holds for no effort: {EFFORTS[0]} is the least, {EFFORTS[-1]} the most")
    return EffortTest(value.strip(), places)


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):  # from an environment variable
        return bool(value == "true")
    raise ValueError("write true or false")


def _header_test(value: Any) -> Comparison | str | bool:
    """Parses a header's condition: a comparison where written like a comparison, else the text itself."""
    if isinstance(value, (bool, Comparison)):
        return value
    if isinstance(value, str) and not (value.lstrip().startswith(("<", ">", "=")) or _RANGE.fullmatch(value)):
        return value
    if not isinstance(value, (str, int, float)):
        raise ValueError("write the text it must equal, a comparison like '>= 2', or true or false")
    return comparison(value)


_COUNT_SCHEMA = {
    "anyOf": [
        {"type": "number"},
        {"type": "string", "pattern": rf"^\s*((<=|>=|==|<|>)?\s*{_NUMBER}|{_NUMBER}\s*\.\.\s*{_NUMBER})\s*$"},
    ],
    "description": "a comparison: '<= 8000', '1000..8000', 3",
}
_TOKENS_SCHEMA = {
    "type": "string",
    "pattern": rf"^\s*((<=|>=|==|<|>)\s*{_NUMBER}|{_NUMBER}\s*\.\.\s*{_NUMBER})\s*$",
    "description": "a comparison: '<= 8000', or '1000..8000'",
}
_EFFORT_SCHEMA = {
    "anyOf": [
        {"type": "string", "pattern": rf"^\s*(<=|>=|==|<|>)?\s*({'|'.join(EFFORTS)})\s*$"},
        {"type": "array", "items": {"enum": list(EFFORTS)}, "minItems": 1},
    ],
    "description": "an effort (high), a comparison ('>= medium'), or a list ([low, medium])",
}
_HEADER_SCHEMA = {
    "type": ["string", "number", "boolean"],
    "description": "the text it must equal, a comparison ('>= 2'), or whether it says true",
}

# Optional inside the annotation: a condition may be absent, but not empty.
Count = Annotated[Comparison | None, PlainValidator(comparison), WithJsonSchema(_COUNT_SCHEMA)]
Tokens = Annotated[Comparison | None, PlainValidator(_token_comparison), WithJsonSchema(_TOKENS_SCHEMA)]
Effort = Annotated[EffortTest | None, PlainValidator(_effort_test), WithJsonSchema(_EFFORT_SCHEMA)]
Flag = Annotated[bool | None, PlainValidator(_flag), WithJsonSchema({"type": "boolean"})]
HeaderTest = Annotated[Comparison | str | bool, PlainValidator(_header_test), WithJsonSchema(_HEADER_SCHEMA)]


def _as_in_yaml(schema: dict[str, Any]) -> None:
    """Describes headers as top-level keys, as in the YAML; no condition has a default."""
    schema["properties"].pop("header")
    schema["patternProperties"] = {r"^header\.[A-Za-z0-9_-]+$": _HEADER_SCHEMA}
    for condition in schema["properties"].values():
        condition.pop("default", None)


class When(BaseModel):
    """Conditions on a request; all must hold."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_as_in_yaml)

    prompt_tokens: Tokens = None
    output_tokens: Tokens = None
    turns: Count = None
    priority: Count = None
    reasoning_effort: Effort = None
    tools: Flag = None
    images: Flag = None
    json_schema: Flag = None
    stream: Flag = None
    header: Mapping[str, HeaderTest] = Field(default_factory=dict)  # by lower-case name

    @model_validator(mode="before")
    @classmethod
    def _gather_headers(cls, value: Any) -> Any:
        """Converts `header.<name>: x` to `header: {<name>: x}`."""
        if not isinstance(value, Mapping):
            return value
        if "header" in value:
            raise ValueError("name the header: write header.x-team: web")
        known = {key: wanted for key, wanted in value.items() if not str(key).startswith(_HEADER)}
        headers = {_header_name(key): wanted for key, wanted in value.items() if key not in known}
        return known | {"header": headers}

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        tests = [*self._conditions, *((_HEADER + name, test) for name, test in self.header.items())]
        return {name: test.text if isinstance(test, (Comparison, EffortTest)) else test for name, test in tests}

    @cached_property
    def _conditions(self) -> tuple[tuple[str, Comparison | EffortTest | bool], ...]:
        named = ((name, getattr(self, name)) for name in type(self).model_fields if name != "header")
        return tuple((name, test) for name, test in named if test is not None)

    def headers(self) -> set[str]:
        """Lower-case names of the headers in conditions."""
        return set(self.header)

    def refuses(self, request: RequestView, prompt_tokens: int, output_tokens: int | None = None) -> str | None:
        """Reason why a condition does not hold; None: all hold. `output_tokens`: max_tokens under the route's cap."""
        values: Mapping[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "turns": request.user_turns,
            EFFORT: request.members.get(EFFORT, ""),
        }
        for name, test in self._conditions:
            value = values[name] if name in values else getattr(request, name)
            if reason := _refusal(name, test, value):
                return reason
        for name, wanted in self.header.items():
            if reason := _header_refusal(_HEADER + name, wanted, request.headers.get(name)):
                return reason
        return None


def _header_name(key: str) -> str:
    name = key.removeprefix(_HEADER).lower()
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError(f"'{key}' names no header; write it like header.x-team")
    return name


def _refusal(name: str, test: Comparison | EffortTest | bool, value: Any) -> str | None:
    if isinstance(test, EffortTest):
        return test.refusal(value)
    if isinstance(test, bool):
        return None if value is test else f"{name} is {'false' if test else 'true'}"
    if value is None:
        return f"{name} is not given, and must be {test.text}"
    return None if test.holds(value) else f"{name} {value} is not {test.text}"


def _header_refusal(name: str, test: Comparison | str | bool, value: str | None) -> str | None:
    if isinstance(test, bool):
        says = value is not None and value.strip().lower() in _FLAGS
        return None if says is test else f"{name} is {'not ' if test else ''}true"
    if value is None:
        return f"{name} is absent"
    if isinstance(test, str):
        return None if value == test else f"{name} is not '{test}'"
    holds = _NUMERIC.fullmatch(value) is not None and test.holds(float(value))
    return None if holds else f"{name} is not {test.text}"
