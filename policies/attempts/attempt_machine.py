"""Attempts of one request: a state machine that takes events and returns actions.

    IDLE --Begin--> RACING --FirstToken--> COMMITTED
                      |  |  <---Broken---
                      |  +--no candidate left, or none allowed--> GAVE_UP
                      +--ClientGone--> GONE

Rules:
- Nothing has reached the client before the first token, so any earlier failure can be hidden. After Commit only a
  stream that a peer can continue is resumed (Broken): an endpoint without a failure in this request, of the same pool
  if there is one, else of the other tiers. Hedges and the deadline are for the first token alone. Every request ends in
  exactly one of Commit, GiveUp or ClientGone; after Broken, once more.
- Candidates are tried in the order of the decision, each once; `max_attempts` bounds all of them. Of three or more
  attempts, the last goes to a pool that was not tried, if there is one.
- A failure that another endpoint may not have goes to the next candidate at once. After an overload reply, the same
  pool is tried again only with `may_retry`, the permission of a retry budget. Another pool needs no permission, and
  neither does a lost connection.
- Two endpoints that died after they had accepted the request may have died of it: it is offered to no third.
- A candidate at its cap or rate limit is passed over. Where no other is left, it is waited for.
- With no candidate left, the one that failed is tried once more if its connection was lost, or if it was overloaded and
  its pool has no other: after the wait that it asked for, and only if that is over before the deadline. Not where it
  would say the same again (`Failed.again`).
- A silent stream is abandoned for the next candidate at the moment that gives the two the best chance of the deadline
  (`policies.attempts.hedging`). With `hedge`, and `may_retry` at TimerFired, the two race instead: the first content
  wins and the other is cancelled. No more than two race at a time.
- An answer that is not streamed arrives whole, so its silence is no evidence; nor is any without a deadline. Every
  attempt is abandoned `first_token_limit` (of the endpoint, where it has its own) after its sending, and at
  `limit_at`, the end of the time for the whole answer. An answer that is not streamed is left for the next candidate
  after half of what remains until then.
- An attempt at an endpoint found dead (EndpointDown) is left for the next candidate, if there is one.
- Events about attempts that have ended, and all events after the end, change nothing.
- A retry after an overload reply (429, 5xx) adds load to a pool, so retries are bounded by a share of the requests
  (RetryBudget). A lost connection is not charged: no engine did work for it.
- A hedge is sent on suspicion alone, so hedges are bounded by a share of all requests, saved in a token bucket ("The
  Tail at Scale", Dean and Barroso 2013). An unused permission is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from policies.attempts.attempt_events import (
    Action,
    AttemptStep,
    Begin,
    Broken,
    Cancel,
    ClientGone,
    Commit,
    EndpointDown,
    Event,
    Failed,
    FirstToken,
    GiveUp,
    Open,
    TimerFired,
)
from policies.attempts.hedging import abandon_at, hedge_at, patience_until
from policies.routing.candidates import p50_of
from policies.types import FOREVER, Attempt, AttemptKind, AttemptOutcome, Candidate, Decision, Placement

BACKOFF = 0.1  # s before an overloaded endpoint is tried again, by default
CLOSED_CHECK = 0.05  # s between two looks for an endpoint that takes requests again
MAX_DEATHS = 2  # of endpoints after acceptance of the request
MAX_RACING = 2  # attempts pending at a time
OVERDUE = "the limit of time for the whole answer has passed"

# --------------------------------------------------------------------------- the machine


class AttemptState(Enum):
    IDLE = "idle"
    RACING = "racing"
    COMMITTED = "committed"
    GAVE_UP = "gave_up"
    GONE = "gone"


# Events accepted by each state, and the possible next states.
TRANSITIONS: dict[AttemptState, dict[type[Event], frozenset[AttemptState]]] = {
    AttemptState.IDLE: {
        Begin: frozenset({AttemptState.RACING, AttemptState.GAVE_UP}),
        ClientGone: frozenset({AttemptState.GONE}),
    },
    AttemptState.RACING: {
        FirstToken: frozenset({AttemptState.RACING, AttemptState.COMMITTED}),
        Failed: frozenset({AttemptState.RACING, AttemptState.GAVE_UP}),
        EndpointDown: frozenset({AttemptState.RACING}),
        TimerFired: frozenset({AttemptState.RACING, AttemptState.GAVE_UP}),
        ClientGone: frozenset({AttemptState.GONE}),
    },
    AttemptState.COMMITTED: {Broken: frozenset({AttemptState.RACING, AttemptState.GAVE_UP})},
    AttemptState.GAVE_UP: {},
    AttemptState.GONE: {},
}


@dataclass(slots=True)
class PendingAttempt:
    """An attempt without a token yet. At `recheck_at` the silence is weighed; then `abandon_at` is fixed."""

    attempt: Attempt
    sent_at: float
    limit_at: float
    recheck_at: float
    weighed: bool = False
    abandon_at: float = FOREVER


class AttemptMachine:
    """Attempts of a request. `now` is the time of each event, never earlier than the time of the event before."""

    def __init__(
        self,
        decision: Decision,
        *,
        max_attempts: int,
        stream: bool,
        hedge: bool,
        first_token_limit: float,
        now: float,
        limit_at: float = FOREVER,
        is_closed: Callable[[Candidate], bool] | None = None,
    ) -> None:
        self.state = AttemptState.IDLE
        self.pending: dict[int, PendingAttempt] = {}
        self._candidates: Sequence[Candidate] = decision.ranked if decision.outcome is Placement.PLACE else ()
        self._ranked = self._candidates
        self._count = len(self._candidates)
        self._deadline = decision.deadline
        self._max_attempts = max_attempts
        self._stream = stream
        self._hedge = hedge
        self._first_token_limit = first_token_limit
        self._limit_at = limit_at
        self._opened = 0  # attempts
        self._tried = 0  # candidates
        self._deaths = 0
        self._lost: set[str] = set()  # endpoints with a failure
        self._next_kind = AttemptKind.FALLBACK
        self._committed: Candidate | None = None
        self._tried_pools: set[str] = set()
        self._avoided: set[str] = set()  # pools
        self._retry: Candidate | None = None  # to be tried once more, at _retry_at
        self._retry_at = self._began_at = now
        self._retried = False
        self._is_closed = is_closed
        self._closed: list[Candidate] = []  # passed over
        self._actions: list[Action] = []

    def on(self, event: Event, now: float, may_retry: bool = True) -> AttemptStep:
        """`may_retry`: a budget allows another copy, should this event call for one; after Failed, in the same pool."""
        if type(event) in TRANSITIONS[self.state]:
            match event:
                case FirstToken(number):
                    self._first_token(number)
                case Begin():
                    self._begin(now)
                case TimerFired():
                    self._timer_fired(now, may_retry)
                case Failed():
                    self._failed(event, now, may_retry)
                case EndpointDown(number):
                    self._endpoint_down(number, now)
                case ClientGone():
                    self._end(AttemptState.GONE)
                case Broken():
                    self._broken(event, now)
        actions, self._actions = tuple(self._actions), []
        wake_at = FOREVER if self._retry is None else self._retry_at
        for pending in self.pending.values():
            wake_at = min(wake_at, pending.recheck_at)
        return AttemptStep(actions, None if wake_at == FOREVER else wake_at)

    # -- events -------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        self.state = AttemptState.RACING
        if not self._count:
            self._give_up("there is no candidate")
        elif now >= self._limit_at:
            self._give_up(OVERDUE)
        else:
            self._open_next(AttemptKind.PRIMARY, now)

    def _first_token(self, number: int) -> None:
        if (pending := self.pending.pop(number, None)) is not None:
            self._committed = pending.attempt.candidate
            self._end(AttemptState.COMMITTED)  # losers are cancelled before Commit: by then the cost is known
            self._actions.append(Commit(number))

    def _failed(self, failure: Failed, now: float, may_retry: bool) -> None:
        pending = self.pending.pop(failure.number, None)
        if pending is None:
            return
        self._deaths += failure.connection_lost and failure.taken
        self._lost.add(pending.attempt.candidate.endpoint.id)
        self._avoided |= failure.avoid
        denied = not (may_retry or failure.connection_lost)
        if denied:
            self._avoided.add(pending.attempt.candidate.endpoint.pool)
        if self.pending:
            self._reset_silence(now)
        elif failure.restart and self._may_open:
            self._open(pending.attempt.candidate, self._next_kind, now)
        elif not failure.retryable:
            self._give_up(f"attempt {failure.number} failed and no other endpoint would do better")
        elif self._next() is not None:
            self._open_next(self._next_kind, now)
        elif self._closed_candidates() and self._may_open:
            self._retry, self._retry_at = self._closed[0], now
            self._open_retry(now)
        elif denied:
            self._give_up(f"attempt {failure.number} failed and the retry budget is spent")
        elif not self._schedule_retry(failure, pending.attempt.candidate, now):
            self._give_up(self._exhausted())

    def _endpoint_down(self, number: int, now: float) -> None:
        pending = self.pending.get(number)
        if pending is None:
            return
        if len(self.pending) > 1:
            self._abandon(pending, None, now)
            self._reset_silence(now)
        elif (upcoming := self._next()) is not None:
            self._abandon(pending, upcoming, now)

    def _reset_silence(self, now: float) -> None:
        """A racer failed: the other is alone again, and the silence is weighed anew."""
        for pending in self.pending.values():
            pending.weighed = False
            pending.recheck_at = min(now, pending.limit_at)

    def _timer_fired(self, now: float, may_retry: bool) -> None:
        self._open_retry(now)
        for number, pending in tuple(self.pending.items()):
            if number in self.pending and pending.recheck_at <= now:
                self._check_silence(pending, now, may_retry)

    def _broken(self, broken: Broken, now: float) -> None:
        """Race again for the rest of the answer, among the peers of the broken endpoint."""
        assert self._committed is not None
        self._lost.add(self._committed.endpoint.id)
        self._deaths += broken.connection_lost
        self._candidates = self.peers(broken.unable)
        self._count, self._tried = len(self._candidates), 0
        self._avoided, self._closed = set(), []
        self._next_kind, self._hedge = AttemptKind.RESCUE, False
        self._deadline = FOREVER
        self._first_token_limit = broken.patience
        self.state = AttemptState.RACING
        if self._has_next():
            self._open_next(AttemptKind.RESCUE, now)
        else:
            self._give_up(self._exhausted())

    def peers(self, unable: Collection[str]) -> Sequence[Candidate]:
        """Candidates to continue the committed answer, of its pool first; none where no further attempt is allowed."""
        if self._committed is None or not self._may_open:
            return ()
        pool, avoided = self._committed.endpoint.pool, self._lost.union(unable, [self._committed.endpoint.id])
        able = (each for each in self._ranked if each.endpoint.id not in avoided)
        return sorted(able, key=lambda each: each.endpoint.pool != pool)

    # -- silence ------------------------------------------------------------------------------

    def _first_check(self, own: Candidate, sent_at: float, limit_at: float) -> float:
        if not self._stream or self._deadline == FOREVER or not self._has_next():
            return limit_at
        next_p50 = p50_of(self._candidates, self._tried)
        return min(patience_until(own.forecast, next_p50, sent_at, self._deadline), limit_at)

    def _check_silence(self, pending: PendingAttempt, now: float, may_retry: bool) -> None:
        """Weighs, races or abandons a silent attempt at `recheck_at`."""
        upcoming = self._next()
        if now >= pending.limit_at:
            self._abandon(pending, None if len(self.pending) > 1 else upcoming, now)
        elif upcoming is None:
            pending.recheck_at = pending.limit_at
        elif not pending.weighed:
            self._weigh(pending, upcoming, now, may_retry)
        elif self._hedge and may_retry and len(self.pending) < MAX_RACING:
            pending.recheck_at = pending.limit_at
            self._open_next(AttemptKind.HEDGE, now)
        elif now >= pending.abandon_at:
            self._abandon(pending, upcoming, now)
        else:
            pending.recheck_at = pending.abandon_at

    def _weigh(self, pending: PendingAttempt, upcoming: Candidate, now: float, may_retry: bool) -> None:
        pending.weighed = True
        about = pending.attempt.candidate.forecast, upcoming.forecast, pending.sent_at, now, self._deadline
        pending.abandon_at = min(abandon_at(*about), pending.limit_at)
        pending.recheck_at = min(hedge_at(*about), pending.abandon_at) if self._hedge else pending.abandon_at
        if pending.recheck_at <= now:
            self._check_silence(pending, now, may_retry)

    def _abandon(self, pending: PendingAttempt, upcoming: Candidate | None, now: float) -> None:
        number = pending.attempt.number
        del self.pending[number]
        self._lost.add(pending.attempt.candidate.endpoint.id)
        self._actions.append(Cancel(number, AttemptOutcome.SILENT))
        if now >= self._limit_at:
            self._give_up(OVERDUE)
        elif upcoming is not None:
            self._open_next(self._next_kind, now)
        elif not self.pending:
            self._give_up(f"no first token within {self._limit_of(pending.attempt.candidate):g} s")

    # -- opening and ending -------------------------------------------------------------------

    def _next(self) -> Candidate | None:
        return self._candidates[self._tried] if self._has_next() else None

    def _has_next(self) -> bool:
        """An untried candidate exists, and another attempt is allowed. Candidates of avoided pools are skipped, and so
        are closed ones."""
        while self._tried < self._count and (self._avoided or self._is_closed) and self._is_skipped(self._tried):
            self._tried += 1
        return self._tried < self._count and self._may_open

    def _is_skipped(self, rank: int) -> bool:
        candidate = self._candidates[rank]
        if candidate.endpoint.pool in self._avoided:
            return True
        if closed := self._is_closed is not None and self._is_closed(candidate):
            self._closed.append(candidate)
        return closed

    def _closed_candidates(self) -> Sequence[Candidate]:
        """Passed over because of a cap or a rate limit, and still worth an attempt."""
        self._closed = [each for each in self._closed if each.endpoint.pool not in self._avoided]
        return self._closed

    def _pool_at(self, rank: int) -> str:
        return self._candidates[rank].endpoint.pool

    def _open_next(self, kind: AttemptKind, now: float) -> None:
        candidate = self._candidates[self._tried]
        self._tried += 1
        self._open(candidate, kind, now)

    def _open(self, candidate: Candidate, kind: AttemptKind, now: float) -> None:
        self._opened += 1
        self._tried_pools.add(candidate.endpoint.pool)
        if 1 < self._opened == self._max_attempts - 1:
            self._keep_last_for_another_pool()
        attempt = Attempt(self._opened, kind, candidate)
        limit_at = self._silence_limit(candidate, now)
        recheck_at = self._first_check(candidate, now, limit_at)
        self.pending[attempt.number] = PendingAttempt(attempt, now, limit_at, recheck_at)
        self._actions.append(Open(attempt))

    def _keep_last_for_another_pool(self) -> None:
        seen = self._tried_pools | self._avoided
        if any(self._pool_at(rank) not in seen for rank in range(self._tried, self._count)):
            self._avoided = seen

    def _limit_of(self, candidate: Candidate) -> float:
        """Seconds without a first token. Of an answer that is not streamed, the whole is awaited."""
        own = candidate.endpoint.first_token_limit
        if own is None or self._committed is not None:
            return self._first_token_limit
        return own if self._stream else max(own, self._first_token_limit)

    def _silence_limit(self, candidate: Candidate, now: float) -> float:
        """Time at which an attempt sent now is abandoned in any case."""
        limit_at = min(now + self._limit_of(candidate), self._limit_at)
        if not self._stream and self._limit_at < FOREVER and self._has_next():
            return min(limit_at, now + (self._limit_at - now) / 2)
        return limit_at

    def _schedule_retry(self, failure: Failed, candidate: Candidate, now: float) -> bool:
        """Schedules another attempt at the endpoint of the last failure, if worthwhile; returns True if scheduled."""
        if self._retried or not (failure.again and self._may_open) or candidate.endpoint.pool in self._avoided:
            return False
        if not failure.connection_lost and any(
            other.endpoint.pool == candidate.endpoint.pool and other.endpoint != candidate.endpoint
            for other in self._candidates
        ):
            return False
        wait = 0.0 if failure.connection_lost else max(failure.retry_after or BACKOFF, BACKOFF)
        if wait > self._first_token_limit or now + wait >= min(self._deadline, self._limit_at):
            return False
        self._retried = True
        self._retry = candidate
        self._retry_at = now + wait
        self._open_retry(now)
        return True

    def _open_retry(self, now: float) -> None:
        if self._retry is None or self._retry_at > now:
            return
        if self._retry in self._closed:
            self._open_closed(now)
        else:
            self._open(self._retry, self._next_kind, now)
            self._retry = None

    def _open_closed(self, now: float) -> None:
        """Open the first that is closed no longer; else look again soon, until the limits of time."""
        opening = next((each for each in self._closed if self._is_closed is None or not self._is_closed(each)), None)
        if opening is not None:
            self._closed.remove(opening)
            self._retry = None
            self._open(opening, self._next_kind, now)
        elif now >= min(self._limit_at, self._began_at + self._first_token_limit):
            self._give_up("every other endpoint is at its cap or rate limited")
        else:
            self._retry_at = now + CLOSED_CHECK

    @property
    def _may_open(self) -> bool:
        return self._opened < self._max_attempts and self._deaths < MAX_DEATHS

    def _exhausted(self) -> str:
        if self._deaths >= MAX_DEATHS:
            return f"{self._deaths} endpoints died while they worked on it"
        if self._opened >= self._max_attempts:
            return f"all {self._opened} attempts allowed have failed"
        return f"all {self._count} candidates have failed"

    def _give_up(self, reason: str) -> None:
        self._actions.append(GiveUp(reason))
        self._end(AttemptState.GAVE_UP)

    def _end(self, state: AttemptState) -> None:
        for number in self.pending:
            self._actions.append(Cancel(number, AttemptOutcome.CANCELLED))
        self.pending.clear()
        self._retry = None
        self.state = state


# --------------------------------------------------------------------------- budgets


@dataclass(slots=True)
class RetryBudget:
    """Token bucket: every request earns `earned` of a retry, up to `burst`, the size at the start. An empty bucket
    still allows as many retries in flight as `share` of the active requests. So a steady fault adds less than a tenth
    to the load (Finagle's RetryBudget), and a sudden one under load is not left without retries (Envoy's).
    """

    earned: float = 0.09
    burst: float = 10.0
    share: float = 0.1
    active: int = 0  # requests
    retrying: int = 0
    tokens: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.burst

    def began(self) -> None:
        """A request entered."""
        self.active += 1
        self.tokens = min(self.tokens + self.earned, self.burst)

    def ended(self) -> None:
        """A request left. Retries are given back separately."""
        self.active -= 1

    def try_take(self) -> bool:
        """Takes a permission for a retry, if any is left."""
        if self.tokens >= 1:
            self.tokens -= 1
        elif self.retrying >= int(self.share * self.active):
            return False
        self.retrying += 1
        return True

    def give_back(self) -> None:
        """The retry has ended."""
        self.retrying -= 1

    def refund(self) -> None:
        """The retry was not sent."""
        self.tokens = min(self.tokens + 1, self.burst)


class HedgeBudget:
    """Token bucket: every request earns `max_extra` of a hedge, up to `burst` hedges.

    The bucket starts empty, so hedges never exceed the share of the requests so far. Counted in millionths, because
    ten times 0.1 is less than one in floating point.
    """

    _HEDGE = 1_000_000

    def __init__(self, max_extra: float, burst: int = 10) -> None:
        self.share = round(max_extra * self._HEDGE)
        self._burst = burst * self._HEDGE
        self._tokens = 0

    def began(self) -> None:
        """A request of the route entered, and earns a share."""
        self._tokens = min(self._tokens + self.share, self._burst)

    def try_take(self) -> bool:
        """Takes a permission for a hedge, if any is left."""
        if self._tokens < self._HEDGE:
            return False
        self._tokens -= self._HEDGE
        return True

    def give_back(self) -> None:
        """The hedge was not sent."""
        self._tokens = min(self._tokens + self._HEDGE, self._burst)
