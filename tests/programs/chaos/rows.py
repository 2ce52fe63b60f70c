"""The catalogue: a row is an async function with a number, a title and a goal, and returns a Result.

The page repeats the docstring of the function under "what is done". A row fails for a missed goal, for an invariant
violated afterwards, or for an exception.
"""

from __future__ import annotations

import inspect
import os
import resource
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.programs.chaos.lab import Lab

NOISE = 0.15  # share of the machine above which other processes are mentioned
GROUPS = ("faults", "overload", "input", "security", "correctness")


@dataclass(frozen=True)
class Result:
    """`figures`: as printed on the page. `table`: Markdown after the table of rows."""

    figures: str
    passed: bool
    note: str = ""
    table: str = ""


Measure = Callable[["Lab"], Awaitable[Result]]


@dataclass(frozen=True)
class Row:
    """`number` of the catalogue; several rows may share a number. `quick`: fit for `make test`."""

    number: int
    group: str
    title: str
    goal: str
    measure: Measure
    quick: bool

    @property
    def method(self) -> str:
        return " ".join(inspect.getdoc(self.measure).split()) if self.measure.__doc__ else ""


@dataclass
class Outcome:
    """Outcome of a row. `violations`: invariants violated afterwards."""

    row: Row
    result: Result
    seconds: float
    violations: list[str] = field(default_factory=list)
    others: float = 0.0  # share of the machine's CPU time taken by other processes

    @property
    def passed(self) -> bool:
        return self.result.passed and not self.violations

    @property
    def verdict(self) -> str:
        """`pass`, or the reasons for falling short."""
        short = [self.result.note] if self.result.note else []
        if self.violations:
            short.append(f"invariants: {'; '.join(self.violations)}")
        if self.others > NOISE:
            short.append(f"other processes took {self.others:.0%} of the machine")
        if self.passed:
            return f"pass. {'; '.join(short)}" if short else "pass"
        return f"**falls short**: {'; '.join(short) or 'the goal is missed'}"


ROWS: list[Row] = []


def row(number: int, group: str, title: str, goal: str, *, quick: bool = False) -> Callable[[Measure], Measure]:
    """Register the function below as a row."""

    def register(measure: Measure) -> Measure:
        assert group in GROUPS
        ROWS.append(Row(number, group, title, goal, measure, quick))
        return measure

    return register


def chosen(only: Iterable[int] = (), quick: bool = False) -> list[Row]:
    """Rows in the catalogue's order."""
    wanted = set(only)
    found = [each for each in ROWS if (not wanted or each.number in wanted) and (each.quick or not quick)]
    return sorted(found, key=lambda each: each.number)


async def run(each: Row, quick: bool) -> Outcome:
    """Measure a row in a temporary directory; an exception is a result, too."""
    from tests.programs.chaos.lab import Lab

    began, before = time.monotonic(), CpuTime.now()
    with TemporaryDirectory() as home:
        lab = Lab(Path(home), quick)
        try:
            result = await each.measure(lab)
        except Exception as error:
            traceback.print_exc()
            result = Result("-", False, f"the measurement ended with {type(error).__name__}: {str(error)[:200]}")
        others = CpuTime.now().others_since(before)
        return Outcome(each, result, time.monotonic() - began, lab.violations, others)


@dataclass(frozen=True)
class CpuTime:
    """CPU time in s: of all cores with idle time, of all cores without, and of this process with ended children."""

    total: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> CpuTime:
        ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle, hertz = ticks[3] + ticks[4], os.sysconf("SC_CLK_TCK")
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        own = sum(usage.ru_utime + usage.ru_stime for usage in used)
        return cls(sum(ticks) / hertz, (sum(ticks) - idle) / hertz, own)

    def others_since(self, before: CpuTime) -> float:
        taken = (self.busy - before.busy) - (self.own - before.own)
        return max(taken, 0.0) / max(self.total - before.total, 1e-9)
