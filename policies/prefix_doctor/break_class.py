"""The class of the text whose change broke a prefix, found without keeping any text.

Around the place of a break, a window of the prompt is masked in several ways: all timestamps replaced, all UUIDs, and
so on. Of each masked window a digest is kept. Where two broken prompts have equal digests under one mask, and unequal
ones without, they differ in text of that class and in nothing else nearby: a proof, not a guess by the looks of a text.

Digests are Python's, keyed by the process: they tell nothing outside of it.

A mend of a break is a rule of the gateway that the route can turn on, or a sentence for whoever writes the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class BreakClass(StrEnum):
    """The values are labels of metrics."""

    CCH = "cch"  # Claude Code's hash of the request
    UUID = "uuid"
    TIMESTAMP = "timestamp"
    RANDOM_ID = "random_id"
    COUNTER = "counter"
    WHITESPACE = "whitespace"
    TOOL_ORDER = "tool_order"
    HISTORY_CUT = "history_cut"  # earlier messages were left out
    INSERTED = "inserted"  # messages stand before those of the prompt before
    TEXT = "text"  # none of the above
    UNCLASSIFIED = "unclassified"  # seen once: a class takes two breaks at the same place


BEFORE = 48  # bytes of a window before the first block that differs: a token may begin there
WINDOW = 400  # bytes
COMPARED = 200  # characters of a masked window

_DAYS = r"\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
_MONTHS = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}\.?"
_CLOCK = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?: ?[AaPp][Mm])?"
TIMESTAMP = re.compile(
    rf"\d{{4}}[-/.]\d\d[-/.]\d\d(?:[T ,]+{_CLOCK})?(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?"
    rf"|(?:{_DAYS},? +)?(?:{_MONTHS} +\d{{1,2}}(?:st|nd|rd|th)?|\d{{1,2}} +{_MONTHS}),? +\d{{4}}(?:[ ,at]+{_CLOCK})?"
    rf"|\d{{1,2}}[./]\d{{1,2}}[./]\d{{4}}|{_DAYS}|{_CLOCK}|\b1[6-9]\d{{8}}(?:\.\d{{1,6}}|\d{{3}})?\b"
)
# In the order of the decision: a later mask covers what an earlier one does.
_MASKS: Mapping[BreakClass, re.Pattern[str]] = {
    BreakClass.CCH: re.compile(r"\bcch=[0-9A-Za-z]+"),
    BreakClass.UUID: re.compile(r"\b[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}\b"),
    BreakClass.TIMESTAMP: TIMESTAMP,
    BreakClass.COUNTER: re.compile(r"(?<![0-9A-Za-z])\d+(?![0-9A-Za-z])"),
    BreakClass.RANDOM_ID: re.compile(
        r"(?<![0-9A-Za-z_-])(?=[A-Za-z_-]*\d)(?=[0-9_-]*[A-Za-z])[0-9A-Za-z_-]{8,}"  # looked for once a word
    ),
    BreakClass.WHITESPACE: re.compile(r"\s+"),
}


class BreakMark(NamedTuple):
    """A window around a break, as digests. `tools`: of a set of tool definitions, whatever their order; 0: the window
    is not in such."""

    plain: int
    masked: tuple[int, ...]  # by _MASKS
    everything: int  # all masks at once
    first: BreakClass  # the first class in the window, for several at once
    tools: int = 0


def mark(window: str, tools: int = 0) -> BreakMark:
    """`window`: text from BEFORE bytes before the first block that differs."""
    masked, whole, found = [], window, BreakClass.TEXT
    for kind, pattern in _MASKS.items():
        masked.append(hash(_replaced(kind, pattern, window)[:COMPARED]))
        if found is BreakClass.TEXT and kind is not BreakClass.WHITESPACE and pattern.search(whole):
            found = kind
        whole = _replaced(kind, pattern, whole)
    return BreakMark(hash(window[:COMPARED]), tuple(masked), hash(whole[:COMPARED]), found, tools)


def _replaced(kind: BreakClass, pattern: re.Pattern[str], text: str) -> str:
    return pattern.sub("" if kind is BreakClass.WHITESPACE else "\0", text)


def changed_class(before: BreakMark, after: BreakMark) -> BreakClass:
    """The class of the text that changed between two breaks at the same place."""
    if before.plain == after.plain:
        return BreakClass.UNCLASSIFIED  # the same text twice: a caller that alternates
    if before.tools and before.tools == after.tools:
        return BreakClass.TOOL_ORDER
    for kind, one, other in zip(_MASKS, before.masked, after.masked, strict=True):
        if one == other:
            return kind
    return after.first if before.everything == after.everything else BreakClass.TEXT


class RepairRule(StrEnum):
    """Values of `routes.R.repair`, in the order in which they are applied."""

    STRIP_CCH = "strip_cch"
    SORT_TOOLS = "sort_tools"


BEHIND = "behind everything that stays the same: the end of the last message"
SENTENCES: Mapping[BreakClass, str] = {
    BreakClass.CCH: "Turn the line off in Claude Code (CLAUDE_CODE_ATTRIBUTION_HEADER=0).",
    BreakClass.TIMESTAMP: f"Write the time {BEHIND}, or leave out what changes within a day.",
    BreakClass.UUID: f"Leave the id out of the prompt, or write it {BEHIND}.",
    BreakClass.RANDOM_ID: f"Leave the id out of the prompt, or write it {BEHIND}.",
    BreakClass.COUNTER: f"Write the number {BEHIND}.",
    BreakClass.WHITESPACE: "Render the prompt once, and send the same bytes: spaces or line ends differ.",
    BreakClass.TOOL_ORDER: "Send the tools in one order, such as by name.",
    BreakClass.HISTORY_CUT: "Leave out earlier messages seldom, many at a time: each cut computes the rest anew.",
    BreakClass.INSERTED: "Append messages; those inserted before earlier ones compute all that follows again.",
    BreakClass.TEXT: f"Find what changes at this place, and write it {BEHIND}.",
    BreakClass.UNCLASSIFIED: "Seen once so far: its class takes two breaks at the same place.",
}
RULES: Mapping[BreakClass, RepairRule] = {
    BreakClass.CCH: RepairRule.STRIP_CCH,
    BreakClass.TOOL_ORDER: RepairRule.SORT_TOOLS,
}
FITS: Mapping[RepairRule, tuple[str, ...]] = {  # roles of parts that a rule changes
    RepairRule.STRIP_CCH: ("system",),
    RepairRule.SORT_TOOLS: ("tools",),
}


def rule_for(cls: BreakClass, role: str) -> RepairRule | None:
    """None: no rule fits."""
    rule = RULES.get(cls)
    return rule if rule is not None and role in FITS[rule] else None


def mend(route: str, cls: BreakClass, role: str) -> str:
    rule = rule_for(cls, role)
    turned_on = "" if rule is None else f"`routes.{route}.repair: [{rule.value}]`, or: "
    return turned_on + SENTENCES[cls]
