"""The gateway's own queue (first cut)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from policies.facts import FOREVER, Ask, Decision, PromptEstimate
from policies.fleet import Fleet
from policies.route import Route
from policies.tiers import decide


class WaitingRoom:
    def __init__(self) -> None:
        self.held: dict[Hashable, Any] = {}
        self.wake_at = FOREVER

    def enter(self, ticket: Any, ask: Ask, estimate: PromptEstimate, route: Route, now: float, seed: int) -> None:
        self.held[ticket] = (ask, estimate, route, seed)

    def release(self, fleet: Fleet, now: float) -> list[tuple[Any, Decision]]:
        out = []
        for ticket, (ask, estimate, route, seed) in self.held.items():
            out.append((ticket, decide(ask, estimate, route, fleet.snapshot(now), fleet, now, seed)))
        self.held.clear()
        return out
