"""Endpoints that have left the configuration, with what is known of their servers.

Rules:
- A reload, a probe of readiness or an answer of the DNS takes an entry away, not the server: its attempts go on, and so
  do the limits of its provider. An entry that comes back takes up the state of its server.
- A state is kept until the last attempt at the server has ended, here and at the peers, no limit and no ejection is
  left, and KEPT seconds have passed. Of states that no attempt holds, at most MOST are kept, the latest.
- A server is known again by the id of its endpoint, or by its account, in whatever pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from policies.fleet.endpoint_state import EndpointState
from policies.types import Endpoint

KEPT = 60.0  # s, at least
MOST = 512  # without an attempt: as many as the pods of the largest service


class DepartedEndpoints:
    """`states`: by the id of the endpoint that has left. Where the server is in the fleet under another id, its state
    there: a request may still name the former id."""

    def __init__(self) -> None:
        self.states: dict[str, EndpointState] = {}  # the latest last
        self._left_at: dict[str, float] = {}  # by id; absent: since the latest `expire`

    def returning(self, known: Mapping[str, EndpointState], wanted: Sequence[Endpoint]) -> Mapping[str, EndpointState]:
        """States for the endpoints of a new configuration, by id: those `known` in the fleet, and those kept here. Each
        state is of one endpoint."""
        own = {state.endpoint.id: state for state in (*self.states.values(), *known.values())}
        found = {one.id: own.pop(one.id) for one in wanted if one.id in own}
        others = _by_account(own.values())
        for one in wanted:
            if one.id not in found and others.get(one.account):
                found[one.id] = others[one.account].pop()
        return found

    def keep(self, known: Mapping[str, EndpointState], members: Mapping[str, EndpointState]) -> None:
        """`members` are the fleet now, in place of `known`."""
        for name in self.states.keys() & members.keys():
            self._drop(name)
        for name, state in known.items():
            if name not in members:
                self.states[name] = state

    def expire(self, now: float) -> list[str]:
        """Drops states of which nothing is left. Returns the ids."""
        for name in self.states.keys() - self._left_at.keys():
            self._left_at[name] = now
        over = [name for name, at in self._left_at.items() if now - at >= KEPT and self.states[name].is_settled(now)]
        idle = [name for name, state in self.states.items() if not state.is_busy]
        over += [name for name in idle[: max(len(idle) - MOST, 0)] if name not in over]
        for name in over:
            self._drop(name)
        return over

    def own(self) -> Iterator[tuple[str, EndpointState]]:
        """States of servers that no entry of the fleet names."""
        return ((name, state) for name, state in self.states.items() if state.endpoint.id == name)

    def _drop(self, name: str) -> None:
        del self.states[name]
        self._left_at.pop(name, None)


def _by_account(states: Iterable[EndpointState]) -> Mapping[str, list[EndpointState]]:
    """The state with most attempts last."""
    found: dict[str, list[EndpointState]] = {}
    for state in sorted(states, key=lambda one: one.inflight.in_flight):
        if state.endpoint.account:
            found.setdefault(state.endpoint.account, []).append(state)
    return found
