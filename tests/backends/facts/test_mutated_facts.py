"""Fact files with values changed at random: a file is refused whole, in one line, or every reader works with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from datetime import UTC, date, datetime, timedelta
from math import inf, isfinite, nan
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from backends.facts import lookup, refreshed
from backends.facts.fact_rows import APIS, MODELS, apis, families, read_on, shipped
from backends.facts.listed_price import in_force
from backends.facts.model_facts import Facts
from backends.facts.priors import prior_ttft
from backends.fitting.target import Author
from backends.interface import Operation
from backends.translation.omissions import Omissions
from backends.translation.translation import UntranslatableError
from gateway.cli.facts_command import changes, shown
from gateway.cli.live import sunsets
from gateway.cli.up.known_servers import FoundServer, KnownServer, Reach
from gateway.cli.up.tier_models import large_model, quality_order, small_model
from policies.latency.api_predictor import ApiPredictor
from policies.types import Load
from tests.backends.fitting.bodies import FUNCTION, Json, whole

TODAY = date(2026, 12, 1)
ROWS = 3  # of a family
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

CALL = {"id": "c" * 60, "type": "function", "function": {"name": "f" * 200, "arguments": "{}"}, "extra_content": {}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/bmp;base64,AA", "detail": "original"}}
SCHEMA = {"type": "object", "properties": {"a": {"oneOf": [{"type": ["string", "null"]}, {"minItems": 3}]}}}
TURNS: list[Json] = [
    {"role": "developer", "content": "s"},
    {"role": "user", "content": [IMAGE, {"type": "file", "file": {}}, {"type": "text", "text": ""}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r", "reasoning_details": []},
    {"role": "tool", "tool_call_id": "c" * 60, "content": "ok"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "x "}]},
]
SAID: Json = {
    "temperature": 1.7,
    "top_p": 0.2,
    "top_k": 3,
    "n": 3,
    "user": "u" * 90,
    "metadata": {"k" * 70: "v"},
    "stop": ["a", "b" * 40, "c"],
    "top_logprobs": 20,
    "logprobs": True,
    "seed": 1,
    "max_tokens": 9,
    "tools": [FUNCTION, {"type": "function", "function": {"name": "g" * 200, "parameters": SCHEMA, "strict": True}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
}
BODIES: list[tuple[Operation, Json]] = [
    (Operation.CHAT, {**SAID, "messages": TURNS, "reasoning_effort": "none"}),
    (Operation.CHAT, {**SAID, "messages": TURNS[:2], "reasoning_effort": "ultra", "max_completion_tokens": 3}),
    (Operation.MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "enabled"}}),
    (
        Operation.MESSAGES,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "", "cache_control": {}}]}],
            "system": [{"type": "text", "text": "s"}],
            "thinking": {"type": "disabled"},
            "max_tokens": 9,
            "output_config": {"effort": "xhigh"},
            "tools": [{"name": "n" * 200, "input_schema": SCHEMA}],
        },
    ),
    (Operation.RESPONSES, {"input": [{"role": "developer", "content": "s"}], "reasoning": {"effort": "none"}}),
]


def small(file: str) -> dict[str, Any]:
    """The shipped file as a later day has it, with few rows of each family."""
    document: dict[str, Any] = deepcopy({**shipped(file), "read": shipped(file)["read"] + timedelta(1)})
    if file == MODELS:
        document["families"] = {name: rows[:ROWS] for name, rows in document["families"].items()}
    return document


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


VALID = {file: small(file) for file in (MODELS, APIS)}
PLACES = {file: sorted(places(document), key=str) for file, document in VALID.items()}
VALUES = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, 0, -1, 1, 10**30, 0.0, -0.5, inf, -inf, nan, 1e-300, 1e300, "", "none", "gone", "{v}"),
            *("(", "[", "(a+)+$", "a|b", "*", "\\1", ".", "a..b", "é" * 300, "\x00", "2026-02-30", "high", "medium"),
            *([], [[]], [None], ["a", 1], [5, 1], {}, {"": ""}, {"medium": 0}, {"a": {"b": 1}}, {"input": inf}),
            *(date.min, date.max, date(2027, 1, 1), datetime(2027, 1, 1, 5), datetime(2027, 1, 1, tzinfo=UTC)),
        ]
    ),
    st.floats(),
    st.integers(),
    st.text(max_size=20),
    st.lists(st.text(max_size=3), max_size=3),
)
CHANGE = st.tuples(st.integers(0, 10**6), st.sampled_from(["put", "drop", "add"]), VALUES)


def mutated(file: str, changed: list[tuple[int, str, Any]]) -> bytes:
    document = deepcopy(VALID[file])
    for number, how, value in changed:
        *path, last = PLACES[file][number % len(PLACES[file])]
        holder: Any = document
        try:
            for key in path:
                holder = holder[key]
            if how == "drop":
                del holder[last]
            elif how == "add" and isinstance(holder, dict):
                holder[str(value)[:9]] = holder[last]
            else:
                holder[last] = value
        except (KeyError, IndexError, TypeError):
            continue  # dropped by the change before
    return yaml.dump(document, Dumper=_DUMPER, sort_keys=False).encode()


def known_names() -> set[str]:
    """A name for each row, of the words of its pattern, and names with prices."""
    found = {"gpt-9-x-2027-01-01", "latest", "a" * 300, "claude-opus-9", "gemini-9-pro", ""}
    for rows in families().values():
        for row in rows:
            found |= set(row.prices)
            text = row.match.pattern.removeprefix("(?<![a-z0-9])").partition("|")[0]
            found.add(re.sub(r"\(\?P<v>.*", "9", text).replace("\\", "").replace("(", "").replace(")", ""))
    return found


def read_all(file: str) -> None:
    """Each reader of rows: of each model at its maker's API, or of some models at each API."""
    names = known_names() if file == MODELS else {"gpt-9-sol", "claude-opus-9", "gpt-oss-20b", "unknown"}
    for api in (*apis(), "nobody"):
        for name in names:
            row = lookup.model_row(api, name)
            if file == MODELS and api != "compatible" and (row is None or row.family != api):
                continue
            facts = lookup.facts_of(api, name)
            lookup.origins(api, name)
            sunsets._believed(facts, TODAY)
            in_force(lookup.listed_prices(api, name), TODAY)
            _forecast(prior_ttft(api, name))
            _fit(facts)
        found = FoundServer(KnownServer(api, api, "https://a", "key", "KEY"), api, Reach.OK, sorted(names))
        large_model(found, TODAY), small_model(found, TODAY), quality_order([found])
    for name in names:
        shown(name, None, None)
    lookup.api_of("compatible", "api.example.com")


def _forecast(prior: Any) -> None:
    predictor = ApiPredictor(0.0, prior)
    for effort in ("", "high"):
        forecast = predictor.of(effort).predict(Load(at=0.0), 1000, 0, 0.0)
        assert isfinite(forecast.point_estimate)
        assert forecast.point_estimate > 0


def _fit(facts: Facts) -> None:
    for operation, body in BODIES:
        for author in (Author.GATEWAY, Author.CALLER):
            try:
                whole(facts, operation, body, author, Omissions())
            except UntranslatableError:
                continue


@pytest.mark.parametrize("file", [MODELS, APIS])
def test_a_changed_file_is_refused_whole_or_read_by_all(file: str) -> None:
    """And the names of the release have their facts again without it."""

    @settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.lists(CHANGE, min_size=1, max_size=2))
    @example([(0, "add", "x")])
    def refused_or_read(changed: list[tuple[int, str, Any]]) -> None:
        left = refreshed.use({file: mutated(file, changed)})
        if left:
            assert str(left[file]).strip()
            assert "\n" not in str(left[file])
            assert read_on(file) == str(shipped(file)["read"])
        else:
            read_all(file)
            changes(shipped(file), refreshed.in_use(file))

    try:
        refused_or_read()
    finally:
        refreshed.use({})
