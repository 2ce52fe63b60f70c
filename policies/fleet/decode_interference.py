"""What a prefill costs the answers that an engine is writing: how many of them will lose their pace.

While an engine prefills, every answer beside it waits. An answer was promised a pace of b seconds a token,
on average. After k tokens and x seconds it is b k - x seconds ahead (its credit). If a stall of S seconds
takes it behind by d, it needs d / (b - p) more tokens to catch up, where p is what a token takes when nothing
else is done; answers end when they end, so it gets them with a chance of exp(-that / m), for m tokens that are
expected of it still (lengths are roughly geometric: what is left does not depend on what was written).
The harm of S is the sum, over the answers, of the chance before minus the chance after.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from dataclasses import dataclass
from math import exp

from policies.types import FOREVER, Load

MEMORY = 10.0  # s over which the answers' pace, and the time spent on prefills, are averaged
MISSES = 0.04  # share of answers that may lose their pace: a fleet that loses none prefills too little
STEP, LIMITS = 0.01, (0.5, 0.85, 1.0)  # by which one answer moves the limit; its least, first and greatest value
COUNTED, PACKED_MEMORY = 16, 1 / 8  # tokens from which an answer's count is telling; weight of the latest
GRID = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # s of stall at which harm is worked out
LEAST_LEFT = 0.1  # of a budget that the pace alone leaves over: less, and nothing can be caught up

Harm = tuple[float, ...]  # answers lost to a stall, at GRID
HARMLESS: Harm = ()
Writing = tuple[float, float, float]  # s that answers took together, tokens written in it, the tightest pace promised
NOBODY: Writing = (0.0, 0.0, FOREVER)


@dataclass(slots=True)
class DecodingAnswer:
    """One that is being written."""

    pace: float | None  # s per token that its caller was promised
    expected: float  # tokens still to come
    context: int  # tokens of its prompt
    first_at: float = 0.0
    tokens: int = 1  # so far
    counted: int = 1  # of them


class DecodeInterference:
    """One endpoint's."""

    __slots__ = (
        "_at",
        "_looked",
        "_paces",
        "_packed",
        "_recent",
        "_seen",
        "_time",
        "_tokens",
        "answers",
        "context",
        "expected_tpot_misses",
        "limit",
        "spent",
    )

    def __init__(self) -> None:
        self.spent = 0.0  # s of prefill sent, in all
        self.context = 0  # tokens of the prompts being answered
        self.answers: dict[Hashable, DecodingAnswer] = {}
        self.expected_tpot_misses = HARMLESS  # as of the last `look`
        self._seen = 0.0  # `spent`, then
        self._recent = self._at = self._looked = 0.0
        self.limit = LIMITS[1]
        self._packed = 1.0  # tokens in one that we count: servers may send several at once
        self._time = self._tokens = 0.0  # of the answers, lately: s, and tokens written in them
        self._paces: dict[float, int] = {}  # that were promised, and to how many of the answers

    def prefill(self, seconds: float, now: float) -> None:
        self._recent = self._recent * exp((self._at - now) / MEMORY) + seconds
        self._at = now
        self.spent += seconds

    def prefill_utilization(self, now: float) -> float:
        """Share of the time spent on prefills, lately."""
        duty = self._recent * exp((self._at - now) / MEMORY) / MEMORY
        return duty if duty < 1.0 else 1.0

    def began(self, key: Hashable, answer: DecodingAnswer, now: float) -> None:
        answer.first_at = now
        self.answers[key] = answer
        self.context += answer.context
        if (pace := answer.pace) is not None:
            self._paces[pace] = self._paces.get(pace, 0) + 1

    def ended(self, key: Hashable, tpot: float | None = None, tokens: int | None = None) -> None:
        """`tokens`: that it had in all, as the engine reported."""
        if (answer := self.answers.pop(key, None)) is None:
            return
        self.context -= answer.context
        if tokens is not None and answer.tokens >= COUNTED:
            self._packed += (max(tokens / answer.tokens, 1.0) - self._packed) * PACKED_MEMORY
        if not self.answers:
            self.expected_tpot_misses = HARMLESS
        if answer.pace is not None:
            self._released(answer.pace, tpot)

    def _released(self, pace: float, tpot: float | None) -> None:
        """The limit settles where a share MISSES of the answers lose their pace."""
        self._paces[pace] -= 1
        if not self._paces[pace]:
            del self._paces[pace]
        if tpot is not None:
            least, _, most = LIMITS
            self.limit = min(max(self.limit + STEP * (MISSES - (tpot > pace)), least), most)

    def look(self, pace: float, now: float) -> None:
        """Work out the harm of stalls from now on."""
        self._seen = self.spent
        self._measure(now)
        total, packed = [0.0] * len(GRID), self._packed
        for answer in self.answers.values():
            promised = answer.pace
            if promised is None:
                continue
            credit = promised * answer.tokens * packed - (now - answer.first_at)
            if credit >= GRID[-1]:
                continue
            left, least = promised - pace, LEAST_LEFT * promised
            scale = 1 / ((left if left > least else least) * answer.expected)
            chance = 1.0 if credit >= 0 else exp(credit * scale)
            for i in range(bisect_right(GRID, credit), len(GRID)):
                total[i] += chance - exp((credit - GRID[i]) * scale)
        self.expected_tpot_misses = tuple(total) if any(total) else HARMLESS

    def _measure(self, now: float) -> None:
        looked, fade = self._looked, exp((self._looked - now) / MEMORY)
        time, tokens = self._time * fade, self._tokens * fade
        for answer in self.answers.values():
            time += now - (answer.first_at if answer.first_at > looked else looked)
            tokens += answer.tokens - answer.counted
            answer.counted = answer.tokens
        self._time, self._tokens, self._looked = time, tokens, now

    @property
    def writing(self) -> Writing:
        """Of the answers, lately."""
        return self._time, self._tokens * self._packed, min(self._paces, default=FOREVER)

    def tpot_pressure(self, alone: float, others: Writing = NOBODY) -> float:
        """What a token takes lately, in shares of what the answers can bear: from 1 on, no other prefill.

        `alone`: s per token that a single answer would take. `others`: the `writing` of other processes. 0 where
        nothing was promised, and where the engine is too slow for the promise whatever it is spared: waiting would
        help nobody.
        """
        if others is NOBODY and not self._paces:
            return 0.0
        time, tokens, budget = self.writing
        if others is not NOBODY:
            time, tokens, budget = time + others[0], tokens + others[1], min(budget, others[2])
        if alone >= self.limit * budget or budget == FOREVER:
            return 0.0
        return time / max(tokens, 1.0) / (budget * self.limit)

    @property
    def since(self) -> float:
        """Seconds of prefill sent since the last `look`."""
        return self.spent - self._seen


def reopens_in(strain: float, more: float) -> float:
    """Seconds until answers have caught up enough for another prefill, if `more` s of it are on their way."""
    return MEMORY * max(strain * (1 + more / MEMORY) - 1, 0.0)


def expected_tpot_misses(load: Load, seconds: float) -> float:
    """Answers that a prefill of so many seconds, sent now, would cost their pace."""
    if not load.expected_tpot_misses:
        return 0.0
    stalled = load.stalled
    return _lost(load.expected_tpot_misses, stalled + seconds) - (
        _lost(load.expected_tpot_misses, stalled) if stalled else 0.0
    )


def _lost(harm: Harm, stall: float) -> float:
    """To so many seconds of stall: linear between grid points."""
    i = bisect_left(GRID, stall)
    if i == 0:
        return harm[0] * stall / GRID[0]
    if i == len(GRID):
        return harm[-1]
    before, at = harm[i - 1], GRID[i - 1]
    return before + (harm[i] - before) * (stall - at) / (GRID[i] - at)
