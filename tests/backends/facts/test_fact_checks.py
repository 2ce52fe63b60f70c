"""Fact files as a whole: what refuses a file, and how long that takes at most."""

from __future__ import annotations

import time
from datetime import datetime
from math import inf, nan
from typing import Any

import pytest

from backends.facts.fact_checks import LARGEST, BadFacts, check_pattern, checked
from backends.facts.fact_rows import APIS, MODELS, shipped
from tests.backends.facts.test_refreshed import newer


def with_row(**row: Any) -> bytes:
    """The models file with one row more."""
    return newer(families={**shipped(MODELS)["families"], "new": [{"match": "gpt-x", "source": "S", **row}]})


def with_api(**row: Any) -> bytes:
    return newer(APIS, apis={**shipped(APIS)["apis"], "new": row})


def priors(**changes: Any) -> bytes:
    return newer(priors={**shipped(MODELS)["priors"], **changes})


def tiers(**changes: Any) -> bytes:
    return newer(tiers={**shipped(MODELS)["tiers"], **changes})


NOON = datetime(2026, 12, 1, 12)
BAD: list[tuple[bytes, str]] = [
    (with_row(efforts="low"), "gpt-x: Expected `array"),
    (with_row(size="large"), "gpt-x: Expected `float"),
    (with_row(size=inf), "no finite number"),
    (with_row(size=nan), "no finite number"),
    (with_row(context=0), "gpt-x: Expected `int` >= 1"),
    (with_row(context=10**40), "no finite number"),
    (with_row(stops=-1), "gpt-x: Expected `int` >= 0"),
    (with_row(ttft={"low": 0}), "gpt-x: Expected `float` > 0"),
    (with_row(ttft={"low": -1.5}), "gpt-x: Expected `float` > 0"),
    (with_row(ttft={"low": 1e7}), "gpt-x: Expected `float` <= 3600"),
    (with_row(temperature=[2, 1]), "the least and the most"),
    (with_row(shutdown="soon"), "shutdown is a date, or gone"),
    (with_row(shutdown="2026-13-40"), "shutdown is a date, or gone"),
    (with_row(shutdown=NOON), "a day is written YYYY-MM-DD"),
    (with_row(shutdown={"gpt-x": NOON}), "a day is written YYYY-MM-DD"),
    (with_row(tool_name="["), "unterminated character set"),
    (with_row(tool_name="([a-z]+)+"), "could take long"),
    (with_row(tool_name="[a-z]*[a-z]*"), "could take long"),
    (with_row(match="("), "missing \\)"),
    (with_row(match="(a|a)*x"), "could take long"),
    (with_row(match=""), "length >= 1"),
    (with_row(match=5), "Expected `str`"),
    (with_row(since=5), "`since` needs a version"),
    (with_row(match="gpt-{v}", since="new"), "invalid literal"),
    (with_row(source=None), "Expected `str`, got `null`"),
    (with_row(sampling="often"), "Invalid enum value 'often'"),
    (with_row(note="\x1b[2J"), "cannot be shown"),
    (with_row(prices={"gpt-x": {"input": inf, "output": 1}}), "no finite number"),
    (with_row(prices={"gpt-x": {"input": -1, "output": 1}}), "Expected `float` >= 0"),
    (with_row(prices={"gpt-x": {"input": 1, "output": 1, "from": NOON}}), "a day is written YYYY-MM-DD"),
    (
        with_row(prices={"gpt-x": {"input": 1, "output": 1, "long_from": 0, "long": {"input": 1, "output": 1}}}),
        "Expected `int` >= 1",
    ),
    (newer(read=NOON), "a day is written YYYY-MM-DD"),
    (newer(read="2026-12-01"), "no day on which it was read"),
    (newer(families={1: []}), "1 is no name"),
    (newer(families=None), "NoneType"),
    (priors(seconds={"openai": [1, 1]}), "no row for `other`"),
    (priors(seconds={"other": [0, 1]}), "Expected `float` > 0"),
    (priors(hidden={"openai": {"low": 2}}), "no seconds for `medium`"),
    (priors(names={}), "there is no 'shows'"),
    (tiers(leaving=10**8), "Expected `int` <= 3650"),
    (tiers(previews="(a*)*"), "could take long"),
    (with_api(hosts="api.x.ai"), "new: Expected `array`"),
    (with_api(hosts=[""]), "length >= 1"),
    (with_api(like="nobody"), "there is no 'nobody'"),
    (with_api(over={"schema": "nowhere"}), "there is no 'nowhere'"),
    (with_api(shutdown="soon"), "shutdown of an API"),
    (with_api(over={"shutdown": "2026-12-01"}), "shutdown of an API"),
    (with_api(over=[]), "Expected `object`"),
    (newer(APIS, schemas={**shipped(APIS)["schemas"], "new": {"closed": "often"}}), "Expected `bool`"),
]


@pytest.mark.parametrize(("text", "words"), BAD, ids=[words for _, words in BAD])
def test_one_bad_value_refuses_the_file(text: bytes, words: str) -> None:
    """In one line that names it."""
    with pytest.raises(BadFacts, match=words) as refused:
        checked(text)
    assert "\n" not in str(refused.value)


def test_both_shipped_files_are_valid() -> None:
    """By the check of refreshed ones."""
    assert [checked(newer(file))[0] for file in (MODELS, APIS)] == [MODELS, APIS]


def bomb(levels: int) -> str:
    """A text that doubles with each level: `source` names the last."""
    lines = ["x0: &x0 [a, a]", *(f"x{level}: &x{level} [*x{level - 1}, *x{level - 1}]" for level in range(1, levels))]
    return "\n".join([*lines, f"families: {{a: [{{match: m, source: *x{levels - 1}}}]}}", "read: 2026-12-01"])


def merged(levels: int) -> str:
    """The same by merge keys, whose pairs are copied while the text is read."""
    steps = (f"x{level}: &x{level} {{<<: [*x{level - 1}, *x{level - 1}]}}" for level in range(1, levels))
    return "\n".join(["x0: &x0 {a: 1, b: 2}", *steps])


HOSTILE = {
    "aliases": bomb(60),
    "merges": merged(60),
    "itself": "read: &x [*x]",
    "deep": "read: " + "[" * 400_000,
    "many": "read: [" + "1," * 1_000_000 + "]",
    "sexagesimal": "read: 1" + ":1" * 1_000_000,
    "long": "read: " + "x" * 3_000_000,
    "digits": "read: " + "9" * 3_000_000,
    "huge": " " * (LARGEST + 1),
    "documents": "--- 1\n" * 500_000,
    "objects": "read: !!python/object/apply:os.system [true]",
    "bytes": "read: !!binary AAAA",
    "set": "read: 2026-12-01\nfamilies: !!set {a, b}",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_at_once(text: str) -> None:
    """Before values are made of it."""
    begin = time.process_time()
    with pytest.raises(BadFacts):
        checked(text.encode())
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("pattern", ["(a?){9}", "a?" * 30 + "a" * 30, "(a|a)?" * 20, r"(a)\1", "a*b*c*", "(?i)a"])
def test_a_pattern_that_could_take_long_is_refused(pattern: str) -> None:
    with pytest.raises(BadFacts, match="could take long"):
        check_pattern("row", pattern)


@pytest.mark.parametrize(
    "pattern", [r"o[134](-pro|-preview)?(-20\d\d.*)?$", r"[)*+|(]{1,64}", r"gpt-(3\.5|4)(?!\d)", r"(?<!x)(?:a|b)?c+"]
)
def test_sets_optional_groups_and_alternatives_are_accepted(pattern: str) -> None:
    check_pattern("row", pattern)


def test_a_file_may_use_aliases() -> None:
    """As the shipped ones do, of bounded size."""
    assert b"*id" in newer()
    assert checked(newer())[0] == MODELS
