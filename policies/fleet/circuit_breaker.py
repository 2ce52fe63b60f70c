"""Availability of an endpoint: a circuit breaker.

Rules (transitions are the table below):
- CLOSED opens after FAILURES in a row, after REFUSALS in a row (a refused probe counts like an attempt), or at once
  when an attempt gets no token for longer than the forecast can explain and no other attempt was answered since.
- Evidence is ranked: an answer to a caller outranks a health page, and a failed load page is no evidence at all. CLOSED
  opens after REFUSALS failed health pages in a row, unless a caller was answered within PROVEN seconds or since the
  last healthy page.
- CLOSED opens at once when the server refuses the gateway's key, the model name, the path, or the account: such a fault
  does not heal within seconds. After an answer within PROVEN seconds, FAILURES in a row are needed, except for an empty
  account.
- A failure that is not `confirmed` (`policies.fleet.caller_evidence`) counts but does not open the breaker. Instead of
  opening, the breaker becomes `unconfirmed`, until a confirmed failure or an answer. As a trial, such a failure decides
  nothing, and the next attempt is the trial.
- OPEN rejects all attempts for a time that doubles with each opening in a row (EJECTIONS: the first and the longest,
  by cause). Then HALF_OPEN admits one trial attempt, and the trial alone decides.
- OPEN half-opens at once when a probe finds a lost server again, and when an older attempt is answered. (A probe which
  is answered while attempts fail proves nothing.)
- An ejected endpoint stays the last resort of requests that no other endpoint can take (Envoy's panic mode), unless
  connections there have failed within GONE_FOR seconds, or a probe has found another model: some answers are better
  than none, and a refused connection costs milliseconds.
- A data-parallel rank that the server's page does not name is down until an answer from there disproves the page.
- A rate limit is no failure (`policies.rate_limit`).
- A peer process which reports the endpoint down since our own last answer from there opens the breaker too, until our
  next answer or answered probe, until the peer withdraws the report or disappears, and for EJECTION seconds at most.
  After a wrong report, reports are ignored for PEER_REPORTS_IGNORED seconds. Reports are never passed on.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

from policies.types import NEVER, AttemptOutcome, Health

FAILURES = 5  # in a row, of any kind
REFUSALS = 2  # in a row: not connected, or reset before a byte
GONE_FOR = 2.0  # s after a failed connection, in which no further one is tried
PROVEN = 60.0  # s since the last answer
EJECTION = 5.0  # s, the first
MAX_EJECTION = 300.0  # s
MAX_DOUBLINGS = 10  # of an ejection: more exceed any limit, and after hours any float
EJECTION_RESET = 60.0  # s closed, after which an opening counts as the first again
PEER_REPORTS_IGNORED = 30.0  # s


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerEvent(Enum):
    TRIPPED = "tripped"  # too many failures; half open: the trial attempt failed
    EJECTION_OVER = "ejection_over"
    ALIVE = "alive"  # the server answers something
    PEER_REPORTED = "peer_reported"
    TRIAL_ANSWERED = "trial_answered"


class EjectionCause(Enum):
    """Reason for opening; a label of a metric."""

    FAILURES = "failures"
    UNREACHABLE = "unreachable"
    UNHEALTHY = "unhealthy"
    SILENT = "silent"
    MISCONFIGURED = "misconfigured"
    QUOTA = "quota"
    PEER = "peer"


EJECTIONS = {
    EjectionCause.MISCONFIGURED: (10.0, 300.0),
    EjectionCause.QUOTA: (300.0, 300.0),
}  # s; other causes: EJECTION

TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.TRIPPED): BreakerState.OPEN,
    (BreakerState.CLOSED, BreakerEvent.PEER_REPORTED): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.EJECTION_OVER): BreakerState.HALF_OPEN,
    (BreakerState.OPEN, BreakerEvent.ALIVE): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.TRIAL_ANSWERED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.TRIPPED): BreakerState.OPEN,
}

_REPLIED = (AttemptOutcome.COMPLETED, AttemptOutcome.REFUSED, AttemptOutcome.RATE_LIMITED)
_REJECTED = {
    AttemptOutcome.MISCONFIGURED: EjectionCause.MISCONFIGURED,
    AttemptOutcome.QUOTA: EjectionCause.QUOTA,
}


class CircuitBreaker:
    """`max_ejection`: s. Short where no probe tells of a recovery."""

    def __init__(self, max_ejection: float = MAX_EJECTION) -> None:
        self.state = BreakerState.CLOSED
        self.until = NEVER  # end of the ejection
        self.openings = 0  # in a row
        self.why = ""  # reason for not being closed
        self.cause = EjectionCause.FAILURES  # of the latest opening
        self.down_since = NEVER  # by observations of this process; NEVER: up, or down by peer reports alone
        self.peer_reported_down = False  # open by reports of peers alone
        self.unconfirmed = False  # closed or half-open only because no failure in the row is confirmed
        self.max_ejection = max_ejection
        self._failures = self._refusals = 0
        self._gone = False  # a refusal in the row is confirmed
        self._refused_at = NEVER  # latest refusal
        self._unwell = 0  # consecutive failed health pages
        self._well_at = NEVER  # latest healthy page
        self._misplaced_at = NEVER  # first page in a row without the configured rank
        self._probe_failures = 0  # in a row
        self._wrong_model = False  # by the latest probe
        self._trial: Hashable = None
        self.closed_at = NEVER  # latest closing
        self._answered_at = NEVER
        self._served_at = NEVER  # latest first token or complete answer
        self._alive_at = NEVER  # latest answer, of an attempt or a probe
        self._failed_at = NEVER  # latest failure, of an attempt or a probe
        self._ignore_peers_until = NEVER

    @property
    def server_gone(self) -> bool:
        """The process of the server has ended, and the cache with the process."""
        return self._gone and self._refusals >= REFUSALS

    def failing(self, now: float) -> bool:
        """Open, and yet a last resort: the server may be there."""
        if self.state is BreakerState.CLOSED or self._wrong_model:
            return False
        return self._refusals < REFUSALS or now - self._refused_at >= GONE_FOR

    @property
    def doubted(self) -> bool:
        """Not closed by the word of a page alone: no caller's request has failed."""
        if self.state is BreakerState.CLOSED or self._wrong_model:
            return False
        return self.cause is EjectionCause.UNHEALTHY or self._misplaced_at > NEVER

    @property
    def on_trial(self) -> bool:
        return self.state is BreakerState.HALF_OPEN and self._trial is not None

    @property
    def unpaid_until(self) -> float:
        """End of the provider's refusal for lack of money; NEVER: there is none."""
        return self.until if self.cause is EjectionCause.QUOTA and self.state is BreakerState.OPEN else NEVER

    def health(self, now: float) -> Health:
        if self.state is BreakerState.CLOSED:
            return Health.UP
        if self.state is BreakerState.OPEN:
            return Health.DOWN if now < self.until else Health.PROBING
        return Health.PROBING if self._trial is None else Health.DOWN

    def on_sent(self, key: Hashable, now: float) -> None:
        if self.state is BreakerState.OPEN and now >= self.until:
            self._on(BreakerEvent.EJECTION_OVER, now)
        if self.state is BreakerState.HALF_OPEN and self._trial is None:
            self._trial = key

    def on_answer(self, key: Hashable, now: float) -> None:
        """First token of `key`, or a complete answer."""
        self._served_at = self._answered_at = self._alive_at = now
        self._refusals, self._gone = 0, False
        if self.state is not BreakerState.CLOSED or self.peer_reported_down:
            self._on_reply_in_doubt(key, now)

    def _on_reply_in_doubt(self, key: Hashable, now: float) -> None:
        if self.peer_reported_down:
            self._disprove_peers(now)
        if self.state is BreakerState.OPEN:
            if self.cause not in EJECTIONS or self._served_at == now:
                self._on(BreakerEvent.ALIVE, now)
        elif self.state is BreakerState.HALF_OPEN and key == self._trial:
            self._on(BreakerEvent.TRIAL_ANSWERED, now)

    def on_ended(
        self,
        key: Hashable,
        outcome: AttemptOutcome,
        now: float,
        connected: bool = True,
        *,
        confirmed: bool = True,
        why: str = "",
    ) -> None:
        """`connected` False: refused, or reset before a byte came. `confirmed`: more than one caller's request shows
        it. `why`: of a failure, for the operator."""
        if outcome in _REPLIED:
            self._failures, self.unconfirmed = 0, False
            self._answered_at = self._alive_at = now
            self._refusals, self._gone = 0, False
            if outcome is AttemptOutcome.COMPLETED:
                self._served_at = now
            if self.state is not BreakerState.CLOSED or self.peer_reported_down:
                self._on_reply_in_doubt(key, now)
        elif outcome in _REJECTED:
            self._on_rejected(key, _REJECTED[outcome], why, now, confirmed)
        elif outcome is not AttemptOutcome.CANCELLED:
            self._on_failure(key, now, connected, confirmed, why)
        if self._trial == key:
            self._trial = None

    def on_silent(self, key: Hashable, sent_at: float, now: float, overdue: bool, confirmed: bool = True) -> None:
        """`key` was cancelled without a token. `overdue`: after longer than the forecast can explain. Silence towards
        all callers needs no confirmation."""
        if overdue and self._answered_at < sent_at:
            self._failures, confirmed = FAILURES, True
            if self.state is BreakerState.CLOSED:
                self._trip(EjectionCause.SILENT, "a request got no token for longer than its forecast can explain", now)
        self.on_ended(key, AttemptOutcome.SILENT, now, confirmed=confirmed, why="no first token in time")

    def on_probe_failed(self, now: float, why: str = "nobody answered", *, lost: bool = True) -> bool:
        """No connection. `lost`: the server's machine has refused it, or is gone. Returns whether the server was found
        dead by this probe."""
        self._probe_failures += 1
        self._failed_at = now
        self._on_refused(lost, now)
        if self.state is BreakerState.OPEN:
            self._confirm_peers(now)
            self.until = max(self.until, now + EJECTION)
        elif self._refusals >= REFUSALS:
            self._trip(EjectionCause.UNREACHABLE, f"{why} {self._refusals} times in a row", now)
        return self._probe_failures == REFUSALS

    def on_probe_unwell(self, now: float, why: str) -> None:
        """The server accepts connections, but its health page fails or times out."""
        if now < self._failed_at:
            return
        self._clear_refusals()
        if now - self._served_at <= PROVEN or self._served_at > self._well_at:
            self._unwell = 0
            return
        self._unwell += 1
        if self._unwell >= REFUSALS and self.state is BreakerState.CLOSED:
            self._probe_failures = max(self._probe_failures, 1)  # cleared by a healthy page
            self._trip(EjectionCause.UNHEALTHY, why, now)

    def on_other_ranks(self, now: float, why: str) -> bool:
        """The server's page does not name the configured rank. Returns whether that is believed: no caller's answer has
        disproved it since."""
        if self._misplaced_at == NEVER:
            self._misplaced_at = now
        if self._served_at >= self._misplaced_at:
            self.on_probe_answered(now, placed=False)
            return False
        self._clear_refusals()
        self._probe_failures = max(self._probe_failures, 1)
        self._trip(EjectionCause.MISCONFIGURED, why, now)
        self.until = max(self.until, now + EJECTION)
        return True

    def on_wrong_model(self, now: float) -> None:
        """The server does not know the configured model: open the breaker until a probe finds the model."""
        self._probe_failures, self._wrong_model = max(self._probe_failures, 1), True
        self._failed_at = now
        self._trip(EjectionCause.MISCONFIGURED, "it serves another model than configured", now)
        self.until = max(self.until, now + EJECTION)

    def on_probe_answered(self, now: float, *, placed: bool = True) -> None:
        """`placed`: the configured rank is one of the server's."""
        if now < self._failed_at:
            return  # another process asked before that failure: the answer proves nothing
        self._unwell, self._well_at = 0, max(self._well_at, now)
        if placed:
            self._misplaced_at = NEVER
        recovered = self._probe_failures > 0 or self.peer_reported_down
        self._probe_failures, self._wrong_model = 0, False
        self._clear_refusals()
        self._alive_at = max(self._alive_at, now)
        if self.peer_reported_down:
            self._disprove_peers(now)
        if recovered:
            self._on(BreakerEvent.ALIVE, now)

    def on_peer_report(self, down_since: float, now: float) -> None:
        """NEVER: no peer reports the endpoint down, or not any more."""
        if self.peer_reported_down and down_since == NEVER:
            self.peer_reported_down = False
            self._on(BreakerEvent.ALIVE, now)
        elif down_since > self._alive_at and now >= self._ignore_peers_until:
            if self.state is BreakerState.CLOSED:
                self.cause = EjectionCause.PEER
            self._on(BreakerEvent.PEER_REPORTED, now, "a peer process reports it down")

    def on_woken(self, now: float) -> None:
        """The engine has slept, and is awake: failures before say nothing more."""
        self._clear_failures()
        self._on(BreakerEvent.ALIVE, now)

    def on_reload(self) -> None:
        """Permit a trial at once: the configuration that the server refused may have been mended."""
        if self.state is BreakerState.OPEN and self.cause in EJECTIONS:
            self.until = NEVER

    def _disprove_peers(self, now: float) -> None:
        self.peer_reported_down = False
        self._ignore_peers_until = now + PEER_REPORTS_IGNORED

    def _confirm_peers(self, now: float) -> None:
        if self.peer_reported_down:
            self.peer_reported_down = False
            self.down_since = now
            self.why = "a peer process reported it down, and it does not answer here"
            self.openings += 1

    def _on_failure(self, key: Hashable, now: float, connected: bool, confirmed: bool, why: str) -> None:
        self._failures += 1
        self._failed_at = now
        if connected:
            self._clear_refusals()
        else:
            self._on_refused(confirmed, now)
        why = f": {why}" if why else ""
        if self.state is BreakerState.OPEN:
            if confirmed:
                self._confirm_peers(now)
        elif self.state is BreakerState.HALF_OPEN:
            if key == self._trial:
                self._trip_if(confirmed, EjectionCause.FAILURES, f"the trial request failed{why}", now)
        elif self._refusals >= REFUSALS:
            why = f"{self._refusals} connections in a row were refused or reset{why}"
            self._trip_if(confirmed or self._gone, EjectionCause.UNREACHABLE, why, now)
        elif self._failures >= FAILURES:
            self._trip_if(confirmed, EjectionCause.FAILURES, f"{self._failures} requests in a row failed{why}", now)

    def _on_rejected(self, key: Hashable, cause: EjectionCause, why: str, now: float, confirmed: bool) -> None:
        self._failures += 1
        self._clear_refusals()
        if self.state is BreakerState.HALF_OPEN:
            rejected = key == self._trial
        else:
            unproven = now - self._served_at > PROVEN or cause is EjectionCause.QUOTA
            rejected = self.state is BreakerState.CLOSED and (unproven or self._failures >= FAILURES)
        if rejected:
            self._trip_if(confirmed, cause, why, now)

    def _on_refused(self, confirmed: bool, now: float) -> None:
        self._refusals += 1
        self._refused_at = now
        self._gone |= confirmed

    def _clear_failures(self) -> None:
        self._failures = 0
        self.unconfirmed = False

    def _clear_refusals(self) -> None:
        self._refusals = 0
        self._gone = False

    def _trip_if(self, confirmed: bool, cause: EjectionCause, why: str, now: float) -> None:
        if confirmed:
            self._trip(cause, why, now)
        else:
            self.unconfirmed = True

    def _trip(self, cause: EjectionCause, why: str, now: float) -> None:
        self.cause = cause
        if cause is EjectionCause.UNREACHABLE:
            self._served_at = NEVER  # by a process that may have ended
        self._on(BreakerEvent.TRIPPED, now, why)

    def _on(self, event: BreakerEvent, now: float, why: str = "") -> None:
        """Events which the table does not name in this state change nothing."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            return
        if after is BreakerState.OPEN:
            self._open(event is BreakerEvent.PEER_REPORTED, now)
            self.why = why
            self.unconfirmed = False
        elif after is BreakerState.CLOSED:
            self.closed_at = now
            self.down_since = NEVER
            self._clear_failures()
            self.why = ""
        self._trial = None
        self.state = after

    def _open(self, peer_reported: bool, now: float) -> None:
        if self.state is BreakerState.CLOSED and now - self.closed_at >= EJECTION_RESET:
            self.openings = 0
        self.peer_reported_down = peer_reported
        if peer_reported:
            self.until = now + EJECTION
            return
        self.openings += 1
        first, longest = EJECTIONS.get(self.cause, (EJECTION, self.max_ejection))
        self.until = now + min(first * 2 ** min(self.openings - 1, MAX_DOUBLINGS), longest)
        if self.down_since == NEVER:
            self.down_since = now
