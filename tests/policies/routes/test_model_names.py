"""Names, patterns and near names."""

from __future__ import annotations

import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.routes.model_names import COMPARED, LONGEST, by_precedence, matches, nearest, own_names
from tests.support.counted_calls import counted_calls

TEXTS = st.text("ab*", max_size=8)


@given(TEXTS, st.text("ab", max_size=8))
def test_a_star_stands_for_any_characters_or_none(pattern: str, name: str) -> None:
    """As `.*` in a regular expression."""
    expression = ".*".join(map(re.escape, pattern.split("*")))
    assert matches(pattern, name) == bool(re.fullmatch(expression, name))


@given(st.lists(st.text("ab*", min_size=1, max_size=6).filter(lambda text: "**" not in text), unique=True))
def test_every_pattern_is_reached_by_some_name(patterns: list[str]) -> None:
    """So two patterns conflict where they are equal, and nowhere else: `c`, which is in no pattern, for each star."""
    ordered = by_precedence(patterns)
    for pattern in ordered:
        name = pattern.replace("*", "c")
        assert next(each for each in ordered if matches(each, name)) == pattern


def test_the_most_literal_characters_come_first() -> None:
    """Of as many, fewer stars, and then the earlier one."""
    patterns = ["*", "gpt-*", "*-mini", "gpt-*-mini", "g*t-*-mini", "abc-*"]
    assert by_precedence(patterns) == ["gpt-*-mini", "g*t-*-mini", "*-mini", "gpt-*", "abc-*", "*"]


def test_a_hostile_name_takes_no_time() -> None:
    """Many stars against a long name, and a long unknown name against many known ones: backtracking would take years,
    and neither the whole name nor every known one is looked at."""
    assert not matches("*a" * 100 + "*b", "a" * LONGEST)
    assert not matches("a*", "a" * (LONGEST + 1))
    known, hostile = iter([f"abcdefgh-{i}" for i in range(2 * COMPARED)]), "abcdefgh" * 1_000_000
    tracemalloc.start()
    nearest(hostile, known)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < len(hostile)
    assert len([*known]) >= COMPARED - 1


def test_known_names_are_taken_apart_once() -> None:
    """A caller that sends unknown names without end has its own names alone taken apart each time."""
    names = [f"provider/some-model-name-{i}-instruct" for i in range(COMPARED)]
    assert counted_calls(lambda: nearest("gpt-unknown", names))["_pairs"] == COMPARED + 1
    assert counted_calls(lambda: nearest("gpt-other", names))["_pairs"] == 1


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("gpt-4p", ["openai/gpt-4", "gpt-4o"]),
        ("lama3.2", ["ollama/llama3.2"]),
        ("LLAMA3.2", ["ollama/llama3.2"]),
        ("zephyr", []),
        ("", []),
    ],
)
def test_near_names_share_pairs_of_letters(name: str, near: list[str]) -> None:
    assert nearest(name, ["gpt-4o", "openai/gpt-4", "ollama/llama3.2", "chat"])[: len(near) or 1] == near


def test_a_model_has_its_own_name_where_one_pool_alone_lists_it() -> None:
    assert own_names({"a": ["x", "y", "*"], "b": ["y", "z"]}) == {"x": "a", "z": "b"}
