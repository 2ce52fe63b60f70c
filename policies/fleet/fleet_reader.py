"""Learned state of the fleet, as decisions and pages read it.

Rules:
- Reads the states of endpoints, pools and attempts that `policies.fleet.fleet.Fleet` alone writes: a question changes
  nothing. All times are seconds of one monotonic clock.
- The loads of a moment are an argument: `Fleet.snapshot` and `Fleet.snapshot_for` give these.

Fleet snapshots for decisions: a shared snapshot, and a snapshot for each caller with own evidence.

Rules:
- A snapshot stays the same value until an endpoint's load is marked as changed, or, for loads that change with time,
  until REFRESH seconds have passed.
- A caller without own evidence (`policies.fleet.caller_evidence`) gets the shared snapshot. While no caller has own
  evidence, the check costs one comparison.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from policies.fleet.beliefs import Belief
from policies.fleet.departed import DepartedEndpoints, learned, saved_limits
from policies.fleet.endpoint_state import STALE, EndpointState, EndpointStatistics
from policies.fleet.engine_load import EngineLoad, EngineRates
from policies.fleet.in_flight_attempt import InFlightAttempt
from policies.fleet.pool_state import PoolState, without_larger_window
from policies.fleet.route_meters import RouteMeters
from policies.latency.learned_state import LearnedEndpoint
from policies.latency.token_counts import TokenScale
from policies.rate_limit.endpoint_limits import SavedLimits
from policies.route_hooks import Meter
from policies.routes.route import Route
from policies.types import (
    MEDIAN,
    NEVER,
    Candidate,
    Completion,
    Endpoint,
    FirstTokenOutlook,
    FleetSnapshot,
    Forecast,
    Health,
    Load,
    Pool,
    PoolEstimate,
    Quantiles,
)

NOTHING: tuple[int, ...] = ()


class FleetReader:
    """Implements `policies.routing.fleet_view.FleetView`. `states`: by endpoint id; `pools`: by name."""

    def __init__(
        self,
        states: Mapping[str, EndpointState],
        pools: Mapping[str, PoolState],
        attempts: Mapping[Hashable, InFlightAttempt],
        meters: RouteMeters,
        departed: DepartedEndpoints,
    ) -> None:
        self._states, self._pools = states, pools
        self._attempts = attempts
        self._meters = meters
        self._departed = departed

    def candidates(
        self, loads: Mapping[str, Load], prompt: PoolEstimate, tier: int, price: float, now: float, left: float
    ) -> list[Candidate]:
        """Predictions for the prompt, sent at `now`, at each endpoint of `loads`, all of one pool."""
        candidates, states, variant, load_s = list[Candidate](), self._states, prompt.variant, 0.0
        tokens, blocks = prompt.tokens, prompt.blocks
        is_local = bool(loads) and states[next(iter(loads))].pool.local
        first = blocks.hashes[0] if blocks.hashes else None
        for name, load in loads.items():
            state, wait, rtt, hit, to_load = states[name], 0.0, 0.0, 0, NOTHING
            predictor, cache, network = state.predictor, state.cache, state.network
            if not is_local:
                predictor = predictor.of(prompt.job_class)
            if network is not None:
                rtt, wait = network.network_s()
                wait += rtt
            if first in cache.index.runs:  # of most endpoints it is not
                hit = cache.hit(prompt, state.block_size)
            if variant and state.variants is not None:
                variant_wait = state.variants.wait(variant, now)
                wait, load_s = wait + variant_wait.seconds, variant_wait.load_s
            if cache.residency is not None:
                hit, to_load = state.loadable(prompt, hit, load)
                if to_load:
                    wait += state.kv_loads.seconds(to_load)
            forecast = predictor.predict(load, tokens, hit, now, wait, load_s)
            chance = forecast.probability(left)
            # By position: names take twice as long, and this is the loop over all endpoints of a decision.
            found = Candidate(state.endpoint, tier, tokens, hit, forecast, chance, price, load, blocks)
            if to_load:
                found.to_load = to_load
            if rtt:
                found.rtt = rtt
            candidates.append(found)
        return candidates

    def outlook(
        self, key: Hashable, upcoming: Candidate, load: Load | None, prompt: PoolEstimate, now: float
    ) -> FirstTokenOutlook | None:
        """The first token of a pending attempt, and of one sent to `upcoming` now; `load`: there, with `prompt` for it;
        None: it has left the fleet. Of an API nothing is known beyond the forecast made before."""
        attempt, fresh = self._attempts.get(key), upcoming.forecast
        if attempt is None:
            return None
        if load is not None and load.health is not Health.ASLEEP:
            fresh = self.fresh_forecast(upcoming.endpoint.id, load, prompt, now)
        known = attempt.outlook(key, now) or (attempt.sent_at, attempt.candidate.forecast, NEVER)
        return FirstTokenOutlook(*known, fresh)

    def fresh_forecast(self, endpoint_id: str, load: Load, prompt: PoolEstimate, now: float) -> Forecast:
        """Forecast of the prompt, sent there now."""
        (candidate,) = self.candidates({endpoint_id: load}, prompt, 0, 0.0, now, 0.0)
        return candidate.forecast

    def continuation_ttft(self, endpoint_id: str, load: Load, prompt: PoolEstimate, written: int, now: float) -> float:
        """Expected seconds to the first token of a prompt and `written` tokens of its answer, sent there now."""
        longer = replace(prompt, tokens=prompt.counted_tokens() + written)
        return self.fresh_forecast(endpoint_id, load, longer, now).p50

    def tpot_chance(self, candidate: Candidate, budget: float, now: float) -> float:
        """Probability of an answer sent there now to keep the TPOT budget."""
        return self._states[candidate.endpoint.id].tpot_predictor.spread.probability(candidate.load, budget, now)

    def tpot_chance_at_rest(self, candidate: Candidate, budget: float) -> float:
        """Probability to keep the TPOT budget at the endpoint while no prefill disturbs the answer."""
        predictor, load = self._states[candidate.endpoint.id].tpot_predictor, candidate.load
        return predictor.at_rest(load.running, load.context).keepable(budget)

    def completion(self, candidate: Candidate, tokens: Quantiles, now: float) -> Completion | None:
        """Seconds of an answer of so many tokens, sent there now; None: nothing is known of its pace there."""
        state, load = self._states[candidate.endpoint.id], candidate.load
        if not state.pace.is_known(now):
            return None
        tpot = state.tpot_of(load, candidate.prompt_tokens)
        return Completion(candidate.forecast, tokens, state.pace.quantiles(now), tpot)

    def meter(self, route: Route) -> Meter | None:
        """None: no hook of the route has one."""
        return self._meters.of(route)

    def hit(self, endpoint: Endpoint, prompt: PoolEstimate) -> int:
        """Prompt tokens (the engine's) believed cached at the endpoint: whole blocks, always less than the prompt."""
        state = self._states[endpoint.id]
        return state.cache.hit(prompt, state.block_size)

    def provider_hit(self, endpoint: Endpoint, prompt: PoolEstimate, now: float) -> int:
        """Prompt tokens believed held in the prompt cache of the provider, of an API that has one."""
        state = self._states[endpoint.id]
        terms = state.pool.prompt_cache
        return 0 if terms is None else state.provider_cache.hit(prompt, terms, now)

    def forecast(self, endpoint: Endpoint, load: Load, prompt_tokens: int, hit: int, now: float) -> Forecast:
        """TTFT from a send at `now` to the first token, and TPOT."""
        state = self._states[endpoint.id]
        wait = 0.0 if state.network is None else sum(state.network.network_s())
        return state.predictor.predict(load, prompt_tokens, hit, now, wait)

    def token_scale(self, pool: str) -> TokenScale:
        """Correction of the pool's prompt counts; the prior, for a pool which a reload has just removed."""
        state = self._pools.get(pool)
        return TokenScale() if state is None else state.scale

    def prompt_error(self, pool: str, prompt: PoolEstimate) -> int:
        """Tokens by which the engine's count of the prompt may exceed the estimate, nearly always."""
        return prompt.margin + self.token_scale(pool).error(prompt.text_tokens, prompt.messages)

    def tpot_alone(self, pool: str) -> float | None:
        """Seconds per token of an answer alone on the fastest engine, at rest; None: not learned yet."""
        state = self._pools.get(pool)
        return None if state is None else state.tpot_alone()

    def decode_seconds(self, route: Route, tokens: Quantiles) -> float:
        """Expected from the first token to the last of an answer alone on the fastest engine of a route that promises
        `total` alone; 0: not known, or another route."""
        if route.ttft is not None or route.total is None:
            return 0.0
        known = [alone for pool in route.pools if (alone := self.tpot_alone(pool)) is not None]
        return tokens[MEDIAN] * min(known, default=0.0)

    def prefill_seconds(self, endpoint: str, tokens: int, hit: int) -> float:
        """Engine time of `tokens` behind `hit` cached ones, as learned; 0: an API, or unknown."""
        state = self._states.get(endpoint)
        return 0.0 if state is None else state.predictor.prefill_seconds(tokens, tokens * (hit + 0.5 * tokens))

    # ----------------------------------------------------------------- endpoints

    def knows(self, endpoint_id: str) -> bool:
        """In the fleet, or has left it and may come back."""
        return endpoint_id in self._states or endpoint_id in self._departed.states

    def pool_of(self, endpoint_id: str) -> str:
        return self._states[endpoint_id].pool.name

    def is_local(self, endpoint_id: str) -> bool:
        return self._states[endpoint_id].pool.local

    def cap(self, endpoint_id: str, now: float, caller: str) -> int | None:
        """Maximum of requests in progress, as the caller has met with it."""
        return self._states[endpoint_id].cap(now, caller)

    def last_used_at(self, endpoint_id: str) -> float:
        """Time of the latest attempt."""
        return self._states[endpoint_id].last_used_at

    def engine_loads(self, now: float) -> Mapping[str, EngineLoad]:
        """Recent scrapes, by endpoint."""
        return {name: state.engine for name, state in self._states.items() if now - state.scraped_at <= STALE}

    def engine_kv_tokens(self, endpoint_id: str) -> int:
        """Size of the engine's KV cache by its own report; 0: none."""
        state = self._states.get(endpoint_id)
        return 0 if state is None else (state.engine.kv_blocks or 0) * state.block_size

    def engine_rates(self, now: float) -> Mapping[str, EngineRates]:
        """By endpoint, where the engine was scraped recently."""
        return {name: state.rates for name, state in self._states.items() if now - state.scraped_at <= STALE}

    def rtts(self) -> Mapping[str, float]:
        """Seconds of a round trip on the network, by endpoint, where measured."""
        return {name: rtt for name, state in self._states.items() if (rtt := state.rtt)}

    def statistics(self, endpoint_id: str, now: float) -> EndpointStatistics:
        return self._states[endpoint_id].statistics(now)

    def learned(self, endpoint_id: str, now: float) -> LearnedEndpoint | None:
        """The state that survives a restart; None: none yet. Raises ValueError for values that must not be kept."""
        state = self._states.get(endpoint_id)
        return None if state is None or not state.predictor.samples else learned(state, now)

    def saved_limits(self, endpoint_id: str, now: float) -> SavedLimits | None:
        """The limits that survive a restart; None: none is in force."""
        state = self._states.get(endpoint_id)
        return None if state is None else saved_limits(state, now)

    def beliefs(self, loads: Mapping[str, Load], now: float) -> Mapping[str, tuple[Belief, ...]]:
        """Beliefs that keep requests away, by endpoint; endpoints without any are left out."""
        found = {name: self._states[name].believed(load, now) for name, load in loads.items()}
        return {name: believed for name, believed in found.items() if believed}

    def limits_in_force(self, now: float) -> Mapping[str, tuple[Belief, ...]]:
        """Limits for which requests of all callers, or of some, do not go there now, by endpoint."""
        may_be = ((name, state) for name, state in self._states.items() if state.may_be_closed(now))
        found = {name: state.limits_in_force(now) for name, state in may_be}
        return {name: limits for name, limits in found.items() if limits}

    def is_outlier(self, endpoint_id: str) -> bool:
        """The endpoint refuses requests answered by other endpoints of the pool."""
        state = self._states.get(endpoint_id)
        return state is not None and self._pools[state.pool.name].is_outlier(state)

    def without_larger_window(self, pool: str) -> frozenset[str]:
        """Pools with no room for what exceeds the context window of `pool`. An unknown window may have room."""
        return without_larger_window({name: state.pool for name, state in self._pools.items()}, pool)

    # ----------------------------------------------------------------- attempts in flight

    def prompt_tokens(self, key: Hashable, candidate: Candidate) -> int:
        """Of an attempt, by the count that follows the estimate while it is in flight."""
        attempt = self._attempts.get(key)
        return candidate.prompt_tokens if attempt is None else attempt.prompt_tokens

    def overtaken(self, key: Hashable) -> bool:
        """The endpoint has answered an attempt that was sent later. Engines start prompts in the order of arrival."""
        attempt = self._attempts.get(key)
        return attempt is not None and attempt.state.newest_answered > attempt.sent_at

    def attempts_at(self, endpoint_id: str) -> list[Hashable]:
        """Attempts in progress there."""
        return [key for key, attempt in self._attempts.items() if attempt.state.endpoint.id == endpoint_id]

    def answering(self) -> list[Hashable]:
        """Attempts with a first token and no end yet."""
        return [key for key, attempt in self._attempts.items() if attempt.first_at is not None]


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
