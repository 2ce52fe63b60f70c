"""Finds how far a forecast of the TTFT can be trusted at all: the noise floor of a set of Records.

Three ways, all over what a gateway can see of a request before its first token: tokens of the prompt, those not cached,
the uncached tokens queued ahead of it on its engine, the time that the first of these has been worked on, and the
requests that decode there. Sizes and cached tokens are those that the engine reported afterwards.

- `Floor.terms`: the median error of the best fit in hindsight. Each engine's TTFT is a sum of terms, as in
  `policies.latency.ttft_predictor`, whose coefficients minimise the relative errors of the engine's other requests. The
  engine is taken as equally fast throughout.
- `Floor.alike`, `Floor.nearby`: the median error of the forecast itself, corrected in hindsight. It is scaled by what
  it missed by in the most similar requests of the engine, or in those just before and after. What a better formula, or
  faster learning, could have known shows here as an error below that of the forecast.
- `Floor.twins`: the deviation between requests that are alike. Each is paired with the most similar one of its engine;
  what the forecasts say that they differ by is taken off. The difference of two independent draws has sqrt(2) times the
  deviation of one, so the median is divided by that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import median
from typing import Any

FOLDS = 10  # of the cross-validation: a request is fitted by 90% of the others of its engine
ITERATIONS = 15  # of the reweighting, from least squares to least absolute errors
SMALLEST_ERROR = 1e-3  # relative; below, a request weighs no more
RIDGE = 1e-9  # of the diagonal: terms that are zero throughout
ALIKE, NEARBY = 12, 8  # requests by which a forecast is corrected
Terms = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as seen before its first token; its forecast and its TTFT, ms. In order of the sending."""

    terms: Terms
    forecast: float
    ttft: float

    @property
    def missed(self) -> float:
        """Actual over forecast."""
        return self.ttft / self.forecast


@dataclass(frozen=True, slots=True)
class Floor:
    """Medians in percent of the TTFT."""

    terms: float
    alike: float
    nearby: float
    twins: float

    @property
    def lowest(self) -> float:
        return min(self.terms, self.alike, self.nearby, self.twins)


@dataclass(frozen=True, slots=True)
class Span:
    """An attempt on its engine: Unix times in ms."""

    sent: float
    first_token: float
    ended: float
    prompt: int
    uncached: int
    forecast: float
    ttft: float


def noise_floor(records: Iterable[dict[str, Any]]) -> Floor:
    """Of streamed Records of engines with one attempt each; all that were in flight meanwhile have to be among them."""
    engines: dict[str, list[Span]] = {}
    for record in records:
        engines.setdefault(record["endpoint"], []).append(span_of(record))
    return floor_of([seen(spans) for spans in engines.values()])


def span_of(record: dict[str, Any]) -> Span:
    arrival = 1e3 * record["wall"]
    sent, ttft, prompt = (
        arrival + record["attempts"][0]["opened_ms"],
        record["ttft_ms"],
        record["prompt_tokens_reported"],
    )
    uncached = prompt - (record["cached_tokens_reported"] or 0)
    return Span(
        sent, arrival + ttft, arrival + record["total_ms"], prompt, uncached, record["ttft_predicted_p50_ms"], ttft
    )


def seen(spans: Sequence[Span]) -> list[Seen]:
    """Requests of one engine in order of their sending, each with what was in flight then."""
    ordered = sorted(spans, key=lambda span: span.sent)
    return [Seen(_terms(span, ordered), span.forecast, span.ttft) for span in ordered]


def _terms(of: Span, spans: Sequence[Span]) -> Terms:
    """One, prompt tokens, uncached tokens, their attention pairs, queued tokens, ms of work on these, decoding."""
    before = [span for span in spans if span.sent < of.sent < span.ended]
    queued = [span for span in before if of.sent < span.first_token]
    decoding = len(before) - len(queued)
    started = max((span.first_token for span in spans if span.first_token <= of.sent), default=0.0)
    worked = of.sent - max(started, min(span.sent for span in queued)) if queued else 0.0
    pairs = of.uncached * (of.prompt - 0.5 * of.uncached)
    return (1.0, of.prompt, of.uncached, pairs, float(sum(span.uncached for span in queued)), worked, decoding)


def floor_of(engines: Sequence[Sequence[Seen]]) -> Floor:
    """The floor over all requests, each judged by the others of its engine."""
    errors = [each for requests in engines for each in _errors(requests)]
    return Floor(*map(median, zip(*errors, strict=True)))


def _errors(requests: Sequence[Seen]) -> Iterator[tuple[float, float, float, float]]:
    """Of the requests of one engine, in the order of Floor."""
    for i, (one, coefficients) in enumerate(zip(requests, _cross_validated(requests), strict=True)):
        others = [j for j in range(len(requests)) if j != i]
        alike = sorted(others, key=lambda j: _distance(one, requests[j], coefficients))[:ALIKE]
        nearby = sorted(others, key=lambda j: abs(j - i))[:NEARBY]
        yield (
            _error(_fit(one.terms, coefficients), one),
            _error(one.forecast * median(requests[j].missed for j in alike), one),
            _error(one.forecast * median(requests[j].missed for j in nearby), one),
            100 * abs(log(one.missed / requests[alike[0]].missed)) / sqrt(2),
        )


def _error(predicted: float, of: Seen) -> float:
    return 100 * abs(predicted / of.ttft - 1)


def _distance(one: Seen, other: Seen, coefficients: Terms) -> float:
    """Requests are as far apart as the times of their terms are, ms."""
    pairs = zip(coefficients, one.terms, other.terms, strict=True)
    return sum(abs(each * (own - its)) for each, own, its in pairs)


def _cross_validated(requests: Sequence[Seen]) -> list[Terms]:
    """Of each request, coefficients to which it has not contributed."""
    folds = [_least_errors([one for i, one in enumerate(requests) if i % FOLDS != fold]) for fold in range(FOLDS)]
    return [folds[i % FOLDS] for i in range(len(requests))]


def _fit(terms: Terms, coefficients: Terms) -> float:
    """At least 1 ms."""
    return max(_dot(coefficients, terms), 1.0)


def _least_errors(requests: Sequence[Seen]) -> Terms:
    """Coefficients with the least absolute relative errors, by iteratively reweighted least squares."""
    rows = [tuple(term / one.ttft for term in one.terms) for one in requests]  # each predicts 1
    weights = [1.0] * len(rows)
    for _ in range(ITERATIONS):
        coefficients = _least_squares(rows, weights)
        weights = [1 / max(abs(_dot(row, coefficients) - 1), SMALLEST_ERROR) for row in rows]
    return coefficients


def _least_squares(rows: Sequence[Terms], weights: Sequence[float]) -> Terms:
    """Coefficients by which every row comes to 1, by the normal equations."""
    weighted = list(zip(rows, weights, strict=True))
    size = range(len(rows[0]))
    matrix = [[sum(w * row[a] * row[b] for row, w in weighted) for b in size] for a in size]
    for a in size:
        matrix[a][a] = matrix[a][a] * (1 + RIDGE) + RIDGE
    return _solved(matrix, [sum(w * row[a] for row, w in weighted) for a in size])


def _solved(matrix: list[list[float]], right: list[float]) -> Terms:
    """The solution of a symmetric, positive definite system, by elimination."""
    size = len(right)
    for a in range(size):
        for b in range(a + 1, size):
            factor = matrix[b][a] / matrix[a][a]
            matrix[b] = [below - factor * above for below, above in zip(matrix[b], matrix[a], strict=True)]
            right[b] -= factor * right[a]
    found = [0.0] * size
    for a in reversed(range(size)):
        found[a] = (right[a] - _dot(matrix[a][a + 1 :], found[a + 1 :])) / matrix[a][a]
    return tuple(found)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
