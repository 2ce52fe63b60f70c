"""Tools that Codex offers beside its own, towards engines that speak chat completions."""

from __future__ import annotations

from typing import Any

import pytest

from backends.translation.omissions import Omissions
from backends.translation.registry import RESPONSES_TO_CHAT
from backends.translation.translation import UntranslatableError

SHELL = {"type": "function", "name": "shell", "parameters": {}}
PATCH = {"type": "custom", "name": "apply_patch"}
GROUP = {"type": "namespace", "name": "images", "tools": [SHELL]}
SEARCH = {"type": "web_search", "external_web_access": False}


def asked(*tools: Any, **members: Any) -> dict[str, Any]:
    return {"model": "m", "input": "hi", "tools": list(tools), **members}


@pytest.mark.parametrize("own", [SHELL, PATCH])
def test_tools_that_an_agent_can_do_without_are_left_out_and_noted(own: dict[str, Any]) -> None:
    """By configured words: the labels of the metric are no caller's."""
    omissions = Omissions()
    sent = RESPONSES_TO_CHAT.request(asked(SEARCH, own, tool_choice="auto"), omissions)
    assert [tool["type"] for tool in sent["tools"]] == [own["type"]]
    assert sent["tool_choice"] == "auto"
    assert omissions.noted == {"tools.web_search": "tools.web_search"}


def test_tools_of_a_namespace_are_functions_with_one_name_and_come_back_with_two() -> None:
    """Alike in offers, calls of the history and answers."""
    call = {"type": "function_call", "call_id": "c1", "name": "shell", "namespace": "images", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    body = {**asked(SHELL, GROUP), "input": [{"role": "user", "content": "hi"}, call, output]}
    sent = RESPONSES_TO_CHAT.request(body, Omissions())
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["shell", "images__shell"]
    [called] = sent["messages"][1]["tool_calls"]
    assert called["function"]["name"] == "images__shell"
    message = {"role": "assistant", "content": None, "tool_calls": [{**called, "id": "c2"}]}
    reply = {"id": "r", "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    [item] = RESPONSES_TO_CHAT.reply(reply, body)["output"]
    assert (item["name"], item["namespace"], item["call_id"]) == ("shell", "images", "c2")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (asked(SEARCH), "web_search"),
        (asked(SHELL, {"type": "mcp", "server_url": "https://x"}), "mcp"),
        (asked(SHELL, SEARCH, tool_choice={"type": "web_search"}), "web_search"),
        (asked(SEARCH, {"type": ["function"]}), "web_search"),
    ],
    ids=str,
)
def test_a_tool_that_the_caller_wants_is_refused_by_name(body: dict[str, Any], name: str) -> None:
    """A caller that offers search alone, or chooses it, wants a search: another tier may have one."""
    with pytest.raises(UntranslatableError, match=name):
        RESPONSES_TO_CHAT.request(body, Omissions())
