"""Members without an equivalent that a request may lose: labels, and what the route drops. Each loss is noted."""

from __future__ import annotations

from typing import Any

import pytest

from backends.interface import Operation
from backends.translation.omissions import Omissions
from backends.translation.registry import (
    CHAT_TO_MESSAGES,
    CHAT_TO_RESPONSES,
    MESSAGES_TO_CHAT,
    RESPONSES_TO_CHAT,
    as_chat,
)
from backends.translation.translation import Translation

ASKED = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "a"}
CITED = [{"type": "url_citation", "url_citation": {"url": "https://x", "title": "t", "start_index": 0, "end_index": 1}}]


def chat(*messages: Any, **members: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages) or [ASKED], **members}


LABELS = [
    (CHAT_TO_MESSAGES, chat(metadata={"a": "b"}), "metadata"),
    (CHAT_TO_MESSAGES, chat(user="a", safety_identifier="b"), "user"),
    (CHAT_TO_MESSAGES, chat({**ASKED, "name": "eve"}, {**ASKED, "name": "bob"}), "messages.name"),
    (CHAT_TO_MESSAGES, chat({**ASKED, "name": "eve"}, ASKED), "messages.name"),
    (CHAT_TO_MESSAGES, chat(ASKED, {**SAID, "annotations": CITED}), "messages.annotations"),
    (CHAT_TO_RESPONSES, chat({**ASKED, "name": "eve"}), "messages.name"),
    (CHAT_TO_RESPONSES, chat(ASKED, {**SAID, "annotations": CITED}), "messages.annotations"),
    (MESSAGES_TO_CHAT, chat(max_tokens=9, metadata={"user_id": "u", "team": "t"}), "metadata"),
]


@pytest.mark.parametrize(("translation", "body", "name"), LABELS, ids=[f"{row[0].backend}:{row[2]}" for row in LABELS])
def test_a_label_is_left_out_and_noted(translation: Translation, body: dict[str, Any], name: str) -> None:
    """What labels a request changes no answer: the request is served without."""
    dropped = Omissions()
    sent = translation.request(body, dropped)
    assert dropped.noted == {name: name}
    assert "eve" not in str(sent)
    assert "url_citation" not in str(sent)


def test_an_empty_label_is_not_noted() -> None:
    dropped = Omissions()
    CHAT_TO_MESSAGES.request(chat(ASKED, {**SAID, "annotations": []}, metadata={}), dropped)
    assert not dropped.noted


HINTS: dict[str, Any] = {"seed": 0, "presence_penalty": 0.5, "frequency_penalty": -1, "prediction": {"type": "content"}}


@pytest.mark.parametrize("translation", [CHAT_TO_MESSAGES, CHAT_TO_RESPONSES])
def test_hints_that_a_dialect_does_not_have_are_left_out_and_noted(translation: Translation) -> None:
    """The answer is nearly the same: no reason to ask another server. One that says nothing is no loss."""
    dropped = Omissions()
    found = translation.request(chat(**HINTS), dropped)
    assert (sorted(dropped.noted), HINTS.keys() & found.keys()) == (sorted(HINTS), set())
    dropped = Omissions()
    translation.request(chat(presence_penalty=0, frequency_penalty=0.0, seed=None), dropped)
    assert not dropped.noted


@pytest.mark.parametrize("translation", [CHAT_TO_MESSAGES, CHAT_TO_RESPONSES])
def test_thinking_of_another_model_among_the_parts_of_a_turn_is_left_out_and_noted(translation: Translation) -> None:
    said = {"role": "assistant", "content": [{"type": "thinking", "thinking": []}, {"type": "text", "text": "a"}]}
    dropped = Omissions()
    sent = translation.request(chat(ASKED, said, ASKED), dropped)
    assert "thinking" not in str(sent.get("messages") or sent["input"])
    assert list(dropped.noted) == ["messages.content.thinking"]


def test_a_top_k_goes_where_a_chat_has_it() -> None:
    """As an extension; Responses has none."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "top_k": 5}
    sent, dropped = MESSAGES_TO_CHAT.request(body, Omissions()), Omissions()
    assert sent["top_k"] == 5
    CHAT_TO_RESPONSES.request(sent, dropped)
    assert list(dropped.noted) == ["top_k"]


def test_a_dropped_member_is_noted_under_the_name_of_the_configuration() -> None:
    """The label of the metric is the configuration's word: a caller's own members make no series."""
    dropped = Omissions({"seed", "web_search", "tools.strict"})
    CHAT_TO_MESSAGES.request(chat(seed=7, **{"x\r\ny.seed": 1}), dropped)
    assert dropped.noted == {"seed": "seed", "x__y.seed": "seed"}
    tools = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {}}]
    dropped = Omissions({"web_search"})
    RESPONSES_TO_CHAT.request({"model": "m", "input": "hi", "tools": tools}, dropped)
    assert dropped.noted == {"tools.web_search": "web_search"}


def test_a_word_of_the_caller_is_told_and_is_no_label_of_a_metric() -> None:
    dropped = Omissions({"search"})
    assert dropped.drop("tools[3].name\r\nspace.search")
    assert dropped.noted == {"tools.name__space.search": "search"}


def test_a_caller_cannot_fill_the_header() -> None:
    dropped = Omissions({"search"})
    for number in range(1000):
        assert dropped.drop(f"tools.{number}{'x' * 1000}.search")
    assert len(", ".join(dropped.noted)) < 2200
    assert set(dropped.noted.values()) == {"search"}


def test_a_prompt_is_counted_with_all_that_another_dialect_has_a_form_for() -> None:
    """Tools of a namespace and blocks of a provider's own tools are part of the prompt that a server gets."""
    function = {"type": "function", "name": "search", "description": "Finds pages.", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "web", "description": "of a server", "tools": [function]}]
    counted = as_chat(Operation.RESPONSES, {"model": "m", "input": "hi", "tools": tools, "truncation": "auto"})
    assert [tool["function"]["name"] for tool in counted["tools"]] == ["web__search"]
    block = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "ferries"}}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [block]}]
    found = as_chat(Operation.MESSAGES, {"model": "m", "max_tokens": 9, "messages": turns})
    assert "ferries" in str(found["messages"])
