"""Times of one attempt, and billed tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from math import ceil

from gateway.observe.record import NO_GAPS, TokenGaps
from policies.types import NEVER

LONG_GAP = 1.0  # s between two tokens, which a reader takes for a standstill
SHORT_GAP = 0.01  # s, which nobody sees; a chunk that comes sooner costs a comparison
KEPT_GAPS = 16  # largest gaps of an answer: its p99 is exact up to 1,600 tokens, and not below the p99 beyond


@dataclass(slots=True)
class AttemptTimes:
    """Monotonic seconds; NEVER, or None: not yet."""

    opened: float
    connected: float
    sent: float | None = None
    head: float | None = None  # of the reply
    first_byte: float | None = None  # of its body
    first_in: float | None = None
    reasoning_in: float | None = None  # first token of reasoning before the answer
    answer_in: float | None = None  # first token of the answer
    last_token: float = NEVER
    quiet_since: float = NEVER  # the last token, or the moment from which the caller reads again; FOREVER: it does not
    gap_floor: float = SHORT_GAP  # s: no smaller gap is of interest
    long_gaps: int = 0
    largest_gaps: list[float] = field(default_factory=list)  # a heap
    last_byte: float = NEVER
    paused_s: float = 0.0  # s in which this process was paused
    ended: float = 0.0

    def tpot(self, tokens: int) -> float | None:
        """Seconds per output token after the first, of a stream; None under two tokens."""
        if self.first_in is None or tokens < 2:
            return None
        return (self.last_token - self.first_in - self.paused_s) / (tokens - 1)

    def note_gap(self, gap: float) -> None:
        """Note a gap between two tokens that is above `gap_floor`."""
        self.long_gaps += gap > LONG_GAP
        if len(self.largest_gaps) < KEPT_GAPS:
            heappush(self.largest_gaps, gap)
        else:
            heappushpop(self.largest_gaps, gap)
            self.gap_floor = min(self.largest_gaps[0], LONG_GAP)

    def follow(self, before: AttemptTimes, now: float) -> None:
        """This attempt continues the answer of another, whose gaps the caller has met with: the last one ends now."""
        self.largest_gaps, self.gap_floor = before.largest_gaps, before.gap_floor
        self.long_gaps = before.long_gaps
        self.note_silence(before.quiet_since, now)

    def note_silence(self, since: float, now: float) -> None:
        """Note a silence that no token of this attempt has ended."""
        if now - since > self.gap_floor:
            self.note_gap(now - since)

    def gaps(self, tokens: int) -> TokenGaps:
        """Of an answer of so many tokens. Tokens of one read have no gap between them."""
        if not self.largest_gaps:
            return NO_GAPS
        largest = sorted(self.largest_gaps, reverse=True)
        rank = max(ceil((tokens - 1) * 0.01), 1)
        kept = rank <= len(largest) or len(largest) == KEPT_GAPS
        return TokenGaps(largest[0], largest[min(rank, len(largest)) - 1] if kept else None, self.long_gaps)


@dataclass(frozen=True, slots=True)
class Consumption:
    """Tokens that the server may bill, and their cost; zero for a request that was refused or not sent."""

    tokens: int = 0
    cost_usd: float = 0.0


NO_CONSUMPTION = Consumption()
