"""What a pool will be asked for, and which of it is worth starting when that is more than it can do.

An answer that keeps a pace of p seconds a token leaves its engine, of every second, 1 - d/p for all else: for
prefills, and for the contexts that every step reads (d: what a step takes besides). So a request costs its prefill,
and its own context once per token of its answer. Of requests that cost more than there is, most are good if those
are taken that cost least: a knapsack in which all are worth the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from gateway.replay.exact_engine import Machine
from gateway.replay.traces import BLOCK, Arrival
from policies.routes.route import Route
from policies.types import FOREVER

AHEAD = 10.0  # s that are foreseen: as long as answers take
OFTEN = 0.5  # s between two looks


class Demand:
    """`arrivals`: all of the replay; those count that have a deadline, and want this pool first."""

    def __init__(
        self, pool: str, machines: Sequence[Machine], arrivals: Sequence[Arrival], routes: Mapping[str, Route]
    ) -> None:
        self._machines = machines
        self._budgets = {
            name: route.ttft.budget for name, route in routes.items() if route.ttft and route.tiers[0].pool == pool
        }
        paced = (route for name, route in routes.items() if route.tpot and name in self._budgets)
        self._pace = min((route.tpot.budget for route in paced if route.tpot), default=FOREVER)
        self._costs = list(self._foreseen(arrivals)) if machines else []
        self._limit, self._until = FOREVER, 0.0

    def _foreseen(self, arrivals: Iterable[Arrival]) -> Iterable[tuple[float, float]]:
        """When each comes and what it costs, with all before it computed; not those that no idle engine could do."""
        known = set[int]()
        for arrival in arrivals:
            if (budget := self._budgets.get(arrival.route)) is None:
                continue
            new = next((i for i, block in enumerate(arrival.hashes) if block not in known), len(arrival.hashes))
            known.update(arrival.hashes)
            hit = min(new * BLOCK, (arrival.prompt_tokens - 1) // BLOCK * BLOCK)
            if self._machines[0].prefill(arrival.prompt_tokens, hit)[0] < budget:
                yield arrival.at, self.cost(arrival, hit)

    def cost(self, arrival: Arrival, hit: int) -> float:
        """Seconds that a request takes from all others."""
        context = arrival.prompt_tokens + arrival.output_tokens / 2
        machine = self._machines[0]
        return machine.compute(arrival.prompt_tokens, hit) + arrival.output_tokens * machine.attention(context)

    def limit(self, now: float, waiting: Iterable[float] = ()) -> float:
        """What a request may cost: FOREVER where there is time for all."""
        if now >= self._until:
            self._until, self._limit = now + OFTEN, FOREVER
            left = (AHEAD + max(self._budgets.values(), default=0.0)) * sum(m.spare(self._pace) for m in self._machines)
            for cost in sorted([*waiting, *(cost for _, cost in self.comes(now, now + AHEAD))]):
                left -= cost
                if left < 0:
                    self._limit = cost
                    break
        return self._limit

    def comes(self, start: float, end: float) -> Sequence[tuple[float, float]]:
        """Those of this time, with what each costs."""
        return self._costs[bisect_left(self._costs, (start,)) : bisect_left(self._costs, (end,))]
