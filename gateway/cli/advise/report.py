"""The report of `firsttoken advise` as Markdown. Names of callers come from keys, or are addresses: never markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import gmtime, strftime

from gateway.cli.tables import printable
from policies.prefix_doctor.advice import Advice, BreakAdvice, Drift
from policies.prefix_doctor.prompt_outline import PARTS

SHOWN = 20  # places
LITTLE = 0.01  # USD


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table of the report, in either form. `empty`: said where it has no rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str


def report(found: Advice, source: str) -> str:
    at = strftime("%Y-%m-%d %H:%M UTC", gmtime(found.wall))
    more = len(found.breaks) - SHOWN
    grown = [
        f"- **{plain(each.route)}** has grown by {each.growth:.0%}: {grown_part(each)}"
        for each in found.drifts
        if each.has_grown
    ]
    sections = [
        f"# Prompts, {at}\n\nFrom {plain(source)}; breaks of the last {duration(found.observed)}, per day.",
        "## Breaks of prefixes\n\n" + markdown(breaks(found)),
        f"{more} more places cost less." if more > 0 else "",
        "## Repairs\n\n" + markdown(repairs(found)) if found.repairs else "",
        "## Prompts, against the week before\n\n" + markdown(drifts(found)),
        "\n".join(grown),
    ]
    return "\n\n".join(filter(None, sections))


def plain(text: str) -> str:
    """Without commands to a terminal, and without bars, which would end the cell of a table."""
    return printable(text).replace("|", "?")


def markdown(table: ReportTable) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *(map(plain, row) for row in table.rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) if table.rows else table.empty


def breaks(found: Advice) -> ReportTable:
    """The places that cost most."""
    columns = ("route", "caller", "where", "changes", "a day", "prefill", "missed", "cost", "mend")
    rows = [_break_row(each) for each in found.breaks[:SHOWN]]
    return ReportTable(columns, rows, "None was seen: prompts continue those before them.")


def _break_row(each: BreakAdvice) -> tuple[str, ...]:
    return (
        each.route,
        each.caller,
        where(each),
        each.cls.value,
        f"{each.breaks:,.0f} of {each.requests:,.0f}",
        duration(each.seconds),
        f"{each.missed:,.0f}",
        usd(each.usd),
        each.mend,
    )


def where(each: BreakAdvice) -> str:
    return f"{each.role}, token {each.at:,}"


def repairs(found: Advice) -> ReportTable:
    rows = [
        (each.route, each.caller, each.rule, f"{each.requests:,.0f}", f"{each.kept:,.0f}") for each in found.repairs
    ]
    return ReportTable(("route", "caller", "rule", "requests a day", "tokens shared a day"), rows, "None so far.")


def drifts(found: Advice) -> ReportTable:
    rows = [
        (each.route, *(_change(each, part) for part in PARTS), f"{sum(each.now.values()):,.0f}", growth(each))
        for each in found.drifts
    ]
    return ReportTable(("route", *PARTS, "prompt", "growth"), rows, "Too few requests so far.")


def _change(drift: Drift, part: str) -> str:
    now = drift.now[part]
    return f"{now:,.0f}" if drift.before is None else f"{now:,.0f} ({now - drift.before[part]:+,.0f})"


def growth(drift: Drift) -> str:
    return "no week before" if drift.growth is None else f"{drift.growth:+.0%}"


def grown_part(drift: Drift) -> str:
    before = drift.before or {}
    part = max(PARTS, key=lambda name: drift.now[name] - before.get(name, 0.0))
    return f"`{part}` by {drift.now[part] - before.get(part, 0.0):,.0f} tokens a prompt."


def duration(seconds: float) -> str:
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 or not seconds else f"{seconds * 1e3:.0f} ms"


def usd(value: float) -> str:
    return "–" if not value else "< $0.01" if value < LITTLE else f"${value:,.2f}"
