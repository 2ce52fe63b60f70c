"""When to leave an attempt that stays silent for one that has not begun.

An attempt sent at `sent` and silent at t still makes the deadline D with P(own <= D - sent | own > t - sent).
A fresh one elsewhere makes it with P(next <= D - t). Both fall as t grows; the first moment at which
the fresh one is the likelier is the moment to go ("The Tail at Scale", with the deadline in it).

Rules:
- Before 1.2 times its own p90, 0.1 s at least, silence is no news, unless by then the next could no longer
  make it. The floor is for engines that answer in a millisecond: there a busy gateway's own delays would
  pass for silence, and a copy would be the answer to load.
- After the deadline there is no chance to compare: then three times what 99 of 100 take, 1 s at
  least, is silence enough.
- A fresh attempt throws away what the first has waited and computed, so it must be the likelier by
  MARGIN: two engines that are both nearly sure to make a generous deadline differ by less than is known of them.
- The moment is looked for on a fixed grid, so that it is the same in a replay.
"""

from __future__ import annotations

from policies.facts import Forecast

PATIENCE, PATIENCE_LEAST = 1.2, 0.1  # of the own p90; s
OVERDUE, OVERDUE_LEAST = 3.0, 1.0  # of the own p99; s
MARGIN = 0.1  # of chance
GRID = 16  # moments between now and the deadline


def first_look(own: Forecast, upcoming: Forecast, sent: float, deadline: float) -> float:
    """The moment before which silence is not weighed."""
    patience = sent + max(PATIENCE * own.p90, PATIENCE_LEAST)
    last_chance = deadline - upcoming.p50  # later, the next would more likely miss than make it
    return last_chance if sent < last_chance < patience else patience


def leave_at(own: Forecast, upcoming: Forecast, sent: float, now: float, deadline: float) -> float:
    """The first moment from `now` on at which `upcoming` is the likelier to make the deadline; else when overdue."""
    made = own.chance(deadline - sent)
    step = (deadline - now) / GRID
    for i in range(GRID if step > 0 else 0):
        at = now + i * step
        spoken = own.chance(at - sent)
        if (upcoming.chance(deadline - at) - MARGIN) * (1 - spoken) > made - spoken:
            return at
    return max(deadline, sent + max(OVERDUE * own.quantile(0.99), OVERDUE_LEAST))
