"""An attempt without a token yet, and the moments at which its silence is looked at."""

from __future__ import annotations

from dataclasses import dataclass

from policies.attempts.hedging import abandon_at, hedge_at
from policies.types import FOREVER, Attempt, Candidate

OVERTAKEN, LEAST_OVERTAKEN = 10.0, 15.0  # times the predicted time of a whole answer, and s


@dataclass(slots=True)
class PendingAttempt:
    """At `recheck_at` the silence is looked at. Once it is weighed, `abandon_at` is fixed."""

    attempt: Attempt
    sent_at: float
    limit_at: float
    recheck_at: float
    weighed: bool = False
    abandon_at: float = FOREVER
    overtake_in: float = FOREVER  # s in which the longest answer would have been written many times over
    overtake_at: float = FOREVER  # next look for later requests that the endpoint has answered
    overtaken: bool = False  # at the last look

    def weigh(self, upcoming: Candidate, deadline: float, hedge: bool, now: float) -> None:
        """Fix the moments to abandon the attempt for `upcoming`, and to send a hedge before."""
        self.weighed = True
        about = self.attempt.candidate.forecast, upcoming.forecast, self.sent_at, now, deadline
        self.abandon_at = min(abandon_at(*about), self.limit_at)
        self.recheck_at = min(hedge_at(*about), self.abandon_at) if hedge else self.abandon_at

    def reset(self, now: float) -> None:
        """The other racer failed: the silence is weighed anew."""
        self.weighed = False
        self.recheck_at = min(now, self.limit_at)

    def extend(self, limit_at: float) -> None:
        """The server shows life: go on until `limit_at`."""
        self.limit_at = self.recheck_at = limit_at

    def recheck_in(self, seconds: float, now: float) -> None:
        self.recheck_at = min(now + seconds, self.limit_at)


def overtake_in(candidate: Candidate, longest_output: int | None) -> float:
    """Seconds in which the candidate would have written the longest answer many times over; FOREVER: not known."""
    forecast = candidate.forecast
    if longest_output is None or not forecast.tpot:
        return FOREVER
    return max(OVERTAKEN * (forecast.p90 + longest_output * forecast.tpot), LEAST_OVERTAKEN)
