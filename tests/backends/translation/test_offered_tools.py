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
    sent = RESPONSES_TO_CHAT.request(asked(SEARCH, own, GROUP, tool_choice="auto"), omissions)
    assert [tool["type"] for tool in sent["tools"]] == [own["type"]]
    assert sent["tool_choice"] == "auto"
    assert omissions.noted == {name: name for name in ("tools.web_search", "tools.namespace")}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (asked(SEARCH), "web_search"),
        (asked(GROUP, SEARCH), "namespace"),
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
