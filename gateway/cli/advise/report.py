"""The report of `firsttoken advise` as Markdown, and as one HTML page: no script, no reference to another file, all
text escaped. Names of callers come from keys, or are addresses: never markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from time import gmtime, strftime

from gateway.cli.tables import printable
from policies.prefix_doctor.advice import Advice, BreakAdvice, Drift
from policies.prefix_doctor.prefix_ledger import DAY
from policies.prompt_outline import PARTS

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


DAYS = 14  # of a plot
WIDTH, ROW, LEFT = 720, 22, 190  # px
COLOURS = ("#0969da", "#8250df", "#57606a", "#bc4c00", "#1a7f37", "#bf3989")  # by part of a prompt
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #24292f;
  background: #fff } h2 { margin-top: 2rem } .wide { overflow-x: auto } table { border-collapse: collapse }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #d0d7de; vertical-align: top }
svg text { font: 12px system-ui, sans-serif; fill: currentColor } .alert { color: #bc4c00; font-weight: 600 }
svg { max-width: 100%; height: auto }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117 } th, td { border-color: #30363d } }
"""


def html_report(found: Advice, source: str) -> str:
    at = strftime("%Y-%m-%d %H:%M UTC", gmtime(found.wall))
    alerts = [
        f'<p class="alert" role="alert">Prompts of {escape(each.route)} have grown by {each.growth:.0%}: '
        f"{escape(grown_part(each))}</p>"
        for each in found.drifts
        if each.has_grown
    ]
    body = [
        f"<h1>Prompts</h1><p>{at}, from {escape(source)}; breaks of the last {duration(found.observed)}, per day.</p>",
        *alerts,
        "<h2>Breaks of prefixes</h2>" + _break_bars(found.breaks[:SHOWN]) + _table(breaks(found)),
        "<h2>Repairs</h2>" + _table(repairs(found)),
        "<h2>Prompts by day</h2>" + _legend(),
        *(_composition(route, days) for route, days in found.days.items()),
        "<h2>Prompts, against the week before</h2>" + _table(drifts(found)),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = f"<title>Prompts, {at}</title>"
    page = f"<head>{head}{title}<style>{STYLE}</style></head><body>{''.join(body)}</body>"
    return f'<!doctype html><html lang="en">{page}</html>\n'


def _table(table: ReportTable) -> str:
    if not table.rows:
        return f"<p>{table.empty}</p>"
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


# -- plots ---------------------------------------------------------------------------------


def _break_bars(breaks: Sequence[BreakAdvice]) -> str:
    """Prefill of a day by place."""
    rows = [(f"{each.route}: {each.cls.value}", [each.seconds], duration(each.seconds)) for each in breaks]
    return _bars("Prefill of a day spent on breaks, by place", rows) if rows else ""


def _composition(route: str, days: Mapping[int, Mapping[str, float]]) -> str:
    rows = []
    for day in sorted(days)[-DAYS:]:
        parts = [days[day][part] for part in PARTS]
        rows.append((strftime("%a %d %b", gmtime(day * DAY)), parts, f"{sum(parts):,.0f} tokens"))
    return f"<h3>{escape(route)}</h3>" + _bars(f"Mean prompt of {route} by day and part", rows)


def _bars(title: str, rows: Sequence[tuple[str, Sequence[float], str]]) -> str:
    """Horizontal bars of one or several parts, all on one scale."""
    most, height = max((sum(parts) for _, parts, _ in rows), default=0.0) or 1.0, ROW * len(rows) + 4
    drawn = []
    for number, (label, parts, told) in enumerate(rows):
        x, y = float(LEFT), ROW * number + 2
        drawn.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(label[:28])}</text>')
        for part, colour in zip(parts, COLOURS, strict=False):
            width = (WIDTH - LEFT - 130) * part / most
            drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 4}" fill="{colour}"/>')
            x += width
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{escape(told)}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" aria-label="{escape(title)}">'
        f"{''.join(drawn)}</svg>"
    )


def _legend() -> str:
    marks = (f'<span style="color:{colour}">■</span> {part}' for part, colour in zip(PARTS, COLOURS, strict=True))
    return f"<p>{'&ensp;'.join(marks)}</p>"
