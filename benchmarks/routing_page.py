"""benchmarks/ROUTING.md: results of `benchmarks.routing`, in a table per scenario.

Per load: the best baseline, ours and the reference, by the share of good requests (TTFT and TPOT within budget, of all
offered), means over the seeds; and the cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from benchmarks.scenarios import SCENARIOS, Scenario
from gateway.replay.sim_fleet import OURS, POOLED, REFERENCE, REFERENCE_LRU, REFERENCES

Result = dict[str, Any]
HEADING = """\
# Routing

What `python -m benchmarks.routing` found: replays of public traces through the gateway's own decision code, against
simulated engines (`firsttoken replay` is the same workbench). A load of 1 is that at which round robin meets the
TTFT of half of the requests. *good*: TTFT and TPOT within budget, of all offered. The best baseline is chosen anew
at every load, after the fact; *reference* is a clairvoyant scheduler with perfect caches
(`gateway/replay/clairvoyant.py` says what it knows and why it bounds what is reachable), *real caches* the same with
what each engine has computed and not evicted: no bound. Means over {seeds}.
"""
COLUMNS = (
    "load",
    "best baseline",
    "ours",
    "reference",
    "real caches",
    "ours/best",
    "ours/ref",
    "p99 best",
    "p99 ours",
    "p90 held",
)
TROUBLED = ("lost", "in trouble: best", "ours", "reference")  # lost: before the first token
TIERED = ("tier 1 best", "tier 1 ours", "tier 1 ref", "USD ours/ref")


class Cell:
    """All seeds of one load and scorer."""

    def __init__(self, scorer: str, results: Sequence[Result]) -> None:
        self.scorer, self.rows = scorer, [result["rows"] for result in results]

    def of(self, value: str, part: str = "all") -> float:
        return fmean(rows[part][value] for rows in self.rows)

    @property
    def good(self) -> float:
        return self.of("good")

    @property
    def p99(self) -> float:
        return fmean(rows["all"]["ttft"][2] for rows in self.rows)

    @property
    def cost(self) -> float:
        """Of all routes: batch has no budget, and is no part of the whole."""
        parts = [part for part in self.rows[0] if part not in ("all", "trouble")]
        return sum(self.of("cost", part) for part in parts)


def page(results: Sequence[Result]) -> str:
    seeds = len({result["seed"] for result in results})
    names = sorted({result["scenario"] for result in results})
    sections = (f"## ({name}) {SCENARIOS[name].title}\n\n" + "\n".join(table(name, results)) for name in names)
    return "\n\n".join([HEADING.format(seeds=f"{seeds} seeds" if seeds > 1 else "one seed").rstrip(), *sections]) + "\n"


def table(name: str, results: Iterable[Result]) -> list[str]:
    """Markdown, aligned for a terminal too."""
    scenario, cells = SCENARIOS[name], _cells(name, results)
    tiered = any(scorer.startswith(POOLED) for scorer in scenario.scorers)
    rows = [(*COLUMNS, *(TIERED if tiered else ()), *(TROUBLED if name == "b" else ()))]
    for load in sorted({load for load, _ in cells}):
        at_load = {scorer: cell for (at, scorer), cell in cells.items() if at == load}
        if {OURS, REFERENCE} < at_load.keys():
            rows.append(_row(scenario, load, at_load, tiered))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _cells(name: str, results: Iterable[Result]) -> dict[tuple[float, str], Cell]:
    found: dict[tuple[float, str], list[Result]] = {}
    for result in results:
        if result["scenario"] == name:
            found.setdefault((result["load"], result["scorer"]), []).append(result)
    return {(load, scorer): Cell(scorer, kept) for (load, scorer), kept in found.items()}


def _row(scenario: Scenario, load: float, cells: dict[str, Cell], tiered: bool) -> tuple[str, ...]:
    ours, reference = cells[OURS], cells[REFERENCE]
    best = max((cell for name, cell in cells.items() if name not in (OURS, *REFERENCES)), key=lambda cell: cell.good)
    row = (
        f"{load:.2f}",
        f"{best.scorer} {best.good:.3f}",
        f"{ours.good:.3f}",
        f"{reference.good:.3f}",
        f"{cells[REFERENCE_LRU].good:.3f}" if REFERENCE_LRU in cells else "-",
        f"{ours.good / max(best.good, 1e-9):.3f}",
        f"{ours.good / max(reference.good, 1e-9):.3f}",
        f"{best.p99:.2f} s",
        f"{ours.p99:.2f} s",
        f"{ours.of('coverage') * 100:.1f}%",
    )
    if tiered:
        first = (f"{cell.of('preferred') * 100:.1f}%" for cell in (best, ours, reference))
        row = (*row, *first, f"{ours.cost / max(reference.cost, 1e-9):.3f}")
    if scenario.name == "b":
        row = (*row, f"{ours.of('lost'):g}", *(f"{cell.of('good', 'trouble'):.3f}" for cell in (best, ours, reference)))
    return row
