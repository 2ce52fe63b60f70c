"""Rules that change prompts: nothing but the order or place of what they name, and nothing of its meaning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.interface import Operation
from gateway.parts.repair.prompt_repairs import repaired
from policies.prefix_doctor.break_class import RepairRule

CCH = "x-anthropic-billing-header: cc_version=2.1.177; cch=36ee5;"
CHAT, MESSAGES = Operation.CHAT, Operation.MESSAGES


def mend(operation: Operation, body: dict[str, Any], *rules: RepairRule) -> tuple[dict[str, Any], tuple[str, ...]]:
    raw, done = repaired(operation, json.dumps(body).encode(), rules)
    return json.loads(raw), done


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}, **more}


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True).flatmap(st.permutations))
def test_sorted_tools_are_the_same_set_in_one_order(names: list[str]) -> None:
    """Each tool as it was written; a sorted list, and all else, stays as it is."""
    body = {"tools": [tool(name) for name in names], "messages": [], "tool_choice": "auto"}
    found, done = mend(CHAT, body, RepairRule.SORT_TOOLS)
    assert found == {**body, "tools": [tool(name) for name in sorted(names)]}
    assert done == (() if names == sorted(names) else ("sort_tools",))


def test_a_cache_mark_of_tools_stays_at_its_place_in_the_list() -> None:
    """It says how much of the list is cached, not which tool."""
    mark = {"type": "ephemeral"}
    body = {"tools": [{"name": "b"}, {"name": "a", "cache_control": mark}], "messages": []}
    found, _ = mend(MESSAGES, body, RepairRule.SORT_TOOLS)
    assert found["tools"] == [{"name": "a"}, {"name": "b", "cache_control": mark}]


def test_a_cache_mark_never_comes_to_a_tool_that_is_loaded_later() -> None:
    """Anthropic refuses a tool with both `cache_control` and `defer_loading`."""
    mark, later = {"type": "ephemeral"}, {"name": "z", "defer_loading": True}
    body = {"tools": [later, {"name": "a", "cache_control": mark}], "messages": []}
    assert mend(MESSAGES, body, RepairRule.SORT_TOOLS) == (body, ())
    body["tools"].append({"name": "b"})
    found, _ = mend(MESSAGES, body, RepairRule.SORT_TOOLS)
    assert found["tools"] == [{"name": "a"}, {"name": "b", "cache_control": mark}, later]


def test_claude_codes_line_goes_wherever_a_line_of_the_system_prompt_begins_with_it() -> None:
    """In what the user says it is text like any other."""
    body = {"system": [{"type": "text", "text": f"Be kind.\n{CCH}\nBe short."}], "messages": [], "x": CCH}
    found, done = mend(MESSAGES, body, RepairRule.STRIP_CCH)
    assert (found["system"][0]["text"], found["x"]) == ("Be kind.\nBe short.", CCH)
    assert done == ("strip_cch",)


@pytest.mark.parametrize("raw", [b"{", b"[]", b'{"tools": [1, 2]}', b'{"tools": {}, "messages": 7}', b""])
def test_a_body_that_cannot_be_read_is_left_to_the_parser(raw: bytes) -> None:
    assert repaired(CHAT, raw, RepairRule) == (raw, ())
