"""Writes docs/reliability.md from results.json, which keeps the last result of every row."""

from __future__ import annotations

import json
import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

from tests.programs.chaos.rows import GROUPS, ROWS, Outcome, Row

RESULTS = Path(__file__).parent / "results.json"
HEAD = """# Reliability

Faults, overload, hostile input and restarts, each tried against a running gateway. `make chaos` runs the catalogue and
writes this page; `make chaos ARGS="--only 2-4"` runs some rows and keeps the others.

A row passes if its goal is met and if afterwards: every request sent whole has exactly one Record, and none says
`internal`; the gauges of requests in progress, in flight and queued are zero; descriptors and asyncio tasks are back at
their baseline within 6 s; a healthy request is answered. Figures are of one run. {where}

`fuzz` and `soak` are commands of their own: `make fuzz CASES=100000`, `make soak MINUTES=60`.
"""
NOT_TRIED = """## Not tried

- Coverage-guided fuzzing of the parsers (34): `make fuzz` generates input without looking at coverage.
- Timing of the comparison of keys (36): the noise of a socket exceeds the effect; keys are looked up by their digest.
- Mutation testing of the tests (46).
"""
TITLES = {
    "faults": "Faults of engines, networks and dependencies",
    "overload": "Overload",
    "input": "Hostile input",
    "security": "Security",
    "correctness": "Correctness over time",
}


def key(row: Row) -> str:
    return f"{row.number} {row.title}"


def as_json(outcome: Outcome, quick: bool) -> dict[str, Any]:
    return {
        "figures": outcome.result.figures,
        "verdict": outcome.verdict,
        "passed": outcome.passed,
        "table": outcome.result.table,
        "quick": quick,
    }


def write(page: Path, outcomes: list[Outcome], *, quick: bool = False) -> None:
    """Merge the outcomes into the stored results, and write the page."""
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    results |= {key(outcome.row): as_json(outcome, quick) for outcome in outcomes}
    known = {key(row) for row in ROWS}
    results = {name: result for name, result in sorted(results.items()) if name in known}
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
    page.write_text(text(results), "utf-8")


def text(results: dict[str, Any]) -> str:
    where = f"Last run {date.today():%d %B %Y}: {os.cpu_count()} cores, Python {platform.python_version()}."
    parts = [HEAD.format(where=where), summary(results)]
    for group in GROUPS:
        rows = sorted((row for row in ROWS if row.group == group), key=lambda row: row.number)
        parts.append(section(group, rows, results))
    return "\n".join([*parts, NOT_TRIED])


def summary(results: dict[str, Any]) -> str:
    short = [name for name, result in results.items() if not result["passed"]]
    ran = f"{len(results)} of {len(ROWS)} rows were run: {len(results) - len(short)} pass"
    rows = ", ".join(sorted((name.partition(" ")[0] for name in short), key=int))
    return f"**{ran}, {len(short)} fall short{f' ({rows})' if short else ''}.**\n"


def section(group: str, rows: list[Row], results: dict[str, Any]) -> str:
    lines = [
        f"## {TITLES[group]}",
        "",
        "| | test | what is done | goal | measured | verdict |",
        "|---|---|---|---|---|---|",
    ]
    lines += [line(row, results.get(key(row))) for row in rows]
    tables = [results[key(row)]["table"] for row in rows if key(row) in results and results[key(row)]["table"]]
    return "\n".join(lines) + "\n" + "".join(f"\n{table}\n" for table in tables)


def line(row: Row, result: dict[str, Any] | None) -> str:
    figures, verdict = (result["figures"], result["verdict"]) if result else ("not run", "-")
    if result and result["quick"]:
        verdict += " (small run)"
    cells = (str(row.number), row.title, row.method, row.goal, figures, verdict)
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"
