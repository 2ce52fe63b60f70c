"""Results as a table, as RESULTS.md, and as JSON for comparison with the next run."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from benchmarks.figures.figure import Block, Figure
from benchmarks.peers import KNOWN, NGINX, OURS, PACKAGES, SMG
from benchmarks.processes import ROOT

HERE = Path(__file__).parent
COMPARED = (NGINX, SMG)  # of which ratios are shown
KEEPS_UP = 0.95  # of the rate offered
PAGE, DATA = HERE / "RESULTS.md", HERE / "results.json"
INTRODUCTION = """# Results

Written by `make bench`; what is measured, and how, is said in the modules under [`figures/`](figures). Less is better
where nothing else is said; `x nginx` and `x smg` are ours divided by theirs. Ours has routing on in full: estimate,
prefix index, prediction, Records and metrics. One worker of each peer on one core, engines and load on the other;
medians of {rounds} or more rounds in which the peers take turns. Absolute times move with the machine, to twice as
much on a busy one: compare along a row.

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

    def of_key(self, key: str) -> Mapping[str, float]:
        """By peer."""
        return self.figures.get(key, {})

    def on_top_of(self, before: Results | None) -> Results:
        """These, and the figures and peers of `before` which were not measured now."""
        if before is None:
            return self
        figures = {key: {**before.of_key(key), **self.of_key(key)} for key in {**before.figures, **self.figures}}
        rounds, decision = min(self.rounds, before.rounds), self.decision or before.decision
        return replace(self, figures=figures, decision=decision, rounds=rounds)


def committed() -> Results | None:
    """The last committed results, not those of a run in between."""
    shown = subprocess.run(
        ["git", "show", f"HEAD:{DATA.relative_to(ROOT)}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return Results(**json.loads(shown.stdout)) if shown.returncode == 0 else None


def stored() -> Results | None:
    """The results of the last run that was kept, committed or not."""
    return Results(**json.loads(DATA.read_text())) if DATA.exists() else None


def write(blocks: Sequence[Block], results: Results, last: Results | None) -> None:
    DATA.write_text(json.dumps(asdict(results), indent=1) + "\n")
    decided = DECISION.format("\n".join(results.decision)) if results.decision else ""
    PAGE.write_text(INTRODUCTION.format(**asdict(results)) + tables(blocks, results, last) + decided)


def tables(blocks: Sequence[Block], results: Results, last: Results | None) -> str:
    """Markdown, without the blocks and figures that were not measured."""
    parts = []
    for block in blocks:
        figures = [figure for figure in block.figures if {figure.key, figure.achieved} & set(results.figures)]
        if figures:
            parts.append(f"## {block.title}\n\n{block.about}\n\n{table(figures, results, last)}")
    return "\n".join(parts)


def table(figures: Sequence[Figure], results: Results, last: Results | None) -> str:
    """Markdown: the ratios first. A peer without results has no column."""
    measured = {name for figure in figures for key in (figure.key, figure.achieved) for name in results.of_key(key)}
    peers = [name for name in KNOWN if name != OURS and name in measured]
    compared = [name for name in COMPARED if name in measured]
    packages = (PACKAGES.get(name, name) for name in peers)
    heads = ["", "goal", *(f"x {name}" for name in compared), OURS, *packages, "last committed"]
    rows = [_row(figure, compared, peers, results, last) for figure in figures]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(
    figure: Figure, compared: Sequence[str], peers: Sequence[str], results: Results, last: Results | None
) -> list[str]:
    values = results.of_key(figure.key)
    return [
        figure.title,
        ", ".join(map(str, figure.goals)),
        *(_ratio(values.get(OURS), values.get(name)) for name in compared),
        f"**{_value(figure, results, OURS)}**{'' if _met(figure, values) else ' (missed)'}",
        *(_value(figure, results, name) for name in peers),
        "" if last is None else _value(figure, last, OURS),
    ]


def _ratio(ours: float | None, other: float | None) -> str:
    """Empty where a peer was not measured, and where an addition drowns in noise."""
    return f"{ours / other:.2f}" if ours is not None and other is not None and min(ours, other) > 0 else ""


def _met(figure: Figure, values: Mapping[str, float]) -> bool:
    """Also true where there is nothing to compare with."""
    ours = values.get(OURS)
    return ours is None or all(goal.met(round(ours, figure.digits), values) for goal in figure.goals)


def _value(figure: Figure, results: Results, name: str) -> str:
    """The rate instead, of a proxy that did not keep up with the rate offered."""
    achieved = results.of_key(figure.achieved).get(name)
    if figure.rate and achieved is not None and achieved < KEEPS_UP * figure.rate:
        return f"only {achieved:.0f}/s"
    value = results.of_key(figure.key).get(name)
    return "" if value is None else f"{value:.{figure.digits}f}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.machine()
