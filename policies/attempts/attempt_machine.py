"""Attempts of one request: events are method calls, and what follows is done by the `Wire` (`policies.attempts.wire`).

    IDLE --begin--> RACING --first_token, answered--> COMMITTED
                      |  |  <-----broken, failed-----  |
                      |  +--no candidate left, or none allowed--> OVER
                      +--client_gone, and in mid answer its limit of time--> OVER

Rules:
- Nothing has reached the client before the first token, so any earlier failure can be hidden. Every request ends in
  exactly one of a commit, giving up or a caller that has gone; after a break or a late failure, once more.
- Candidates are tried in the order of the decision, each once (`policies.attempts.candidate_walk`).
- The blame of a failure (`policies.blame`) decides the next attempt: none, the next candidate, or another pool. A
  refusal by an endpoint whose siblings answer is doubtful: another endpoint must confirm.
- On a route with `retries` an endpoint is retried up to this number, BACKOFF seconds after a failure that shows load,
  without charge to the retry budget: the operator has permitted the retries.
- A retry in the same pool after a reply that shows load is charged to the retry budget. Another pool, another key of
  the server and a lost connection are not. Without a permission, the pool is avoided.
- No attempt is opened at an engine that needs longer for the prompt itself, by a trained forecast, than its limit or
  the time for the whole answer: a wasted prefill and a wait up to the limit.
- A candidate at its cap or rate limit is skipped; if no other is left, the request waits.
- With no candidate left, the failed endpoint is retried once after a lost connection, or after an overload if the pool
  has no other endpoint: after the requested wait, and only if the wait ends before the deadline. Not if the same
  failure would follow (`Blame.again`).
- A silent attempt is raced or abandoned (`policies.attempts.patience`), in any case at `limit_at`.
- A whole answer with an objection is kept while another pool is asked, once. The caller gets the kept answer if no
  other arrives.
- An endpoint whose stream could not be assembled is retried unstreamed at once, in addition to other attempts: the
  fault is the gateway's, so no budget is charged, and no other endpoint would do better. After a failed stream, an
  unstreamed retry follows if no other endpoint is left.
- An endpoint that refused the form of a request, not its content, is likewise retried with another form.
- An attempt at an endpoint found dead is abandoned for the next candidate, if any.
- A silent committed stream is checked, and possibly abandoned (`policies.attempts.patience`).
- If nothing of the answer was written, a failure is handled as before the commit. Otherwise endpoints without a failure
  in this request race to continue the answer.
- Events about ended attempts, and all events after the end, have no effect.
- The wire may report another event from within a call, so an event ends with that call: a commit, or giving up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from policies.attempts.budgets import HedgeBudget, RequestBudgets, RetryBudget
from policies.attempts.candidate_walk import (
    BACKOFF,
    CandidateWalk,
    first_token_limit,
    is_charged,
    is_lost,
    pools_alike,
    wait_before_retry,
)
from policies.attempts.patience import PendingAttempt, SilenceFinding, SilenceLook, idle_of, is_late, next_look
from policies.attempts.wire import AttemptLimits, Failed, Wire
from policies.blame.blame import Blame
from policies.types import FOREVER, Attempt, AttemptKind, AttemptOutcome, Candidate, Decision, Placement

CLOSED_CHECK = 0.05  # s between two looks for an endpoint that takes requests again
OVERDUE = "the limit of time for the whole answer has passed"


class AttemptState(Enum):
    IDLE = "idle"
    RACING = "racing"
    COMMITTED = "committed"
    OVER = "over"


class AttemptMachine:
    """Attempts of a request. `now` is the time of each event, never earlier than the time of the event before. `kept`:
    the answer with an objection, while another pool is asked."""

    def __init__(
        self,
        decision: Decision,
        limits: AttemptLimits,
        retries: RetryBudget,
        hedges: HedgeBudget,
        wire: Wire,
        *,
        now: float,
    ) -> None:
        self.state = AttemptState.IDLE
        self.pending: dict[int, PendingAttempt] = {}
        self.kept: Attempt | None = None
        self._limits = limits
        self._share = RequestBudgets(retries, hedges)
        self._wire = wire
        self._ranked: Sequence[Candidate] = decision.ranked if decision.outcome is Placement.PLACE else ()
        self._walk = CandidateWalk(self._ranked, wire, limits)
        self._deadline = decision.deadline
        self._began_at = now
        self._next_kind = AttemptKind.FALLBACK
        self._committed: Attempt | None = None
        self._look_at = FOREVER  # at the committed stream
        self._later: tuple[float, Candidate | None] | None = None  # time to open one; None: the first open again
        self._retried = False

    @property
    def is_racing(self) -> bool:
        """Attempts are pending, or still to be opened."""
        return self.state in (AttemptState.IDLE, AttemptState.RACING)

    def limit_by(self, limits: AttemptLimits) -> None:
        """Limits of the attempts to come."""
        self._limits = limits

    def _set_timer(self) -> None:
        """Set the timer to the next due time. Called at the end of every event."""
        wake_at = self._look_at if self._later is None else min(self._look_at, self._later[0])
        for pending in self.pending.values():
            wake_at = min(wake_at, pending.recheck_at)
        self._wire.wake(wake_at)

    # -- the course of most requests ------------------------------------------------------------

    def begin(self, now: float) -> None:
        """The request is decided."""
        if self.state is not AttemptState.IDLE:
            return
        self.state = AttemptState.RACING
        self._share.begin()
        if not self._ranked:
            self._give_up("there is no candidate")
        elif now >= self._limits.limit_at:
            self._give_up(OVERDUE)
        elif self._limits.checks_forecasts and not self._walk.skip_slow(now):
            self._give_up(self._walk.too_slow, unasked=True)
        else:
            self._open(self._walk.take(), AttemptKind.PRIMARY, now)
        self._set_timer()

    def first_token(self, number: int, now: float) -> None:
        """Visible content of an attempt; a preamble, a ping or an error is not."""
        if (pending := self.pending.pop(number, None)) is not None:
            self._commit(pending.attempt, now)
            self._set_timer()

    def _commit(self, attempt: Attempt, now: float) -> None:
        """Losers are cancelled before the commit: by then their cost is known."""
        self._end(AttemptState.COMMITTED)
        kept, limits = self.kept, self._limits
        self._committed, self.kept = attempt, None
        self._look_at = min(now + self._patience(attempt), limits.limit_at)
        if kept is not None and kept is not attempt:
            self._wire.cancel(kept.number, AttemptOutcome.COMPLETED)
        self._wire.commit(attempt.number, was_kept=kept is attempt)

    def answered(self, number: int, objection: str, now: float) -> None:
        """A whole answer is complete and was judged. `objection`: for which another pool is asked;
        empty: none."""
        pending = self.pending.get(number)
        if pending is None:
            return
        walk, candidate = self._walk, pending.attempt.candidate
        if objection and self.kept is None and walk.may_open and walk.has_other_pool(candidate):
            self._keep(pending.attempt, objection, now)
            self._set_timer()
        else:
            self.first_token(number, now)

    def _keep(self, attempt: Attempt, objection: str, now: float) -> None:
        """Ask another pool, and hold this answer meanwhile."""
        del self.pending[attempt.number]
        self.kept = attempt
        self._wire.keep(attempt.number, objection)
        if not self._walk.turn_to("content_filter"):
            self._walk.avoid({attempt.candidate.endpoint.pool})
        self._go_on(now, objection)

    def client_gone(self) -> None:
        """The caller has disconnected. COMPLETED if the last event was written, whichever side closes first."""
        if self.state is AttemptState.OVER:
            return
        if self.kept is not None:
            self._wire.cancel(self.kept.number, AttemptOutcome.COMPLETED)
        if self.state is AttemptState.COMMITTED and self._committed is not None:
            number = self._committed.number
            progress = self._wire.progress(number)
            is_read = progress.relayed and not progress.paused
            self._wire.cancel(number, AttemptOutcome.COMPLETED if is_read else AttemptOutcome.CANCELLED)
        self._end(AttemptState.OVER)
        self._set_timer()

    # -- failures -------------------------------------------------------------------------------

    def failed(self, failure: Failed, now: float) -> None:
        """An attempt has ended, and nothing of an answer has been written."""
        if (attempt := self._take_failed(failure.number)) is not None:
            self._follow(failure, attempt, now)
            self._set_timer()

    def _follow(self, failure: Failed, attempt: Attempt, now: float) -> None:
        if failure.whole or (failure.mended and now < min(self._deadline, self._limits.limit_at)):
            self._ask_anew(attempt.candidate, AttemptKind.WHOLE if failure.whole else AttemptKind.MENDED, now)
            return
        candidate, lost = attempt.candidate, is_lost(failure.blame)
        self._walk.deaths += lost and failure.accepted
        self._walk.lost.add(candidate.endpoint.id)
        own_tiers = self._walk.turn_to(failure.blame.kind)
        alike = () if own_tiers else pools_alike(failure, candidate, self._walk, self._limits, self._wire)
        self._walk.avoid(alike or ())
        if self.pending:
            self._weigh_anew(now)
        elif failure.anew and self._walk.may_open:
            self._open(candidate, self._next_kind, now)
        elif alike is None and not failure.doubtful and failure.anew is None:
            self._give_up(f"attempt {failure.number} failed and no other endpoint would do better")
        elif self._retry_elsewhere(failure, candidate, now):
            return
        elif failure.whole_at_last:
            self._ask_anew(candidate, AttemptKind.WHOLE, now)
        elif not self._schedule_retry(failure, candidate, now):
            self._give_up(self._walk.exhausted(self._share.denied))

    def _ask_anew(self, candidate: Candidate, kind: AttemptKind, now: float) -> None:
        self._walk.allow_another()
        self._open(candidate, kind, now)

    def _take_failed(self, number: int) -> Attempt | None:
        """Remove and return the failed attempt; None: the attempt had ended before."""
        pending, committed = self.pending.pop(number, None), self._committed
        if pending is not None:
            return pending.attempt
        if self.state is not AttemptState.COMMITTED or committed is None or committed.number != number:
            return None
        self.state, self._look_at = AttemptState.RACING, FOREVER
        self._committed = None
        return committed

    def _retry_elsewhere(self, failure: Failed, failed: Candidate, now: float) -> bool:
        """Open the next candidate; with none left, wait for a candidate at its cap or rate limit."""
        charged = self._walk.retries is None and is_charged(failure, failed, self._walk)
        if self._walk.advance(now) and charged and self._walk.upcoming.endpoint.pool == failed.endpoint.pool:
            if self._share.take_retry():
                self._open(self._walk.take(), self._next_kind, now)
                return True
            self._walk.avoid({failed.endpoint.pool})
        if self._walk.advance(now) and self._walk.asks_again and not is_lost(failure.blame):
            self._later = now + BACKOFF, self._walk.take()
            return True
        if self._walk.advance(now):
            self._open(self._walk.take(), self._next_kind, now)
            return True
        if not self._walk.closed or not self._walk.may_open:
            return False
        self._later = now, None
        self._open_later(now)
        return True

    def _schedule_retry(self, failure: Failed, candidate: Candidate, now: float) -> bool:
        """Schedule another attempt at the endpoint of the last failure, if worthwhile."""
        wait = (
            None
            if self._retried or self._walk.retries is not None
            else wait_before_retry(failure, candidate, self._walk)
        )
        if wait is None or not self._walk.may_open or wait > self._limits.first_token_limit:
            return False
        if now + wait >= min(self._deadline, self._limits.limit_at):
            return False
        if is_charged(failure, candidate, self._walk) and not self._share.take_retry():
            return False
        self._retried, self._later = True, (now + wait, candidate)
        self._open_later(now)
        return True

    def _go_on(self, now: float, reason: str) -> None:
        """The next candidate, or the end."""
        if self._walk.advance(now):
            self._open(self._walk.take(), self._next_kind, now)
        else:
            self._give_up(reason)

    def endpoint_down(self, number: int, now: float) -> None:
        """The endpoint of an attempt does not answer its probes any more."""
        pending = self.pending.get(number)
        if pending is None:
            return
        if len(self.pending) > 1:
            self._abandon(pending, now, leave=False)
            self._weigh_anew(now)
        elif self._walk.advance(now):
            self._abandon(pending, now)
        self._set_timer()

    def _weigh_anew(self, now: float) -> None:
        for pending in self.pending.values():
            pending.recheck_in(0.0, now)

    # -- after the commit -----------------------------------------------------------------------

    def others(self) -> Sequence[Candidate]:
        """Candidates that may continue the committed answer: no failure in this request so far."""
        assert self._committed is not None
        return self._walk.others(self._committed.candidate)

    def _patience(self, attempt: Attempt) -> float:
        """Seconds without a byte after which the committed stream is left."""
        idle = idle_of(self._limits, attempt.candidate)
        return min(idle, self._wire.patience(attempt.number, self.others())) if self._limits.recovers else idle

    def broken(
        self, blame: Blame, others: Sequence[Candidate], now: float, kind: AttemptKind = AttemptKind.FALLBACK
    ) -> bool:
        """The committed stream broke, of which a part has been written: race again for the rest of the answer.
        `others`: those that may write the rest, in order; `kind`: of their attempts. False: none is asked, and this is
        the end."""
        if self.state is not AttemptState.COMMITTED or self._committed is None:
            return False
        walk = self._walk
        walk.lost.add(self._committed.candidate.endpoint.id)
        walk.deaths += is_lost(blame)
        if may_ask := bool(others) and walk.may_open:
            self._race_for_rest(others, kind)
            self._go_on(now, walk.exhausted(self._share.denied))
        else:
            self._end(AttemptState.OVER)
        self._set_timer()
        return may_ask

    def _race_for_rest(self, others: Sequence[Candidate], kind: AttemptKind) -> None:
        """Attempts from here on write the rest of the answer: without a deadline, and without hedges."""
        self._walk.go_through(others)
        self._next_kind = kind
        silence = self._limits.first_token_limit if self._limits.idle == FOREVER else self._limits.idle
        self._limits = replace(self._limits, hedge=False, first_token_limit=silence)
        self._deadline = self._look_at = FOREVER
        self.state = AttemptState.RACING

    def _check_stream(self, attempt: Attempt, now: float) -> None:
        """Leave the committed stream, or look again later."""
        progress = self._wire.progress(attempt.number)
        if is_late(self._limits, progress, now):
            self._wire.cancel(attempt.number, AttemptOutcome.CANCELLED)
            self._give_up(OVERDUE)
        elif (look_at := next_look(self._limits, self._patience(attempt), progress, now)) > now:
            self._look_at = look_at
        else:
            self._look_at = FOREVER
            self._wire.leave(attempt.number)

    # -- silence --------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """The time of the latest `Wire.wake` is reached."""
        if self.state is AttemptState.COMMITTED and self._committed is not None:
            if now >= self._look_at:
                self._check_stream(self._committed, now)
        else:
            self._open_later(now)
            for number, pending in tuple(self.pending.items()):
                if number in self.pending and pending.recheck_at <= now:
                    self._check_silence(pending, now)
        self._set_timer()

    def _check_silence(self, pending: PendingAttempt, now: float) -> None:
        """Race or abandon a silent attempt at `recheck_at`."""
        look = SilenceLook(now, self._limits, self._deadline, self._wire, self._share, len(self.pending), self._walk)
        match look.at(pending):
            case SilenceFinding.RACE:
                self._open(self._walk.take(), AttemptKind.HEDGE, now)
            case SilenceFinding.NO_TOKEN:
                self._abandon(pending, now)
            case SilenceFinding.NO_BYTE:
                idle = idle_of(self._limits, pending.attempt.candidate)
                self._abandon(pending, now, f"no byte for {idle:g} s in the middle of the answer")

    def _abandon(self, pending: PendingAttempt, now: float, reason: str = "", leave: bool = True) -> None:
        """Cancel a silent attempt and, with `leave`, go to the next candidate where no other attempt races."""
        limit = first_token_limit(self._limits, pending.attempt.candidate, pending.attempt.kind)
        reason = reason or f"no first token within {limit:g} s"
        del self.pending[pending.attempt.number]
        self._walk.lost.add(pending.attempt.candidate.endpoint.id)
        self._wire.cancel(pending.attempt.number, AttemptOutcome.SILENT)
        if now >= self._limits.limit_at:
            self._give_up(OVERDUE)
        elif not self.pending or (leave and now < pending.limit_at):
            self._go_on(now, reason)

    # -- opening and ending -----------------------------------------------------------------------

    def _open(self, candidate: Candidate, kind: AttemptKind, now: float) -> None:
        attempt = self._walk.attempt(candidate, kind)
        self.pending[attempt.number] = PendingAttempt.sent(attempt, self._limits, self._walk, self._deadline, now)
        self._wire.open(attempt)

    def _open_later(self, now: float) -> None:
        """Open the candidate that was put off, unless it was drained since, or the first that is closed no longer; else
        look again soon, until the limits of time."""
        if self._later is None or self._later[0] > now:
            return
        candidate = self._later[1] or self._walk.take_opened(now)
        self._later = None
        if candidate is not None and candidate.endpoint.id in self._wire.drained:
            self._go_on(now, "its endpoint was drained")
        elif candidate is not None:
            self._open(candidate, self._next_kind, now)
        elif not self._walk.closed or now >= min(
            self._limits.limit_at, self._began_at + self._limits.first_token_limit
        ):
            self._give_up("every other endpoint is at its cap or rate limited")
        else:
            self._later = now + CLOSED_CHECK, None

    def _give_up(self, reason: str, *, unasked: bool = False) -> None:
        """Commit the answer that was kept, or end without an answer."""
        if self.kept is not None:
            self._commit(self.kept, FOREVER)  # it is whole: no silence to look at
            return
        self._end(AttemptState.OVER)
        self._wire.give_up(reason, unasked=unasked)

    def _end(self, state: AttemptState) -> None:
        """Cancel what is pending, and return the shares of the budgets."""
        numbers = tuple(self.pending)
        self.pending.clear()
        for number in numbers:
            self._wire.cancel(number, AttemptOutcome.CANCELLED)
        self._later, self._look_at = None, FOREVER
        self.state = state
        self._share.end()
