"""Usual values of a route, from its latest requests that met their budgets.

Rules:
- A request adds one Sample to a bounded ring; quantiles are computed for a diagnosis only.
- Requests that missed are left out: during an incident the usual stays what it was before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ENOUGH = 8  # requests, below which nothing is usual


class Sample(NamedTuple):
    """Values of one request. Times are seconds; None: unknown."""

    spent: Sequence[float | None]  # by stage, in the order of the stages' names
    prompt: int
    computed: int  # tokens of the prompt that were not cached
    predicted_share: float  # of the prompt, forecast as cached
    output: int
    tpot: float | None
    engine_queue: float | None
    engine_prefill: float | None
    thinking: float  # from the first token of reasoning to that of the answer
    lag: float  # of the event loop


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 90th percentile."""

    p50: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None where nothing is known."""
        ordered = sorted(value for value in values if value is not None)
        if not ordered:
            return None
        return cls(ordered[len(ordered) // 2], ordered[min(len(ordered) * 9 // 10, len(ordered) - 1)])


NOTHING = Spread(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Usual:
    """By the names of a Sample; `requests`: number of samples. A value that no sample knows is NOTHING."""

    requests: int = 0
    stages: dict[str, Spread] = field(default_factory=dict)
    prompt: Spread = NOTHING
    computed: Spread = NOTHING
    predicted_share: Spread = NOTHING
    output: Spread = NOTHING
    tpot: Spread = NOTHING
    engine_queue: Spread = NOTHING
    engine_prefill: Spread = NOTHING
    thinking: Spread = NOTHING
    lag: Spread = NOTHING

    @property
    def known(self) -> bool:
        return self.requests >= ENOUGH

    @classmethod
    def of(cls, names: Sequence[str], samples: Sequence[Sample]) -> Usual:
        """`names`: of the stages."""
        _, *known = Sample._fields
        return cls(
            len(samples),
            _spreads(names, [sample.spent for sample in samples]),
            **_spreads(known, [sample[1:] for sample in samples]),
        )

    def of_stage(self, name: str) -> float:
        """The median, s; 0 where the stage is unknown."""
        return self.stages.get(name, NOTHING).p50 if self.known else 0.0


def _spreads(names: Sequence[str], rows: Sequence[Sequence[float | None]]) -> dict[str, Spread]:
    """Of the columns with a known value."""
    columns = zip(names, zip(*rows, strict=True), strict=False)
    return {name: spread for name, values in columns if (spread := Spread.of(values)) is not None}
