"""A plot of shares as SVG, for the page of a replay.

It has colours for light and dark pages, no script, and no reference to another file. Text in it is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

PANEL_W, PANEL_H, LEFT, TOP, GAP = 420, 260, 70, 40, 90  # px
LEGEND_LINE = 18  # px
COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#9a6700")
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.grid { stroke: #d0d7de }
polyline { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .grid { stroke: #30363d } }"""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # with a line of the grid


@dataclass(frozen=True, slots=True)
class PlotLine:
    """`points`: a share for each value of the x-axis. `colour`: number of a colour."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Panel:
    """Shares by a value on a logarithmic axis, which leaves out what is not above 0. `unit` formats a value."""

    title: str
    across: str
    lines: Sequence[PlotLine]
    unit: Callable[[float], str]


def svg(title: str, panel: Panel) -> str:
    width, height = LEFT + PANEL_W + 20, TOP + PANEL_H + GAP + len(panel.lines) * LEGEND_LINE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
    ]
    return "\n".join([*lines, *_panel(panel), "</svg>\n"])


def _panel(panel: Panel) -> Iterator[str]:
    axis = _Axis.around([x for line in panel.lines for x, _ in line.points])
    bottom, right = TOP + PANEL_H, LEFT + PANEL_W
    yield f'<text class="title" x="{LEFT}" y="{TOP - 14}">{escape(panel.title)}</text>'
    for share in SHARES:
        at = bottom - PANEL_H * share
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{share:.0%}</text>'
    for value in axis.ticks():
        at = LEFT + PANEL_W * axis.share(value)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(panel.unit(value))}</text>'
    yield f'<text x="{(LEFT + right) / 2:g}" y="{bottom + 38}" text-anchor="middle">{escape(panel.across)}</text>'
    for number, line in enumerate(panel.lines):
        yield _line(line, [(LEFT + PANEL_W * axis.share(x), bottom - PANEL_H * y) for x, y in line.points if x > 0])
        yield from _legend(line, LEFT, bottom + 62 + number * LEGEND_LINE)


def _line(line: PlotLine, places: Sequence[tuple[float, float]]) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline stroke="{COLOURS[line.colour % len(COLOURS)]}" points="{path}"/>'


def _legend(line: PlotLine, x: int, y: int) -> Iterator[str]:
    yield _line(line, [(x, y - 4), (x + 26, y - 4)])
    yield f'<text x="{x + 34}" y="{y}">{escape(line.name)}</text>'


@dataclass(frozen=True, slots=True)
class _Axis:
    """From 10**low to 10**high."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float]) -> _Axis:
        """Of thirds of decades around the values."""
        logs = [log10(value) for value in values if value > 0] or [0.0]
        low, high = floor(min(logs) * 3) / 3, ceil(max(logs) * 3) / 3
        return cls(low, max(high, low + 1 / 3))

    def share(self, value: float) -> float:
        """0 at the beginning of the axis, 1 at its end."""
        return (log10(value) - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        steps = (1, 2, 5) if self.high - self.low < 2.5 else (1,)
        found = [step * 10.0**power for power in range(floor(self.low), ceil(self.high) + 1) for step in steps]
        return [value for value in found if -1e-9 <= self.share(value) <= 1 + 1e-9]
