"""Rules of a route that change prompts so that their prefix stays the same from turn to turn (`routes.R.repair`).

Rules:
- Nothing is changed unless the route names the rule: `policies.prefix_doctor.mends.RepairRule`.
- `strip_cch` removes Claude Code's line (`gateway.tokenize.prefix_breakers`) wherever a line of the system prompt
  begins with it, towards servers that read the line too.
- `sort_tools` sorts tool definitions by name: the same set, each as it was written. A `cache_control` stays at its
  place in the list, as it says how much of the list is cached. Where it would come to a tool with `defer_loading`,
  which the API refuses, the list is left alone.
- `move_timestamp` moves a line of the system prompt that is a time and nothing else, with a label of up to five words,
  to the end of the system prompt. A prompt with several such lines, such as a log, is left alone, and so is one with
  a fence of code, or with LINES short lines with a figure. So is a line that means something by what is before: it is
  announced by a colon, has no label, goes on with a sentence, or stands in an `<example>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Raw

from backends.interface import Operation
from gateway.strict_json import MAX_DEPTH, UNREADABLE, element, encode, members
from gateway.tokenize.prefix_breakers import ANYWHERE, without_breakers
from gateway.tokenize.system_texts import Texts, with_system_texts
from policies.prefix_doctor.break_class import TIMESTAMP
from policies.prefix_doctor.mends import RepairRule

FENCE = "```"
LINES = 256  # looked at in a prompt: 40 us each at most
_LABEL = r"(?:[A-Za-z'()]+[ \t]+){0,4}(?:[A-Za-z'()]+:?[ \t]+)?"
_TIME_LINE = re.compile(rf"{_LABEL}(?:(?:{TIMESTAMP.pattern})[ \t,]*(?:at[ \t]+)?)+(?:Z|[A-Z]{{3,4}})?[.]?[ \t]*")
_SHORT_LINE = re.compile(r"^[^\n\d]{0,50}\d[^\n]{0,50}$", re.MULTILINE)
_MARK = "cache_control"


def repaired(operation: Operation, raw: bytes, rules: Iterable[RepairRule]) -> tuple[bytes, tuple[str, ...]]:
    """The body after the rules, and the names of the rules that changed the body."""
    done = list[str]()
    for rule in RepairRule:
        if rule in rules and (changed := _REPAIRS[rule](operation, raw)) is not raw:
            raw = changed
            done.append(rule.value)
    return raw, tuple(done)


# -- tools ---------------------------------------------------------------------------------


def _sort_tools(operation: Operation, raw: bytes) -> bytes:
    try:
        body = members(raw)
        tools = body.get("tools")
        if type(tools) is not list:
            return raw
        ordered = _in_order(tools)
    except UNREADABLE:
        return raw
    return raw if ordered is tools else encode({**body, "tools": ordered})


def _in_order(tools: list[Any]) -> list[Any]:
    """`tools` itself where these are sorted, or hold what is no tool."""
    found = [element(tool, MAX_DEPTH - 2) if isinstance(tool, Raw) else tool for tool in tools]
    if not all(isinstance(tool, dict) for tool in found):
        return tools
    places = sorted(range(len(found)), key=lambda i: _name(found[i]))
    if places == list(range(len(found))):
        return tools
    if not any(_MARK in tool for tool in found):
        return [tools[i] for i in places]
    if any(_MARK in tool and found[i].get("defer_loading") for tool, i in zip(found, places, strict=True)):
        return tools
    unmarked = [{name: value for name, value in found[i].items() if name != _MARK} for i in places]
    return [
        {**tool, _MARK: marked[_MARK]} if _MARK in marked else tool
        for tool, marked in zip(unmarked, found, strict=True)
    ]


def _name(tool: Mapping[str, Any]) -> tuple[str, str]:
    """Of a function in each dialect; tools of a provider have a type alone. Sorting keeps the order of equal names."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return str(name or ""), str(tool.get("type") or "")


# -- times ---------------------------------------------------------------------------------


def _move_timestamp(operation: Operation, raw: bytes) -> bytes:
    left = iter(range(LINES))
    return with_system_texts(operation, raw, lambda texts: _with_time_last(texts, left))


def _with_time_last(texts: Texts, left: Iterator[int]) -> Texts:
    """`left`: lines that may still be looked at."""
    found = [(i, line) for i, text in enumerate(texts) for line in _time_lines(text, left)]
    if len(found) != 1 or next(left, None) is None or any(FENCE in text for text in texts):
        return texts
    (number, line), last = found[0], len(texts) - 1
    lines = texts[number].split("\n")
    if (number == last and lines[-1] == line) or not _stands_alone(line, lines[: lines.index(line)]):
        return texts
    lines.remove(line)
    moved = [*texts[:number], "\n".join(lines), *texts[number + 1 :]]
    moved[last] = f"{moved[last]}\n{line}" if moved[last] else line
    return moved


def _time_lines(text: str, left: Iterator[int]) -> list[str]:
    """Lines that are a time and nothing else."""
    lines = (match[0] for match in _SHORT_LINE.finditer(text))
    return [line for line, _ in zip(lines, left, strict=False) if _TIME_LINE.fullmatch(line)]


def _stands_alone(line: str, before: Sequence[str]) -> bool:
    """True for a labelled time that no earlier line announces or begins the sentence of, in no example."""
    if sum(each.count("<example") - each.count("</example") for each in before) > 0:
        return False
    above = next((each.rstrip() for each in reversed(before) if each.strip()), "")
    if not above:
        return True
    return not (above.endswith(":") or TIMESTAMP.match(line) or (line[0].islower() and ": " not in line))


_REPAIRS: Mapping[RepairRule, Callable[[Operation, bytes], bytes]] = {
    RepairRule.STRIP_CCH: partial(without_breakers, lines=ANYWHERE),
    RepairRule.SORT_TOOLS: _sort_tools,
    RepairRule.MOVE_TIMESTAMP: _move_timestamp,
}
