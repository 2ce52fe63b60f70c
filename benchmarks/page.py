"""Results as a table, as RESULTS.md, and as JSON for comparison with the next run."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from benchmarks.figures.figure import Figure
from benchmarks.peers import NGINX, OURS, PACKAGES, PEERS
from benchmarks.processes import ROOT

HERE = Path(__file__).parent
PAGE, DATA = HERE / "RESULTS.md", HERE / "results.json"
INTRODUCTION = """# Results

Written by `make bench`; what is measured, and how, is said in the modules under [`figures/`](figures). Less is better
everywhere. Ours has routing on in full: estimate, prefix index, prediction, Records and metrics. One worker of each
peer on one core, engines and load on the other; medians of {rounds} rounds in which the peers take turns. Absolute
times move with the machine, by half on a busy one: compare along a row.

{when}, Python {python}, {machine}; the host took {stolen:.0%} of the machine's time for others.

"""
DECISION = "\nWhat a decision costs (`python -m benchmarks.decision`):\n\n```\n{}\n```\n"


@dataclass(frozen=True, slots=True)
class Results:
    """`figures`: medians, by figure and peer."""

    figures: Mapping[str, Mapping[str, float]]
    decision: Sequence[str]
    rounds: int
    stolen: float  # share of the machine's time stolen by the host during the run
    when: str
    python: str
    machine: str

    @classmethod
    def of(
        cls, values: Mapping[str, Mapping[str, Sequence[float]]], decision: Sequence[str], rounds: int, stolen: float
    ) -> Results:
        medians = {
            key: {name: round(median(found), 3) for name, found in peers.items()} for key, peers in values.items()
        }
        today = f"{datetime.now(UTC):%-d %B %Y}"
        return cls(medians, decision, rounds, stolen, today, platform.python_version(), _processor())

    def median(self, figure: Figure, name: str) -> float | None:
        return self.figures.get(figure.key, {}).get(name)


def committed() -> Results | None:
    """The last committed results, not those of a run in between."""
    shown = subprocess.run(
        ["git", "show", f"HEAD:{DATA.relative_to(ROOT)}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return Results(**json.loads(shown.stdout)) if shown.returncode == 0 else None


def write(figures: Sequence[Figure], results: Results, last: Results | None) -> None:
    DATA.write_text(json.dumps(asdict(results), indent=1) + "\n")
    decided = DECISION.format("\n".join(results.decision)) if results.decision else ""
    PAGE.write_text(INTRODUCTION.format(**asdict(results)) + table(figures, results, last) + decided)


def table(figures: Sequence[Figure], results: Results, last: Results | None) -> str:
    """Markdown. A peer without results has no column."""
    measured = {name for peers in results.figures.values() for name in peers}
    peers = [name for name in PEERS if name != OURS and name in measured]
    heads = ["", "goal", OURS, "x nginx", *(PACKAGES.get(name, name) for name in peers), "last committed"]
    rows = [_row(figure, peers, results, last) for figure in figures]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(figure: Figure, peers: Sequence[str], results: Results, last: Results | None) -> list[str]:
    ours, nginx = results.median(figure, OURS), results.median(figure, NGINX)
    return [
        figure.title,
        _goal(figure),
        f"**{_number(figure, ours)}**{'' if _met(figure, ours, nginx) else ' (missed)'}",
        f"{ours / nginx:.2f}" if ours is not None and nginx and not figure.added else "",
        *(_number(figure, results.median(figure, name)) for name in peers),
        _number(figure, last.median(figure, OURS) if last is not None else None),
    ]


def _goal(figure: Figure) -> str:
    if figure.goal is None:
        return ""
    return f"{figure.goal:g} x nginx" if figure.times_nginx else f"{figure.goal:g}"


def _met(figure: Figure, ours: float | None, nginx: float | None) -> bool:
    """Also true where there is nothing to compare with."""
    if figure.goal is None or ours is None or (figure.times_nginx and nginx is None):
        return True
    limit = figure.goal * (nginx or 0.0) if figure.times_nginx else figure.goal
    return round(ours, figure.digits) <= limit


def _number(figure: Figure, value: float | None) -> str:
    return "" if value is None else f"{value:.{figure.digits}f}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.machine()
