"""The diagnosis kept with the Record of a slow request: verdict, usual values, and the decision in 400 bytes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from policies.diagnosis.causes import CauseVerdict
from policies.diagnosis.usual import Usual
from policies.types import Decision

MAX_CANDIDATES = 8
FIGURES = 5  # of each candidate: p50 and p90 in s, cached tokens, tokens queued there, USD


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The best candidates of a decision, in its order. `figures`: FIGURES of each, one after the other."""

    endpoints: tuple[str, ...] = ()
    figures: array[float] = field(default_factory=lambda: array("f"))

    @classmethod
    def of(cls, decision: Decision | None) -> Alternatives:
        ranked = [] if decision is None else list(islice(decision.ranked, MAX_CANDIDATES))
        figures = array("f")
        for each in ranked:
            forecast, ahead = each.forecast, each.load.queued_tokens
            figures.extend((forecast.p50, forecast.p90, each.hit, ahead, each.price))
        return cls(tuple(each.endpoint.id for each in ranked), figures)

    def as_json(self) -> list[dict[str, Any]]:
        rows = []
        for at, endpoint in enumerate(self.endpoints):
            p50, p90, hit, ahead, price = self.figures[at * FIGURES : (at + 1) * FIGURES]
            times = {"ttft_p50_ms": round(p50 * 1e3, 1), "ttft_p90_ms": round(p90 * 1e3, 1)}
            tokens = {"hit_tokens": round(hit), "tokens_ahead": round(ahead)}
            rows.append({"endpoint": endpoint, **times, **tokens, "price_usd": round(price, 6)})
        return rows


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Kept with the Record of a slow request. `usual` is shared by requests of a route."""

    verdict: CauseVerdict
    usual: Usual
    alternatives: Alternatives

    def as_json(self) -> dict[str, Any]:
        verdict = self.verdict
        stages = self.usual.stages if self.usual.known else {}
        return {
            "cause": verdict.cause.value,
            "evidence": verdict.evidence,
            "mend": verdict.mend,
            "part": verdict.part,
            "over_ms": round(verdict.over * 1e3, 1),
            "culprit": verdict.culprit,
            "own": verdict.own,
            "failed": verdict.failed,
            "witnessed": verdict.witnessed,
            "usual_of": self.usual.requests,
            "usual_ms": {name: [round(s.p50 * 1e3, 1), round(s.p90 * 1e3, 1)] for name, s in stages.items()},
            "candidates": self.alternatives.as_json(),
        }
