"""Whether one endpoint may be sent requests: a circuit breaker, and its provider's rate limit.

Rules (transitions are the table below):
- It opens on FAILURES in a row, on REFUSALS in a row (a probe that finds nobody counts like an attempt),
  or at once when an attempt stayed silent longer than its forecast can explain and nothing else there has
  spoken since it was sent.
- Open, it lets nothing through for EJECTION * 2^n seconds, n counting openings that follow one another.
  Then it is half open: one attempt may try. That attempt alone decides.
- A server that a probe had lost and finds again half-opens at once, and so does a sign of life from an older
  attempt. (That a probe is answered while attempts fail proves nothing.)
- A rate limit is not ill health: it only says until when to wait.
- It opens on hearsay too, when another process has found the endpoint down since we last saw it alive. That ends with
  our own first sign of life, when it is taken back or its teller falls silent, and after EJECTION seconds at latest:
  then one attempt may try. Hearsay that proved wrong is not listened to again for DEAF seconds, and none is told on.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

from policies.types import NEVER, AttemptOutcome, Health

FAILURES = 5  # in a row, of any kind
REFUSALS = 2  # in a row: not connected, or reset before a byte
EJECTION = 5.0  # s, the first
LONGEST_EJECTION = 300.0  # s
FORGIVEN = 60.0  # s closed, after which an opening counts as the first again
DEAF = 30.0  # s
RATE_LIMIT = (0.1, 1.0, 60.0)  # s: least, where the provider names none, most


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Sign(Enum):
    TRIPPED = "tripped"  # too much went wrong; half open: the one attempt failed
    COOLED = "cooled"  # the ejection is over
    ALIVE = "alive"  # somebody is there
    RUMOURED = "rumoured"  # others found it down
    PROVED = "proved"  # the one attempt was answered


TRANSITIONS: dict[tuple[BreakerState, Sign], BreakerState] = {
    (BreakerState.CLOSED, Sign.TRIPPED): BreakerState.OPEN,
    (BreakerState.CLOSED, Sign.RUMOURED): BreakerState.OPEN,
    (BreakerState.OPEN, Sign.COOLED): BreakerState.HALF_OPEN,
    (BreakerState.OPEN, Sign.ALIVE): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, Sign.PROVED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, Sign.TRIPPED): BreakerState.OPEN,
}

_CLOSED, _UP = (
    BreakerState.CLOSED,
    Health.UP,
)  # what is nearly always so: a member is slow to look up in its enumeration
_ANSWERED = (AttemptOutcome.COMPLETED, AttemptOutcome.REFUSED, AttemptOutcome.RATE_LIMITED)


class Breaker:
    """`longest`: the longest ejection, s. Short where no probe tells of a recovery."""

    __slots__ = (
        "_closed_at",
        "_deaf_until",
        "_failures",
        "_longest",
        "_lost",
        "_probe",
        "_refusals",
        "_seen_at",
        "_spoke_at",
        "blocked_until",
        "down_at",
        "openings",
        "peer_reported_down",
        "state",
        "until",
        "why",
    )

    def __init__(self, longest: float = LONGEST_EJECTION) -> None:
        self.state = BreakerState.CLOSED
        self.until = NEVER  # the end of the ejection
        self.blocked_until = NEVER
        self.openings = 0  # that followed one another
        self.why = ""  # it is not closed
        self.down_at = NEVER  # since when it is not well, by what we saw; NEVER: it is, or others alone say so
        self.peer_reported_down = False  # open because others alone say so
        self._longest = longest
        self._failures = self._refusals = 0
        self._lost = False  # the last probe found nobody
        self._probe: Hashable = None
        self._spoke_at = self._closed_at = NEVER
        self._seen_at = self._deaf_until = NEVER  # the latest sign of life

    def health(self, now: float) -> Health:
        if self.state is _CLOSED:
            return _UP
        if self.state is BreakerState.OPEN:
            return Health.DOWN if now < self.until else Health.PROBING
        return Health.PROBING if self._probe is None else Health.DOWN

    def sent(self, key: Hashable, now: float) -> None:
        if self.state is _CLOSED:
            return
        if self.state is BreakerState.OPEN and now >= self.until:
            self._move(Sign.COOLED, now)
        if self.state is BreakerState.HALF_OPEN and self._probe is None:
            self._probe = key

    def spoke(self, key: Hashable, now: float) -> None:
        """`key` got its first token, or an answer."""
        self._spoke_at = self._seen_at = now
        self._refusals = 0
        if self.state is not _CLOSED:
            self._disprove(now)
            self._alive(key, now)

    def ended(self, key: Hashable, ending: AttemptOutcome, now: float, connected: bool = True) -> None:
        """`connected` False: refused, or reset before a byte came."""
        if ending in _ANSWERED:
            self._failures = 0
            self.spoke(key, now)
        elif ending is not AttemptOutcome.CANCELLED:
            self._failed(key, now, connected)
        if self._probe is not None and self._probe == key:
            self._probe = None

    def silent(self, key: Hashable, sent_at: float, now: float, overdue: bool) -> None:
        """`key` was left without a token; `overdue`: after longer than its forecast can explain."""
        if overdue and self._spoke_at < sent_at:
            self._failures = FAILURES
            if self.state is BreakerState.CLOSED:
                self._move(Sign.TRIPPED, now, "a request stayed silent for longer than its forecast can explain")
        self.ended(key, AttemptOutcome.SILENT, now)

    def limited(self, now: float, retry_after: float | None) -> None:
        least, default, most = RATE_LIMIT
        wait = default if retry_after is None else min(max(retry_after, least), most)
        self.blocked_until = max(self.blocked_until, now + wait)

    def unreachable(self, now: float) -> None:
        """A probe found nobody."""
        self._lost = True
        self._refusals += 1
        if self.state is BreakerState.OPEN:
            self._confirm(now)
            self.until = max(self.until, now + EJECTION)
        elif self._refusals >= REFUSALS:
            self._move(Sign.TRIPPED, now, f"nobody answered {self._refusals} times in a row")

    def reachable(self, now: float) -> None:
        """A probe was answered."""
        found, self._lost, self._refusals = self._lost or self.peer_reported_down, False, 0
        self._seen_at = now
        self._disprove(now)
        if found:
            self._move(Sign.ALIVE, now)

    def peer_reported(self, down_at: float, now: float) -> None:
        """Others find it down, since then; NEVER: they do not, or not any more."""
        if self.peer_reported_down and down_at == NEVER:
            self.peer_reported_down = False
            self._move(Sign.ALIVE, now)
        elif down_at > self._seen_at and now >= self._deaf_until:
            self._move(Sign.RUMOURED, now, "another process finds it down")

    def _disprove(self, now: float) -> None:
        if self.peer_reported_down:
            self.peer_reported_down, self._deaf_until = False, now + DEAF

    def _confirm(self, now: float) -> None:
        """We have seen it ourselves."""
        if self.peer_reported_down:
            self.peer_reported_down, self.down_at = False, now
            self.why = "another process found it down, and so do we"
            self.openings += 1

    @property
    def gone(self) -> bool:
        """Nobody is there: the server's process, and all that it held, has ended."""
        return self._refusals >= REFUSALS

    def _alive(self, key: Hashable, now: float) -> None:
        if self.state is BreakerState.OPEN:
            self._move(Sign.ALIVE, now)
        elif key == self._probe:
            self._move(Sign.PROVED, now)

    def _failed(self, key: Hashable, now: float, connected: bool) -> None:
        self._failures += 1
        if self.state is BreakerState.OPEN:
            self._confirm(now)
        self._refusals = 0 if connected else self._refusals + 1
        tripped = self._failures >= FAILURES or self._refusals >= REFUSALS
        if key == self._probe if self.state is BreakerState.HALF_OPEN else tripped:
            self._move(Sign.TRIPPED, now, self._what_failed())

    def _what_failed(self) -> str:
        if self.state is BreakerState.HALF_OPEN:
            return "the request that tried it failed"
        if self._refusals >= REFUSALS:
            return f"{self._refusals} connections in a row were refused or reset"
        return f"{self._failures} requests in a row failed"

    def _move(self, sign: Sign, now: float, why: str = "") -> None:
        """Signs that the table does not name in this state change nothing."""
        after = TRANSITIONS.get((self.state, sign))
        if after is None:
            return
        if after is BreakerState.OPEN:
            self._open(sign is Sign.RUMOURED, now)
            self.why = why
        elif after is BreakerState.CLOSED:
            self._closed_at, self.down_at = now, NEVER
            self._failures = 0
            self.why = ""
        self._probe = None
        self.state = after

    def _open(self, hearsay: bool, now: float) -> None:
        if self.state is BreakerState.CLOSED and now - self._closed_at >= FORGIVEN:
            self.openings = 0
        self.peer_reported_down = hearsay
        if hearsay:
            self.until = now + EJECTION
            return
        self.openings += 1
        self.until = now + min(EJECTION * 2 ** (self.openings - 1), self._longest)
        if self.down_at == NEVER:
            self.down_at = now
