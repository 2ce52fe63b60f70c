"""How every endpoint stands: the snapshot that decisions read, and what siblings tell of it and are told.

Rules:
- It is the part of a fleet (`policies.fleet.fleet`) that knows no attempt, and the fleet inherits it: both are asked
  for each
  request, and to pass a question on would cost more than most answers.
- Whatever changes an endpoint's state says so by `_touch`: the next snapshot and the siblings then hear of it. What is
  heard from siblings is shown and never told on.
- A snapshot is a value, and the same one until something changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from policies.fleet.circuit_breaker import BreakerState
from policies.fleet.endpoint_state import STALE, EndpointState
from policies.fleet.membership import Membership
from policies.fleet.peers import NOTHING, PeerLink, PeerLoad
from policies.prefix_cache.prefix_caches import PrefixCaches
from policies.types import NEVER, EngineLoad, FleetSnapshot, Health, Load, Pool

REFRESH = 0.1  # s: how long a snapshot lets time drain what is ahead before it asks the ledger again

_UP = Health.UP  # a member is slow to look up in its enumeration


class Standing:
    """Implements `policies.fleet.peers.Reader`. All times are seconds of one monotonic clock."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self.siblings: PeerLink | None = None  # other processes before the same engines
        self.on_untold: Callable[[], None] = self.publish  # they are to be told of something, now or soon
        self._untold: dict[EndpointState, None] = {}
        self.caches = PrefixCaches()  # whoever hears engines tell of them writes there
        self.cache_lost: set[str] = set()  # endpoints without a cache, that nobody has cared for yet
        self._members = Membership(self.caches)
        self._recheck = NEVER
        self.reload(pools)

    def reload(self, pools: Iterable[Pool]) -> None:
        """Another configuration: what stays keeps what was learned of it."""
        before = self._members.states.keys()
        joined = self._members.reload(pools)
        self._states, self._groups = self._members.states, self._members.groups
        self.cache_lost = (self.cache_lost | joined) & self._states.keys()
        if self.siblings is not None:
            for gone in before - self._states.keys():
                self.siblings.publish(gone, NOTHING)
        self._changed = dict.fromkeys(self._states.values())  # in the order in which they did
        self._snapshot = FleetSnapshot(NEVER, {name: group.pool for name, group in self._groups.items()}, {})

    # ----------------------------------------------------------------- read by decisions

    def snapshot(self, now: float) -> FleetSnapshot:
        """The fleet as of `now`; the same value until something changes."""
        if self.siblings is not None:
            self.siblings.merge(self, now)
        if not self._changed and now < self._recheck:
            return self._snapshot
        if now >= self._recheck:
            moving = (self._states[name] for name, load in self._snapshot.loads.items() if _moves(load))
            self._changed.update(dict.fromkeys(moving))
            self._recheck = now + REFRESH
        if self._changed:
            loads = dict(self._snapshot.loads)
            for state in self._changed:
                if self._states.get(name := state.endpoint.id) is state:  # a reload may have removed it
                    loads[name] = state.load(now)
            self._changed.clear()
            self._snapshot = FleetSnapshot(now, self._snapshot.pools, loads)
        return self._snapshot

    def pool(self, name: str) -> Pool:
        return self._groups[name].pool

    def knows(self, endpoint_id: str) -> bool:
        return endpoint_id in self._states

    def is_local(self, endpoint_id: str) -> bool:
        return self._states[endpoint_id].local

    def used_at(self, endpoint_id: str) -> float:
        """When an attempt was last sent there."""
        return self._states[endpoint_id].used_at

    def reported(self, now: float) -> Mapping[str, EngineLoad]:
        """What engines said of themselves lately, by endpoint."""
        return {name: state.engine for name, state in self._states.items() if now - state.scraped_at <= STALE}

    # ----------------------------------------------------------------- told by siblings

    def burdened(self, endpoint_id: str, burden: PeerLoad, now: float) -> None:
        """All of them together have this under way there."""
        if (state := self._states.get(endpoint_id)) is not None:
            state.on_peer_load(burden, now)
            if burden.down_at > NEVER or state.breaker.peer_reported_down:
                state.breaker.peer_reported(burden.down_at if self._is_spared(state) else NEVER, now)
            self._changed[state] = None

    def hinted(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        """One of them sent a prompt of these blocks there."""
        if (state := self._states.get(endpoint_id)) is not None and state.local:
            self.caches.index.record(endpoint_id, hashes)

    def publish(self) -> None:
        """Siblings, of what we have under way where that has changed."""
        untold, self._untold = self._untold, {}
        for state in untold:
            if self.siblings is not None and self._is_member(state):
                burden = state.burden
                if burden.down_at > NEVER and self._finds_most_down(state):
                    burden = burden._replace(down_at=NEVER)
                self.siblings.publish(state.endpoint.id, burden)

    # ----------------------------------------------------------------- what follows from it

    def _touch(self, state: EndpointState) -> None:
        self._changed[state] = None
        if self.siblings is not None:
            first = not self._untold
            self._untold[state] = None
            if first:
                self.on_untold()

    def _is_spared(self, state: EndpointState) -> bool:
        """Another one of its pool is up, so that hearsay may take it."""
        members = self._groups[state.pool.name].members
        return any(one.breaker.state is BreakerState.CLOSED for one in members if one is not state)

    def _finds_most_down(self, state: EndpointState) -> bool:
        """Of its pool."""
        members = self._groups[state.pool.name].members
        return 2 * sum(one.breaker.down_at > NEVER for one in members) > len(members)

    def _is_member(self, state: EndpointState) -> bool:
        """Of one that a reload removed, attempts may still end; another may have its name by then."""
        return self._states.get(state.endpoint.id) is state

    def _lost_its_cache(self, state: EndpointState) -> None:
        """It is another engine, or nobody is there: whoever comes back has an empty one."""
        if not self._is_member(state):
            return
        self.caches.forget(state.endpoint.id)
        self.cache_lost.add(state.endpoint.id)


def _moves(load: Load) -> bool:
    """Whether time alone changes it."""
    return load.prefilling > 0 or load.health is not _UP or load.running + load.waiting > load.in_flight
