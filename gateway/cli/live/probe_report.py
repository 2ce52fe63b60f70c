"""Report of `firsttoken probe`: a table, and bars for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gateway.cli.charts import bars
from gateway.cli.tables import aligned
from gateway.config.notes import duration


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """One request. `size`: prompt tokens that were meant, `tokens`: reported. Times in s; `failure` empty: none."""

    endpoint: str
    size: int
    at_once: int
    ttft: float | None = None
    tpot: float | None = None
    tokens: int | None = None
    total: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ProbeCell:
    """The requests of one size to one endpoint, `at_once` at a time. NaN where there is no value."""

    endpoint: str
    size: int
    at_once: int
    samples: Sequence[ProbeSample]

    @property
    def ttfts(self) -> list[float]:
        return sorted(sample.ttft for sample in self.samples if sample.ttft is not None)

    @property
    def tpots(self) -> list[float]:
        return [sample.tpot for sample in self.samples if sample.tpot is not None]

    @property
    def tokens(self) -> int | None:
        """Prompt tokens, as the server counts."""
        return next((sample.tokens for sample in self.samples if sample.tokens), None)

    @property
    def failure(self) -> str:
        return next((sample.failure for sample in self.samples if sample.failure), "")

    @property
    def name(self) -> str:
        return "alone" if self.at_once == 1 else f"{self.at_once} at once"

    @property
    def title(self) -> str:
        return f"{_size(self.size)} {self.name}"


def cells(samples: Sequence[ProbeSample]) -> list[ProbeCell]:
    keys = dict.fromkeys((sample.endpoint, sample.size, sample.at_once) for sample in samples)
    return [
        ProbeCell(*key, [sample for sample in samples if (sample.endpoint, sample.size, sample.at_once) == key])
        for key in keys
    ]


def report(samples: Sequence[ProbeSample]) -> list[str]:
    found = cells(samples)
    head = ("endpoint", "prompt", "tokens", "", "first token", "slowest", "per token")
    lines = aligned([head, *map(_row, found)], {0, 3})
    several = len({cell.endpoint for cell in found}) > 1
    rows = [
        (f"{cell.endpoint} {cell.title}" if several else cell.title, median(cell.ttfts), _ms(cell.ttfts))
        for cell in found
        if cell.ttfts
    ]
    failed = [f"{cell.endpoint}, {cell.title}: {cell.failure}" for cell in found if cell.failure]
    return [*lines, "", *(("first token, median", *bars(rows), "") if rows else ()), *failed]


def _row(cell: ProbeCell) -> tuple[str, ...]:
    slowest = duration(round(cell.ttfts[-1], 3)) if cell.ttfts else "-"
    tokens = "-" if cell.tokens is None else str(cell.tokens)
    return cell.endpoint, _size(cell.size), tokens, cell.name, _ms(cell.ttfts), slowest, _ms(cell.tpots, 4)


def _ms(values: Sequence[float], digits: int = 3) -> str:
    return duration(round(median(values), digits)) if values else "-"


def _size(tokens: float) -> str:
    return f"{tokens:g}" if tokens < 1000 else f"{tokens / 1000:g}k"
