"""TPOT of an endpoint, learned online: the time of an output token while no prefill stalls it."""

from __future__ import annotations

from math import log

from policies.latency.prediction_errors import ChangeDetector
from policies.latency.regression import Regression

DECODE_BASE = 0.02  # s per output token
DECODE_RUNNING = 0.0002  # s per output token and decoding request
DECODE_CONTEXT = 1e-7  # s per output token and token of context of all decoding requests
MIN_TPOT = 1e-5  # s
DECODE_VARIANCES = (4.0,) * 3


class TpotPredictor:
    """Time of a decoding step, which grows with the number of requests and with context."""

    def __init__(self) -> None:
        self._regression = Regression(DECODE_VARIANCES)
        self._changes = ChangeDetector()

    def predict(self, running: float, context: float) -> float:
        base, step, read = self._regression.coefficients
        return base * DECODE_BASE + step * DECODE_RUNNING * running + read * DECODE_CONTEXT * context

    def observe(self, running: float, context: float, tpot: float) -> None:
        tpot = max(tpot, MIN_TPOT)
        factor = self._changes.observe(log(tpot / max(self.predict(running, context), MIN_TPOT)))
        if factor != 1.0:
            self._regression.scale(factor)
        else:
            terms = (DECODE_BASE, DECODE_RUNNING * running, DECODE_CONTEXT * context)
            self._regression.update(terms, tpot, self._changes.clip)

    def warm_start_from(self, sibling: TpotPredictor) -> None:
        self._regression.warm_start_from(sibling._regression)
