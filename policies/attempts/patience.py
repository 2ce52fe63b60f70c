"""Checks a silent attempt before the commit, and a silent stream after it: times of the checks, and the findings.

Rules:
- A silent stream is abandoned for the next candidate at the moment that gives the two the best chance of the deadline,
  by what is known at each look. With `hedge`, and a permission of the budget, both race instead: the first content
  wins and the other is cancelled. No more than two race at a time.
- A silent stream that may be raced is left in any case once its endpoint has answered later requests, and OVERTAKEN
  times the p90 of its forecast, LEAST_OVERTAKEN at least, are over: the request is lost there.
- An endpoint that was asked before, and a tier that comes after a failure, are asked for no lateness.
- Without a deadline, silence is no evidence. Every attempt is abandoned at its limit
  (`policies.attempts.candidate_walk`), or later where there is no other candidate and the server shows life; in any
  case at `limit_at`, the end of the time for the whole answer.
- An attempt whose tokens are not seen (not `stream`) is left for the next candidate after half of what remains until
  `limit_at`, or once the endpoint has answered later requests and has had the time for the longest answer since.

The moment to abandon or to hedge: an attempt abandoned at t, if silent until then, makes the deadline D with
`P(own <= t) + P(own > t) P(next <= D - t)`: waiting adds to the first term and takes from the second. The t with the
greatest sum is the moment to abandon, provided that it beats staying to the end, P(own <= D). Compared at one instant,
the fresh attempt would be slightly likelier as soon as the first is a little late, however much time is left for both.
Of two equals under a generous deadline the sum gives each half of the time ("The Tail at Scale", with a deadline).

Rules:
- The forecasts are those of the look: silence counts from the time at which the engine began with what is ahead.
- To leave throws a prefill away and pays for it twice, so the gain is WORTH of the chance at least.
- One attempt in a hundred is taken to hang for ever (HUNG), as forecasts are learned from attempts that answered. Not
  where the engine has written a token for anybody since.
- Silence is no evidence before 1.2 times the own p90, unless the next could no longer make the deadline by then; nor
  before 0.1 s: delays of a busy gateway would pass for silence, and copies would be the answer to load.
- Three times the own p99 is silence enough at any time, if the next may make the deadline; but not less than 1 s or an
  eighth of the time allowed: a budget of 30 s leaves time.
- Past the deadline staying costs nothing, so no token of anybody for as long must show that the engine is dead. The p99
  of a forecast that is not trained is a guess: there it is the forecast and what a fresh attempt would take.
- An API that has shown nothing yet may hang, and no look into it tells. It is left at the last moment that leaves the
  next candidate the same chance of its forecast as its own silence has used up, of one half at least (`leave_by`); its
  guess claims half of the time at most. An engine is not left so: its siblings would take as long.

After the commit.

Rules:
- A stream is abandoned after `idle` without a byte, and at the time limit of the whole answer.
- If another endpoint can continue the answer, a stream is abandoned after `Wire.patience`.
- A caller that does not read pauses reading from the server: no silence is measured.
- An answer that has ended on an open connection is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from policies.attempts.budgets import RequestBudgets
from policies.attempts.candidate_walk import CandidateWalk, first_token_limit
from policies.attempts.wire import AttemptLimits, Progress, Wire
from policies.types import FOREVER, MEDIAN, NEVER, QUANTILES, Attempt, Candidate, Forecast

PATIENCE, PATIENCE_LEAST = 1.2, 0.1  # of the own p90; s
OVERDUE, OVERDUE_LEAST, OVERDUE_SHARE = 3.0, 1.0, 0.125  # of the own p99; s; of the time allowed
HUNG = 0.01  # of attempts
WORTH = 0.1  # least chance gained: within the error of two forecasts, and less than a prefill takes from others
GRID = 16  # moments between now and the deadline
STEP, STEP_LEAST, GROWTH = 0.1, 0.02, 1.3  # first step of the search for `hedge_at`: of the own p90; s; growth per step


def patience_until(own: Forecast, upcoming: float, sent: float, deadline: float) -> float:
    """Time before which silence is no evidence, but for `leave_by`. `upcoming`: the median of the next candidate, s."""
    patience = sent + max(PATIENCE * own.p90, PATIENCE_LEAST)
    last_chance = deadline - upcoming  # later, the next would more likely miss than make it
    return last_chance if sent < last_chance < patience else patience


def leave_by(own: Forecast, upcoming: Forecast, sent: float, deadline: float) -> float:
    """Last moment at which an API with a forecast that is a guess is left for `upcoming` before the deadline; FOREVER:
    there is no time for both, or this rule does not apply."""
    if own.trained or own.prefill:
        return FOREVER
    half = (deadline - sent) / 2
    for i in range(len(QUANTILES) - 1, MEDIAN - 1, -1):
        last = deadline - upcoming.ratios[i] * upcoming.point_estimate
        if min(own.ratios[i] * own.point_estimate, half) <= last - sent:
            return last if upcoming.samples else min(last, sent + half)
    return FOREVER


def hedge_at(
    own: Forecast, upcoming: Forecast, sent: float, now: float, deadline: float, heard: float = NEVER
) -> float:
    """The first time from `now` on at which a fresh attempt is likelier to make the deadline than the silent attempt;
    FOREVER: none is.

    A hedge keeps the chance of the first attempt, so is sent before `abandon_at`. The search steps grow: an attempt
    overdue by little is mostly slow, an attempt overdue by much is mostly hung.
    """
    hung = HUNG if heard <= sent else 0.0
    allowed, at = (1 - hung) * own.probability(deadline - sent), now
    step = max(STEP * own.p90, STEP_LEAST)
    while at < deadline:
        spoken = (1 - hung) * own.probability(at - sent)
        if (allowed - spoken) / (1 - spoken) < (1 - HUNG) * upcoming.probability(deadline - at):
            return at
        at += step
        step *= GROWTH
    return FOREVER


def abandon_at(
    own: Forecast, upcoming: Forecast, sent: float, now: float, deadline: float, heard: float = NEVER
) -> float:
    """Time from `now` on at which to abandon for `upcoming`. `heard`: time of the latest token of anybody there."""
    hung = HUNG if heard <= sent else 0.0
    allowed, step = deadline - sent, (deadline - now) / GRID
    least = sent + max(OVERDUE_LEAST, OVERDUE_SHARE * allowed)
    overdue = max(sent + OVERDUE * own.quantile(0.99), least)
    stays, most, best = (1 - hung) * own.probability(allowed), 0.0, deadline
    for i in range(GRID if step > 0 else 0):
        at = now + i * step
        spoken = (1 - hung) * own.probability(at - sent)
        gained = (1 - spoken) * (1 - HUNG) * upcoming.probability(deadline - at)
        if gained - (stays - spoken) > WORTH * (1 - spoken) and spoken + gained > most:
            most, best = spoken + gained, at
    best = min(best, leave_by(own, upcoming, sent, deadline))
    if best < deadline:
        return max(min(best, overdue), now)
    dead = overdue if own.trained else min(overdue, max(least, sent + own.p50 + upcoming.p50))
    return max(deadline, dead + max(heard - sent, 0.0))


OVERTAKEN, LEAST_OVERTAKEN = 10.0, 15.0  # times the forecast of a whole answer, or of a first token; s, the least
MAX_RACING = 2  # attempts pending at a time
LOOK_LEAST = 0.02  # s between two looks


@dataclass(slots=True)
class PendingAttempt:
    """At `recheck_at` the silence is looked at."""

    attempt: Attempt
    sent_at: float
    limit_at: float
    recheck_at: float
    overtake_in: float = FOREVER  # s in which the longest answer would have been written many times over
    overtake_at: float = FOREVER  # next look for later requests that the endpoint has answered
    overtaken: bool = False  # at the last look
    seen: bool = True  # tokens would be seen

    @classmethod
    def sent(
        cls, attempt: Attempt, limits: AttemptLimits, walk: CandidateWalk, deadline: float, now: float
    ) -> PendingAttempt:
        limit_at = min(now + first_token_limit(limits, attempt.candidate, attempt.kind), limits.limit_at)
        seen = limits.stream and attempt.candidate.endpoint.id not in limits.unseen
        pending = cls(attempt, now, limit_at, recheck_at=limit_at, seen=seen)
        if not seen:
            pending._await_whole(limits, has_next=limits.limit_at < FOREVER and walk.advance(now))
        elif deadline < FOREVER and walk.advance(now) and walk.may_race:
            pending._await_token(walk, deadline)
        return pending

    def _await_token(self, walk: CandidateWalk, deadline: float) -> None:
        """Set the moment from which silence is evidence, by the next candidate."""
        own = self.attempt.candidate.forecast
        look_at = patience_until(own, walk.upcoming.forecast.p50, self.sent_at, deadline)
        if not own.trained:
            look_at = min(look_at, leave_by(own, walk.upcoming.forecast, self.sent_at, deadline))
        self.recheck_at = min(look_at, self.limit_at)

    def _await_whole(self, limits: AttemptLimits, has_next: bool) -> None:
        """Set the moments of an attempt whose tokens are not seen."""
        if has_next:
            self.limit_at = min(self.limit_at, self.sent_at + (limits.limit_at - self.sent_at) / 2)
        self.overtake_in = overtake_in(self.attempt.candidate, limits.longest_output)
        self.overtake_at = self.sent_at + self.overtake_in
        self.recheck_in(min(idle_of(limits, self.attempt.candidate), self.overtake_in), self.sent_at)

    def recheck_in(self, seconds: float, now: float) -> None:
        self.recheck_at = min(now + seconds, self.limit_at)


class SilenceFinding(Enum):
    """Finding of a look at a silent attempt."""

    WAITING = "waiting"  # until `recheck_at`
    RACE = "race"  # another attempt is opened beside, with a permission of the hedge budget
    NO_TOKEN = "no token"  # to be abandoned, like the next
    NO_BYTE = "no byte"  # in the middle of a whole answer


@dataclass(slots=True)
class SilenceLook:
    """A look at a silent attempt. `walk`: asked for the next candidate where a rule needs it, as asking passes over
    candidates. `racers`: attempts pending, this one included."""

    now: float
    limits: AttemptLimits
    deadline: float
    wire: Wire
    share: RequestBudgets
    racers: int
    walk: CandidateWalk

    def at(self, pending: PendingAttempt) -> SilenceFinding:
        if self.now >= pending.limit_at:
            return self._at_limit(pending)
        return self._at_stream(pending) if pending.seen else self._at_unseen(pending)

    def _at_limit(self, pending: PendingAttempt) -> SilenceFinding:
        """Abandon the attempt, unless the server shows life and nobody else could do better."""
        now, end, attempt = self.now, self.limits.limit_at, pending.attempt
        limit = first_token_limit(self.limits, attempt.candidate, attempt.kind)
        heard_at = self.wire.progress(attempt.number).heard_at
        alone = self.racers == 1 and self.walk.next_at(now) is None
        if not (alone and heard_at > pending.sent_at and now - heard_at < limit and now < end):
            return SilenceFinding.NO_TOKEN
        pending.limit_at = pending.recheck_at = min(heard_at + limit, end)
        return SilenceFinding.WAITING

    def _at_stream(self, pending: PendingAttempt) -> SilenceFinding:
        if (upcoming := self.walk.next_at(self.now)) is None or not self.walk.may_race:
            pending.recheck_at = pending.limit_at
            return SilenceFinding.WAITING
        seen = self.wire.outlook(pending.attempt, pending.sent_at, upcoming, self.now)
        own, fresh, since = seen.forecast, seen.upcoming, seen.since
        lost_at = pending.sent_at + max(OVERTAKEN * own.p90, LEAST_OVERTAKEN)
        if self.now >= lost_at:
            if self.wire.is_overtaken(pending.attempt.number):  # lost there: later requests are answered
                return SilenceFinding.NO_TOKEN
            lost_at = self.now + LEAST_OVERTAKEN
        doubt_at = patience_until(own, fresh.p50, since, self.deadline)
        if (look_at := min(doubt_at, leave_by(own, fresh, since, self.deadline))) <= self.now:
            about = own, fresh, since, self.now, self.deadline, seen.heard_at
            look_at = leave_at = abandon_at(*about)
            if self._may_race and (look_at := min(hedge_at(*about), leave_at)) <= self.now:
                if self.share.take_hedge():
                    pending.recheck_at = pending.limit_at
                    return SilenceFinding.RACE
                look_at = leave_at
            if leave_at <= self.now:
                return SilenceFinding.NO_TOKEN
        pending.recheck_in(max(min(look_at, lost_at) - self.now, LOOK_LEAST), self.now)
        return SilenceFinding.WAITING

    @property
    def _may_race(self) -> bool:
        return self.limits.hedge and self.racers < MAX_RACING and not self.wire.is_saturated()

    def _at_unseen(self, pending: PendingAttempt) -> SilenceFinding:
        """Abandon an endpoint that stalled in mid-answer, or that has answered later requests and then had enough time
        for this request."""
        now, number, idle = self.now, pending.attempt.number, idle_of(self.limits, pending.attempt.candidate)
        heard_at = self.wire.progress(number).heard_at
        if heard_at >= pending.sent_at and now - heard_at >= idle:
            return SilenceFinding.NO_BYTE
        if now < pending.overtake_at:
            pending.recheck_in(min(idle, pending.overtake_at - now), now)
        elif pending.overtaken and self.walk.next_at(now) is not None:
            return SilenceFinding.NO_TOKEN
        else:
            pending.overtaken = self.wire.is_overtaken(number)
            pending.overtake_at = now + pending.overtake_in
            pending.recheck_in(min(idle, pending.overtake_in), now)
        return SilenceFinding.WAITING


def overtake_in(candidate: Candidate, longest_output: int | None) -> float:
    """Seconds in which the candidate would have written the longest answer many times over; FOREVER: not known."""
    forecast = candidate.forecast
    if longest_output is None or not forecast.tpot:
        return FOREVER
    return max(OVERTAKEN * (forecast.p90 + longest_output * forecast.tpot), LEAST_OVERTAKEN)


SOON = 0.05  # s, the least time between two looks


def idle_of(limits: AttemptLimits, own: Candidate) -> float:
    """Seconds without a byte after which a stream of this endpoint is left in any case."""
    return limits.idle if own.endpoint.stream_idle is None else own.endpoint.stream_idle


def is_late(limits: AttemptLimits, progress: Progress, now: float) -> bool:
    return now >= limits.limit_at and not progress.complete


def next_look(limits: AttemptLimits, allowed: float, progress: Progress, now: float) -> float:
    """Time of the next look; `now`: the stream is to be left. `allowed`: s without a byte."""
    quiet = now - progress.heard_at
    if not progress.paused and quiet >= allowed:
        return now
    return min(now + max(allowed - quiet, SOON), limits.limit_at if now < limits.limit_at else now + SOON)
