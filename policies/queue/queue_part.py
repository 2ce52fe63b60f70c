"""Hooks of the queue for parts: a part hears what becomes of requests, and has a say in where and when those wait.

The queue asks each part in order; a part that does not define a method is never asked for it. Questions change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from policies.queue.queued_request import HoldRule, QueuedRequest
from policies.types import Candidate, Load, Pool


class IdleEngine(NamedTuple):
    """An idle engine to which a request behind all in time would go, with a prefill of `prefill_s` seconds there."""

    load: Load
    pool: Pool
    prefill_s: float
    late: bool  # requests with a deadline wait for an idle engine
    now: float


class BestEffortReach(NamedTuple):
    """Places of a request behind all in time: any tier, or the preferred; each endpoint of a pool, or the
    fastest."""

    any_tier: bool
    each_endpoint: bool


class QueuePart:
    """A part of the queue. This one does nothing."""

    def behind(self, queued: QueuedRequest) -> HoldRule | None:
        """The rule by which a request waits behind all in time; None: it may be in time."""
        return None

    def hold(self, queued: QueuedRequest, engine: IdleEngine) -> HoldRule | None:
        """The rule that holds a request behind all in time at an idle engine; None: it may begin."""
        return None

    def reach(self, queued: QueuedRequest, now: float) -> BestEffortReach | None:
        """None: not a request of this part."""
        return None

    def precedence(self, queued: QueuedRequest) -> tuple[float, ...]:
        """Order among the first of all best-effort queues: the least begins first."""
        return ()

    def on_dispatched(self, queued: QueuedRequest, chosen: Candidate, now: float) -> None:
        """The request leaves the queue for an endpoint."""

    def on_held(self, queued: QueuedRequest, now: float) -> None:
        """The request waits behind all in time from now on."""

    def on_begun(self, queued: QueuedRequest, now: float) -> None:
        """A request that `on_held` told of begins."""

    def on_left(self, queued: QueuedRequest, now: float) -> None:
        """A request that `on_held` told of does not begin: it is refused, moves, or its caller is gone."""


@dataclass(frozen=True, slots=True)
class QueueHooks:
    """The methods that parts define, in the order of the parts."""

    behind: tuple[Callable[[QueuedRequest], HoldRule | None], ...] = ()
    hold: tuple[Callable[[QueuedRequest, IdleEngine], HoldRule | None], ...] = ()
    reach: tuple[Callable[[QueuedRequest, float], BestEffortReach | None], ...] = ()
    precedence: tuple[Callable[[QueuedRequest], tuple[float, ...]], ...] = ()
    on_dispatched: tuple[Callable[[QueuedRequest, Candidate, float], None], ...] = ()
    on_held: tuple[Callable[[QueuedRequest, float], None], ...] = ()
    on_begun: tuple[Callable[[QueuedRequest, float], None], ...] = ()
    on_left: tuple[Callable[[QueuedRequest, float], None], ...] = ()

    def behind_rule(self, queued: QueuedRequest) -> HoldRule | None:
        """The first rule by which the request waits behind all in time."""
        for behind in self.behind:
            if (rule := behind(queued)) is not None:
                return rule
        return None


def bound_hooks(parts: Sequence[QueuePart]) -> QueueHooks:
    """The hooks of these parts, without methods that a part leaves as they are."""

    def bound(name: str) -> Any:
        defining = [part for part in parts if getattr(type(part), name) is not getattr(QueuePart, name)]
        return tuple(getattr(part, name) for part in defining)

    return QueueHooks(**{each.name: bound(each.name) for each in fields(QueueHooks)})
