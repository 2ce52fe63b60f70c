"""TPOT of one endpoint, learned online: what an output token takes while nothing is prefilled beside it."""

from __future__ import annotations

from math import log
from typing import Self

from policies.latency.change_detector import ChangeDetector
from policies.latency.regression import Regression

DECODE_BASE = 0.02  # s per output token
DECODE_RUNNING = 0.0002  # s per output token and request that is decoding
DECODE_CONTEXT = 1e-7  # s per output token and token of context of all that decode
LEAST_TPOT = 1e-5  # s
PACE_VARIANCES = (4.0,) * 3


class TpotPredictor:
    """TPOT: a step's time grows with how many requests share it."""

    __slots__ = ("_fit", "_surprise")

    def __init__(self) -> None:
        self._fit = Regression(PACE_VARIANCES)
        self._surprise = ChangeDetector()

    def predict(self, running: float, context: float) -> float:
        base, step, read = self._fit.coefficients
        return base * DECODE_BASE + step * DECODE_RUNNING * running + read * DECODE_CONTEXT * context

    def observe(self, running: float, context: float, tpot: float) -> None:
        tpot = tpot if tpot > LEAST_TPOT else LEAST_TPOT
        predicted = self.predict(running, context)
        factor = self._surprise.judge(log(tpot / (predicted if predicted > LEAST_TPOT else LEAST_TPOT)))
        if factor != 1.0:
            self._fit.scale(factor)
        else:
            terms = DECODE_BASE, DECODE_RUNNING * running, DECODE_CONTEXT * context
            self._fit.learn(terms, tpot, self._surprise.clip)

    def warm_start_from(self, sibling: Self) -> None:
        self._fit.warm_start_from(sibling._fit)
