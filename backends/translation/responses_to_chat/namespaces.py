"""Tools in namespaces, as Codex groups those of an MCP server: a chat has one flat list of functions.

`{"type": "namespace", "name": "mcp__web", "tools": [{"name": "search"}]}` is the function `mcp__web__search` of a chat.
The names are mapped back in the answer, and alike in calls of the history. Tools that a search has found in earlier
turns (`tool_search_output`) are offered as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from backends.translation.reply_members import as_objects
from backends.translation.translation import Json

SEPARATOR = "__"
TOOL_SEARCH = "tool_search"  # type of the tool, and name of its substitute function


def flat_name(namespace: str, name: str) -> str:
    return f"{namespace}{SEPARATOR}{name}"


class Namespaces:
    """Maps namespaced tools of a request to flat function names. `body`: in the dialect of Responses."""

    __slots__ = ("_flat", "_names", "runs_searches")

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.runs_searches = any(tool.get("type") == TOOL_SEARCH for tool in as_objects(body.get("tools")))
        self._names: dict[str, tuple[str, str]] = {}  # namespace and name by flat name
        self._flat: dict[tuple[str, str], str] = {}
        offered = offered_tools(body)
        taken = {str(tool.get("name")) for tool in offered if tool.get("type") != "namespace"}
        for namespace in (tool for tool in offered if tool.get("type") == "namespace"):
            for tool in as_objects(namespace.get("tools")):
                self._add(str(namespace.get("name")), str(tool.get("name")), taken)

    def _add(self, namespace: str, name: str, taken: set[str]) -> None:
        """Add a flat name, numbered if another tool has the same name."""
        if (namespace, name) in self._flat:
            return
        flat, number = flat_name(namespace, name), 2
        while flat in taken:
            flat, number = f"{flat_name(namespace, name)}_{number}", number + 1
        taken.add(flat)
        self._names[flat], self._flat[namespace, name] = (namespace, name), flat

    def flat(self, namespace: Any, name: str) -> str:
        """The name of a function towards the chat."""
        if not namespace:
            return name
        return self._flat.get((str(namespace), name)) or flat_name(str(namespace), name)

    def named(self, flat: str) -> Json:
        """The members of a call with the caller's names."""
        if flat not in self._names:
            return {"name": flat}
        namespace, name = self._names[flat]
        return {"name": name, "namespace": namespace}


def offered_tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Tools of a request, and tools found by earlier searches."""
    return [*as_objects(body.get("tools")), *_found(body)]


def _found(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for item in as_objects(body.get("input")):
        if item.get("type") == "tool_search_output":
            yield from as_objects(item.get("tools"))
