"""Changes of a body by path: what they change, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from backends.body_changes import BodyChange, ChangeKind, changed, nearest, told

USER, SYSTEM = {"role": "user", "content": "u"}, {"role": "system", "content": "s"}


def raw(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))


def plain(body: dict[str, Any]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(body))


def out(path: str, **more: Any) -> BodyChange:
    return BodyChange(ChangeKind.LEAVE_OUT, path, **more)


CASES: dict[str, tuple[dict[str, Any], BodyChange, dict[str, Any]]] = {
    "a member": ({"a": 1, "b": 2}, out("a"), {"b": 2}),
    "a member of each message": (
        {"messages": [{"x": 1, "y": 2}, {"y": 3}]},
        out("messages.x"),
        {"messages": [{"y": 2}, {"y": 3}]},
    ),
    "a member beside another": ({"a": 1, "b": 2}, out("a", beside="b"), {"b": 2}),
    "a member without the other": ({"a": 1}, out("a", beside="b"), {"a": 1}),
    "a member beside a value": (
        {"a": 1, "t": {"type": "on"}},
        out("a", beside="t.type=on|auto"),
        {"t": {"type": "on"}},
    ),
    "another name": ({"a": 1}, BodyChange(ChangeKind.RENAME, "a", to="b"), {"b": 1}),
    "another name that is taken": ({"a": 1, "b": 2}, BodyChange(ChangeKind.RENAME, "a", to="b"), {"b": 2}),
    "another place": (
        {"effort": "low"},
        BodyChange(ChangeKind.RENAME, "effort", to="reasoning.effort"),
        {"reasoning": {"effort": "low"}},
    ),
    "another place that is taken": (
        {"effort": "low", "reasoning": {"effort": "high"}},
        BodyChange(ChangeKind.RENAME, "effort", to="reasoning.effort"),
        {"reasoning": {"effort": "high"}},
    ),
    "the nearest value": (
        {"effort": "xhigh"},
        BodyChange(ChangeKind.REPLACE, "effort", values=("low", "high")),
        {"effort": "high"},
    ),
    "one value for another": (
        {"messages": [{"role": "developer"}, {"role": "user"}]},
        BodyChange(ChangeKind.REPLACE, "messages.role", was="developer", values=("system",)),
        {"messages": [{"role": "system"}, {"role": "user"}]},
    ),
    "parts of a type": (
        {"messages": [{"content": [{"type": "thinking"}, {"type": "text"}]}]},
        BodyChange(ChangeKind.PARTS, "messages.content", values=("thinking",)),
        {"messages": [{"content": [{"type": "text"}]}]},
    ),
    "parts that are all there is": (
        {"messages": [{"content": [{"type": "thinking"}]}]},
        BodyChange(ChangeKind.PARTS, "messages.content", values=("thinking",)),
        {"messages": [{"content": [{"type": "thinking"}]}]},
    ),
    "folded": (
        {"messages": [SYSTEM, SYSTEM, USER, SYSTEM]},
        BodyChange(ChangeKind.FOLD, "messages"),
        {"messages": [{"role": "system", "content": "s\n\ns"}, {"role": "user", "content": "u\n\ns"}]},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spelling", ["decoded", "raw"])
def test_a_change_changes_what_its_path_names_and_nothing_else(name: str, spelling: str) -> None:
    """Of decoded bodies, and of those whose values are JSON as it was written. The body given stays as it is."""
    body, change, after = CASES[name]
    given = {each: raw(value) for each, value in body.items()} if spelling == "raw" else body
    before = plain(given)
    assert plain(changed(given, [change])) == after
    assert plain(given) == before


def test_values_without_the_name_keep_their_spelling() -> None:
    """Names of the path within texts change nothing."""
    first, second = Raw(b'{ "content" : "reasoning_content" }'), Raw(b'{"reasoning_content":"x","n":1.0}')
    found = changed({"messages": [first, second]}, [out("messages.reasoning_content")])
    assert found["messages"][0] is first
    assert plain(found)["messages"][1] == {"n": 1.0}


def test_what_a_change_takes_is_told_and_what_it_does_not_is_not() -> None:
    body = {"temperature": 0, "effort": "low", "messages": [SYSTEM, SYSTEM, USER], "x\r\ny": 1}
    changes = [
        out("temperature", label="temperature"),
        out("seed"),
        out("x\r\ny"),
        BodyChange(ChangeKind.REPLACE, "effort", values=("low", "high")),
        BodyChange(ChangeKind.RENAME, "effort", to="reasoning.effort", same=True),
        BodyChange(ChangeKind.FOLD, "messages", label="messages.role"),
    ]
    assert told(changes, body) == {"temperature": "temperature", "x__y": "other", "messages.role": "messages.role"}


def test_a_rename_is_told_where_the_name_is_new_or_taken() -> None:
    """Names that mean the same lose nothing, unless the body has both: the other name's value counts."""
    body = {"seed": 1, "max_tokens": 9, "max_completion_tokens": 99}
    changes = [
        BodyChange(ChangeKind.RENAME, "seed", to="other_seed", label="seed"),
        BodyChange(ChangeKind.RENAME, "max_tokens", to="max_completion_tokens", same=True, label="max_tokens"),
    ]
    assert told(changes, body) == {"seed": "seed", "max_tokens": "max_tokens"}
    del body["max_completion_tokens"]
    assert told(changes, body) == {"seed": "seed"}


def test_one_system_message_at_the_beginning_is_left_as_it_is() -> None:
    body = {"messages": [SYSTEM, USER]}
    assert changed(body, [BodyChange(ChangeKind.FOLD, "messages")]) == body


@pytest.mark.parametrize(
    ("value", "values", "near"),
    [("max", ("low", "high"), "high"), ("minimal", ("low", "high"), "low"), (9, (1, 4), 4), ("other", ("low",), None)],
)
def test_the_nearest_value_is_of_efforts_and_of_numbers(value: Any, values: Any, near: Any) -> None:
    assert nearest(value, values) == near
