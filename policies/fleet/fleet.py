"""What the gateway has learned of its fleet: the one owner of all beliefs.

Rules:
- One writer tells it what happens (`sent`, `first_token`, `ended`, `scraped`, ...); decisions only read
  (`snapshot`, and `prospects`: the `Beliefs` protocol).
- How its endpoints stand, for decisions and for siblings, it inherits (`policies.fleet.standing`). Here are the
  attempts, and
  what they and the engines teach.
- An attempt counts from the moment it is sent, or bursts would herd onto one engine.
- An event may come twice, late, or for a key or endpoint that is gone: it then changes nothing.
- Scrapes reveal other traffic and restarts; of our own attempts the ledger knows better and sooner.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from policies.fleet.decode_interference import DecodingAnswer
from policies.fleet.endpoint_state import EndpointState, EndpointStatistics
from policies.fleet.in_flight_attempt import InFlightAttempt, Reported
from policies.fleet.standing import Standing
from policies.latency.output_lengths import OutputLengths
from policies.latency.token_scale import TokenScale
from policies.prefix_cache.prefix_caches import PendingPrompt
from policies.scorers.scorer import CandidateInput
from policies.types import AttemptOutcome, Candidate, Endpoint, EngineLoad, Forecast, Load, Pool, PoolEstimate

__all__ = ["Fleet", "Reported"]

_COMPLETED = AttemptOutcome.COMPLETED  # a member is slow to look up in its enumeration
_UNTOLD = Reported()
_new = tuple.__new__  # half of what a named tuple's own constructor takes


class Fleet(Standing):
    """Implements `policies.routing.fleet_view.Beliefs`. All times are seconds of one monotonic clock."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        super().__init__(pools)
        self._flights: dict[Hashable, InFlightAttempt] = {}
        self._lengths: dict[str, OutputLengths] = {}

    # ----------------------------------------------------------------- read by decisions

    def prospects(
        self,
        endpoints: Sequence[Endpoint],
        loads: Sequence[Load],
        prompt: PoolEstimate,
        tier: int,
        price: float,
        now: float,
    ) -> list[CandidateInput]:
        """What each of these endpoints of one pool would make of the prompt, sent at `now`."""
        states, caches, tokens, hashes = self._states, self.caches, prompt.tokens, prompt.blocks.hashes
        find, prospects = caches.index.find, []
        for endpoint, load in zip(endpoints, loads, strict=True):
            state = states[endpoint.id]
            found = find(endpoint.id, hashes)
            hit = caches.hit(endpoint.id, prompt, found, state.block_size) if found[0] else 0
            predictor = state.predictor
            center, ratios, seconds = predictor.expect(load, state.context, state.rate, tokens, hit, now)
            about = endpoint, tier, load, prompt, price, hit, center, ratios, seconds, predictor.samples
            prospects.append(_new(CandidateInput, about))
        return prospects

    def hit(self, endpoint: Endpoint, prompt: PoolEstimate) -> int:
        """Prompt tokens (the engine's) believed cached there: whole blocks, always less than the prompt."""
        found = self.caches.index.find(endpoint.id, prompt.blocks.hashes)
        return self.caches.hit(endpoint.id, prompt, found, self._states[endpoint.id].block_size)

    def forecast(self, endpoint: Endpoint, load: Load, prompt_tokens: int, hit: int, now: float) -> Forecast:
        """TTFT from a send at `now` to the first token, and TPOT."""
        state = self._states[endpoint.id]
        predictor = state.predictor
        center, ratios, seconds = predictor.expect(load, state.context, state.rate, prompt_tokens, hit, now)
        return Forecast(center, ratios, load.tpot, predictor.samples, seconds)

    def token_scale(self, pool: str) -> TokenScale:
        """Of a pool that a reload has just removed: what is expected of any."""
        group = self._groups.get(pool)
        return TokenScale() if group is None else group.scale

    def expected_output(self, route: str, max_tokens: int | None = None) -> int:
        lengths = self._lengths.get(route)
        return (lengths or OutputLengths()).mean(max_tokens)

    def statistics(self, endpoint_id: str, now: float) -> EndpointStatistics:
        """For people: cheap enough to ask once a second."""
        return self._states[endpoint_id].statistics(*self.caches.statistics(endpoint_id), now)

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
        if key in self._flights:
            self.ended(key, AttemptOutcome.CANCELLED, now)
        tokens, hit = candidate.prompt_tokens, candidate.hit
        work, ledger, predictor = state.work(tokens, hit, now), state.ledger, state.predictor
        cache = self._record(key, state, prompt, session)
        _, uncached, ahead, pairs, running = work
        told = predictor.point_estimate(tokens, uncached, ahead, pairs, running, now)
        answer = DecodingAnswer(pace, output, tokens)
        self._flights[key] = InFlightAttempt(
            state, candidate, prompt, work, told, now, stream, cache, state.queue, state.rate, answer
        )
        state.stall.prefill(predictor.seconds(uncached, uncached * (hit + 0.5 * uncached)), now)
        ledger.charge(key, uncached, now, hit, stream)
        state.used_at = now
        if state.quota is not None:
            state.quota.sent(now)
        state.breaker.sent(key, now)
        state.seen(uncached)
        self._touch(state)

    def first_token(self, key: Hashable, now: float, engine_ttft: float | None = None) -> None:
        """The first visible output. `engine_ttft` stands in for our own clock where the answer is not streamed."""
        flight = self._flights.get(key)
        if flight is None or flight.first_at is not None:
            return
        state = flight.state
        state.last_token_at = now
        flight.began(now)
        state.stall.began(key, flight.answer, now)
        state.ledger.clear(key, now)
        state.breaker.spoke(key, now)
        ttft = now - flight.sent_at if flight.stream else engine_ttft
        if ttft is not None:
            self._learn(flight, ttft, now)
        self._touch(state)

    def ended(self, key: Hashable, ending: AttemptOutcome, now: float, reported: Reported | None = None) -> None:
        """The attempt is over. Unknown keys and second endings change nothing."""
        flight = self._flights.pop(key, None)
        if flight is None:
            return
        state, reported = flight.state, reported or _UNTOLD
        if flight.first_at is None and ending is _COMPLETED:
            state.ledger.clear(key, now)
        state.ledger.release(key, now)
        state.stall.ended(key, reported.mean_itl, reported.completion_tokens)
        flight.judge(key, ending, now, reported)
        if state.breaker.gone:
            self._lost_its_cache(state)
        if flight.first_at is None:
            self._ended_without_token(flight, ending, now, reported)
        accounted = self._computed(key, flight, ending, reported)
        self._reconcile(flight, reported, accounted)
        self._touch(state)

    def progress(self, tokens: Iterable[tuple[Hashable, int]], now: float) -> None:
        """How many tokens each of these attempts has by now. Any number of times a second; five are enough."""
        touched: dict[EndpointState, None] = {}
        for key, count in tokens:
            if (flight := self._flights.get(key)) is not None:
                flight.answer.tokens = count
                touched[flight.state] = None
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
            self.caches.index.resize(endpoint_id, state.blocks)
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
            if state.breaker.gone:
                self._lost_its_cache(state)
            self._touch(state)

    def emptied(self, endpoint_id: str) -> None:
        """The engine says that it holds nothing, or it is another one."""
        if (state := self._states.get(endpoint_id)) is not None:
            self._lost_its_cache(state)
            self._touch(state)

    def observe_output(self, route: str, tokens: int) -> None:
        """An answer of this route was complete at so many tokens."""
        if (lengths := self._lengths.get(route)) is None:
            lengths = self._lengths[route] = OutputLengths()
        lengths.observe(tokens)

    def warming(self, endpoint_id: str, on: bool) -> None:
        """Its cache is being filled: until that is over it is the last to be sent to."""
        if (state := self._states.get(endpoint_id)) is not None:
            state.warming = on
            self._touch(state)

    # ----------------------------------------------------------------- what follows from it

    def _record(self, key: Hashable, state: EndpointState, prompt: PoolEstimate, session: str) -> PendingPrompt | None:
        """Takes this prompt for held there."""
        blocks = prompt.blocks
        if not state.local or not blocks.hashes:
            return None
        if state.measure(blocks.size * blocks.scale):
            self.caches.index.resize(state.endpoint.id, state.blocks)
        if self.siblings is not None:
            self.siblings.sent(state.endpoint.id, blocks.hashes)
        return self.caches.sent(key, state.endpoint.id, prompt, session)

    def _computed(self, key: Hashable, flight: InFlightAttempt, ending: AttemptOutcome, reported: Reported) -> bool:
        """What has become of its prompt; whether the engine's own events tell of it."""
        if flight.cache is None:
            return False
        if flight.first_at is not None or ending is _COMPLETED:
            return self.caches.answered(key, flight.cache, reported.prompt_tokens, reported.cached_tokens)
        self.caches.unanswered(key, flight.cache)
        return False

    def _learn(self, flight: InFlightAttempt, ttft: float, now: float) -> None:
        state, group = flight.state, self._groups.get(flight.state.pool.name)
        state.predictor.observe(flight.sample(ttft), now)
        state.calibration.observe(ttft, flight.candidate.forecast)
        if group is not None and group.untaught:
            for taught in group.teach(state, now):
                self._touch(taught)

    def _ended_without_token(
        self, flight: InFlightAttempt, ending: AttemptOutcome, now: float, reported: Reported
    ) -> None:
        if ending is _COMPLETED:
            if reported.engine_ttft is not None:
                self._learn(flight, reported.engine_ttft, now)
        elif flight.stream and ending in (AttemptOutcome.SILENT, AttemptOutcome.CANCELLED):
            flight.learn_at_least(now)

    def _reconcile(self, flight: InFlightAttempt, reported: Reported, accounted: bool) -> None:
        """Hold what was believed against what the answer says."""
        state, prompt = flight.state, flight.prompt
        if reported.prompt_tokens is not None and prompt.text_tokens and (group := self._groups.get(state.pool.name)):
            group.scale.observe(prompt.text_tokens, prompt.messages, reported.prompt_tokens)
        if reported.mean_itl is not None:
            flight.learn_pace(reported.mean_itl, reported.completion_tokens or 0)
        if reported.cached_tokens is not None and state.local and not accounted and self._is_member(state):
            confirmed = flight.confirmed(reported.cached_tokens)
            if confirmed is not None:
                self.caches.index.confirm(state.endpoint.id, flight.candidate.hit, confirmed)
