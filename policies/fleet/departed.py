"""Endpoints that have left the configuration, with what is known of their servers.

Rules:
- A reload, a probe of readiness or an answer of the DNS takes an entry away, not the server: its attempts go on, and so
  do the limits of its provider. An entry that comes back takes up the state of its server.
- A state is kept until the last attempt at the server has ended, here and at the peers, no limit and no ejection is
  left, and KEPT seconds have passed. Of states that no attempt holds, at most MOST are kept, the latest.
- A server is known again by the id of its endpoint, or by its account, in whatever pool.

`learned` and `saved_limits` are what survives of an endpoint over a restart of the gateway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from policies.fleet.endpoint_state import EndpointState
from policies.latency.api_predictor import ApiPredictor
from policies.latency.learned_state import LearnedEndpoint, kept_share
from policies.latency.tpot import MAX_SHARE, MIN_SHARE, TpotPredictor
from policies.latency.ttft_predictor import EnginePredictor, TtftPredictor
from policies.rate_limit.endpoint_limits import SavedLimits
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


def learned(state: EndpointState, now: float) -> LearnedEndpoint:
    """The state that survives a restart."""
    predictor = state.predictor
    return LearnedEndpoint(
        tpot=state.tpot_predictor.learned(),
        tpot_share=state.interference.tpot_share,
        tokens_per_event=state.interference.tokens_per_event,
        served=state.model,
        engine=predictor.learned(now) if isinstance(predictor, EnginePredictor) else None,
        api=predictor.learned(now) if isinstance(predictor, ApiPredictor) else None,
        variant_load_s=None if state.variants is None else state.variants.load_s,
    )


def saved_limits(state: EndpointState, now: float) -> SavedLimits | None:
    """The limits that survive a restart; None: none is in force."""
    refusals = {caller: one.refusal for caller, one in state.callers.states.items()}
    blocked_until = state.limits.send_limits(state.peer_load.blocked_until).blocked_until
    return state.limits.saved(blocked_until, refusals, now)


def restore_limits(state: EndpointState, saved: SavedLimits, age: float, now: float) -> None:
    """Brings back the limits of `age` seconds ago."""
    state.limits.restore(saved, age, now)
    state.callers.restore(saved.callers, age, now)


def restore(state: EndpointState, saved: LearnedEndpoint, age: float, now: float) -> None:
    """Brings back what was saved `age` seconds ago. Raises ValueError, with no change, where it does not fit."""
    predictor: TtftPredictor
    if state.pool.local and saved.engine is not None:
        predictor = EnginePredictor()
        predictor.restore(saved.engine, age, now)
    elif not state.pool.local and saved.api is not None:
        predictor = ApiPredictor(state.unix_offset, state.pool.prior_ttft)
        predictor.restore(saved.api, age, now)
    else:
        raise ValueError("an engine that was an API, or the reverse")
    tpot = TpotPredictor()
    tpot.restore(saved.tpot, age)
    state.predictor = predictor
    state.tpot_predictor = tpot
    state.interference.tpot_share = min(max(saved.tpot_share, MIN_SHARE), MAX_SHARE)
    state.interference.tokens_per_event = saved.tokens_per_event
    state.model = state.model or saved.served
    if state.variants is not None and saved.variant_load_s is not None:
        state.variants.load_s = saved.variant_load_s


def restore_all(
    states: Mapping[str, EndpointState], endpoints: Mapping[str, LearnedEndpoint], age: float, now: float
) -> list[EndpointState]:
    """Brings back what was saved `age` seconds ago, of endpoints of which less is known now. Returns these."""
    restored = []
    for name, saved in endpoints.items():
        state = states.get(name)
        if state is None or saved.samples * kept_share(age) < state.predictor.samples + 1:
            continue
        with suppress(ValueError):  # a pool that became another kind
            restore(state, saved, age, now)
            restored.append(state)
    return restored
