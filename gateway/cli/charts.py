"""Plots of the commands: bars for a terminal, and panels of lines as SVG.

An SVG has colours for light and dark pages, no script, and no reference to another file. Text in it is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from pathlib import Path

from gateway.config.config_errors import file_errors

BAR = 40  # characters of the longest bar
PANEL_W, PANEL_H, LEFT, TOP, GAP = 420, 260, 70, 40, 90  # px
LEGEND_LINE = 18  # px
COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#9a6700")
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.grid { stroke: #d0d7de } .mark { stroke-dasharray: 2 3; stroke-width: 1.5 }
polyline { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .grid { stroke: #30363d } }"""


@dataclass(frozen=True, slots=True)
class PlotLine:
    """`colour`: number of a colour; `mark`: a vertical line at this value of the x-axis."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False
    mark: float | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot with a logarithmic x-axis. `shares`: values from 0 to 1, on a linear axis; else logarithmic too.

    Values that are not above 0 are left out of a logarithmic axis. `unit` formats a value of the x- or y-axis.
    """

    title: str
    across: str
    lines: Sequence[PlotLine]
    x_unit: Callable[[float], str]
    y_unit: Callable[[float], str]
    shares: bool = False


def bars(rows: Sequence[tuple[str, float, str]], longest: int = BAR) -> list[str]:
    """A line per row of a label, a value and its text; the bar of the largest value has `longest` characters."""
    if not rows:
        return []
    width, most = max(len(label) for label, _, _ in rows), max(value for _, value, _ in rows) or 1.0
    return [
        f"{label.ljust(width)}  {'█' * max(round(longest * value / most), 1)} {text}" for label, value, text in rows
    ]


def write_svg(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Raises ConfigError where the file cannot be written."""
    with file_errors(f"firsttoken: --svg {path}", "written"):
        path.write_text(svg(title, panels), "utf-8")


def svg(title: str, panels: Sequence[Panel]) -> str:
    legend = max(len(panel.lines) for panel in panels)
    width, height = len(panels) * (LEFT + PANEL_W) + 20, TOP + PANEL_H + GAP + legend * LEGEND_LINE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
    ]
    for number, panel in enumerate(panels):
        lines += _panel(panel, LEFT + number * (LEFT + PANEL_W), TOP)
    return "\n".join([*lines, "</svg>\n"])


def _panel(panel: Panel, left: int, top: int) -> Iterator[str]:
    points = [point for line in panel.lines for point in line.points]
    marks = [line.mark for line in panel.lines if line.mark is not None]
    x = _Axis.logarithmic([*(x for x, _ in points), *marks])
    y = _Axis(0.0, 1.0, False) if panel.shares else _Axis.logarithmic([y for _, y in points])
    bottom, right = top + PANEL_H, left + PANEL_W
    yield f'<text class="title" x="{left}" y="{top - 14}">{escape(panel.title)}</text>'
    for value in y.ticks():
        at = bottom - PANEL_H * y.share(value)
        yield f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(panel.y_unit(value))}</text>'
    for value in x.ticks():
        at = left + PANEL_W * x.share(value)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(panel.x_unit(value))}</text>'
    yield f'<text x="{(left + right) / 2:g}" y="{bottom + 38}" text-anchor="middle">{escape(panel.across)}</text>'
    for number, line in enumerate(panel.lines):
        places = [
            (left + PANEL_W * x.share(px), bottom - PANEL_H * y.share(py))
            for px, py in line.points
            if x.holds(px) and y.holds(py)
        ]
        yield from _line(line, places)
        if line.mark is not None and x.holds(line.mark):
            at, stroke = left + PANEL_W * x.share(line.mark), COLOURS[line.colour % len(COLOURS)]
            yield f'<line class="mark" stroke="{stroke}" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>'
        yield from _legend(line, left, bottom + 62 + number * LEGEND_LINE)


def _line(line: PlotLine, places: Sequence[tuple[float, float]]) -> Iterator[str]:
    stroke, dash = COLOURS[line.colour % len(COLOURS)], ' stroke-dasharray="6 4"' if line.dashed else ""
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
    yield f'<polyline stroke="{stroke}"{dash} points="{path}"/>'
    if len(places) <= 12:
        yield from (f'<circle fill="{stroke}" cx="{px:.1f}" cy="{py:.1f}" r="3"/>' for px, py in places)


def _legend(line: PlotLine, x: int, y: int) -> Iterator[str]:
    yield from _line(PlotLine("", (), line.colour, line.dashed), [(x, y - 4), (x + 26, y - 4)])
    yield f'<text x="{x + 34}" y="{y}">{escape(line.name)}</text>'


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    log: bool = True

    @classmethod
    def logarithmic(cls, values: Sequence[float]) -> _Axis:
        """Of whole decades around the values; within a decade, of a part of it."""
        logs = [log10(value) for value in values if value > 0] or [0.0]
        low, high = floor(min(logs) * 3) / 3, ceil(max(logs) * 3) / 3
        return cls(low, max(high, low + 1 / 3))

    def holds(self, value: float) -> bool:
        return not self.log or value > 0

    def share(self, value: float) -> float:
        """0 at the beginning of the axis, 1 at its end."""
        return ((log10(value) if self.log else value) - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if not self.log:
            return [self.low + (self.high - self.low) * step / 4 for step in range(5)]
        steps = (1, 2, 5) if self.high - self.low < 2.5 else (1,)
        found = [step * 10.0**power for power in range(floor(self.low), ceil(self.high) + 1) for step in steps]
        return [value for value in found if -1e-9 <= self.share(value) <= 1 + 1e-9]
