"""benchmarks/ABLATION.md: results of `benchmarks.ablation`, an idea a row, a scenario at its load a column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.replays import mean_points
from benchmarks.scenarios import SCENARIOS

LITTLE = 0.5  # points: an idea that gives less in every scenario is named
HEADING = """\
# Ablation

What `python -m benchmarks.ablation --traces DIR` found: replays of the scenarios of [ROUTING.md](ROUTING.md) with one
idea of the routing off at a time, at the load up to which 90% of the requests are good with every idea on
([CAPACITY.md](CAPACITY.md)). The first row is the share of good requests (TTFT and TPOT within budget, of all offered)
with every idea on, and the others the difference from it in points, with its standard error where several seeds were
played. *no change*: not one request was placed or answered otherwise. *not called*: the replay never asked the function
that is switched off, so the row says nothing. A dash: not tried, or the scenario has no use for the idea.
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


Column = tuple[str, float]  # scenario, load
Seeds = Mapping[int, Ablated]  # by seed


def page(ideas: Mapping[str, str], on: str, found: Sequence[Ablated]) -> str:
    """`ideas`: the replacement of each idea, by name. `on`: the name of the row with every idea on."""
    cells = by_cell(found)
    scenarios = "\n".join(f"- ({name}) {SCENARIOS[name].title}" for name in sorted({one.scenario for one in found}))
    little = ", ".join(idea for idea in ideas if idea != on and gives_little(idea, on, cells)) or "none"
    verdict = f"Less than {LITTLE} points in every scenario that was tried: {little}."
    off = "\n".join(f"- *{name}* off: {meaning}." for name, meaning in ideas.items() if name != on)
    return "\n\n".join([HEADING.rstrip(), scenarios, "\n".join(table(ideas, on, cells)), verdict, off]) + "\n"


def by_cell(found: Sequence[Ablated]) -> Mapping[tuple[Column, str], Seeds]:
    cells: dict[tuple[Column, str], dict[int, Ablated]] = {}
    for one in found:
        cells.setdefault(((one.scenario, one.load), one.idea), {})[one.seed] = one
    return cells


def table(ideas: Mapping[str, str], on: str, cells: Mapping[tuple[Column, str], Seeds]) -> Iterator[str]:
    columns = sorted({column for column, _ in cells})
    yield "| off | " + " | ".join(f"({name}) at {load:.3g}" for name, load in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for idea in ideas:
        row = (
            whole(seeds) if idea == on else cell(seeds, cells.get((column, on), {}))
            for column in columns
            for seeds in [cells.get((column, idea), {})]
        )
        yield f"| {idea} | " + " | ".join(row) + " |"


def whole(seeds: Seeds) -> str:
    return f"{fmean(one.good for one in seeds.values()):.3f}" if seeds else "-"


def cell(off: Seeds, on: Seeds) -> str:
    if not off:
        return "-"
    if uncalled := set.intersection(*(set(one.uncalled) for one in off.values())):
        return f"not called: `{'`, `'.join(sorted(uncalled))}`"
    common = off.keys() & on.keys()
    if common and all(off[seed].placements == on[seed].placements for seed in common):
        return "no change"
    points = differences(off, on)
    return mean_points(points) if points else "-"


def differences(off: Seeds, on: Seeds) -> list[float]:
    """Points, of the same seeds, so that chance in the traffic plays no part."""
    return [(off[seed].good - on[seed].good) * 100 for seed in off if seed in on]


def gives_little(idea: str, on: str, cells: Mapping[tuple[Column, str], Seeds]) -> bool:
    """False for an idea without a replay."""
    tried = [differences(off, cells.get((column, on), {})) for (column, name), off in cells.items() if name == idea]
    means = [fmean(points) for points in tried if points]
    return bool(means) and min(means) > -LITTLE
