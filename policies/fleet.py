"""What the gateway has learned of its fleet: the one owner of all beliefs.

Rules:
- One writer tells it what happens (`sent`, `first_token`, `ended`, `scraped`, ...); decisions only read
  (`snapshot`, `hit`, `forecast`: the `Beliefs` protocol).
- An attempt counts from the moment it is sent, or bursts would herd onto one engine.
- An event may come twice, late, or for a key or endpoint that is gone: it then changes nothing.
- Scrapes reveal other traffic and restarts; of our own attempts the ledger knows better and sooner.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from policies.caches import Caches, Sent
from policies.endpoint import EndpointState, EndpointStatistics
from policies.facts import (
    NEVER,
    Candidate,
    Ending,
    Endpoint,
    EngineLoad,
    FleetSnapshot,
    Forecast,
    Health,
    Load,
    Pool,
    PoolEstimate,
)
from policies.flight import Flight
from policies.group import Group
from policies.lengths import OutputLengths
from policies.predictor import Work, learn_at_least
from policies.stall import Answer
from policies.tokens import TokenScale

REFRESH = 0.1  # s: how long a snapshot lets time drain what is ahead before it asks the ledger again
OVERDUE, OVERDUE_LEAST = 0.98, 0.5  # the quantile of its forecast, and s, that an attempt must outlast to be silent


@dataclass(frozen=True, slots=True)
class Reported:
    """What an attempt's answer said of it. None: it did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    mean_itl: float | None = None  # s
    engine_ttft: float | None = None  # s
    retry_after: float | None = None  # s
    connected: bool = True  # False: refused, or reset before a byte came


class Fleet:
    """Implements `policies.beliefs.Beliefs`. All times are seconds of one monotonic clock."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._caches = Caches()
        self._groups: dict[str, Group] = {}
        self._states: dict[str, EndpointState] = {}
        self._flights: dict[Hashable, Flight] = {}
        self._lengths: dict[str, OutputLengths] = {}
        self.cold: set[str] = set()  # endpoints without a cache, that nobody has cared for yet
        self._changed: set[EndpointState] = set()
        self._recheck = NEVER
        self._snapshot = FleetSnapshot(NEVER, {}, {})
        self.reload(pools)

    def reload(self, pools: Iterable[Pool]) -> None:
        """Another configuration: what stays keeps what was learned of it."""
        known, before = self._states, self._groups
        self._states, self._groups = {}, {}
        for pool in pools:
            scale = before[pool.name].scale if pool.name in before else TokenScale()
            group = self._groups[pool.name] = Group(pool, scale)
            for endpoint in pool.endpoints:
                group.members.append(self._keep_or_create(known.get(endpoint.id), endpoint, pool))
            group.untaught = list(group.members)
        for gone in known.keys() - self._states.keys():
            self._caches.remove(gone)
        joined = self._states.keys() - known.keys() if known else set()
        self.cold = (self.cold | joined) & self._states.keys()
        self._changed = set(self._states.values())
        self._snapshot = FleetSnapshot(NEVER, {name: group.pool for name, group in self._groups.items()}, {})

    def _keep_or_create(self, known: EndpointState | None, endpoint: Endpoint, pool: Pool) -> EndpointState:
        if known is not None and (known.pool.model, known.local) == (pool.model, pool.local):
            known.endpoint, known.pool = endpoint, pool
            state = known
        else:
            self._caches.remove(endpoint.id)
            state = EndpointState(endpoint, pool)
            self._caches.index.resize(endpoint.id, state.blocks)
        self._states[endpoint.id] = state
        return state

    # ----------------------------------------------------------------- read by decisions

    def snapshot(self, now: float) -> FleetSnapshot:
        """The fleet as of `now`; the same value until something changes."""
        if not self._changed and now < self._recheck:
            return self._snapshot
        if now >= self._recheck:
            self._changed.update(self._states[name] for name, load in self._snapshot.loads.items() if _moves(load))
            self._recheck = now + REFRESH
        if self._changed:
            loads = dict(self._snapshot.loads)
            for state in self._changed:
                loads[state.endpoint.id] = state.load(now)
            self._changed.clear()
            self._snapshot = FleetSnapshot(now, self._snapshot.pools, loads)
        return self._snapshot

    def hit(self, endpoint: Endpoint, prompt: PoolEstimate) -> int:
        """Prompt tokens (the engine's) believed cached there: whole blocks, always less than the prompt."""
        state = self._states[endpoint.id]
        if not state.local or not prompt.blocks.hashes:
            return 0
        size = state.block_size
        return min(int(self._caches.held(endpoint.id, prompt)), prompt.tokens - 1) // size * size

    def forecast(self, endpoint: Endpoint, load: Load, prompt_tokens: int, hit: int, now: float) -> Forecast:
        """TTFT from a send at `now` to the first token, and TPOT."""
        return self._states[endpoint.id].forecast(load, prompt_tokens, hit, now)

    def prefill(self, endpoint: Endpoint, prompt_tokens: int, hit: int) -> float:
        """Engine time that a prompt takes there, s; 0 for an API."""
        uncached = prompt_tokens - hit
        return self._states[endpoint.id].predictor.seconds(uncached, uncached * (hit + 0.5 * uncached))

    def pool(self, name: str) -> Pool:
        return self._groups[name].pool

    def is_local(self, endpoint_id: str) -> bool:
        return self._states[endpoint_id].local

    def token_scale(self, pool: str) -> TokenScale:
        return self._groups[pool].scale

    def used_at(self, endpoint_id: str) -> float:
        """When an attempt was last sent there."""
        return self._states[endpoint_id].used_at

    def expected_output(self, route: str, max_tokens: int | None = None) -> int:
        lengths = self._lengths.get(route)
        return (lengths or OutputLengths()).mean(max_tokens)

    def statistics(self, endpoint_id: str, now: float) -> EndpointStatistics:
        """For people: cheap enough to ask once a second."""
        return self._states[endpoint_id].statistics(*self._caches.statistics(endpoint_id), now)

    # ----------------------------------------------------------------- told by the monitor

    def sent(
        self,
        key: Hashable,
        candidate: Candidate,
        prompt: PoolEstimate,
        now: float,
        stream: bool,
        pace: float | None = None,
        output: int = 256,
        session: str = "",
    ) -> None:
        """An attempt, named by `key`, is on its way. `pace`: s per output token that its caller was promised;
        `session`: what the engine's events call it."""
        state = self._states.get(candidate.endpoint.id)
        if state is None:
            return
        self.ended(key, Ending.CANCELLED, now)
        work = Work(*state.work(state.load(now), candidate.prompt_tokens, candidate.hit, now))
        cache = self._record(key, state, prompt, session)
        told = state.predictor.center(*work, now)
        self._flights[key] = Flight(
            state,
            candidate,
            prompt,
            work,
            told,
            now,
            stream,
            cache,
            state.ledger.queue,
            state.rate,
            answer=Answer(pace, output, candidate.prompt_tokens),
        )
        state.stall.prefill(self.prefill(candidate.endpoint, candidate.prompt_tokens, candidate.hit), now)
        state.ledger.charge(key, candidate.uncached, now, candidate.hit, stream)
        state.used_at = now
        if state.quota is not None:
            state.quota.sent(now)
        state.breaker.sent(key, now)
        state.seen(candidate.uncached)
        self._touch(state)

    def first_token(self, key: Hashable, now: float, engine_ttft: float | None = None) -> None:
        """The first visible output. `engine_ttft` stands in for our own clock where the answer is not streamed."""
        flight = self._flights.get(key)
        if flight is None or flight.first_at is not None:
            return
        state = flight.state
        state.heard_at = now
        flight.first_at, flight.running = now, state.ledger.in_flight - state.ledger.prefilling
        flight.context, flight.spent = state.stall.context, state.stall.spent
        state.stall.began(key, flight.answer, now)
        state.ledger.clear(key, now)
        state.breaker.spoke(key, now)
        ttft = now - flight.sent_at if flight.stream else engine_ttft
        if ttft is not None:
            self._learn(flight, ttft, now)
        self._touch(state)

    def ended(self, key: Hashable, ending: Ending, now: float, reported: Reported | None = None) -> None:
        """The attempt is over. Unknown keys and second endings change nothing."""
        flight = self._flights.pop(key, None)
        if flight is None:
            return
        reported = reported or Reported()
        if ending is Ending.COMPLETED:
            flight.state.ledger.clear(key, now)
        flight.state.ledger.release(key, now)
        flight.state.stall.ended(key, reported.mean_itl, reported.completion_tokens)
        self._judge(key, flight, ending, now, reported)
        if flight.first_at is None:
            self._ended_without_token(flight, ending, now, reported)
        accounted = self._computed(key, flight, ending, reported)
        self._reconcile(flight, reported, now, accounted)
        self._touch(flight.state)

    def progress(self, tokens: Iterable[tuple[Hashable, int]], now: float) -> None:
        """How many tokens each of these attempts has by now. Any number of times a second; five are enough."""
        touched = set()
        for key, count in tokens:
            if (flight := self._flights.get(key)) is not None:
                flight.answer.tokens = count
                touched.add(flight.state)
        for state in touched:
            state.progress(now)
            self._touch(state)

    def scraped(self, endpoint_id: str, engine: EngineLoad, now: float) -> None:
        """What the engine says of itself."""
        state = self._states.get(endpoint_id)
        if state is None:
            return
        room = state.blocks
        if state.scraped(engine, now):
            self._lost_its_cache(state)
        if state.blocks != room:
            self._caches.index.resize(endpoint_id, state.blocks)
        self.reachable(endpoint_id, now)

    def reachable(self, endpoint_id: str, now: float) -> None:
        """A probe was answered."""
        if (state := self._states.get(endpoint_id)) is not None:
            state.breaker.reachable(now)
            self._touch(state)

    def unreachable(self, endpoint_id: str, now: float) -> None:
        """A probe found nobody."""
        if (state := self._states.get(endpoint_id)) is not None:
            state.breaker.unreachable(now)
            self._forget_the_dead(state)
            self._touch(state)

    @property
    def caches(self) -> Caches:
        """For the one who hears engines tell of them."""
        return self._caches

    def emptied(self, endpoint_id: str) -> None:
        """The engine says that it holds nothing, or it is another one."""
        if (state := self._states.get(endpoint_id)) is not None:
            self._lost_its_cache(state)
            self._touch(state)

    def observe_output(self, route: str, tokens: int) -> None:
        """An answer of this route was complete at so many tokens."""
        self._lengths.setdefault(route, OutputLengths()).observe(tokens)

    def warming(self, endpoint_id: str, on: bool) -> None:
        """Its cache is being filled: until that is over it is the last to be sent to."""
        if (state := self._states.get(endpoint_id)) is not None:
            state.warming = on
            self._touch(state)

    # ----------------------------------------------------------------- what follows from it

    def _touch(self, state: EndpointState) -> None:
        if self._states.get(state.endpoint.id) is state:  # a reload may have removed it under an attempt
            self._changed.add(state)

    def _record(self, key: Hashable, state: EndpointState, prompt: PoolEstimate, session: str) -> Sent | None:
        """Takes this prompt for held there."""
        blocks = prompt.blocks
        if not state.local or not blocks.hashes:
            return None
        if state.measure(blocks.size * blocks.scale):
            self._caches.index.resize(state.endpoint.id, state.blocks)
        return self._caches.sent(key, state.endpoint.id, prompt, session)

    def _computed(self, key: Hashable, flight: Flight, ending: Ending, reported: Reported) -> bool:
        """What has become of its prompt; whether the engine's own events tell of it."""
        if flight.cache is None:
            return False
        if flight.first_at is not None or ending is Ending.COMPLETED:
            return self._caches.answered(key, flight.cache, reported.prompt_tokens, reported.cached_tokens)
        self._caches.unanswered(key, flight.cache)
        return False

    def _learn(self, flight: Flight, ttft: float, now: float) -> None:
        state, group = flight.state, self._groups.get(flight.state.pool.name)
        state.predictor.observe(flight.sample(ttft), now)
        if group is not None and group.untaught:
            for taught in group.teach(state, now):
                self._touch(taught)

    def _judge(self, key: Hashable, flight: Flight, ending: Ending, now: float, reported: Reported) -> None:
        breaker = flight.state.breaker
        if ending is Ending.SILENT:
            patience = max(flight.candidate.forecast.quantile(OVERDUE), OVERDUE_LEAST)
            breaker.silent(key, flight.sent_at, now, flight.stream and now - flight.sent_at > patience)
            return
        if ending is Ending.RATE_LIMITED:
            breaker.limited(now, reported.retry_after)
            if flight.state.quota is not None:
                flight.state.quota.refused(now)
        breaker.ended(key, ending, now, reported.connected)
        self._forget_the_dead(flight.state)

    def _ended_without_token(self, flight: Flight, ending: Ending, now: float, reported: Reported) -> None:
        if ending is Ending.COMPLETED:
            if reported.engine_ttft is not None:
                self._learn(flight, reported.engine_ttft, now)
            return
        if flight.stream and ending in (Ending.SILENT, Ending.CANCELLED):
            learn_at_least(flight.state.predictor, flight.sample(now - flight.sent_at), now)

    def _reconcile(self, flight: Flight, reported: Reported, now: float, accounted: bool) -> None:
        """Hold what was believed against what the answer says."""
        state, prompt = flight.state, flight.prompt
        group = self._groups.get(state.pool.name)
        if reported.prompt_tokens is not None and prompt.text_tokens and group is not None:
            group.scale.observe(prompt.text_tokens, prompt.messages, reported.prompt_tokens)
        if reported.mean_itl is not None:
            self._learn_pace(flight, reported.mean_itl, reported.completion_tokens or 0)
        if reported.cached_tokens is not None and state.local and not accounted:
            self._confirm(flight, reported.cached_tokens)

    def _learn_pace(self, flight: Flight, itl: float, tokens: int) -> None:
        """What a token takes without the prefills that stalled it."""
        state, ledger, stall = flight.state, flight.state.ledger, flight.state.stall
        stalled = (stall.spent - flight.spent) / (tokens - 1) if tokens > 1 else 0.0
        running = (flight.running + ledger.in_flight - ledger.prefilling) / 2
        state.pace.observe(running, (flight.context + stall.context) / 2, max(itl - stalled, itl * 0.1))

    def _confirm(self, flight: Flight, cached: int) -> None:
        """Blocks that an attempt ahead was still computing say nothing of the cache's size."""
        believed, size = flight.candidate.hit, flight.state.block_size
        borne_out = cached + size > believed
        if believed and (borne_out or not flight.queue.tokens):
            self._caches.index.confirm(flight.state.endpoint.id, believed, believed if borne_out else cached)

    def _forget_the_dead(self, state: EndpointState) -> None:
        """Nobody is there: whoever comes back has an empty cache."""
        if state.breaker.gone:
            self._lost_its_cache(state)

    def _lost_its_cache(self, state: EndpointState) -> None:
        self._caches.forget(state.endpoint.id)
        self.cold.add(state.endpoint.id)


def _moves(load: Load) -> bool:
    """Whether time alone changes it."""
    return load.prefilling > 0 or load.health is not Health.UP or load.running + load.waiting > load.in_flight
