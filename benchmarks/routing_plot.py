"""Plots of the results of `benchmarks.routing`, for docs/routing.md.

    python -m benchmarks.routing_plot [RESULTS]

A panel per scenario; load to the right, 1 where round robin meets the TTFT of half of the requests; upwards the share
of good requests, or the p90 of the TTFT. Lines: ours, the best baseline at each load, the clairvoyant reference. The
SVG has colours for light and dark pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path
from statistics import fmean

from benchmarks.routing import RESULTS, read
from benchmarks.routing_page import Cell, Result, best, by_load, compares, shared
from lab.replay.sim_fleet import OURS, REFERENCE

DOCS = Path(__file__).parent.parent / "docs"
TITLES = {
    "a": "(a) long conversations, 8 engines",
    "b": "(b) uneven fleet, one slow, one dead",
    "c": "(c) four workloads, three tiers",
    "d": "(d) agent sessions, cached prompts",
}
ACROSS = "load; at 1, round robin meets half of the deadlines"
LINES = (("ours", "firsttoken"), ("best", "best of the baselines at that load"), ("ref", "clairvoyant reference"))

PANEL_W, PANEL_H, GAP_X, GAP_Y, LEFT, TOP = 330, 190, 70, 74, 52, 66  # px
WIDTH, HEIGHT = LEFT + 2 * PANEL_W + GAP_X + 18, TOP + 2 * PANEL_H + GAP_Y + 48
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.grid { stroke: #d0d7de; stroke-width: 1 }
.ours { stroke: #0969da } .best { stroke: #bc4c00 } .ref { stroke: #57606a }
polyline { fill: none; stroke-width: 2.2 }
circle { fill: #0969da }
polyline.best { stroke-dasharray: 7 4 } polyline.ref { stroke-dasharray: 2 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .grid { stroke: #30363d }
  .ours { stroke: #58a6ff } .best { stroke: #f0883e } .ref { stroke: #8b949e } circle { fill: #58a6ff }
}"""

Points = dict[str, list[tuple[float, float]]]  # by line: load, value


@dataclass(frozen=True, slots=True)
class Axis:
    """`at`: 0 at the bottom of a panel, 1 at the top."""

    title: str
    value: Callable[[Cell], float]
    at: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]


def p90(cell: Cell) -> float:
    return fmean(rows["all"]["ttft"][1] for rows in cell.rows)


def decades(seconds: float) -> float:
    """0.1 s to 100 s."""
    return min(max((log10(max(seconds, 1e-9)) + 1) / 3, 0.0), 1.0)


GOODPUT = Axis(
    "share of requests that were good (TTFT and TPOT within budget), of all offered",
    lambda cell: cell.good,
    lambda share: share,
    tuple((share / 4, f"{share * 25}%") for share in range(5)),
)
TTFT = Axis(
    "p90 of the time to first token, of the requests that got one",
    p90,
    decades,
    ((0.1, "0.1 s"), (1.0, "1 s"), (10.0, "10 s"), (100.0, "100 s")),
)


def points(name: str, results: Sequence[Result], value: Callable[[Cell], float]) -> Points:
    """Of the loads at which ours, a baseline and the reference were all played."""
    found = Points(ours=[], best=[], ref=[])
    for load, at_load in by_load(name, shared(results)).items():
        if compares(at_load) and REFERENCE in at_load:
            for line, cell in zip(found, (at_load[OURS], best(at_load), at_load[REFERENCE]), strict=True):
                found[line].append((load, value(cell)))
    return found


def picture(results: Sequence[Result], axis: Axis) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{axis.title}, by load</title>",
        f"<style>{STYLE}</style>",
        f'<text x="8" y="18">{axis.title}</text>',
        *_legend(),
    ]
    found = {name: points(name, results, axis.value) for name in TITLES}
    loads = [load for lines_of in found.values() for load, _ in lines_of["ours"]]
    for i, name in enumerate(TITLES):
        x, y = LEFT + (i % 2) * (PANEL_W + GAP_X), TOP + (i // 2) * (PANEL_H + GAP_Y)
        lines += _panel(x, y, name, found[name], axis, (min(loads), max(loads)))
    lines.append(f'<text x="{WIDTH / 2:g}" y="{HEIGHT - 6}" text-anchor="middle">{ACROSS}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _legend() -> Iterator[str]:
    x = 8
    for line, title in LINES:
        yield f'<polyline class="{line}" points="{x},34 {x + 28},34"/><text x="{x + 34}" y="38">{title}</text>'
        x += 64 + 7 * len(title)


def _panel(x: int, y: int, name: str, found: Points, axis: Axis, loads: tuple[float, float]) -> Iterator[str]:
    low, high = loads
    yield f'<text class="title" x="{x}" y="{y - 8}">{TITLES[name]}</text>'
    for value, label in axis.ticks:
        at = y + PANEL_H * (1 - axis.at(value))
        yield f'<line class="grid" x1="{x}" x2="{x + PANEL_W}" y1="{at:g}" y2="{at:g}"/>'
        yield f'<text x="{x - 6}" y="{at + 4:g}" text-anchor="end">{label}</text>'
    across = {load: x + 12 + (PANEL_W - 24) * (load - low) / max(high - low, 1e-9) for load, _ in found["ours"]}
    previous = 0.0
    for load, at in across.items():
        if at - previous > 26:  # px of a label
            yield f'<text x="{at:g}" y="{y + PANEL_H + 17}" text-anchor="middle">{load:g}</text>'
            previous = at
    for line in ("ref", "best", "ours"):
        places = [(across[load], y + PANEL_H * (1 - axis.at(value))) for load, value in found[line]]
        yield f'<polyline class="{line}" points="{" ".join(f"{px:.1f},{py:.1f}" for px, py in places)}"/>'
        if line == "ours":
            yield from (f'<circle class="ours" cx="{px:.1f}" cy="{py:.1f}" r="3"/>' for px, py in places)


def main() -> None:
    results = read(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
    for name, axis in (("goodput", GOODPUT), ("ttft", TTFT)):
        (DOCS / f"routing-{name}.svg").write_text(picture(results, axis), "utf-8")


if __name__ == "__main__":
    main()
