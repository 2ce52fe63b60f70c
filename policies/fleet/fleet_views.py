"""Fleet snapshots for decisions: a shared snapshot, and a snapshot for each caller with own evidence.

Rules:
- A snapshot stays the same value until an endpoint's load is marked as changed, or, for loads that change with time,
  until REFRESH seconds have passed.
- A caller without own evidence (`policies.fleet.caller_evidence`) gets the shared snapshot. While no caller has own
  evidence, the check costs one comparison.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.fleet.endpoint_state import EndpointState
from policies.types import NEVER, FleetSnapshot, Health, Load, Pool

REFRESH = 0.1  # s after which a snapshot is computed anew without an event: time drains queues


class FleetViews:
    """The loads as of the latest snapshot, and what has changed since."""

    def __init__(self) -> None:
        self._states: Mapping[str, EndpointState] = {}
        self.changed: dict[EndpointState, None] = {}  # since the snapshot, in order
        self.disputed: dict[EndpointState, None] = {}  # with evidence of single callers
        self._recheck_at = NEVER
        self._shared = FleetSnapshot(NEVER, {}, {})

    def reload(self, states: Mapping[str, EndpointState], pools: Mapping[str, Pool]) -> None:
        self._states = states
        self.changed = dict.fromkeys(states.values())
        self.disputed = dict.fromkeys(state for state in states.values() if state.callers.states)
        self._shared = FleetSnapshot(NEVER, pools, {})

    def mark(self, state: EndpointState) -> None:
        """The load of the endpoint has changed."""
        self.changed[state] = None
        if state.callers.states:
            self.dispute(state)

    def dispute(self, state: EndpointState) -> None:
        """Single callers have evidence of the endpoint."""
        if self._states.get(state.endpoint.id) is state:  # not removed by a reload
            self.disputed[state] = None

    def at(self, now: float) -> FleetSnapshot:
        """For all callers."""
        if now >= self._recheck_at:
            self._recheck(now)
        if self.changed:
            loads = dict(self._shared.loads)
            for state in self.changed:
                if self._states.get(state.endpoint.id) is state:
                    state.advance(now)
                    loads[state.endpoint.id] = state.load(now)
            self.changed.clear()
            self._shared = FleetSnapshot(now, self._shared.pools, loads)
        return self._shared

    def _recheck(self, now: float) -> None:
        """Mark loads that change with time, and drop expired evidence of callers."""
        self._recheck_at = now + REFRESH
        for name, load in self._shared.loads.items():
            if load.prefilling or load.health is not Health.UP or load.running + load.waiting > load.in_flight:
                self.changed[self._states[name]] = None
        for state in [*self.disputed]:
            state.callers.expire(now)
            if not state.callers.states or self._states.get(state.endpoint.id) is not state:
                del self.disputed[state]

    def for_caller(self, caller: str, now: float) -> FleetSnapshot:
        """As `at`, while nothing is `disputed`."""
        shared = self.at(now)
        own = {
            state.endpoint.id: state.load_for(caller, shared.loads[state.endpoint.id], now)
            for state in self.disputed
            if caller in state.callers.states
        }
        return FleetSnapshot(shared.at, shared.pools, {**shared.loads, **own}) if own else shared

    def load_for(self, caller: str, endpoint_id: str, now: float) -> Load:
        """Raises KeyError where the endpoint is not in the fleet."""
        load, state = self.at(now).loads[endpoint_id], self._states[endpoint_id]
        return state.load_for(caller, load, now) if state in self.disputed else load
