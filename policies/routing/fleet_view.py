"""Learned state of the fleet, as decisions read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from policies.routes.route import Route
from policies.types import Candidate, Completion, Load, PoolEstimate, Quantiles


class FleetView(Protocol):
    """Learned state, read-only to decisions; implemented by `policies.fleet.fleet_reader.FleetReader`."""

    def candidates(
        self,
        loads: Mapping[str, Load],
        prompt: PoolEstimate,
        tier: int,
        price: float,
        now: float,
        left: float,
    ) -> list[Candidate]:
        """Cache hits and forecasts of a prompt sent at `now` to these endpoints of one pool, in their order.

        `loads`: by endpoint id; `left`: s of the TTFT budget.
        """
        ...

    def tpot_chance(self, candidate: Candidate, budget: float, now: float) -> float:
        """Probability of an answer sent there at `now` to keep the TPOT budget, s per token."""
        ...

    def tpot_chance_at_rest(self, candidate: Candidate, budget: float) -> float:
        """The same at an endpoint that prefills nothing."""
        ...

    def completion(self, candidate: Candidate, tokens: Quantiles, now: float) -> Completion | None:
        """Seconds of an answer of so many tokens, sent there at `now`; None: nothing is known of its pace there."""
        ...

    def prompt_error(self, pool: str, prompt: PoolEstimate) -> int:
        """Tokens by which the engine's count of the prompt may exceed the estimate, nearly always."""
        ...

    def may_use_api(self, route: Route, usd: float, now: float) -> bool:
        """An attempt of this cost keeps within `limits.external` of the route."""
        ...
