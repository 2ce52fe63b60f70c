"""Desired replicas of a pool, from what replays of its recent traffic find to be needed.

Rules:
- An engine that is asked for now serves after its start. So a pool gets what its traffic takes once it has grown by as
  much as it did within one start in the last KEPT seconds (`growth`). That was seen, and is no forecast; at rest it is
  nothing, because a rise counts only beyond the noise of independent arrivals.
- The largest need of the last HOLD seconds holds (`ReplicaLaw`): a pool grows at once, and shrinks HOLD seconds after
  more was needed. The number at the beginning is such a need: a gateway that has just started has seen little traffic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from math import sqrt

KEPT = 600.0  # s of traffic
HOLD = 600.0  # s
NOISE = 2.0  # standard deviations of the difference of two counts
MAX_GROWTH = 4.0  # times the traffic
STEPS = 4  # positions of a window within its length


def growth(arrivals: Sequence[float], since: float, now: float, span: float) -> float:
    """Factor from the busiest `span` seconds to that and the largest rise between two neighbouring ones. `arrivals`:
    times, ascending, of all that came from `since` to `now`."""
    windows = list(_windows(arrivals, since, now, span))
    rises = (after - before - NOISE * sqrt(after + before) for before, after in windows)
    busiest = max((after for _, after in windows), default=0)
    return min(1.0 + max(*rises, 0.0, 0.0) / busiest, MAX_GROWTH) if busiest else 1.0


def _windows(times: Sequence[float], since: float, now: float, span: float) -> Iterator[tuple[int, int]]:
    """Arrivals of neighbouring windows, the latest first."""
    end = now
    while end - 2 * span >= since:
        edges = [bisect_left(times, end - i * span) for i in range(3)]
        yield edges[1] - edges[2], edges[0] - edges[1]
        end -= span / STEPS


class ReplicaLaw:
    """`desired` of a pool between `least` and `most`: `present` at first, which held until `now`."""

    def __init__(self, least: int, most: int, present: int, now: float) -> None:
        self._least = least
        self._most = most
        self._needs: deque[tuple[float, int]] = deque()  # (time, engines) of the last HOLD seconds
        self.desired = self.on_need(present, now)

    def on_need(self, needed: int, now: float) -> int:
        """`needed`: engines, by replays of the latest traffic. Returns the desired number."""
        self._needs.append((now, needed))
        while self._needs[0][0] <= now - HOLD:
            self._needs.popleft()
        self.desired = min(max(max(need for _, need in self._needs), self._least), self._most)
        return self.desired
