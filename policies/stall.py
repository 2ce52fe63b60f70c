"""What a prefill costs the answers that an engine is writing: how many of them will lose their pace.

While an engine prefills, every answer beside it waits. An answer was promised a pace of b seconds a token,
on average. After k tokens and x seconds it is b k - x seconds ahead (its credit). If a stall of S seconds
takes it behind by d, it needs d / (b - p) more tokens to catch up, where p is what a token takes when nothing
else is done; answers end when they end, so it gets them with a chance of exp(-that / m), for m tokens that are
expected of it still (lengths are roughly geometric: what is left does not depend on what was written).
The harm of S is the sum, over the answers, of the chance before minus the chance after.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import exp

import os
KEPT = float(os.environ.get('KEPT', '0.72'))
LEAST_SHARE = float(os.environ.get('LEASTS', '0.2'))
MEMORY = float(os.environ.get('MEM', '20'))
#  # s over which the share of time spent on prefills is averaged
GRID = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # s of stall at which harm is worked out
LEAST_LEFT = 0.1  # of a budget that the pace alone leaves over: less, and nothing can be caught up

Harm = tuple[float, ...]  # answers lost to a stall, at GRID
HARMLESS: Harm = (0.0,) * len(GRID)


@dataclass(slots=True)
class Answer:
    """One that is being written."""

    pace: float | None  # s per token that its caller was promised
    expected: float  # tokens still to come
    context: int  # tokens of its prompt
    first_at: float = 0.0
    tokens: int = 1  # so far


class Stall:
    """One endpoint's."""

    __slots__ = ("_at", "_recent", "_seen", "answers", "context", "harm", "spent")

    def __init__(self) -> None:
        self.spent = 0.0  # s of prefill sent, in all
        self.context = 0  # tokens of the prompts being answered
        self.answers: dict[Hashable, Answer] = {}
        self.harm = HARMLESS  # as of the last `look`
        self._seen = 0.0  # `spent`, then
        self._recent = self._at = 0.0

    def prefill(self, seconds: float, now: float) -> None:
        self._recent = self._recent * exp((self._at - now) / MEMORY) + seconds
        self._at = now
        self.spent += seconds

    def duty(self, now: float) -> float:
        """Share of the time spent on prefills, lately."""
        return min(self._recent * exp((self._at - now) / MEMORY) / MEMORY, 1.0)

    def began(self, key: Hashable, answer: Answer, now: float) -> None:
        answer.first_at = now
        self.answers[key] = answer
        self.context += answer.context

    def ended(self, key: Hashable) -> None:
        if (answer := self.answers.pop(key, None)) is not None:
            self.context -= answer.context

    def look(self, pace: float, now: float) -> None:
        """Work out the harm of stalls from now on."""
        self._seen = self.spent
        total = [0.0] * len(GRID)
        for answer in self.answers.values():
            if answer.pace is None:
                continue
            left = max(answer.pace - pace, LEAST_LEFT * answer.pace)
            scale = 1 / (left * answer.expected)
            credit = answer.pace * answer.tokens - (now - answer.first_at)
            chance = 1.0 if credit >= 0 else exp(credit * scale)
            for i, stall in enumerate(GRID):
                if stall > credit:
                    total[i] += chance - exp((credit - stall) * scale)
        self.harm = tuple(total)

    def bearable(self, pace: float) -> float:
        """Share of the time that may be spent on prefills if the answers are to keep their pace."""
        budget = min((answer.pace for answer in self.answers.values() if answer.pace is not None), default=None)
        return 1.0 if budget is None else max(1 - pace / (KEPT * budget), LEAST_SHARE)

    @property
    def since(self) -> float:
        """Seconds of prefill sent since the last `look`."""
        return self.spent - self._seen


def lost(harm: Harm, stall: float) -> float:
    """Answers lost to so many seconds of stall: linear between grid points."""
    if stall <= 0:
        return 0.0
    before, at = 0.0, 0.0
    for i, grid in enumerate(GRID):
        if stall <= grid:
            return before + (harm[i] - before) * (stall - at) / (grid - at)
        before, at = harm[i], grid
    return before
