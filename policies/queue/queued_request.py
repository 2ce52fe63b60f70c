"""A request in the gateway's queue: where it waits, and which rule holds it.

Written by `policies.queue` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from policies.routing.candidates import PlacementRequest
from policies.types import FOREVER, NEVER, Endpoint


class HoldRule(StrEnum):
    """A rule of the queue that holds a request; the value is its name in Records, metrics and on the page."""

    CAP = "cap"
    RATE_LIMIT = "rate_limit"
    PREFILL = "prefill"
    PACE = "pace"
    SLACK = "slack"
    HARM = "harm"
    CALM = "calm"
    SHARE = "share"
    TURN = "turn"


FREED_BY = {
    HoldRule.CAP: "the end of an answer there: it has as many requests as its cap allows",
    HoldRule.RATE_LIMIT: "the provider's rate limit, once it lets this request pass",
    HoldRule.PREFILL: "the end of the prefill in progress there",
    HoldRule.PACE: "answers there that catch up with their TPOT budget",
    HoldRule.SLACK: "answers there that can bear the prefill, or the end of the time that this request has to spare",
    HoldRule.HARM: "answers there that can bear the prefill: it is late, and would make them late too",
    HoldRule.CALM: "answers there that use less of their pace: it is late, and its prefill is long",
    HoldRule.SHARE: "use of the engines by other tenants: its tenant is above its share",
    HoldRule.TURN: "the requests that wait for the same endpoints before it",
}


@dataclass(frozen=True, slots=True)
class Hold:
    """A rule holds a request since a time, at the endpoint where it would go."""

    rule: HoldRule
    endpoint: str
    since: float


@dataclass(slots=True, eq=False)
class QueuedRequest(PlacementRequest):
    """A request with its state in the queue."""

    assigned: Endpoint | None = None
    own_limit: bool = False  # assigned, and waiting for a limit that its caller alone has met
    prefill_s: float = 0.0  # engine time where it would go
    send_by: float = FOREVER  # last moment at which the deadline is made there, with nothing ahead
    spill_at: float = FOREVER  # last moment at which another tier still makes the deadline
    checked_at: float = NEVER  # last decision
    late_since: float = FOREVER  # entry into the best-effort queue
    returned: bool = False  # refused lately, and sent again
    hold: Hold | None = None
    held_s: dict[str, float] = field(default_factory=dict)  # by rule, without the current hold

    def __lt__(self, other: QueuedRequest) -> bool:
        return (self.deadline, self.sequence) < (other.deadline, other.sequence)

    def hold_by(self, rule: HoldRule, endpoint: str, now: float) -> None:
        """Note the rule that holds the request from now on."""
        current = self.hold
        if current is None or (current.rule, current.endpoint) != (rule, endpoint):
            self.end_hold(now)
            self.hold = Hold(rule, endpoint, now)

    def end_hold(self, now: float) -> None:
        """Note that nothing holds the request any more."""
        if self.hold is not None:
            rule, seconds = self.hold.rule.value, max(now - self.hold.since, 0.0)
            self.held_s[rule] = self.held_s.get(rule, 0.0) + seconds
            self.hold = None
