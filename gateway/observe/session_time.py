"""Time taken by the steps of a session, and the rest of the time that the route promises for all steps together.

Rules:
- A session is a conversation that the client names; a user's name alone names none.
- Time counts while a step is in the gateway, from arrival to last byte. Parallel steps count once, up to the last one.
  Tools, thoughts and pauses between steps are the client's own.
- A session without a step for FORGOTTEN seconds is over: another of the same name begins anew. At most SESSIONS are
  known; the one without a step for the longest time is forgotten first.
- Steps that a process does not serve, it does not know.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from gateway.observe.record import Record

SESSIONS = 8192
FORGOTTEN = 3600.0  # s


@dataclass(slots=True)
class SessionTime:
    """`spent`: s of all steps; `since`, `until`: the latest stretch of time with a step."""

    spent: float
    since: float
    until: float

    def add(self, since: float, until: float) -> None:
        """Count a step that has ended; steps end in any order."""
        if since >= self.until:
            self.spent += until - since
            self.since, self.until = since, until
            return
        before = self.until - self.since
        self.since, self.until = min(self.since, since), max(self.until, until)
        self.spent += self.until - self.since - before


class SessionTimes:
    """Of the latest sessions, by route and the Record's name of the session."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[str, int], SessionTime] = OrderedDict()

    def left(self, record: Record) -> float | None:
        """Seconds left for the session after a step that has ended; below 0: over its budget. None: no budget."""
        if record.session_budget is None:
            return None
        key, end = (record.route, record.session), record.arrival + record.total
        known = self._of.pop(key, None)
        if known is None or record.arrival - known.until > FORGOTTEN:
            known = SessionTime(0.0, record.arrival, record.arrival)
        known.add(record.arrival, end)
        self._of[key] = known
        if len(self._of) > SESSIONS:
            self._of.popitem(last=False)
        return record.session_budget - known.spent
