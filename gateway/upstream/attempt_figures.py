"""Times of one attempt, and billed tokens."""

from __future__ import annotations

from dataclasses import dataclass

from policies.types import NEVER


@dataclass(slots=True)
class AttemptTimes:
    """Monotonic seconds; NEVER, or None: not yet."""

    opened: float
    connected: float
    sent: float | None = None
    first_in: float | None = None
    reasoning_in: float | None = None  # first token of reasoning before the answer
    answer_in: float | None = None  # first token of the answer
    last_token: float = NEVER
    last_byte: float = NEVER
    ended: float = 0.0

    def tpot(self, tokens: int) -> float | None:
        """Seconds per output token after the first, of a stream; None under two tokens."""
        if self.first_in is None or tokens < 2:
            return None
        return (self.last_token - self.first_in) / (tokens - 1)


@dataclass(slots=True)
class Consumption:
    """Tokens that the server may bill, and their cost; zero for a request that was refused or not sent."""

    prompt: int = 0
    output: int = 0
    cost_usd: float = 0.0
