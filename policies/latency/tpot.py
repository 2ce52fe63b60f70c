"""TPOT of an endpoint, learned online, and the price of a prefill for the answers that decode there.

`TpotPredictor` learns the time of an output token while no prefill stalls the answer. The price of a prefill is the
expected number of answers, decoding on the same engine, that will miss their TPOT: while an engine prefills, every
answer stalls. An answer has a TPOT budget of b seconds a token, on average. After k tokens and x seconds the credit is
b k - x seconds. If a stall of S seconds puts an answer behind by d, catching up takes d / (b - p) more tokens, where p
is the TPOT of an undisturbed engine; so many tokens come with probability exp(-tokens / m), for m expected remaining
tokens (lengths are roughly geometric: the remainder does not depend on the tokens so far). The expected misses of S are
the sum, over the answers, of the probability before minus after.

An engine at rest prefills nothing. A promise below the TPOT of an answer that decodes alone there cannot be kept, with
or without a further prefill: it causes no expected misses, teaches nothing, and the engine is closed only for what
prefills cost beyond the engine's own pace.
Derivation and measurements: docs/decisions/0011-decode-interference.md.

Before an answer begins, its TPOT is a distribution (`TpotSpread`): the prediction times what it was wrong by lately.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
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
TARGET_MISS_RATE = 0.02  # share of answers which may miss their TPOT: a fleet which misses none prefills too little
SHARE_STEP = 0.01  # by which an answer moves the usable share of the TPOT budget
MIN_SHARE, FIRST_SHARE, MAX_SHARE = 0.5, 0.85, 1.0  # of the TPOT budget
COUNTED = 16  # tokens from which an answer tells how many tokens an event carries
TOKENS_PER_EVENT_WEIGHT = 1 / 8  # of the latest answer, at least: the first tells all
MAX_TOKENS_PER_EVENT = 100.0  # of an answer: more is a wrong report
STALL_GRID = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # s of stall at which misses are computed
MIN_SLACK = 0.1  # of a budget, that the undisturbed TPOT leaves: with less, nothing can be caught up
KEEPABLE_SLACK = 0.2  # of a budget, that the TPOT of an answer alone leaves: with less, the promise counts for less
ALONE_MULTIPLE = 1.25  # times the TPOT of a lone answer, tolerated for any promise: normal variation
REST_MULTIPLE = 5.0  # times the TPOT at rest that answers with a lost promise bear: 80% of the time for prefills
KNOWN_ANSWERS, KNOWN_DECODE_S = 3, 5.0  # answers, or seconds of decoding at rest, from which the TPOT is known
REST_PRIOR = 0.1  # s of decoding as predicted, beside what was measured at rest

PRESSURE_CLASSES = 4  # of TPOT pressure, between 0 and 1; more than 1 is one class more
SPREAD_ANSWERS, SPREAD_AGE = 128, 600.0  # latest answers of a class; s: so a pool left for its pace is tried again
SPREAD_PRIOR = 20  # answers in time, believed before any

MissCurve = tuple[float, ...]  # expected misses at STALL_GRID; empty: none anywhere
NO_MISSES: MissCurve = ()


@dataclass(slots=True)
class RestTpot:
    """Seconds per token of an engine without prefills: `alone` for a lone answer, `now` with the answers in progress;
    `undisturbed`: as `now`, from whole answers less prefill stalls."""

    alone: float
    now: float
    undisturbed: float = 0.0

    def keepable(self, budget: float) -> float:
        """1: the budget can be kept; 0: lost, however little is prefilled; between: too little slack to count on."""
        return min(max((1 - self.alone / max(budget, MIN_TPOT)) / KEEPABLE_SLACK, 0.0), 1.0)

    def limit(self, budget: float, share: float) -> float:
        """Seconds per token from which on the engine receives no further prefill, by an answer's budget.

        The usable `share` of a budget that can be kept, a multiple of `now` for one that is lost; no step between.
        """
        keepable = self.keepable(budget)
        kept = max(share * budget, ALONE_MULTIPLE * self.alone, MIN_TPOT)
        return keepable * kept + (1 - keepable) * max(kept, REST_MULTIPLE * self.now)


@dataclass(slots=True)
class RestingAnswers:
    """Tokens written while nothing was prefilled: exponential averages over time at rest."""

    decode_s: float = 0.0  # of all answers together
    tokens: float = 0.0
    running: float = 0.0  # answers at a time, times `tokens`
    context: float = 0.0  # tokens of the prompts of these answers, times `tokens`

    def add(self, running: float, context: float, decode_s: float, tokens: float, seconds: float) -> None:
        decay = exp(-seconds / TIME_CONSTANT)
        self.decode_s = self.decode_s * decay + decode_s
        self.tokens = self.tokens * decay + tokens
        self.running = self.running * decay + running * tokens
        self.context = self.context * decay + context * tokens


class RecentRatios:
    """The latest answers' TPOT over the predicted one."""

    def __init__(self) -> None:
        self._recent = deque[tuple[float, float]]()  # (time, ratio), oldest first
        self._sorted: list[float] = []

    def observe(self, ratio: float, now: float) -> None:
        recent = self._recent
        if recent and (len(recent) >= SPREAD_ANSWERS or recent[0][0] < now - SPREAD_AGE):
            self._forget(now, SPREAD_ANSWERS - 1)
        recent.append((now, ratio))
        insort(self._sorted, ratio)

    def share_within(self, ratio: float, now: float) -> float:
        """Share of answers with at most this ratio, SPREAD_PRIOR pseudo-answers included."""
        self._forget(now, SPREAD_ANSWERS)
        within = bisect_right(self._sorted, ratio)
        return (within + SPREAD_PRIOR) / (len(self._sorted) + SPREAD_PRIOR)

    def _forget(self, now: float, most: int) -> None:
        while self._recent and (len(self._recent) > most or self._recent[0][0] < now - SPREAD_AGE):
            _, ratio = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, ratio)]


class TpotSpread:
    """Distribution of an answer's TPOT, by the TPOT pressure when sent.

    Learned from whole answers, stalls included. A single prefill dominates the TPOT of a short answer: short answers
    form the tail of the distribution.
    """

    def __init__(self) -> None:
        self._ratios = defaultdict[int, RecentRatios](RecentRatios)

    def observe(self, sent: Load, tpot: float, now: float) -> None:
        """`sent`: load at the sending."""
        if sent.tpot:
            self._ratios[_pressure_class(sent)].observe(tpot / sent.tpot, now)

    def probability(self, load: Load, budget: float, now: float) -> float:
        """P(TPOT <= `budget`); 1 where nothing is known."""
        known = self._ratios.get(_pressure_class(load))
        return known.share_within(budget / load.tpot, now) if known is not None and load.tpot else 1.0


def _pressure_class(load: Load) -> int:
    return int(min(load.tpot_pressure, 1.0) * PRESSURE_CLASSES)


class TpotPredictor:
    """Time of a decoding step, which grows with the number of requests and with context.

    Learned from whole answers, less the prefills that stalled these. `at_rest` corrects that by what the last answers
    showed between prefills, at once: the first long answer of an unknown engine, or of a host that became busy.
    """

    def __init__(self) -> None:
        self.samples = 0  # answers learned from
        self.spread = TpotSpread()
        self._regression = Regression(DECODE_VARIANCES)
        self._changes = ChangeDetector()
        self._resting = RestingAnswers()
        self._slowness = 1.0  # measured at rest / predicted

    def predict(self, running: float, context: float) -> float:
        base, step, read = self._regression.coefficients
        return base * DECODE_BASE + step * DECODE_RUNNING * running + read * DECODE_CONTEXT * context

    def at_rest(self, running: float, context: float) -> RestTpot:
        now = self.predict(running, context)
        alone = now if running < 2 else self.predict(1, context / running)
        return RestTpot(alone * self._slowness, now * self._slowness, now)

    @property
    def tpot_alone(self) -> float | None:
        """Seconds per token of an answer alone, at rest, with a usual prompt; None: not learned yet."""
        resting = self._resting
        if self.samples < KNOWN_ANSWERS and resting.decode_s < KNOWN_DECODE_S:
            return None
        return self.at_rest(1, resting.context / max(resting.running, 1.0)).alone

    def observe(self, running: float, context: float, tpot: float) -> None:
        """A whole answer."""
        self.samples += 1
        tpot = max(tpot, MIN_TPOT)
        factor = self._changes.observe(log(tpot / max(self.predict(running, context), MIN_TPOT)))
        if factor != 1.0:
            self._regression.scale(factor)
        else:
            terms = (DECODE_BASE, DECODE_RUNNING * running, DECODE_CONTEXT * context)
            self._regression.update(terms, tpot, self._changes.clip)
        self._compare()

    def observe_at_rest(self, running: float, context: float, decode_s: float, tokens: float, seconds: float) -> None:
        """All answers together took `decode_s` for `tokens`, in `seconds` without a prefill."""
        self._resting.add(running, context, decode_s, tokens, seconds)
        self._compare()

    def warm_start_from(self, sibling: TpotPredictor) -> None:
        self._regression.warm_start_from(sibling._regression)
        self._compare()

    def _compare(self) -> None:
        """Measured at rest, over predicted by what is known now. Predictions are linear, so means suffice."""
        resting = self._resting
        tokens = max(resting.tokens, 1.0)
        predicted_s = resting.tokens * self.predict(resting.running / tokens, resting.context / tokens)
        self._slowness = (resting.decode_s + REST_PRIOR) / (predicted_s + REST_PRIOR)

    def learned(self) -> LearnedTpot:
        return LearnedTpot(self._regression.learned(), self._changes.learned())

    def restore(self, saved: LearnedTpot, age: float) -> None:
        """Raises ValueError where this predictor learns other terms."""
        self._regression.restore(saved.regression, age)
        self._changes.restore(saved.changes)
        self._compare()


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
        self._prefill_at = 0.0
        self.updated_at = 0.0  # time of the last `update`
        self.tokens_per_event = 1.0  # servers may send several tokens at once
        self.counted_answers = 0  # answers with a token count
        self._decode_events = 0.0  # exponential average
        self._budgets: dict[float, int] = {}  # number of answers by TPOT budget
        self._rest = RestTpot(0.0, 0.0)  # as of the last `update`

    @property
    def decode_tokens(self) -> float:
        """Tokens written in `decode_s`."""
        return self._decode_events * self.tokens_per_event

    def tpot_limit(self, rest: RestTpot) -> float:
        """Seconds per token that the answers bear; FOREVER: any number. A lost promise hides no other."""
        limit = FOREVER
        for budget in self._budgets:
            limit = min(limit, rest.limit(budget, self.tpot_share))
        return limit

    def on_prefill(self, seconds: float, now: float) -> None:
        self._recent_prefill_s = self._recent_prefill_s * exp((self._prefill_at - now) / TIME_CONSTANT) + seconds
        self._prefill_at = now
        self.prefill_s += seconds
        self.unaccounted_s += seconds

    def prefill_utilization(self, now: float) -> float:
        """Recent share of time spent on prefills, 0 to 1."""
        return min(self._recent_prefill_s * exp((self._prefill_at - now) / TIME_CONSTANT) / TIME_CONSTANT, 1.0)

    def on_first_token(self, key: Hashable, answer: DecodingAnswer, now: float) -> None:
        if not self.answers:
            self.unaccounted_s = 0.0
        answer.first_at = now
        self.answers[key] = answer
        self.context += answer.context
        if (budget := answer.tpot_budget) is not None:
            self._budgets[budget] = self._budgets.get(budget, 0) + 1
            misses = [*self.expected_tpot_misses] or [0.0] * len(STALL_GRID)
            self._add_misses(misses, answer, budget, now)
            self.expected_tpot_misses = tuple(misses)

    def on_ended(self, key: Hashable, tpot: float | None = None, tokens: int | None = None) -> None:
        """`tokens`: of the whole answer, as the engine reported."""
        if (answer := self.answers.pop(key, None)) is None:
            return
        self.context -= answer.context
        if tokens is not None and answer.tokens >= COUNTED:
            reported = min(max(tokens / answer.tokens, 1.0), MAX_TOKENS_PER_EVENT)
            self.counted_answers += 1
            weight = max(1 / self.counted_answers, TOKENS_PER_EVENT_WEIGHT)
            self.tokens_per_event += (reported - self.tokens_per_event) * weight
        if not self.answers:
            self.expected_tpot_misses = NO_MISSES
        if (budget := answer.tpot_budget) is not None:
            self._budgets[budget] -= 1
            if not self._budgets[budget]:
                del self._budgets[budget]
            if tpot is not None:  # the share settles where TARGET_MISS_RATE of the answers miss
                step = SHARE_STEP * self._rest.keepable(budget)
                share = self.tpot_share + step * (TARGET_MISS_RATE - (tpot > budget))
                self.tpot_share = min(max(share, MIN_SHARE), MAX_SHARE)

    def update(self, rest: RestTpot, now: float) -> tuple[float, float]:
        """Computes the recent throughput, and the expected misses of stalls which begin now.

        Returns the seconds that the answers together took since the last update, and the tokens written in these.
        """
        self.unaccounted_s, self._rest = 0.0, rest
        recent = self._count_tokens(now)
        total = [0.0] * len(STALL_GRID)
        for answer in self.answers.values():
            if answer.tpot_budget is not None:
                self._add_misses(total, answer, answer.tpot_budget, now)
        self.expected_tpot_misses = tuple(total) if any(total) else NO_MISSES
        self.updated_at = now
        return recent

    def _count_tokens(self, now: float) -> tuple[float, float]:
        seconds, events = 0.0, 0
        for answer in self.answers.values():
            seconds += now - max(answer.first_at, self.updated_at)
            events += answer.tokens - answer.counted
            answer.counted = answer.tokens
        decay = exp((self.updated_at - now) / TIME_CONSTANT)
        self.decode_s = self.decode_s * decay + seconds
        self._decode_events = self._decode_events * decay + events
        return seconds, events * self.tokens_per_event

    def _add_misses(self, total: list[float], answer: DecodingAnswer, budget: float, now: float) -> None:
        credit = budget * answer.tokens * self.tokens_per_event - (now - answer.first_at)
        if not (keepable := self._rest.keepable(budget)) or credit >= STALL_GRID[-1]:
            return
        slack = max(budget - self._rest.undisturbed, MIN_SLACK * budget, MIN_TPOT)
        scale = 1 / (slack * answer.expected_tokens)
        probability = 1.0 if credit >= 0 else exp(credit * scale)
        for i in range(bisect_right(STALL_GRID, credit), len(STALL_GRID)):
            total[i] += keepable * (probability - exp((credit - STALL_GRID[i]) * scale))

    def tpot_pressure(
        self, rest: RestTpot, decode_s: float = 0.0, decode_tokens: float = 0.0, tpot_limit: float = FOREVER
    ) -> float:
        """Recent TPOT as a share of what the answers bear: from 1 on, no further prefill; 0 where they bear anything.

        `decode_s`, `decode_tokens`, `tpot_limit`: of other processes.
        """
        limit = min(self.tpot_limit(rest), tpot_limit)
        if limit == FOREVER:
            return 0.0
        return (self.decode_s + decode_s) / max(self.decode_tokens + decode_tokens, 1.0) / limit


def reopens_in(tpot_pressure: float, prefill_s: float) -> float:
    """Seconds until the answers can bear another prefill, with `prefill_s` seconds of it queued already."""
    return TIME_CONSTANT * max(tpot_pressure * (1 + prefill_s / TIME_CONSTANT) - 1, 0.0)


def expected_tpot_misses(load: Load, seconds: float) -> float:
    """Answers which a prefill of `seconds`, sent now, would make miss their TPOT."""
    if not (curve := load.expected_tpot_misses):
        return 0.0
    if stalled := load.stalled:
        return _misses(curve, stalled + seconds) - _misses(curve, stalled)
    return _misses(curve, seconds)


def _misses(curve: MissCurve, stall: float) -> float:
    """Linear between grid points."""
    grid = STALL_GRID
    if stall > grid[-1]:
        return curve[-1]
    if not (i := bisect_left(grid, stall)):
        return curve[0] * stall / grid[0]
    before, at = curve[i - 1], grid[i - 1]
    return before + (curve[i] - before) * (stall - at) / (grid[i] - at)
