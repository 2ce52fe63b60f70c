"""Results of `benchmarks.picker`: a table of figures with what each must be, stored as JSON and as PICKER.md."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.figures.figure import Goal
from benchmarks.picker.paths import BUFFERED, DUPLEX, NAMES, PLAIN, SERVE, VERSION

Found = dict[str, dict[str, dict[str, list[float]]]]  # by measure, path and figure: a value of each round
Figures = Mapping[str, Mapping[str, Mapping[str, float]]]  # medians
HERE = Path(__file__).parent
PAGE, DATA = HERE.parent / "PICKER.md", HERE / "results.json"
INTRODUCTION = """# The endpoint picker behind Envoy

Written by `python -m benchmarks.picker --write`; what is measured, and how, is said in [`picker/`](picker). The
picker has routing on in full, as `serve` has: estimate, prefix index, prediction, queue, Records and metrics. Envoy
{envoy} has one worker thread and, before the picker, the configuration of [deploy/envoy](../deploy/envoy/envoy.yaml);
*duplex* is the body mode of the usual gateways, FULL_DUPLEX_STREAMED both ways. CPU of 8 KB prompts is of 16 callers
without a pause, an answer of one token each. Medians of {rounds} rounds in which all take turns. Absolute times move
with the machine, to twice as much on a busy one: compare along a row.

{when}, Python {python}; the host took {stolen:.0%} of the machine's time for others.

"""

SIGHTS = """
## Goodput, by what the picker sees of an answer

`python -m benchmarks.picker.sight --traces DIR --write`: replays of public traces (scenarios of
[ROUTING.md](ROUTING.md)), the share of good requests of all offered, and in brackets of `serve`'s. *Body*: first token,
tokens, end and usage are seen. *Access log*: the first token, and the end with a count of tokens, without usage.
The queue holds requests for as long as `serve` does, by
`pick.hold`; where 0.2 s is written,
it lets them go after that time, the default, for data planes that wait no longer. None sends anything twice.

| | load | serve | body (0.995) | log (0.995) | body, 0.2 s |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Run:
    """Results of the figures that were measured."""

    figures: Figures
    rounds: int
    stolen: float
    when: str
    python: str
    envoy: str = VERSION

    @classmethod
    def of(cls, found: Found, rounds: int, stolen: float) -> Run:
        figures = {
            key: {path: {name: round(median(values), 3) for name, values in of.items()} for path, of in paths.items()}
            for key, paths in found.items()
        }
        return cls(figures, rounds, stolen, f"{datetime.now(UTC):%-d %B %Y}", platform.python_version())

    def value(self, key: str, path: str, name: str) -> float | None:
        return self.figures.get(key, {}).get(path, {}).get(name)


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of each path. `of`: Envoy + picker alone is held against the goal."""

    title: str
    value: Callable[[Run, str], float | None]
    goal: Goal | None = None
    digits: int = 0


def figure(key: str, name: str) -> Callable[[Run, str], float | None]:
    return lambda run, path: run.value(key, path, name)


def all_cpu(key: str) -> Callable[[Run, str], float | None]:
    """CPU of Envoy and picker, or of the proxy."""

    def value(run: Run, path: str) -> float | None:
        parts = [run.value(key, path, name) for name in ("envoy", "brain")]
        return None if None in parts else sum(part or 0.0 for part in parts)

    return value


def added(key: str, name: str) -> Callable[[Run, str], float | None]:
    """Beyond that of a plain Envoy."""

    def value(run: Run, path: str) -> float | None:
        mine, plain = run.value(key, path, name), run.value(key, PLAIN, name)
        return None if mine is None or plain is None else mine - plain

    return value


def of_proxy(key: str, part: Callable[[Run, str], float | None]) -> Callable[[Run, str], float | None]:
    """Divided by the CPU of our own proxy."""

    def value(run: Run, path: str) -> float | None:
        mine, proxy = part(run, path), all_cpu(key)(run, SERVE)
        return None if mine is None or not proxy else mine / proxy

    return value


ROWS = (
    Row("8 KB never seen: CPU of the picker (the proxy), us", figure("busy-new", "brain"), Goal(900)),
    Row("8 KB, all but 1 KB seen: the same", figure("busy-seen", "brain")),
    Row("8 KB, the same prompt: the same", figure("busy-same", "brain"), Goal(500)),
    Row("8 KB never seen: CPU of Envoy, us", figure("busy-new", "envoy")),
    Row("TTFT added to a plain Envoy's at 150/s, p50, ms", added("short", "p50"), Goal(1.2), 2),
    Row("TTFT added to a plain Envoy's at 150/s, p99, ms", added("short", "p99"), Goal(4), 2),
    Row("CPU of the picker (the proxy) at 150/s, us", figure("short", "brain")),
    Row("220 KB, 150 callers, the same prompt: requests/s", figure("crowd-same", "rate"), Goal(500, least=True)),
    Row("220 KB, 150 callers, the same prompt: mean TTFT, ms", figure("crowd-same", "ttft"), Goal(300)),
    Row("220 KB, 150 callers, never seen: requests/s", figure("crowd-new", "rate"), Goal(180, least=True)),
    Row("220 KB, 150 callers, never seen: mean TTFT, ms", figure("crowd-new", "ttft")),
    Row("8 KB and 200 tokens, 17/s: CPU of all, us", all_cpu("long")),
    Row("the same, of our own proxy's", of_proxy("long", all_cpu("long")), Goal(0.9), 2),
    Row("the picker alone, of our own proxy's", of_proxy("long", figure("long", "brain")), Goal(0.2), 2),
    Row("resident memory of the picker (the proxy) after 220 KB by 150 callers, MB", figure("memory", "brain")),
    Row("resident memory of Envoy, MB", figure("memory", "envoy")),
)


def table(run: Run) -> str:
    """Markdown."""
    lines = [["", "goal", *NAMES], ["---", *["---:"] * (1 + len(NAMES))]]
    for row in ROWS:
        values = {path: row.value(run, path) for path in NAMES}
        if values[BUFFERED] is not None or values[DUPLEX] is not None:
            lines.append([row.title, str(row.goal or ""), *(_cell(row, path, values[path]) for path in NAMES)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(row: Row, path: str, value: float | None) -> str:
    if value is None or (value == 0 and path == PLAIN):
        return ""
    shown = f"{value:,.{row.digits}f}"
    if path != BUFFERED:
        return shown
    return f"**{shown}**{'' if row.goal is None or row.goal.met(value, {}) else ' (missed)'}"


@dataclass(frozen=True, slots=True)
class SightRow:
    """Shares of good requests: of `serve`, and picked, by what is seen of an answer."""

    scenario: str
    load: float
    good: Sequence[float]

    def line(self) -> str:
        serve, *picked = self.good
        cells = [f"{each:.3f} ({each / serve:.3f})" for each in picked]
        return f"| {self.scenario} | {self.load:.2f} | {serve:.3f} | {' | '.join(cells)} |"


def write(run: Run) -> None:
    """Figures that were not measured now are kept."""
    before = stored()
    _write({**before, **asdict(run), "figures": {**before.get("figures", {}), **run.figures}})


def write_sights(rows: Sequence[SightRow]) -> None:
    _write({**stored(), "sights": [asdict(row) for row in rows]})


def stored() -> dict[str, Any]:
    return dict(json.loads(DATA.read_text())) if DATA.exists() else {}


def _write(kept: dict[str, Any]) -> None:
    DATA.write_text(json.dumps(kept, indent=1) + "\n")
    sights = [SightRow(**each) for each in kept.get("sights", ())]
    measured = {name: value for name, value in kept.items() if name != "sights"}
    shown = INTRODUCTION.format(**measured) + table(Run(**measured)) if measured else ""
    PAGE.write_text(shown + SIGHTS + means(sights) + "".join(f"{row.line()}\n" for row in sights))


def means(rows: Sequence[SightRow]) -> str:
    """The ratios to `serve`, in the mean over all rows."""
    ratios = zip(*([each / row.good[0] for each in row.good[1:]] for row in rows), strict=True)
    return f"| all | | | {' | '.join(f'**{fmean(each):.3f}**' for each in ratios)} |\n"
