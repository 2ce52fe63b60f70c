"""A request in the gateway's queue: where it waits, and which rule holds it.

Written by `policies.queue` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

from policies.routing.placement_request import PlacementRequest
from policies.types import FOREVER, NEVER, Candidate, Endpoint


class HoldRule(str):
    """A rule of the queue, or of a part of it, that holds a request. The text is its name in Records, metrics and on
    the page; `freed_by`: the event that frees the request."""

    freed_by: str
    CAP: ClassVar[HoldRule]
    RATE_LIMIT: ClassVar[HoldRule]
    PREFILL: ClassVar[HoldRule]
    BLOCKS: ClassVar[HoldRule]
    PACE: ClassVar[HoldRule]
    HARM: ClassVar[HoldRule]
    CALM: ClassVar[HoldRule]
    TURN: ClassVar[HoldRule]

    def __new__(cls, name: str, freed_by: str) -> Self:
        rule = super().__new__(cls, name)
        rule.freed_by = freed_by
        return rule


HoldRule.CAP = HoldRule("cap", "the end of an answer there: it has as many requests as its cap allows")
HoldRule.RATE_LIMIT = HoldRule("rate_limit", "the provider's rate limit, once it lets this request pass")
HoldRule.PREFILL = HoldRule("prefill", "the end of the prefill in progress there")
HoldRule.BLOCKS = HoldRule("blocks", "the end of answers there: its KV cache is full")
HoldRule.PACE = HoldRule("pace", "answers there that catch up with their TPOT budget")
HoldRule.HARM = HoldRule("harm", "answers there that can bear the prefill: it is late, and would make them late too")
HoldRule.CALM = HoldRule("calm", "answers there that use less of their pace: it is late")
HoldRule.TURN = HoldRule("turn", "the requests that wait for the same endpoints before it")


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
    answer_s: float = 0.0  # expected time of the whole answer there; of a late request
    checked_at: float = NEVER  # last decision
    late_since: float = FOREVER  # entry into the best-effort queue
    returned: bool = False  # refused lately, and sent again
    hold: Hold | None = None
    held_s: dict[str, float] = field(default_factory=dict)  # by rule, without the current hold

    def __lt__(self, other: QueuedRequest) -> bool:
        return (self.deadline, self.sequence) < (other.deadline, other.sequence)

    @property
    def is_late(self) -> bool:
        """In the best-effort queue."""
        return self.late_since < FOREVER

    @property
    def has_other_places(self) -> bool:
        """The request has a deadline, and the route more than one tier, or divided ones."""
        return self.deadline < FOREVER and (len(self.route.tiers) > 1 or self.route.divide is not None)

    def plan_late(self, chosen: Candidate) -> None:
        """Note the times at an endpoint where the request would go once that is idle."""
        forecast = chosen.forecast
        self.prefill_s = forecast.prefill
        self.answer_s = forecast.p50 + self.estimate.output_tokens * forecast.tpot

    def hold_by(self, rule: HoldRule, endpoint: str, now: float) -> None:
        """Note the rule that holds the request from now on."""
        current = self.hold
        if current is None or (current.rule, current.endpoint) != (rule, endpoint):
            self.end_hold(now)
            self.hold = Hold(rule, endpoint, now)

    def hold_here(self, rule: HoldRule, endpoint: str, now: float) -> None:
        """Note a rule of the endpoint where the request waits. A request that waits there because an API of a better
        tier refuses stays held by that rate limit."""
        if self.hold is None or self.hold.rule is not HoldRule.RATE_LIMIT:
            self.hold_by(rule, endpoint, now)

    def end_hold(self, now: float) -> None:
        """Note that nothing holds the request any more."""
        if self.hold is not None:
            rule, seconds = str(self.hold.rule), max(now - self.hold.since, 0.0)
            self.held_s[rule] = self.held_s.get(rule, 0.0) + seconds
            self.hold = None
