"""Events of the fleet: the single writer of all beliefs behind decisions.

Rules:
- Events are reported here (`on_sent`, `on_first_token`, `on_ended`, `on_scrape`, ...). Decisions read: the loads of a
  moment as a `snapshot`, and all else of the `view`. All times are seconds of one monotonic clock.
- An attempt counts from the moment of sending: otherwise bursts would herd onto one engine.
- An event may come twice, late, or for a removed key or endpoint: nothing changes then.
- Scrapes reveal other traffic and restarts; of our own attempts the fleet knows more, and sooner.
- A decision reads the fleet as the request's caller has met with it (`snapshot_for`): evidence that one caller alone
  has brought back counts for no other.
- A change of an endpoint's state is marked by `_touch`: the next snapshot shows the change, and the peers are told.
  Peer loads are shown and never passed on.
- A reload keeps what was learned of every endpoint which serves the same model as before. Of a server that gets another
  model, or whose entry leaves, it keeps what is about the server (`policies.fleet.departed`).
- Endpoints with few samples learn from the most similar sibling (a pool may mix two kinds of machines), and
  not only at first: after a slow first request, usual for cold engines, an endpoint would be avoided for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from policies.blame.blame import Fault
from policies.fleet.circuit_breaker import CircuitBreaker
from policies.fleet.departed import DepartedEndpoints, restore_all, restore_limits
from policies.fleet.endpoint_state import EndpointState
from policies.fleet.engine_load import EngineLoad
from policies.fleet.fleet_reader import FleetReader, FleetViews
from policies.fleet.in_flight_attempt import AttemptReport, InFlightAttempt
from policies.fleet.network_path import NetworkPath
from policies.fleet.observations import (
    BATCH,
    AnswerObservation,
    FirstTokenObservation,
    Observation,
    Pauses,
    learn_silence,
)
from policies.fleet.peers import NO_LOAD, PeerLink, PeerLoad
from policies.fleet.pool_state import PoolState, share_predictors
from policies.fleet.route_meters import RouteMeters
from policies.latency.answer_lengths import AnswerLengths
from policies.latency.learned_state import LearnedEndpoint, LearnedRegression
from policies.latency.token_counts import TokenScale
from policies.latency.tpot import DecodingAnswer
from policies.latency.ttft_predictor import MATURE_SAMPLES
from policies.prefix_cache.endpoint_cache import EndpointCache
from policies.rate_limit.endpoint_limits import SavedLimits
from policies.rate_limit.send_limits import RateLimit
from policies.routes.route import Route
from policies.types import (
    NEVER,
    AttemptOutcome,
    Candidate,
    Endpoint,
    FleetSnapshot,
    Load,
    Pool,
    PoolEstimate,
)

__all__ = ["AttemptReport", "Fleet"]


class Fleet:
    """Implements `policies.fleet.peers.PeerReader`. `unix_offset`: Unix time less the time `now` of all calls, s: APIs
    have hours of the day."""

    def __init__(self, pools: Iterable[Pool], unix_offset: float = 0.0) -> None:
        self._unix_offset = unix_offset
        self.answer_lengths = AnswerLengths()
        self.peers: PeerLink | None = None  # other processes in front of the same engines
        self.request_publish: Callable[[], None] = self.publish  # called once there is something to publish
        self.on_news: Callable[[], None] | None = None  # called when capacity may be free, while requests wait
        self.on_found_dead: Callable[[list[Hashable]], None] = lambda keys: None  # attempts without a first token
        self.on_breaker: Callable[[Endpoint, CircuitBreaker], None] = lambda *changed: None  # the state changed
        self.on_unconfirmed: Callable[[Endpoint], None] = lambda endpoint: None  # failures of one caller alone
        self.on_cache_lost: Callable[[str], None] = lambda endpoint: None  # its engine has restarted, or is gone
        self.closes = False  # an endpoint may have a cap or a rate limit
        self.cache_lost: set[str] = set()  # endpoints with an empty cache, not yet warmed
        self.drained: set[str] = set()  # endpoints that an operator has taken out, absent ones too
        self._states: dict[str, EndpointState] = {}
        self._pools: dict[str, PoolState] = {}
        self._departed = DepartedEndpoints()
        self._attempts: dict[Hashable, InFlightAttempt] = {}
        self._meters = RouteMeters()
        self._pauses = Pauses(self._on_pause)
        self.on_beat = self._pauses.on_beat  # called every few ten milliseconds
        self.request_learning: Callable[[], None] = self.learn  # called once there is something to learn
        self._observations: list[Observation] = []
        self._unpublished: dict[EndpointState, None] = {}
        self._views = FleetViews()
        self.view = FleetReader(self._states, self._pools, self._attempts, self._meters, self._departed)
        self.reload(pools)

    def reload(self, pools: Iterable[Pool], *, mended: bool = True) -> None:
        """`mended` False: found addresses have changed, and nothing that an endpoint may have refused."""
        self.learn()
        pools = [*pools]
        known_states, known_pools = {**self._states}, {**self._pools}
        returning = self._departed.returning(known_states, [one for pool in pools for one in pool.endpoints])
        self._states.clear()
        self._pools.clear()
        for pool in pools:
            members = [self._keep_or_create(returning.get(one.id), one, pool, mended) for one in pool.endpoints]
            share_predictors(members)
            scale = known_pools[pool.name].scale if pool.name in known_pools else TokenScale()
            learners = members if len(members) > 1 else []
            self._pools[pool.name] = PoolState(pool, scale, members, learners, members)
            self._states.update((state.endpoint.id, state) for state in members)
        self._departed.keep(known_states, self._states)
        for name in known_states.keys() - self._states.keys():
            self._publish(name, known_states[name])
        if known_states:
            joined = self._states.keys() - known_states.keys()
            self.cache_lost |= {name for name in joined if not len(self._states[name].cache.index)}
        self.cache_lost &= self._states.keys()
        self.closes = any(
            not state.pool.local or state.pool.concurrent_requests or state.has_refused_more
            for state in self._states.values()
        )
        self._views.reload(self._states, {name: state.pool for name, state in self._pools.items()})

    def _keep_or_create(
        self, known: EndpointState | None, endpoint: Endpoint, pool: Pool, mended: bool
    ) -> EndpointState:
        if known is None:
            known = EndpointState(endpoint, pool, self._unix_offset)
        else:
            known.reload(endpoint, pool, mended=mended)
        known.drained = endpoint.id in self.drained
        return known

    def expire(self, now: float) -> None:
        """Forget removed servers once no request or limit is left. Called every few seconds."""
        for name in self._departed.expire(now) if self._departed.states else ():
            if self.peers is not None and name not in self._states:
                self.peers.publish(name, NO_LOAD)

    def _known(self, endpoint_id: str) -> EndpointState | None:
        """State of an endpoint, present or removed."""
        return self._states.get(endpoint_id) or self._departed.states.get(endpoint_id)

    # ----------------------------------------------------------------- loads of a moment

    def snapshot(self, now: float) -> FleetSnapshot:
        """The fleet as of `now`, for all callers; the same value until something changes."""
        if self.peers is not None:
            self.peers.merge(self, now)
        return self._views.at(now)

    def snapshot_for(self, caller: str, now: float) -> FleetSnapshot:
        """The same, as this caller has met with it."""
        if self.peers is not None:
            self.peers.merge(self, now)
        return self._views.for_caller(caller, now) if self._views.disputed else self._views.at(now)

    def load_for(self, caller: str, endpoint_id: str, now: float) -> Load:
        """The load in `snapshot_for`. Raises KeyError where the endpoint is not in the fleet."""
        if self.peers is not None:
            self.peers.merge(self, now)
        return self._views.load_for(caller, endpoint_id, now)

    # ----------------------------------------------------------------- over a restart

    def restore(self, endpoints: Mapping[str, LearnedEndpoint], age: float, now: float) -> list[str]:
        """Brings back what was learned, up to a time `age` seconds ago, of endpoints of which less is known now.
        Returns their ids."""
        restored = restore_all(self._states, endpoints, age, now)
        for state in restored:
            self._touch(state)
        for pool in self._pools.values():
            share_predictors(pool.members)
        return [state.endpoint.id for state in restored]

    def restore_limits(self, limits: Mapping[str, SavedLimits], age: float, now: float) -> None:
        """The same of rate limits, by endpoint."""
        for name, saved in limits.items():
            if (state := self._states.get(name)) is not None:
                restore_limits(state, saved, age, now)
                self._touch(state)

    def restore_scale(self, pool: str, scale: LearnedRegression, age: float) -> None:
        """The same of a pool's prompt counts. Raises ValueError where other terms were saved."""
        self._pools[pool].scale.restore(scale, age)

    # ----------------------------------------------------------------- events of attempts

    def on_arrived(self, route: Route, now: float) -> None:
        """A request of a route with a meter."""
        if (meter := self._meters.of(route)) is not None:
            meter.on_arrived(now)

    def on_sent(
        self,
        key: Hashable,
        candidate: Candidate,
        prompt: PoolEstimate,
        now: float,
        stream: bool,
        tpot_budget: float | None = None,
        output: int = 256,
        session: str = "",
        route: Route | None = None,
        caller: str = "",
    ) -> None:
        """Attempt `key` was sent. `output`: expected tokens; `session`: name of the attempt in KV events; `caller`: key
        or address whose request it is; empty: the gateway's own."""
        state = self._states.get(candidate.endpoint.id)
        if state is None and (state := self._known(candidate.endpoint.id)) is None:
            return
        if key in self._attempts:
            self.on_ended(key, AttemptOutcome.CANCELLED, now)
        pending_prompt = None  # nothing is known of the endpoint's cache
        if state.pool.local and prompt.blocks.hashes:
            if self.peers is not None:
                self.peers.publish_prompt(state.endpoint.id, prompt.blocks.hashes)
            pending_prompt = state.record_prompt(key, prompt, session)
        provider_hit = None
        if state.pool.prompt_cache is not None and route is not None and len(route.tiers) > 1:
            provider_hit = state.provider_cache.hit(prompt, state.pool.prompt_cache, now)
        answer = DecodingAnswer(tpot_budget, output, candidate.prompt_tokens)
        attempt = self._attempts[key] = InFlightAttempt.sent(
            state,
            candidate,
            prompt,
            now,
            stream=stream,
            answer=answer,
            pending_prompt=pending_prompt,
            provider_hit=provider_hit,
            meter=None if state.pool.local or route is None else self._meters.of(route),
            caller=caller,
        )
        attempt.on_sent(key)
        self._touch(state)

    def on_connected(self, key: Hashable, seconds: float) -> None:
        """Attempt `key` had to wait for a new connection."""
        if (attempt := self._attempts.get(key)) is not None:
            attempt.network_s += seconds
            attempt.waited += seconds

    def on_first_token(self, key: Hashable, now: float, engine_ttft: float | None = None) -> None:
        """`engine_ttft` replaces our own clock where the answer is not streamed."""
        if now > self._pauses.due:
            self._pauses.note(now)
        if self.on_news is not None:
            self.on_news()
        if (attempt := self._attempts.get(key)) is None or attempt.first_at is not None:
            return
        attempt.on_first_token(key, now)
        if attempt.models_before == attempt.state.models_before:
            if not attempt.stream:
                self._note_engine_ttft(attempt, engine_ttft, now)
            elif not attempt.paused:
                self._note(FirstTokenObservation(attempt, now, now - attempt.sent_at))
        self._touch(attempt.state)

    def _on_pause(self) -> None:
        """Nobody has watched the attempts in progress for a while."""
        for key, attempt in self._attempts.items():
            attempt.on_pause(key)

    def paused_s(self, since: float, now: float) -> float:
        """Seconds since then in which this process was paused."""
        if now > self._pauses.due:
            self._pauses.note(now)
        return self._pauses.within(since, now)

    def on_unread(self, key: Hashable) -> None:
        """The caller of the attempt does not read, so nothing is read from the endpoint for a while."""
        if (attempt := self._attempts.get(key)) is not None and not attempt.unread:
            attempt.on_unread(key)
            self._touch(attempt.state)

    def on_rate_limits(self, key: Hashable, limits: Sequence[RateLimit]) -> None:
        """The reply to an attempt reports what remains of the provider's rate limits."""
        if (attempt := self._attempts.get(key)) is not None:
            attempt.state.limits.on_reported(limits, attempt.sent_at)
            self._touch(attempt.state)

    def is_closed(self, candidate: Candidate, now: float, caller: str = "") -> bool:
        """A request of the caller sent there now would exceed the cap or a rate limit."""
        state = self._known(candidate.endpoint.id)
        if state is None or not state.may_be_closed(now):
            return False
        member = self._is_member(state)
        load = self.load_for(caller, state.endpoint.id, now) if member else state.load_for(caller, state.load(now), now)
        return load.full or load.limits.wait(candidate.prompt_tokens, now) > 0

    def on_ended(self, key: Hashable, outcome: AttemptOutcome, now: float, report: AttemptReport | None = None) -> None:
        if now > self._pauses.due:
            self._pauses.note(now)
        if self.on_news is not None:
            self.on_news()
        attempt = self._attempts.pop(key, None)
        if attempt is None:
            return
        state, report = attempt.state, report or AttemptReport()
        former = attempt.models_before != state.models_before
        attempt.on_ended(key, outcome, now, report)
        if outcome is AttemptOutcome.COMPLETED:
            state.callers.on_replied(key, attempt.caller, outcome, now)
            if not former:
                state.refusals.append(False)
        else:
            self._judge(attempt, key, outcome, now, report)
        pool = self._pools.get(state.pool.name)
        if pool is not None and pool.uncounted and state.interference.counted_answers:
            pool.share_tokens_per_event(state)
        if not former:
            self._note_end(attempt, key, outcome, now, report)
        self._touch(state)

    def _judge(
        self, attempt: InFlightAttempt, key: Hashable, outcome: AttemptOutcome, now: float, report: AttemptReport
    ) -> None:
        """The attempt has not been answered: whether its endpoint is to blame."""
        state = attempt.state
        if report.unknown_model and attempt.prompt.variant and state.variants is not None:
            attempt.on_unknown_variant(key, state.variants, now)
        else:
            former = attempt.models_before != state.models_before
            is_own = report.blame is not None and report.blame.fault is Fault.CALLER_CREDENTIAL
            outlier = False
            if outcome is AttemptOutcome.REFUSED and not (former or is_own):
                state.refusals.append(True)
                outlier = self.view.is_outlier(state.endpoint.id)
            attempt.update_breaker(key, outcome, now, report, outlier)
            self.closes = self.closes or state.has_refused_more
            if state.breaker.unconfirmed:
                self.on_unconfirmed(state.endpoint)
        if state.breaker.server_gone:
            self._lose_cache(state)

    def _note_end(
        self, attempt: InFlightAttempt, key: Hashable, outcome: AttemptOutcome, now: float, report: AttemptReport
    ) -> None:
        """Notes what the end has shown of the model."""
        state, is_completed, is_whole = attempt.state, outcome is AttemptOutcome.COMPLETED, False
        if is_completed:
            is_whole = not (attempt.stream or attempt.paused)
        if attempt.first_at is None:
            if is_completed:
                self._note_engine_ttft(attempt, report.engine_ttft, now)
            elif attempt.stream and not attempt.paused and outcome in (AttemptOutcome.SILENT, AttemptOutcome.CANCELLED):
                learn_silence(attempt, now)
        computed = is_completed or attempt.first_at is not None
        attempt.settle_prompt(key, report, computed)
        is_held = computed and attempt.provider_hit is not None and attempt.settle_provider_cache(report)
        if is_held and self.peers is not None:
            self.peers.publish_prompt(state.endpoint.id, attempt.prompt.blocks.hashes)
        if is_whole or report.prompt_tokens is not None or report.mean_itl is not None:
            prefill_s = state.interference.prefill_s
            self._note(AnswerObservation(attempt, now, report, is_whole, *state.decoding, prefill_s))

    def _note_engine_ttft(self, attempt: InFlightAttempt, ttft: float | None, now: float) -> None:
        """The engine's own figure knows nothing of the network, which a stream's first token has passed."""
        if ttft is not None:
            self._note(FirstTokenObservation(attempt, now, ttft if attempt.stream else ttft + attempt.network_s))

    def _note(self, observation: Observation) -> None:
        self._observations.append(observation)
        if len(self._observations) >= BATCH or observation.attempt.state.predictor.samples < MATURE_SAMPLES:
            self.learn()
        elif len(self._observations) == 1:
            self.request_learning()

    def learn(self) -> None:
        """Learn from all pending observations."""
        observations, self._observations = self._observations, []
        moved: dict[EndpointState, None] = {}
        for observation in observations:
            state = observation.attempt.state
            pool = self._pools.get(state.pool.name)
            moved[state] = None
            is_sample = observation.learn(None if pool is None else pool.scale)
            if is_sample and pool is not None and (pool.learners or observation.at >= pool.fades_at):
                moved.update(dict.fromkeys(pool.teach(state, observation.at)))
        for state in moved:
            self._touch(state)

    def on_refusal_confirmed(self, endpoint_id: str) -> None:
        """Another endpoint has refused the same request: the outlier was right."""
        if (state := self._states.get(endpoint_id)) is not None:
            state.refusals.clear()

    def on_progress(self, tokens: Iterable[tuple[Hashable, int]], now: float) -> None:
        """Tokens so far, by attempt. Called about five times a second."""
        if now > self._pauses.due:
            self._pauses.note(now)
        touched: dict[EndpointState, None] = {}
        for key, count in tokens:
            if (attempt := self._attempts.get(key)) is not None:
                if count > attempt.answer.tokens:
                    attempt.state.heard_at = attempt.state.interference.updated_at
                attempt.answer.tokens = count
                touched[attempt.state] = None
        for state in touched:
            state.on_progress(now)
            self._touch(state)

    # ----------------------------------------------------------------- events of endpoints

    def on_networks(self, networks: Mapping[str, NetworkPath]) -> None:
        """The connections to the endpoints, by id: their network time is read at every decision."""
        for name, state in self._states.items():
            state.network = networks.get(name)

    def cache(self, endpoint_id: str) -> EndpointCache | None:
        """Takes the events of the engine's own cache. None: the endpoint is not in the fleet."""
        state = self._states.get(endpoint_id)
        return None if state is None else state.cache

    def on_scrape(self, endpoint_id: str, engine: EngineLoad, now: float) -> None:
        if (state := self._states.get(endpoint_id)) is None:
            return
        slept = state.sleep.asleep
        if state.on_scrape(engine, now):
            self._lose_cache(state)
        if state.sleep.asleep and not slept:
            self._leave(state)
        self._assume_other_traffic(state)
        self.on_probe_answered(endpoint_id, now)

    def on_load_unknown(self, endpoint_id: str, fault: str, now: float) -> None:
        """The server has not told its load, or not the load of this engine. `fault`: how, for the operator."""
        if (state := self._states.get(endpoint_id)) is not None:
            state.on_load_unknown(fault, now)
            self._assume_other_traffic(state)
            self._touch(state)

    def on_other_ranks(self, endpoint_id: str, fault: str, now: float) -> None:
        """The server does not name the configured rank among its own. The gateway asks there itself: the page may be
        wrong."""
        if (state := self._states.get(endpoint_id)) is None:
            return
        if state.breaker.on_other_ranks(now, fault):
            self.on_unconfirmed(state.endpoint)
        self.on_load_unknown(endpoint_id, fault, now)

    def on_probe_answered(self, endpoint_id: str, now: float) -> None:
        if (state := self._states.get(endpoint_id)) is not None:
            state.breaker.on_probe_answered(now)
            self._touch(state)

    def on_probe_failed(self, endpoint_id: str, now: float, why: str = "nobody answered", *, lost: bool = True) -> None:
        """No connection. `lost`: the server's machine has refused it, or is gone."""
        if (state := self._states.get(endpoint_id)) is None:
            return
        found_dead = state.breaker.on_probe_failed(now, why, lost=lost)
        state.on_load_unknown("", now)
        if state.breaker.server_gone:
            self._lose_cache(state)
        self._touch(state)
        if found_dead:
            self._leave(state)

    def on_probe_unwell(self, endpoint_id: str, now: float, why: str) -> None:
        """The server accepts connections, and its pages of load and health fail."""
        if (state := self._states.get(endpoint_id)) is not None:
            state.breaker.on_probe_unwell(now, why)
            self.on_load_unknown(endpoint_id, why, now)

    def on_wrong_model(self, endpoint_id: str, now: float) -> None:
        """The engine does not know the configured model."""
        if (state := self._states.get(endpoint_id)) is not None:
            state.breaker.on_wrong_model(now)
            self._touch(state)

    def on_woken(self, endpoint_id: str, seconds: float, now: float) -> None:
        """The gateway has woken the engine. Cached prefixes were forgotten when the engine fell asleep."""
        if (state := self._states.get(endpoint_id)) is not None:
            state.on_woken(seconds, now)
            self._touch(state)

    def on_model(self, endpoint_id: str, model: str) -> str:
        """The engine names this model as served. After a change its cache is empty, and times are learned by model.
        Returns the model before; empty: no change."""
        self.learn()
        state = self._states.get(endpoint_id)
        if state is None or not (before := state.on_model(model)):
            return ""
        pool = self._pools[state.pool.name]
        pool.learners = pool.members if len(pool.members) > 1 else []
        self._lose_cache(state)
        self._touch(state)
        return before

    def on_cache_cleared(self, endpoint_id: str) -> None:
        """The engine has reported an empty cache, or was replaced."""
        if (state := self._states.get(endpoint_id)) is not None:
            self._lose_cache(state)
            self._touch(state)

    def drain(self, endpoints: Set[str]) -> None:
        """These endpoints, by id, get no new request, and all others do. Attempts in progress go on; what was learned
        stays. An endpoint that leaves the configuration and returns is drained still."""
        changed = self.drained ^ endpoints
        self.drained ^= changed  # the set that running requests read
        for name in changed & self._states.keys():
            self._states[name].on_drained(name in endpoints)
            self._touch(self._states[name])
        if changed and self.on_news is not None:
            self.on_news()

    def set_warming(self, endpoint_id: str, on: bool) -> None:
        """A warming endpoint is the last choice of its pool."""
        if (state := self._states.get(endpoint_id)) is not None:
            state.warming = on
            self._touch(state)

    # ----------------------------------------------------------------- peers

    def on_peer_load(self, endpoint_id: str, load: PeerLoad, now: float) -> None:
        state = self._known(endpoint_id)
        if state is not None and state.endpoint.id == endpoint_id:
            state.on_peer_load(load, now)
            if (load.down_since > NEVER or state.breaker.peer_reported_down) and self._is_member(state):
                believed = self._pools[state.pool.name].others_up(state)
                state.breaker.on_peer_report(load.down_since if believed else NEVER, now)
                if state.breaker.state is not state.shown:
                    self._show(state)
            self._views.mark(state)

    def on_peer_prompt(self, endpoint_id: str, hashes: Sequence[int], now: float) -> None:
        if (state := self._states.get(endpoint_id)) is not None and state.pool.local:
            state.cache.index.record(hashes)
        elif state is not None and state.pool.prompt_cache is not None:
            state.provider_cache.record(hashes, now)

    def publish(self) -> None:
        """Publishes our load at endpoints with a change."""
        unpublished, self._unpublished = self._unpublished, {}
        for state in unpublished:
            if self._known(state.endpoint.id) is state:
                self._publish(state.endpoint.id, state)

    def _publish(self, endpoint_id: str, state: EndpointState) -> None:
        """Publish own load at an endpoint, including requests at a removed endpoint."""
        if self.peers is None:
            return
        load = state.own_load if state.endpoint.id == endpoint_id else NO_LOAD  # else counted under its present id
        if load.down_since > NEVER and (not self._is_member(state) or self._pools[state.pool.name].mostly_down()):
            load = replace(load, down_since=NEVER)
        self.peers.publish(endpoint_id, load)

    # ----------------------------------------------------------------- consequences

    def _touch(self, state: EndpointState) -> None:
        self._views.changed[state] = None
        if state.callers.states:
            self._views.dispute(state)
        if state.breaker.state is not state.shown:
            self._show(state)
        if self.peers is not None:
            first = not self._unpublished
            self._unpublished[state] = None
            if first:
                self.request_publish()

    def _leave(self, state: EndpointState) -> None:
        """Attempts without a first token have nothing to wait for there."""
        self.on_found_dead([key for key, one in self._attempts.items() if one.state is state and not one.first_at])

    def _assume_other_traffic(self, state: EndpointState) -> None:
        for changed in self._pools[state.pool.name].assume_other_traffic():
            self._views.mark(changed)

    def _show(self, state: EndpointState) -> None:
        state.shown = state.breaker.state
        self.on_breaker(state.endpoint, state.breaker)

    def _is_member(self, state: EndpointState) -> bool:
        """False once a reload has removed the endpoint; attempts there may still end."""
        return self._states.get(state.endpoint.id) is state

    def _lose_cache(self, state: EndpointState) -> None:
        """Engine restarted or gone: assumes an empty cache."""
        state.cache.clear()
        if state.variants is not None:
            state.variants.clear()
        if self._is_member(state):
            self.cache_lost.add(state.endpoint.id)
            self.on_cache_lost(state.endpoint.id)
