"""Decides when to abandon or to hedge a silent attempt.

An attempt abandoned at t, if silent until then, makes the deadline D with
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
  eighth of the time allowed: a budget of 30 s is in no hurry.
- Past the deadline staying costs nothing, so no token of anybody for as long must show that the engine is dead. The p99
  of a forecast that is not trained is a guess: there it is the forecast and what a fresh attempt would take.
- An API that has shown nothing yet may hang, and no look into it tells. It is left at the last moment that leaves the
  next candidate the same chance of its forecast as its own silence has used up, of one half at least (`leave_by`); its
  guess claims half of the time at most. An engine is not left so: its siblings would take as long.
"""

from __future__ import annotations

from policies.types import FOREVER, MEDIAN, NEVER, QUANTILES, Forecast

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
