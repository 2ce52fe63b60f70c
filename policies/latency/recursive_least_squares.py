"""One sample's step of recursive least squares, written out for a given number of terms.

Every request teaches three regressions, and a loop over a matrix costs several times the arithmetic in it: for five
terms 10 us, for three 6 us, where straight-line code takes 3 and 1.5. So the step is put down once, as formulas in `i`
and `j`, and compiled for as many terms as a regression has (as `namedtuple` does for its fields).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

COMMON_DRIFT = 2e-4  # variance added per sample, relative: 1.4% a sample
OWN_DRIFT = 5e-5
HUBER = 1.0  # times what was expected of an error: beyond it a sample's weight falls, and medians are what is learned
SMALLEST = 1e-6  # predictions stay above it, in the unit of the result

Vector = Sequence[float]
Matrix = Sequence[float]  # row by row
# Coefficients and covariance after a sample: of both before it, the most that variances may be, its features, what they
# came to, the largest error that counts, the usual noise, the least that a coefficient may be, and what sees to that.
Step = Callable[
    [Vector, Matrix, Vector, Vector, float, float, float, float, Callable[[Vector, Matrix], Vector]],
    tuple[Vector, Matrix],
]


@cache
def step(terms: int) -> Step:
    """For so many of them."""
    known: dict[str, Any] = {name: globals()[name] for name in ("COMMON_DRIFT", "OWN_DRIFT", "HUBER", "SMALLEST")}
    exec("\n    ".join(_lines(range(terms))), known)
    compiled: Step = known["step"]
    return compiled


def _lines(n: range) -> list[str]:
    """c: coefficients; p: their covariance; v: the most of its diagonal; x: features; s: their part in the doubt."""

    def each(formula: str) -> list[str]:
        return [formula.format(i=i) for i in n]

    def pairs(formula: str) -> list[str]:
        return [formula.format(i=i, j=j) for i in n for j in n]

    def listed(parts: list[str]) -> str:
        return "".join(f"{part}, " for part in parts)

    def own(i: int, j: int) -> str:
        return f" + OWN_DRIFT * m{i}" if i == j else ""

    c, p = listed(each("c{i}")), listed(pairs("p{i}_{j}"))
    return [
        "def step(coefficients, covariance, most, features, actual, clip, noise, floor, project):",
        f"{c} = coefficients",
        f"{p} = covariance",
        f"{listed(each('v{i}'))} = most",
        f"{listed(each('x{i}'))} = features",
        f"predicted = {' + '.join(each('c{i} * x{i}'))}",
        "if predicted < SMALLEST: predicted = SMALLEST",
        *each("x{i} /= predicted"),
        "error = actual / predicted - 1.0",
        "error = clip if error > clip else -clip if error < -clip else error",
        *(f"s{i} = " + " + ".join(f"p{i}_{j} * x{j}" for j in n) for i in n),
        f"doubt = {' + '.join(each('s{i} * x{i}'))}",
        "surprise = abs(error) / (HUBER * (doubt + noise) ** 0.5)",
        "total = doubt + (noise * surprise if surprise > 1.0 else noise)",
        *each("g{i} = s{i} / total"),
        *each("c{i} += g{i} * error"),
        f"if {' or '.join(each('c{i} < floor'))}:",
        f"    {c} = project(({c}), ({listed(pairs('p{i}_{j} - g{i} * s{j}'))}))",
        *each("m{i} = c{i} ** 2 if c{i} > 1.0 else 1.0"),
        *each("d{i} = COMMON_DRIFT * c{i}"),
        *(f"p{i}_{j} = p{i}_{j} - g{i} * s{j}{own(i, j)} + d{i} * c{j}" for i in n for j in n),
        *(line for i in n for line in _cap(i, n)),
        f"return ({c}), ({p})",
    ]


def _cap(i: int, n: range) -> list[str]:
    """A row and its column are scaled together, which keeps the matrix a covariance."""
    return [
        f"if p{i}_{i} > v{i} * m{i}:",
        f"    factor = (v{i} * m{i} / p{i}_{i}) ** 0.5",
        *(f"    p{i}_{j} *= factor; p{j}_{i} *= factor" for j in n),
    ]
