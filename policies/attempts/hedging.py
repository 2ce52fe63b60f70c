"""When to leave an attempt that stays silent for one that has not begun.

An attempt that is left at t, if silent until then, makes the deadline D with
`P(own <= t) + P(own > t) P(next <= D - t)`: waiting gives the first its chance and takes from the next one's.
The t at which this sum is greatest is the moment to go, provided that it beats staying to the end,
P(own <= D). Compared at one instant, the fresh one is the likelier by a hair as soon as the first is
a little late, however much time there is for both; the sum knows that one may still leave later. Of two
equals under a generous deadline it gives each half of the time ("The Tail at Scale", with the deadline in it).

Rules:
- One attempt in a hundred is taken to be silent for ever (HUNG): forecasts are made of attempts that spoke,
  and would hold a hung engine for one that is about to.
- Before 1.2 times its own p90, 0.1 s at least, silence is no news, unless by then the next could no longer
  make it. The floor is for engines that answer in a millisecond: there a busy gateway's own delays would
  pass for silence, and a copy would be the answer to load.
- Three times what 99 of 100 take is silence enough at any time, if the next may make it, and past the deadline
  in any case; but not less than 1 s, or an eighth of the time allowed: who gives 30 s is in no hurry.
- Where a second copy may be sent, the first need not be given up: see `hedge_at`.
- The moment is looked for on a fixed grid, so that it is the same in a replay.
"""

from __future__ import annotations

from policies.types import Forecast

PATIENCE, PATIENCE_LEAST = 1.2, 0.1  # of the own p90; s
OVERDUE, OVERDUE_LEAST, OVERDUE_SHARE = 3.0, 1.0, 0.125  # of the own p99; s; of the time allowed
HUNG = 0.01  # of attempts
GRID = 16  # moments between now and the deadline
STEP, STEP_LEAST, GROWTH = (
    0.1,
    0.02,
    1.3,
)  # to the second look at whether to hedge: of the own p90; s; and from look to look


def patience_until(own: Forecast, upcoming: float, sent: float, deadline: float) -> float:
    """The moment before which silence is not weighed. `upcoming`: s, the median of the next."""
    usual = PATIENCE * own.p90
    patience = sent + (usual if usual > PATIENCE_LEAST else PATIENCE_LEAST)
    last_chance = deadline - upcoming  # later, the next would more likely miss than make it
    return last_chance if sent < last_chance < patience else patience


def hedge_at(own: Forecast, upcoming: Forecast, sent: float, now: float, deadline: float) -> float:
    """The first moment from `now` on at which a fresh attempt is likelier to make it than one that is still silent.

    A hedge keeps the first attempt's chance, so it need not wait for the moment to leave. It is looked for in steps
    that grow: what is overdue by little is mostly slow, and what is overdue by much is mostly hung.
    """
    allowed, at = (1 - HUNG) * own.probability(deadline - sent), now
    step = max(STEP * own.p90, STEP_LEAST)
    while at < deadline:
        spoken = (1 - HUNG) * own.probability(at - sent)
        if (allowed - spoken) / (1 - spoken) < (1 - HUNG) * upcoming.probability(deadline - at):
            return at
        at += step
        step *= GROWTH
    return deadline


def abandon_at(own: Forecast, upcoming: Forecast, sent: float, now: float, deadline: float) -> float:
    """The moment from `now` on at which to leave for `upcoming`, before the deadline if that is worth it."""
    allowed, step = deadline - sent, (deadline - now) / GRID
    overdue = sent + max(OVERDUE * own.quantile(0.99), OVERDUE_LEAST, OVERDUE_SHARE * allowed)
    most, best = (1 - HUNG) * own.probability(allowed), deadline  # to stay to the end
    for i in range(GRID if step > 0 else 0):
        at = now + i * step
        spoken = (1 - HUNG) * own.probability(at - sent)
        made = spoken + (1 - spoken) * (1 - HUNG) * upcoming.probability(deadline - at)
        if made > most:
            most, best = made, at
    return max(min(best, overdue), now) if best < deadline else max(deadline, overdue)
