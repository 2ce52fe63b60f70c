"""What a request loses in no lesson: content that determines the answer, in each dialect and with each engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.fitting import members
from backends.lessons.refusal import Reading, RefusalVerdict, read_refusal
from backends.lessons.refused_members import RefusedBody, may_mean

SCHEMA: dict[str, Any] = {"type": "json_schema", "schema": {"type": "object"}}
MEANT: dict[str, Any] = {
    "output_config": {"effort": "low", "format": SCHEMA},
    "output_config.format": SCHEMA,
    "output_format": SCHEMA,
    "function_call": {"name": "f"},
    "web_search_options": {"search_context_size": "low"},
    "structured_outputs": {"json": {}},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": "root ::= 'a'",
    "grammar": "root ::= 'a'",
    "ebnf": "root ::= 'a'",
    "regex": "a+",
    "json_schema": {"type": "object"},
    "suffix": "end",
    "echo": True,
    "mcp_servers": [{"url": "u"}],
    "documents": [{"text": "t"}],
    "tool_choice": {"type": "any"},
    "tool_choice.type": "tool",
    "max_tool_calls": 1,
    "background": True,
    "provider": {"data_collection": "deny"},
    "safe_prompt": True,
    "messages.prefix": True,
    "messages.partial": True,
    "messages.content.title": "t",
    "tools.allowed_domains": ["a.example"],
    "tools.filters": {"allowed_domains": ["a.example"]},
    "tools.max_uses": 1,
    "tools.function.description": "looks",
}


LISTED = ("prefix", "partial", "title", "allowed_domains", "filters")  # members of elements of lists


def sent(path: str, value: Any) -> dict[str, Any]:
    """A body with the value at the path."""
    found = value
    for name in reversed(path.split(".")):
        found = [{name: found}] if name in LISTED else {name: found}
    return {"model": "m", **found}


def reading(path: str, value: Any, **error: Any) -> Reading:
    return read_refusal(json.dumps({"error": error}).encode(), sent(path, value))


@pytest.mark.parametrize("path", MEANT)
def test_what_has_meaning_is_lacking_at_a_server_that_refuses_it(path: str) -> None:
    """By its name, in words or as `param`, and as an extra input of a place."""
    value, extra = MEANT[path], "unsupported_parameter"
    for found in (
        reading(path, value, message=f"Unsupported parameter: '{path}'"),
        reading(path, value, message="no", param=path, code=extra),
        reading(path, value, message=f"{path}: Extra inputs are not permitted"),
        reading(path, value, message=f"'{path}' is deprecated. Use 'other' instead."),
    ):
        assert (found.verdict, found.member) == (RefusalVerdict.LACKS, path)


@pytest.mark.parametrize("name", sorted(members._MEANT | members._MEANT_OF_CHAT))
def test_what_fitting_refuses_by_name_is_left_out_by_no_lesson(name: str) -> None:
    assert may_mean(name)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("output_config", {"effort": "low"}),
        ("output_config", {"effort": "low", "format": None}),
        ("tool_choice", "auto"),
        ("tool_choice", {"type": "auto"}),
        ("function_call", "auto"),
        ("echo", None),
        ("guided_json", {}),
        ("metadata", {"a": "b"}),
    ],
)
def test_what_says_nothing_is_left_out(path: str, value: Any) -> None:
    lesson = reading(path, value, message=f"Unsupported parameter: '{path}'").lesson
    assert str(lesson) == f"{path} is left out"


def test_a_member_with_more_members_than_are_looked_at_may_have_a_meaning() -> None:
    body = RefusedBody({"metadata": {f"k{number}": 1 for number in range(1000)}})
    assert body.has_meaning("metadata")
