"""benchmarks/ABLATION.md: results of `benchmarks.ablation`, in a table per load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.scenarios import SCENARIOS

HEADING = """\
# Ablation

What `python -m benchmarks.ablation --traces DIR` found: replays of the scenarios of [ROUTING.md](ROUTING.md) with one
idea of the routing off at a time. A cell is the share of good requests (TTFT and TPOT within budget, of all offered),
the difference from the first row in points with its standard error over {seeds} seeds, the share that met the TTFT, and
the p99 of the TTFT; of recorded sessions also the share of whole sessions with all turns good.
*no change*: not one request was placed or answered otherwise. *not called*: the replay never asked the function that is
switched off, so the row says nothing. A dash: not tried, or the scenario has no use for the idea.
"""


@dataclass(frozen=True, slots=True)
class Ablated:
    """One replay without an idea. `placements`: checksum of where and when every request was sent and answered.
    `uncalled`: patched functions that the replay never called. `whole`: share of sessions with all turns good."""

    scenario: str
    load: float
    idea: str
    seed: int
    good: float
    met: float
    p99: float
    placements: int
    uncalled: tuple[str, ...] = ()
    whole: float | None = None


Seeds = Mapping[int, Ablated]  # by seed


def page(ideas: Mapping[str, str], on: str, found: Sequence[Ablated]) -> str:
    """`ideas`: what each is replaced by, by name. `on`: the one that is none."""
    loads, seeds = sorted({one.load for one in found}), len({one.seed for one in found})
    tables = ("\n".join(table(load, ideas, on, found)) for load in loads)
    names = sorted({one.scenario for one in found})
    scenarios = "\n".join(f"- ({name}) {SCENARIOS[name].title}" for name in names)
    off = "\n".join(f"- *{name}* off: {meaning}." for name, meaning in ideas.items() if name != on)
    return "\n\n".join([HEADING.format(seeds=seeds).rstrip(), scenarios, *tables, off]) + "\n"


def table(load: float, ideas: Mapping[str, str], on: str, found: Iterable[Ablated]) -> Iterator[str]:
    """Markdown: an idea a row, a scenario a column."""
    cells: dict[tuple[str, str], dict[int, Ablated]] = {}
    for one in found:
        if one.load == load:
            cells.setdefault((one.scenario, one.idea), {})[one.seed] = one
    names = sorted({scenario for scenario, _ in cells})
    yield f"| off, at load {load:g} | " + " | ".join(f"({name})" for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for idea in ideas:
        row = (cell(cells.get((name, idea), {}), {} if idea == on else cells.get((name, on), {})) for name in names)
        yield f"| {idea} | " + " | ".join(row) + " |"


def cell(without: Seeds, whole: Seeds) -> str:
    """`whole`: with every idea on; empty: the cell is that one."""
    if not without:
        return "-"
    if uncalled := set.intersection(*(set(one.uncalled) for one in without.values())):
        return f"not called: `{'`, `'.join(sorted(uncalled))}`"
    common = without.keys() & whole.keys()
    if common and all(without[seed].placements == whole[seed].placements for seed in common):
        return "no change"
    values = without.values()
    difference = _difference([(without[seed].good - whole[seed].good) * 100 for seed in common])
    figures = fmean(one.met for one in values), fmean(one.p99 for one in values)
    sessions = [one.whole for one in values if one.whole is not None]
    whole = f", {fmean(sessions):.3f} whole" if sessions else ""
    return f"{fmean(one.good for one in values):.3f}{difference}, {figures[0]:.3f}, {figures[1]:.1f} s{whole}"


def _difference(points: Sequence[float]) -> str:
    """Mean and standard error; of the same seeds, so that chance in the traffic plays no part."""
    if not points:
        return ""
    error = f" ±{stdev(points) / len(points) ** 0.5:.1f}" if len(points) > 1 else ""
    return f" ({fmean(points):+.1f}{error})"
