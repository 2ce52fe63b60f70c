"""Cache breakpoints in requests to Anthropic."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from backends.anthropic import BREAKPOINT, Anthropic, with_breakpoints
from backends.interface import BackendConfig, BackendRequest, Operation

TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]
TEXT = {"type": "text", "text": "x"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def sent(body: dict[str, Any], operation: Operation = Operation.MESSAGES, **config: Any) -> dict[str, Any]:
    backend = Anthropic(BackendConfig("anthropic", "claude", api_key="sk-1", **config))
    call = backend.call(BackendRequest(operation, {"messages": TALK, **body}, "claude", stream=False))
    decoded: dict[str, Any] = json.loads(call.body)
    return decoded


def marks(value: Any, path: str = "") -> list[str]:
    """Places with a breakpoint."""
    if isinstance(value, dict):
        own = [path] if value.get("cache_control") == BREAKPOINT else []
        return own + [mark for key, inner in value.items() for mark in marks(inner, f"{path}/{key}")]
    if isinstance(value, list):
        return [mark for i, inner in enumerate(value) for mark in marks(inner, f"{path}/{i}")]
    return []


@pytest.mark.parametrize(
    ("body", "places"),
    [
        ({}, ["/messages/2/content/0"]),
        ({"messages": TALK[:1]}, []),
        ({"system": "You are kind.", "messages": TALK[:1]}, ["/system/0"]),
        ({"system": "You are kind."}, ["/system/0", "/messages/2/content/0"]),
        ({"system": Raw(b'"You are kind."'), "messages": TALK[:1]}, ["/system/0"]),
        ({"system": [{"type": "text", "text": "a"}, Raw(b'{"type":"text","text":"b"}')]}, ["/system/1"]),
        ({"system": "s", "tools": [TOOL, TOOL], "messages": TALK[:1]}, ["/system/0"]),
        ({"tools": [TOOL, TOOL], "messages": TALK[:1]}, ["/tools/1"]),
        ({"tools": [TOOL, {**TOOL, "defer_loading": True}], "messages": TALK[:1]}, ["/tools/0"]),
        ({"tools": [{**TOOL, "defer_loading": True}], "messages": TALK[:1]}, []),
        ({"system": "", "messages": TALK[:1]}, []),
    ],
)
def test_the_ends_of_stable_prefixes_are_marked(body: dict[str, Any], places: list[str]) -> None:
    """Anthropic refuses a mark on a tool with `defer_loading`."""
    found = marks(sent(body))
    assert set(places) <= set(found)
    assert len(found) <= 2
    assert not any("defer_loading" in tool and "cache_control" in tool for tool in sent(body).get("tools", []))


def test_the_last_block_of_a_conversation_is_marked_with_its_text() -> None:
    assert sent({})["messages"][2]["content"] == [{"type": "text", "text": "three", "cache_control": BREAKPOINT}]


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": ""}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
        {"role": "user", "content": []},
        {"role": "user", "content": 7},
    ],
)
def test_what_anthropic_cannot_mark_is_left_as_it_is(last: Any) -> None:
    """A wrong mark would be refused with a 400 that the caller has not caused."""
    assert sent({"messages": [*TALK[:2], last]})["messages"][2] == last


@pytest.mark.parametrize(
    "own",
    [
        {"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
        {"tools": [{**TOOL, "cache_control": BREAKPOINT}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": BREAKPOINT}]},
                *TALK,
            ]
        },
        {"cache_control": BREAKPOINT},
    ],
)
def test_where_the_caller_sets_its_own_none_is_added(own: dict[str, Any]) -> None:
    assert sent(own) == sent(own, prompt_caching=False)


def test_a_pool_may_opt_out_and_counts_of_tokens_are_left_alone() -> None:
    assert marks(sent({"system": "s"}, prompt_caching=False)) == []
    assert marks(sent({"system": "s"}, Operation.COUNT_TOKENS)) == []


@given(
    st.dictionaries(
        st.sampled_from(["system", "tools", "messages", "x"]),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.sampled_from(["type", "text", "content", "role"]), inner, max_size=3)
            ),
            max_leaves=8,
        ),
    )
)
def test_a_body_of_any_shape_is_sent(body: dict[str, Any]) -> None:
    """What is malformed is the server's to refuse."""
    assert len(marks(with_breakpoints(body))) <= 4
