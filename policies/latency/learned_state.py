"""Learned state of engines, APIs, prompts and answers, as values that survive a restart.

Rules:
- A value is checked when it is made, by decoding too: finite, bounded, a covariance that is one. ValueError otherwise:
  no learner ever holds what a broken or hostile file says.
- Times are ages, s: the clock of a process ends with the process.
- What is old counts less when it is restored. The error of predictions: as without a restart, by the age of its samples
  (`ErrorQuantiles`, `ApiPredictor`). The number of samples, which makes a forecast trained, halves every day. The
  coefficients stay, and their variance grows towards that of coefficients learned from another endpoint: an engine that
  was replaced meanwhile is learned as fast as a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from policies.types import QUANTILES

SAMPLE_HALF_LIFE = 86_400.0  # s: machines and versions of engines change over days
OTHER_COMMON, OTHER_OWN = 0.25, 0.05  # variances, relative to squares, of coefficients learned from another endpoint

WINDOW = 128  # errors kept
MAX_LOG_RATIO = 6.0  # a factor of 400
MAX_COEFFICIENT = 1e9  # times the reference
MAX_TERMS = 16
MAX_COUNT = 10**12
MAX_NUMBER = 1e18  # of tokens, attention pairs, seconds
MAX_OWN_SAMPLES = 64
MAX_EFFORTS = 64  # classes of reasoning effort
MAX_LENGTHS = 64  # classes of prompt length
HOURS, MAX_DAYS = 24, 7
MAX_NAME = 1024  # characters
SINGULAR = 1e-6  # relative: what rounding may make of a covariance


def kept_share(age: float) -> float:
    """Share of saved samples that still counts after `age` seconds."""
    return float(0.5 ** (age / SAMPLE_HALF_LIFE))


def _within(name: str, values: Iterable[float], least: float, most: float) -> None:
    for value in values:
        if not (isfinite(value) and least <= value <= most):
            raise ValueError(f"{name} outside of {least:g} to {most:g}")


def _at_most(name: str, values: Sequence[object] | Mapping[Any, object], most: int) -> None:
    if len(values) > most:
        raise ValueError(f"{name} of more than {most}")


def _check_covariance(rows: Sequence[Sequence[float]]) -> None:
    """Raises ValueError unless symmetric and positive semidefinite (Cholesky)."""
    size = len(rows)
    if any(len(row) != size for row in rows):
        raise ValueError("covariance that is not square")
    factor = [[0.0] * size for _ in rows]
    for i in range(size):
        for j in range(i + 1):
            _within("covariance", (rows[i][j], rows[j][i]), -MAX_NUMBER, MAX_NUMBER)
            scale = abs(rows[i][i] * rows[j][j]) ** 0.5
            if abs(rows[i][j] - rows[j][i]) > SINGULAR * scale:
                raise ValueError("covariance that is not symmetric")
            rest = rows[i][j] - sum(factor[i][k] * factor[j][k] for k in range(j))
            if i != j:
                factor[i][j] = rest / factor[j][j]
            elif rows[i][i] <= 0 or rest < -SINGULAR * rows[i][i]:
                raise ValueError("covariance that is not positive")
            else:
                factor[i][i] = max(rest, SINGULAR * rows[i][i]) ** 0.5


@dataclass(frozen=True, slots=True)
class LearnedRegression:
    coefficients: list[float]
    covariance: list[list[float]]

    def __post_init__(self) -> None:
        _at_most("coefficients", self.coefficients, MAX_TERMS)
        _within("coefficients", self.coefficients, 0.0, MAX_COEFFICIENT)
        if len(self.covariance) != len(self.coefficients):
            raise ValueError("covariance of another size than the coefficients")
        _check_covariance(self.covariance)


@dataclass(frozen=True, slots=True)
class LearnedErrors:
    """Logarithms of actual / predicted. `recent`: oldest first; `prior`: at QUANTILES; `age`: of the latest."""

    recent: list[float]
    prior: list[float]
    age: float = 0.0

    def __post_init__(self) -> None:
        _at_most("errors", self.recent, WINDOW)
        _within("errors", (*self.recent, *self.prior), -MAX_LOG_RATIO, MAX_LOG_RATIO)
        _within("age of errors", (self.age,), 0.0, MAX_NUMBER)
        if len(self.prior) != len(QUANTILES) or sorted(self.prior) != self.prior:
            raise ValueError("prior errors that are no quantiles")


@dataclass(frozen=True, slots=True)
class LearnedChanges:
    mean_error: float
    samples: int

    def __post_init__(self) -> None:
        _within("mean error", (self.mean_error,), 0.0, 100.0)
        _within("samples", (self.samples,), 0, MAX_COUNT)


@dataclass(frozen=True, slots=True)
class LearnedEngine:
    """TTFT of an engine. `own`: while siblings may teach; by sample the work (5 numbers), predicted and actual TTFT."""

    samples: int
    regression: LearnedRegression
    changes: LearnedChanges
    idle_errors: LearnedErrors
    queued_errors: LearnedErrors
    own: list[tuple[float, float, float, float, float, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _within("samples", (self.samples,), 0, MAX_COUNT)
        _at_most("samples", self.own, MAX_OWN_SAMPLES)
        for sample in self.own:
            _within("samples", sample, 0.0, MAX_NUMBER)


@dataclass(frozen=True, slots=True)
class LearnedMean:
    mean: float
    weight: float
    age: float = 0.0

    def __post_init__(self) -> None:
        _within("mean", (self.mean,), -20.0, 20.0)
        _within("weight", (self.weight,), 0.0, 1000.0)
        _within("age of a mean", (self.age,), 0.0, MAX_NUMBER)


@dataclass(frozen=True, slots=True)
class LearnedApi:
    """TTFT of an API. `by_length`: by the bits of a prompt's number of tokens; `by_effort`: by class of effort;
    `hours`: logarithms of the factors of the hours of the day (UTC), of so many `days`; empty: none is known."""

    samples: int
    changes: LearnedChanges
    errors: LearnedErrors
    overall: LearnedMean
    by_length: dict[int, LearnedMean] = field(default_factory=dict)
    by_effort: dict[str, LearnedApi] = field(default_factory=dict)
    hours: list[float] = field(default_factory=list)
    days: int = 0

    def __post_init__(self) -> None:
        _within("samples", (self.samples,), 0, MAX_COUNT)
        _at_most("hours", self.hours, HOURS)
        _within("hours", self.hours, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        _within("days", (self.days,), 0, MAX_DAYS)
        _at_most("lengths", self.by_length, MAX_LENGTHS)
        _within("lengths", self.by_length, 0, 64)
        _at_most("efforts", self.by_effort, MAX_EFFORTS)
        for effort, times in self.by_effort.items():
            _at_most("effort", effort, MAX_NAME)
            if times.by_effort:
                raise ValueError("efforts within an effort")


@dataclass(frozen=True, slots=True)
class LearnedTpot:
    regression: LearnedRegression
    changes: LearnedChanges


@dataclass(frozen=True, slots=True)
class LearnedEndpoint:
    """`served`: the model as the engine names it; empty: unknown. Either `engine` or `api`."""

    tpot: LearnedTpot
    tpot_share: float
    tokens_per_event: float
    served: str = ""
    engine: LearnedEngine | None = None
    api: LearnedApi | None = None
    variant_load_s: float | None = None  # of a variant of the model

    def __post_init__(self) -> None:
        _at_most("model name", self.served, MAX_NAME)
        _within("share of TPOT", (self.tpot_share,), 0.0, 1.0)
        _within("tokens per event", (self.tokens_per_event,), 1.0, 1000.0)
        _within("load time of variants", (self.variant_load_s or 0.0,), 0.0, 1000.0)
        if (self.engine is None) == (self.api is None):
            raise ValueError("endpoint that is neither an engine nor an API")

    @property
    def samples(self) -> int:
        times = self.engine or self.api
        return 0 if times is None else times.samples


@dataclass(frozen=True, slots=True)
class LearnedLengths:
    """Answers of a route. `spread`: of tokens over a constant; None: saved by an earlier version."""

    mean: float
    answers: int
    spread: LearnedErrors | None = None

    def __post_init__(self) -> None:
        _within("mean length", (self.mean,), 0.0, MAX_NUMBER)
        _within("answers", (self.answers,), 1, MAX_COUNT)
