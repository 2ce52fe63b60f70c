"""The attempts of one request, up to its first token: a state machine, told what happens, that says what to do.

    IDLE --Begin--> RACING --FirstToken--> COMMITTED
                      |  |
                      |  +--no candidate left, or none allowed--> GAVE_UP
                      +--ClientGone--> GONE

Rules:
- Nothing has reached the client before the first token, so anything before it can be mended; after
  Commit nothing is retried. Every request comes to exactly one of Commit, GiveUp or ClientGone.
- Candidates are taken in the order of the decision, each once; `max_attempts` bounds all of them.
- A failure that another endpoint may not have goes to the next candidate at once. After an overload
  reply that needs `may_retry`, a retry budget's permission; after a death it does not.
- Two endpoints that died with the request in their hands may have died of it: it is offered to no third.
- With no candidate left, the one that failed is tried once more if it died, or if it was overloaded
  and its pool has no other: after the wait that it asked for, and only if that is over before the deadline.
- A stream that stays silent is left for the next candidate at the moment that gives the two of them the best
  chance of the deadline (`policies.attempts.hedging`). With `hedge`, and `may_retry` at the Wake, it is raced instead:
  the first content wins and the other is cancelled. Two race at a time, no more.
- An answer that is not streamed arrives whole, so its silence says nothing; nor does any where there
  is no deadline. `first_token_limit` after its sending every attempt is left.
- Events about attempts that have ended, and all events after the end, are late news and change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from policies.attempts.attempt_steps import (
    Action,
    AttemptStep,
    Begin,
    Cancel,
    ClientGone,
    Commit,
    Event,
    Failed,
    FirstToken,
    GiveUp,
    Open,
    TimerFired,
)
from policies.attempts.hedging import abandon_at, hedge_at, patience_until
from policies.routing.ranking import p50_of
from policies.types import FOREVER, Attempt, AttemptKind, AttemptOutcome, Candidate, Decision, Placement

BACKOFF = 0.1  # s before an overloaded endpoint is asked again, where it does not say
DEATHS = 2  # of endpoints that had accepted the request
RACERS = 2  # attempts pending at a time


class AttemptState(Enum):
    IDLE = "idle"
    RACING = "racing"
    COMMITTED = "committed"
    GAVE_UP = "gave_up"
    GONE = "gone"


# What each state listens to, and where that may lead.
TRANSITIONS: dict[AttemptState, dict[type[Event], frozenset[AttemptState]]] = {
    AttemptState.IDLE: {
        Begin: frozenset({AttemptState.RACING, AttemptState.GAVE_UP}),
        ClientGone: frozenset({AttemptState.GONE}),
    },
    AttemptState.RACING: {
        FirstToken: frozenset({AttemptState.RACING, AttemptState.COMMITTED}),
        Failed: frozenset({AttemptState.RACING, AttemptState.GAVE_UP}),
        TimerFired: frozenset({AttemptState.RACING, AttemptState.GAVE_UP}),
        ClientGone: frozenset({AttemptState.GONE}),
    },
    AttemptState.COMMITTED: {},
    AttemptState.GAVE_UP: {},
    AttemptState.GONE: {},
}

# Of every request: a member is slow to look up in its enumeration.
_RACING, _COMMITTED, _PLACE, _PRIMARY = (
    AttemptState.RACING,
    AttemptState.COMMITTED,
    Placement.PLACE,
    AttemptKind.PRIMARY,
)
_IN_A_RACE = TRANSITIONS[AttemptState.RACING]


@dataclass(slots=True)
class Pending:
    """An attempt without a token yet. At `look_at` its silence is weighed; once `settled`, it is left then."""

    attempt: Attempt
    sent: float
    limit: float
    recheck_at: float
    settled: bool = False
    abandon_at: float = FOREVER


class AttemptMachine:
    """One per request. `now` is the time of each event, never earlier than the last one's."""

    state = AttemptState.IDLE
    _hears = TRANSITIONS[AttemptState.IDLE]  # the events that it listens to now
    _opened = 0
    _tried = 0  # candidates
    _again: Candidate | None = None  # the one to be tried once more, at _again_at
    _retried = False
    _deaths = 0

    def __init__(
        self,
        decision: Decision,
        *,
        max_attempts: int,
        stream: bool,
        hedge: bool,
        first_token_limit: float,
        now: float,
    ) -> None:
        self.pending: dict[int, Pending] = {}
        self._candidates = decision.ranked if decision.outcome is _PLACE else ()
        self._count = len(self._candidates)
        self._deadline = decision.deadline
        self._max_attempts, self._stream, self._hedge = max_attempts, stream, hedge
        self._first_token_limit = first_token_limit
        self._again_at = now
        self._actions: list[Action] = []

    def on(self, event: Event, now: float, may_retry: bool = True) -> AttemptStep:
        """`may_retry`: whether a budget allows another copy, should this event call for one."""
        if type(event) not in self._hears:
            return AttemptStep((), self._wake_at())
        if isinstance(event, FirstToken):
            self._first_token(event.number)
        elif isinstance(event, Begin):
            self._begin(now)
        elif isinstance(event, TimerFired):
            self._wake(now, may_retry)
        elif isinstance(event, Failed):
            self._failed(event, now, may_retry)
        else:
            self._end(AttemptState.GONE)
        actions, self._actions = tuple(self._actions), []
        return AttemptStep(actions, self._wake_at())

    # -- events -------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        self.state, self._hears = _RACING, _IN_A_RACE
        if self._count:
            self._open_next(_PRIMARY, now)
        else:
            self._give_up("there is no candidate")

    def _first_token(self, number: int) -> None:
        if self.pending.pop(number, None) is not None:
            self._end(_COMMITTED)  # those that lost are ended first: by then it is known what they cost
            self._actions.append(Commit(number))

    def _failed(self, failure: Failed, now: float, may_retry: bool) -> None:
        pending = self.pending.pop(failure.number, None)
        if pending is None:
            return
        self._deaths += failure.connection_lost and failure.taken
        if self.pending:
            self._weigh_again(now)
        elif not failure.retryable:
            self._give_up(f"attempt {failure.number} failed and no other endpoint would do better")
        elif not (may_retry or failure.connection_lost):
            self._give_up(f"attempt {failure.number} failed and the retry budget is spent")
        elif self._next() is not None:
            self._open_next(AttemptKind.FALLBACK, now)
        elif not self._try_again(failure, pending.attempt.candidate, now):
            self._give_up(self._exhausted())

    def _weigh_again(self, now: float) -> None:
        """A racer fell out: the other is alone again, and its silence counts as before."""
        for pending in self.pending.values():
            pending.settled, pending.recheck_at = False, min(now, pending.limit)

    def _wake(self, now: float, may_retry: bool) -> None:
        self._open_again(now)
        for number, pending in tuple(self.pending.items()):
            if number in self.pending and pending.recheck_at <= now:
                self._look(pending, now, may_retry)

    # -- silence ------------------------------------------------------------------------------

    def _first_look(self, own: Candidate, sent: float, limit: float) -> float:
        if not self._stream or self._deadline == FOREVER or not self._has_next:
            return limit
        look = patience_until(own.forecast, p50_of(self._candidates, self._tried), sent, self._deadline)
        return look if look < limit else limit

    def _look(self, pending: Pending, now: float, may_retry: bool) -> None:
        """A silent attempt's moment has come: weigh it, race it, or leave it."""
        upcoming = self._next()
        if now >= pending.limit:
            self._leave(pending, None if len(self.pending) > 1 else upcoming, now)
        elif upcoming is None:
            pending.recheck_at = pending.limit
        elif not pending.settled:
            self._settle(pending, upcoming, now, may_retry)
        elif self._hedge and may_retry and len(self.pending) < RACERS:
            pending.recheck_at = pending.limit
            self._open_next(AttemptKind.HEDGE, now)
        elif now >= pending.abandon_at:
            self._leave(pending, upcoming, now)
        else:
            pending.recheck_at = pending.abandon_at

    def _settle(self, pending: Pending, upcoming: Candidate, now: float, may_retry: bool) -> None:
        own, pending.settled = pending.attempt.candidate, True
        about = own.forecast, upcoming.forecast, pending.sent, now, self._deadline
        pending.abandon_at = min(abandon_at(*about), pending.limit)
        pending.recheck_at = min(hedge_at(*about), pending.abandon_at) if self._hedge else pending.abandon_at
        if pending.recheck_at <= now:
            self._look(pending, now, may_retry)

    def _leave(self, pending: Pending, upcoming: Candidate | None, now: float) -> None:
        number = pending.attempt.number
        del self.pending[number]
        self._actions.append(Cancel(number, AttemptOutcome.SILENT))
        if upcoming is not None:
            self._open_next(AttemptKind.FALLBACK, now)
        elif not self.pending:
            self._give_up(f"no first token within {self._first_token_limit:g} s")

    # -- opening and ending -------------------------------------------------------------------

    def _next(self) -> Candidate | None:
        return self._candidates[self._tried] if self._has_next else None

    @property
    def _has_next(self) -> bool:
        """Whether there is an untried candidate, and another attempt is allowed."""
        return self._tried < self._count and self._may_open

    def _open_next(self, kind: AttemptKind, now: float) -> None:
        candidate = self._candidates[self._tried]
        self._tried += 1
        self._open(candidate, kind, now)

    def _open(self, candidate: Candidate, kind: AttemptKind, now: float) -> None:
        self._opened += 1
        attempt = Attempt(self._opened, kind, candidate)
        limit = now + self._first_token_limit
        self.pending[attempt.number] = Pending(attempt, now, limit, self._first_look(candidate, now, limit))
        self._actions.append(Open(attempt))

    def _try_again(self, failure: Failed, candidate: Candidate, now: float) -> bool:
        """Whether the endpoint that failed last, having no stand-in, is worth one more attempt."""
        if self._retried or not self._may_open:
            return False
        if not failure.connection_lost and any(
            other.endpoint.pool == candidate.endpoint.pool and other.endpoint != candidate.endpoint
            for other in self._candidates
        ):
            return False
        wait = 0.0 if failure.connection_lost else max(failure.retry_after or BACKOFF, BACKOFF)
        if wait > self._first_token_limit or now + wait >= self._deadline:
            return False
        self._retried, self._again, self._again_at = True, candidate, now + wait
        self._open_again(now)
        return True

    def _open_again(self, now: float) -> None:
        if self._again is not None and self._again_at <= now:
            self._open(self._again, AttemptKind.FALLBACK, now)
            self._again = None

    @property
    def _may_open(self) -> bool:
        return self._opened < self._max_attempts and self._deaths < DEATHS

    def _exhausted(self) -> str:
        if self._deaths >= DEATHS:
            return f"{self._deaths} endpoints died while they worked on it"
        if self._opened >= self._max_attempts:
            return f"all {self._opened} attempts allowed have failed"
        return f"all {self._count} candidates have failed"

    def _give_up(self, reason: str) -> None:
        self._actions.append(GiveUp(reason))
        self._end(AttemptState.GAVE_UP)

    def _end(self, state: AttemptState) -> None:
        if self.pending:
            self._actions += [Cancel(number, AttemptOutcome.CANCELLED) for number in self.pending]
            self.pending.clear()
        self._again = None
        self.state, self._hears = state, {}

    def _wake_at(self) -> float | None:
        at = None if self._again is None else self._again_at
        for pending in self.pending.values():
            if at is None or pending.recheck_at < at:
                at = pending.recheck_at
        return at
