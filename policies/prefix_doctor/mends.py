"""Mends of breaks: a rule of the gateway that the route can turn on, or a sentence for whoever writes the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from policies.prefix_doctor.break_class import BreakClass


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
