"""The pace of the answers in progress at an endpoint over the last seconds, by their counts of tokens.

Rules:
- Tokens are counted about five times a second. A pace is measured from the start of the previous window on: over one to
  two times WINDOW.
- An endpoint is as fast as its fastest answer: a caller that does not read makes its own answer slow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

WINDOW = 0.8  # s: twice that is less than what a stream is measured over that compares itself
YOUNG = 0.5  # s of an answer that shows no pace yet


@dataclass(frozen=True, slots=True)
class AnswerPace:
    """`tpot`: s per token of the fastest answer; None: unknown. `silent`: s since the latest token of any answer; 0:
    unknown."""

    tpot: float | None = None
    silent: float = 0.0


class TokenWindows:
    """Counts of one answer, whose first token came at `now`."""

    __slots__ = ("_before", "_since", "_tokens", "heard_at")

    def __init__(self, now: float) -> None:
        self.heard_at = now  # the latest token, or the count that has found it
        self._tokens = 1
        self._before = self._since = (now, 1)  # starts of the previous window and of the present one

    def count(self, tokens: int, now: float) -> None:
        """`tokens`: so far."""
        if tokens > self._tokens:
            self.heard_at, self._tokens = now, tokens
        if now - self._since[0] >= WINDOW:
            self._before, self._since = self._since, (now, tokens)

    def tpot(self, now: float) -> float | None:
        """Seconds per token; None: none has come, or the answer is young."""
        at, tokens = self._before
        if now - at < YOUNG or self._tokens <= tokens:
            return None
        return (now - at) / (self._tokens - tokens)


def pace_of(answers: Iterable[TokenWindows], tokens_per_event: float, now: float) -> AnswerPace:
    """Of all answers in progress at an endpoint."""
    known = list(answers)
    paces = [pace / tokens_per_event for each in known if (pace := each.tpot(now)) is not None]
    silent = min((now - each.heard_at for each in known), default=0.0)
    return AnswerPace(min(paces, default=None), max(silent, 0.0))
