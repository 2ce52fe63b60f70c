"""TPOT of an endpoint, learned online, and the price of a prefill for the answers that decode there.

`TpotPredictor` learns the time of an output token while no prefill stalls the answer. The price of a prefill is the
expected number of answers, decoding on the same engine, that will miss their TPOT: while an engine prefills, every
answer stalls. An answer has a TPOT budget of b seconds a token, on average. After k tokens and x seconds the credit is
b k - x seconds. If a stall of S seconds puts an answer behind by d, catching up takes d / (b - p) more tokens, where p
is the TPOT of an undisturbed engine; so many tokens come with probability exp(-tokens / m), for m expected remaining
tokens (lengths are roughly geometric: the remainder does not depend on the tokens so far). The expected misses of S are
the sum, over the answers, of the probability before minus after.
Derivation and measurements: docs/decisions/0011-decode-interference.md.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from dataclasses import dataclass
from math import exp, log

from policies.latency.learned_state import LearnedTpot
from policies.latency.online_learning import ChangeDetector, Regression
from policies.types import FOREVER, Load

DECODE_BASE = 0.02  # s per output token
DECODE_RUNNING = 0.0002  # s per output token and decoding request
DECODE_CONTEXT = 1e-7  # s per output token and token of context of all decoding requests
MIN_TPOT = 1e-5  # s
DECODE_VARIANCES = (4.0,) * 3

TIME_CONSTANT = 10.0  # s of the exponential averages over decoding and over time spent on prefills
TARGET_MISS_RATE = 0.04  # share of answers which may miss their TPOT: a fleet which misses none prefills too little
SHARE_STEP = 0.01  # by which an answer moves the usable share of the TPOT budget
MIN_SHARE, FIRST_SHARE, MAX_SHARE = 0.5, 0.85, 1.0  # of the TPOT budget
COUNTED = 16  # tokens from which an answer tells how many tokens an event carries
TOKENS_PER_EVENT_WEIGHT = 1 / 8  # of the latest answer
STALL_GRID = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # s of stall at which misses are computed
MIN_SLACK = 0.1  # of a budget, that the undisturbed TPOT leaves: with less, nothing can be caught up

MissCurve = tuple[float, ...]  # expected misses at STALL_GRID; empty: none anywhere
NO_MISSES: MissCurve = ()


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

    def learned(self) -> LearnedTpot:
        return LearnedTpot(self._regression.learned(), self._changes.learned())

    def restore(self, saved: LearnedTpot, age: float) -> None:
        """Raises ValueError where this predictor learns other terms."""
        self._regression.restore(saved.regression, age)
        self._changes.restore(saved.changes)


@dataclass(slots=True)
class DecodingAnswer:
    """An answer before and during decoding."""

    tpot_budget: float | None  # s per token; None: the caller has none
    expected_tokens: float  # still to come
    context: int  # tokens of the prompt
    first_at: float = 0.0
    tokens: int = 1  # so far, in events
    counted: int = 1  # of these, in the throughput


class DecodeInterference:
    """The decoding answers of an endpoint, and the prefills which stall them."""

    def __init__(self) -> None:
        self.prefill_s = 0.0  # sent, in all
        self.context = 0  # tokens of the prompts of decoding answers
        self.answers: dict[Hashable, DecodingAnswer] = {}
        self.expected_tpot_misses = NO_MISSES  # as of the last `update`
        self.tpot_share = FIRST_SHARE  # of the TPOT budget which decoding may use
        self.decode_s = 0.0  # of all answers together, exponential average
        self.unaccounted_s = 0.0  # of `prefill_s`, sent since the last `update`
        self._recent_prefill_s = 0.0  # exponential average, as of `_prefill_at`
        self._prefill_at = self._updated_at = 0.0
        self.tokens_per_event = 1.0  # servers may send several tokens at once
        self._decode_events = 0.0  # exponential average
        self._budgets: dict[float, int] = {}  # number of answers by TPOT budget

    @property
    def decode_tokens(self) -> float:
        """Tokens written in `decode_s`."""
        return self._decode_events * self.tokens_per_event

    @property
    def tpot_budget(self) -> float:
        """Seconds per token, the tightest; FOREVER: none."""
        return min(self._budgets, default=FOREVER)

    def on_prefill(self, seconds: float, now: float) -> None:
        self._recent_prefill_s = self._recent_prefill_s * exp((self._prefill_at - now) / TIME_CONSTANT) + seconds
        self._prefill_at = now
        self.prefill_s += seconds
        self.unaccounted_s += seconds

    def prefill_utilization(self, now: float) -> float:
        """Recent share of time spent on prefills, 0 to 1."""
        return min(self._recent_prefill_s * exp((self._prefill_at - now) / TIME_CONSTANT) / TIME_CONSTANT, 1.0)

    def on_first_token(self, key: Hashable, answer: DecodingAnswer, now: float) -> None:
        answer.first_at = now
        self.answers[key] = answer
        self.context += answer.context
        if (budget := answer.tpot_budget) is not None:
            self._budgets[budget] = self._budgets.get(budget, 0) + 1

    def on_ended(self, key: Hashable, tpot: float | None = None, tokens: int | None = None) -> None:
        """`tokens`: of the whole answer, as the engine reported."""
        if (answer := self.answers.pop(key, None)) is None:
            return
        self.context -= answer.context
        if tokens is not None and answer.tokens >= COUNTED:
            reported = max(tokens / answer.tokens, 1.0)
            self.tokens_per_event += (reported - self.tokens_per_event) * TOKENS_PER_EVENT_WEIGHT
        if not self.answers:
            self.expected_tpot_misses = NO_MISSES
        if (budget := answer.tpot_budget) is not None:
            self._budgets[budget] -= 1
            if not self._budgets[budget]:
                del self._budgets[budget]
            if tpot is not None:  # the share settles where TARGET_MISS_RATE of the answers miss
                share = self.tpot_share + SHARE_STEP * (TARGET_MISS_RATE - (tpot > budget))
                self.tpot_share = min(max(share, MIN_SHARE), MAX_SHARE)

    def update(self, undisturbed_tpot: float, now: float) -> None:
        """Computes the recent throughput, and the expected misses of stalls which begin now."""
        self.unaccounted_s = 0.0
        decay = exp((self._updated_at - now) / TIME_CONSTANT)
        self.decode_s *= decay
        self._decode_events *= decay
        total = [0.0] * len(STALL_GRID)
        for answer in self.answers.values():
            self.decode_s += now - max(answer.first_at, self._updated_at)
            self._decode_events += answer.tokens - answer.counted
            answer.counted = answer.tokens
            budget = answer.tpot_budget
            if budget is None:
                continue
            credit = budget * answer.tokens * self.tokens_per_event - (now - answer.first_at)
            if credit >= STALL_GRID[-1]:
                continue
            slack = max(budget - undisturbed_tpot, MIN_SLACK * budget)
            scale = 1 / (slack * answer.expected_tokens)
            probability = 1.0 if credit >= 0 else exp(credit * scale)
            for i in range(bisect_right(STALL_GRID, credit), len(STALL_GRID)):
                total[i] += probability - exp((credit - STALL_GRID[i]) * scale)
        self.expected_tpot_misses = tuple(total) if any(total) else NO_MISSES
        self._updated_at = now

    def tpot_pressure(
        self, single_tpot: float, decode_s: float = 0.0, decode_tokens: float = 0.0, tpot_budget: float = FOREVER
    ) -> float:
        """Recent TPOT as a share of what the answers can bear: from 1 on, no further prefill.

        `single_tpot`: s per token of an answer which decodes alone. The others: of other processes. 0 where no answer
        has a budget, and where the engine is too slow for the budget in any case: waiting would not help.
        """
        if not self._budgets and tpot_budget == FOREVER:
            return 0.0
        usable = self.tpot_share * min(self.tpot_budget, tpot_budget)
        if single_tpot >= usable:
            return 0.0
        return (self.decode_s + decode_s) / max(self.decode_tokens + decode_tokens, 1.0) / usable


def reopens_in(tpot_pressure: float, prefill_s: float) -> float:
    """Seconds until the answers can bear another prefill, with `prefill_s` seconds of it queued already."""
    return TIME_CONSTANT * max(tpot_pressure * (1 + prefill_s / TIME_CONSTANT) - 1, 0.0)


def expected_tpot_misses(load: Load, seconds: float) -> float:
    """Answers which a prefill of `seconds`, sent now, would make miss their TPOT."""
    curve, stalled = load.expected_tpot_misses, load.stalled
    if not curve:
        return 0.0
    return _misses(curve, stalled + seconds) - (_misses(curve, stalled) if stalled else 0.0)


def _misses(curve: MissCurve, stall: float) -> float:
    """Linear between grid points."""
    i = bisect_left(STALL_GRID, stall)
    if i == 0:
        return curve[0] * stall / STALL_GRID[0]
    if i == len(STALL_GRID):
        return curve[-1]
    before, at = curve[i - 1], STALL_GRID[i - 1]
    return before + (curve[i] - before) * (stall - at) / (STALL_GRID[i] - at)
