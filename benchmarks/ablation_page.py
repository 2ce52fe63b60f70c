"""benchmarks/ABLATION.md: results of `benchmarks.ablation`, an idea a row, a scenario at its load a column."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import fmean

from benchmarks.replays import mean_points
from benchmarks.scenarios import SCENARIOS

POINTS = re.compile(r"[+-]\d+\.\d|no change")
LITTLE = 0.5  # points: an idea that gives less in every scenario is named
HEADING = """\
# Ablation

What `python -m benchmarks.ablation --traces DIR` found: replays of the scenarios of [ROUTING.md](ROUTING.md) with one
idea of the routing off at a time, at the load up to which 90% of the requests are good with every idea on
([CAPACITY.md](CAPACITY.md)). The first row is the share of good requests (TTFT and TPOT within budget, of all offered)
with every idea on, and the others the difference from it in points, with its standard error where several seeds were
played. In brackets: p50 and p90 of the TTFT of the answered requests, and the differences from these, in ms; columns
without were played before these were kept. After the scenario and its load stands the newest decision record when the
column was played, kept by git: "longest first" is a rule from 0093 on, and older columns predate it.
*no change*: not one request was placed or answered otherwise. *not called*: the replay never asked
the function that is switched off, so the row says nothing. A dash: not tried, or the scenario has no use for the idea.
"""


@dataclass(frozen=True, slots=True)
class Ablated:
    """One replay without an idea. `placements`: checksum of where and when every request was sent and answered.
    `uncalled`: patched functions that the replay never called."""

    scenario: str
    load: float
    idea: str
    seed: int
    good: float
    placements: int
    uncalled: tuple[str, ...] = ()
    rules: str = "-"
    ttft: tuple[float, ...] = ()  # p50 and p90, s


Column = tuple[str, float, str]  # scenario, load, newest decision record when played
Columns = Mapping[str, Mapping[str, str]]  # cells by idea, by heading
Seeds = Mapping[int, Ablated]  # by seed


def page(ideas: Mapping[str, str], on: str, found: Sequence[Ablated], before: str = "") -> str:
    """`ideas`: the replacement of each idea, by name. `on`: the name of the row with every idea on. `before`: the page
    so far, of which the columns without a replay are kept."""
    columns = {**kept(before), **dict(table(ideas, on, by_cell(found)))}
    played = sorted({heading[1 : heading.index(")")] for heading in columns})
    scenarios = "\n".join(f"- ({name}) {SCENARIOS[name].title}" for name in played)
    little = ", ".join(idea for idea in ideas if idea != on and gives_little(idea, columns)) or "none"
    verdict = f"Less than {LITTLE} points in every scenario that was tried: {little}."
    off = "\n".join(f"- *{name}* off: {meaning}." for name, meaning in ideas.items() if name != on)
    return "\n\n".join([HEADING.rstrip(), scenarios, "\n".join(_lines(ideas, columns)), verdict, off]) + "\n"


def kept(page: str) -> Columns:
    """Columns of the table of a page."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {heading: {row[0]: row[i] for row in rows[1:]} for i, heading in enumerate(rows[0] if rows else ()) if i}


def _lines(ideas: Mapping[str, str], columns: Columns) -> Iterator[str]:
    headings = sorted(columns)
    yield f"| off | {' | '.join(headings)} |"
    yield "|---" * (len(headings) + 1) + "|"
    for idea in ideas:
        yield f"| {idea} | {' | '.join(columns[heading].get(idea, '-') for heading in headings)} |"


def by_cell(found: Sequence[Ablated]) -> Mapping[tuple[Column, str], Seeds]:
    cells: dict[tuple[Column, str], dict[int, Ablated]] = {}
    for one in found:
        cells.setdefault(((one.scenario, one.load, one.rules), one.idea), {})[one.seed] = one
    return cells


def table(
    ideas: Mapping[str, str], on: str, cells: Mapping[tuple[Column, str], Seeds]
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Columns, each with its cells by idea."""
    for column in sorted({column for column, _ in cells}):
        name, load, rules = column
        every = cells.get((column, on), {})
        shown = {idea: cell(cells.get((column, idea), {}), every) for idea in ideas if idea != on}
        yield f"({name}) at {load:.3g}, {rules}", {on: whole(every), **shown}


def whole(seeds: Seeds) -> str:
    """Share of good requests, and the TTFT."""
    if not seeds:
        return "-"
    return f"{fmean(one.good for one in seeds.values()):.3f}{_in_ms(_ttfts(seeds.values()), '')}"


def cell(off: Seeds, on: Seeds) -> str:
    if not off:
        return "-"
    if uncalled := set.intersection(*(set(one.uncalled) for one in off.values())):
        return f"not called: `{'`, `'.join(sorted(uncalled))}`"
    common = off.keys() & on.keys()
    if common and all(off[seed].placements == on[seed].placements for seed in common):
        return "no change"
    points = differences(off, on)
    return mean_points(points) + _in_ms(ttft_differences(off, on), "+") if points else "-"


def differences(off: Seeds, on: Seeds) -> list[float]:
    """Points, of the same seeds, so that chance in the traffic plays no part."""
    return [(off[seed].good - on[seed].good) * 100 for seed in off if seed in on]


def ttft_differences(off: Seeds, on: Seeds) -> list[float]:
    """Of p50 and p90, s, means over the same seeds; none where a replay has no TTFT."""
    common = off.keys() & on.keys()
    pairs = zip(_ttfts(off[seed] for seed in common), _ttfts(on[seed] for seed in common), strict=False)
    return [without - with_it for without, with_it in pairs]


def _ttfts(replays: Iterable[Ablated]) -> list[float]:
    return [fmean(column) for column in zip(*(one.ttft for one in replays), strict=True)]


def _in_ms(ttfts: Sequence[float], sign: str) -> str:
    shown = " ".join(f"{ttft * 1e3:{sign}.0f}" for ttft in ttfts if not isnan(ttft))
    return f" ({shown})" if shown else ""


def gives_little(idea: str, columns: Columns) -> bool:
    """False for an idea without a replay."""
    shown = (POINTS.match(cells.get(idea, "-")) for cells in columns.values())
    points = [0.0 if found[0] == "no change" else float(found[0]) for found in shown if found]
    return bool(points) and min(points) > -LITTLE
