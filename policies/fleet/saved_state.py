"""Learned state of an endpoint, over a restart of the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from policies.fleet.endpoint_state import EndpointState
from policies.latency.api_predictor import ApiPredictor
from policies.latency.learned_state import LearnedEndpoint, kept_share
from policies.latency.tpot import MAX_SHARE, MIN_SHARE, TpotPredictor
from policies.latency.ttft_predictor import EnginePredictor, TtftPredictor
from policies.rate_limit.saved_limits import SavedLimits


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
        adapter_load_s=None if state.adapters is None else state.adapters.load_s,
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
    if state.adapters is not None and saved.adapter_load_s is not None:
        state.adapters.load_s = saved.adapter_load_s


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
