"""Decides when a committed stream that has fallen behind its promises is moved to a peer, on routes with `gap`.

How long a silence will last is known to nobody. So the stream is left once the silence has cost as much as the move
would: at most twice the cost of knowing it before (ski rental; Karlin, Manasse, Rudolph and Sleator, "Competitive
Snoopy Caching", 1988). A slow pace goes on, and is compared by its forecast.

Rules:
- Silence before half of the budget is no evidence, nor before 20 of the stream's own mean gaps. The stream is left at
  the last moment at which the peer's first token (its p90, and HANDOVER) still keeps the budget, but not before twice
  the peer's median TTFT: so late, the move costs no more than the silence has.
- A stream that has written too slowly for its TPOT budget for a WINDOW is left if the rest of the answer, expected to
  be as long as any, takes the peer half of the time at most, its TTFT (p90) included.
- Peers are compared as of now, by their forecasts and by the answers in progress there. A peer that is as silent, or as
  slow, is no peer: where all engines are slow, nothing moves.
- A stream is moved MAX_MOVES times at most, and never by its last attempt: that is for a break.
- A caller that does not read makes its stream slow: the window begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.attempts.attempt_events import AttemptFacts, AttemptLimits, Leaving, PeerForecast, Progress
from policies.attempts.budgets import RequestBudgets
from policies.attempts.committed_stream import GAPS, SOON, TTFTS, look
from policies.types import FOREVER, Attempt, Candidate

EVIDENCE, EVIDENCE_LEAST = 0.5, 0.5  # of the gap budget; s, as the progress of peers is counted five times a second
HANDOVER = 0.1  # s to count the text so far at the peer, and to notice the silence
AS_SILENT = 0.6  # of the stream's own silence
WINDOW = 2.0  # s over which a pace is measured: a prefill beside the answer is no pace
SOONER = 0.5  # of the time that the rest of the answer would take here
MAX_MOVES = 2  # of a stream
OVERDUE, OVERDUE_LEAST = 3.0, 1.0  # of the peer's p90; s: the wait for its first token


@dataclass(frozen=True, slots=True)
class Target:
    """A peer that is expected to be sooner, and the seconds after which it is not any more."""

    candidate: Candidate
    patience: float


Peers = Sequence[tuple[Candidate, PeerForecast]]


class PaceWatch:
    """Pace of the committed stream of a request. `lost`: at the last look every peer was as silent as the stream."""

    def __init__(self, limits: AttemptLimits) -> None:
        self.lost = False
        self.moves = 0
        self._gap, self._least = limits.gap, max(EVIDENCE * limits.gap, EVIDENCE_LEAST)
        self._tpot = FOREVER if limits.tpot is None else limits.tpot
        self._limits = limits
        self._since, self._tokens = FOREVER, 0.0  # start of the window, and the tokens up to there

    @classmethod
    def of(cls, limits: AttemptLimits) -> PaceWatch | None:
        """None: the route promises no gap, or no peer could continue the answer by its pace."""
        return cls(limits) if limits.gap < FOREVER and limits.rescue and limits.by_pace else None

    def begin(self, now: float) -> float:
        """A stream is committed, or goes on. Returns the time of the first look."""
        self._since = FOREVER
        return now + self._least

    def may_move(self, opened: int) -> bool:
        """`opened`: attempts so far."""
        return self.moves < MAX_MOVES and opened + 1 < self._limits.max_attempts

    def look(self, stream: Progress, peers: Callable[[], Peers], now: float) -> Target | float:
        """The peer to move to, or the time of the next look. `peers`: asked only where the stream has fallen behind."""
        self.lost = False
        quiet, pace = now - stream.token_at, self._pace(stream, now)
        if stream.paused or stream.complete or stream.obstacle:
            return now + self._least
        if quiet < self._least and pace <= self._tpot:
            return max(min(stream.token_at + self._least, self._since + WINDOW), now + SOON)
        known = peers()
        speaking = [each for each in known if each[1].silent < AS_SILENT * max(quiet, self._least)]
        self.lost = bool(known) and not speaking
        return self._soonest(stream, speaking, pace, now) or self._again(stream, speaking, now)

    def _soonest(self, stream: Progress, peers: Peers, pace: float, now: float) -> Target | None:
        """The peer with the earliest end of the answer, of those that are worth a move; None: there is none."""
        left = self._tokens_left(stream)
        worth = [
            (forecast.p90 + left * forecast.tpot, candidate, forecast)
            for candidate, forecast in peers
            if now >= self._leave_at(stream, forecast) or self._writes_sooner(forecast, pace, left)
        ]
        if not worth:
            return None
        _, candidate, forecast = min(worth, key=lambda each: each[0])
        return Target(candidate, max(OVERDUE * forecast.p90, OVERDUE_LEAST))

    def _again(self, stream: Progress, peers: Peers, now: float) -> float:
        """Time of the next look at a stream that has fallen behind."""
        due = min((self._leave_at(stream, forecast) for _, forecast in peers), default=FOREVER)
        return max(min(due, now + self._least), now + SOON)

    def _pace(self, stream: Progress, now: float) -> float:
        """Seconds per token of the window that ends now; 0: the window goes on."""
        if stream.paused or stream.reading_since > self._since or self._since == FOREVER:
            self._since, self._tokens = now, stream.tokens
        if now - self._since < WINDOW:
            return 0.0
        pace = (now - self._since) / max(stream.tokens - self._tokens, 1.0)
        self._since, self._tokens = now, stream.tokens
        return pace

    def _leave_at(self, stream: Progress, peer: PeerForecast) -> float:
        """Time from which on a silence is worth a move to the peer."""
        break_even = max(TTFTS * peer.p50, GAPS * (stream.tpot or 0.0), self._least)
        return stream.token_at + max(break_even, self._gap - peer.p90 - HANDOVER)

    def _writes_sooner(self, peer: PeerForecast, pace: float, left: float) -> bool:
        return pace > self._tpot and peer.p90 + left * peer.tpot <= SOONER * left * pace

    def _tokens_left(self, stream: Progress) -> float:
        """Lengths of answers are roughly geometric: what is left does not depend on the tokens so far."""
        cap = self._limits.output_cap
        return max(min(self._limits.expected_output, FOREVER if cap is None else cap - stream.tokens), 1.0)


@dataclass(frozen=True, slots=True)
class StreamLook:
    """A look at the committed stream. `peers`: able to continue the answer, the first choice first."""

    now: float
    limits: AttemptLimits
    facts: AttemptFacts
    share: RequestBudgets
    watch: PaceWatch | None
    peers: Sequence[Candidate]

    def at(self, attempt: Attempt, opened: int) -> Leaving | Target | float:
        """Reason to leave the stream, or the peer to move it to, or the time of the next look. `opened`: attempts so
        far."""
        progress, watch, again = self.facts.progress(attempt.number), self.watch, FOREVER
        if watch is not None and watch.may_move(opened) and self.now < self.limits.limit_at:
            found = watch.look(progress, lambda: self._movable(attempt), self.now)
            if not isinstance(found, Target):
                again = found
            elif self.share.take_move():
                watch.moves += 1
                return found
            else:
                again = watch.begin(self.now)
        peer = None if not self.peers or (watch is not None and watch.lost) else self.peers[0]
        left = look(self.limits, attempt.candidate, progress, peer, self.now)
        return left if isinstance(left, Leaving) else min(left, again)

    def _movable(self, attempt: Attempt) -> Peers:
        """Peers that could continue the stream now, and take no other request's place."""
        facts, now = self.facts, self.now
        if facts.is_saturated():
            return ()
        known = facts.peer_forecasts(attempt.number, now)
        able = (each for each in self.peers if each.endpoint.id in known)
        return [(each, known[each.endpoint.id]) for each in able if not (facts.closes and facts.is_closed(each, now))]
