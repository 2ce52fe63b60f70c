"""A trace through the gateway's own decision code, in virtual time, against simulated engines.

What is pure here is what serves: `policies.tiers`, `policies.waiting`, `policies.attempts`, `policies.fleet`
and the budgets for trying again. The player stands in for the sockets and for the clock alone, and is
deterministic: one seed, one outcome.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from backends.simulated.events import EngineRequest, Finished, FirstToken, Refused
from backends.simulated.profiles import Profile
from gateway.replay.tally import Fate, Tally
from gateway.replay.traces import BLOCK, Arrival
from gateway.replay.world import Fault, Happened, World
from policies import attempts
from policies.attempts import AttemptMachine
from policies.facts import FOREVER, Ask, Candidate, Decision, Ending, Outcome, Pool, PoolEstimate, PrefixBlocks, PromptEstimate
from policies.fleet import Fleet, Reported
from policies.retries import HedgeBudget, RetryBudget
from policies.route import Route
from policies.waiting import WaitingRoom

PROGRESS = 0.2  # s between two counts of the tokens that answers have
SCRAPE = 0.5  # s between two looks at an engine
FIRST_TOKEN = 120.0  # s an attempt may be silent
DRAIN = 300.0  # s that answers may take after the last arrival
ATTEMPTS = 16  # keys of one request's attempts
RETRY_LIMIT = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """What a trace is played on. `profiles` by endpoint id."""

    pools: tuple[Pool, ...]
    routes: Mapping[str, Route]
    profiles: Mapping[str, Profile]
    faults: tuple[Fault, ...] = ()
    hung: float = 0.0  # share of requests that an engine takes and never answers

    def with_scorer(self, scorer: str) -> Setting:
        """The same with a yardstick in place of the brain."""
        routes = {name: route.model_copy(update={"scorer": scorer, "hedge": "off"}) for name, route in self.routes.items()}
        return replace(self, routes=routes)


@dataclass(slots=True)
class _Live:
    """A request under way. The mutable twin of what the gateway holds in a task."""

    number: int
    arrival: Arrival
    route: Route
    ask: Ask
    estimate: PromptEstimate
    fate: Fate
    machine: AttemptMachine | None = None
    open: dict[int, tuple[Candidate, float]] | None = None
    won: int = 0
    wake: float = FOREVER


class Player:
    """One replay. `play` may be called once."""

    def __init__(self, setting: Setting, arrivals: Sequence[Arrival], seed: int = 0) -> None:
        self.setting, self.arrivals = setting, arrivals
        self.world = World(setting.profiles, seed, setting.hung)
        self.fleet = Fleet(setting.pools)
        self.room = WaitingRoom()
        self.retries = RetryBudget()
        self.hedges = {name: HedgeBudget(0.0 if r.hedge == "off" else r.hedge.max_extra) for name, r in setting.routes.items()}
        self.tally = Tally(dict(setting.routes), max(arrivals[-1].at, 1e-9) if arrivals else 1.0)
        self._pools = {pool.name: pool for pool in setting.pools}
        self._live: dict[int, _Live] = {}
        self._timers: list[tuple[float, int, str, Any]] = []
        self._order = count()
        self._born = dict.fromkeys(setting.profiles, 0.0)
        self._next = 0
        self.now = 0.0

    # ---------------------------------------------------------------- time

    def play(self) -> Tally:
        """Everything until the last answer, or DRAIN seconds after the last arrival."""
        for fault in self.setting.faults:
            self._at(fault.at, "fault", fault)
        for i, endpoint in enumerate(self.setting.profiles):
            self._at(SCRAPE * i / len(self.setting.profiles), "scrape", endpoint)
            self._at(PROGRESS * i / len(self.setting.profiles), "progress", endpoint)
        end = self.tally.seconds + DRAIN
        while (self._next < len(self.arrivals) or self._live) and self.now < end:
            self._advance(min(self._horizon(), end))
        for live in self._live.values():
            live.fate.lost = live.fate.ended_at is None
        return self.tally

    def _horizon(self) -> float:
        upcoming = self._timers[0][0] if self._timers else FOREVER
        if self._next < len(self.arrivals):
            upcoming = min(upcoming, self.arrivals[self._next].at)
        if self.room.wake_at < upcoming:
            upcoming = max(self.room.wake_at, self.now)
        return min(upcoming, self.now + self.world.overhead) if self.room.held else upcoming

    def _advance(self, until: float) -> None:
        for happened in self.world.run_until(until):
            self.now = max(self.now, happened.at)
            self._hear(happened)
        self.now = until
        while self._timers and self._timers[0][0] <= until:
            _, _, what, payload = heappop(self._timers)
            getattr(self, f"_on_{what}")(payload)
        while self._next < len(self.arrivals) and self.arrivals[self._next].at <= until:
            self._next += 1
            self._arrive(self._next, self.arrivals[self._next - 1])
        if self.room.held and self.room.wake_at <= until:
            self._release()

    def _at(self, when: float, what: str, payload: Any) -> None:
        heappush(self._timers, (when, next(self._order), what, payload))

    # ---------------------------------------------------------------- arrivals and decisions

    def _arrive(self, number: int, arrival: Arrival) -> None:
        route = self.setting.routes[arrival.route]
        ask = Ask(route.name, self.now, True)
        expected = self.fleet.expected_output(route.name)
        estimate = estimate_of(arrival, route, expected)
        fate = Fate(route.name, self.now, arrival.prompt_tokens, arrival.output_tokens)
        self.tally.fates.append(fate)
        self._live[number] = _Live(number, arrival, route, ask, estimate, fate, open={})
        self.room.enter(number, ask, estimate, route, self.now, number)
        self._release()

    def _release(self) -> None:
        for number, decision in self.room.release(self.fleet, self.now):
            self._decided(self._live[number], decision)

    def _decided(self, live: _Live, decision: Decision) -> None:
        live.fate.decision = decision
        if decision.outcome is not Outcome.PLACE:
            live.fate.shed = True
            del self._live[live.number]
            return
        route = live.route
        if route.scorer != "predicted":  # a yardstick leaves nothing for being silent: that is our brain's
            decision = replace(decision, deadline=FOREVER)
        live.machine = AttemptMachine(
            decision, max_attempts=route.max_attempts, stream=True, hedge=route.hedge != "off",
            first_token_limit=FIRST_TOKEN, now=self.now,
        )  # fmt: skip
        self.retries.began()
        self.hedges[route.name].began()
        self._tell(live, attempts.Begin())

    # ---------------------------------------------------------------- attempts

    def _tell(self, live: _Live, event: attempts.Event, may_retry: bool = True) -> None:
        assert live.machine is not None
        step = live.machine.on(event, self.now, may_retry)
        for action in step.actions:
            match action:
                case attempts.Open(attempt):
                    self._open(live, attempt.number, attempt.candidate, attempt.kind)
                case attempts.Cancel(number, ending):
                    self._cancel(live, number, ending)
                case attempts.Commit(number):
                    live.won = number
                case attempts.GiveUp():
                    live.fate.lost = True
                    self._close(live)
        if step.wake_at is not None and live.number in self._live and step.wake_at != live.wake:
            live.wake = step.wake_at
            self._at(max(step.wake_at, self.now), "wake", (live.number, step.wake_at))

    def _open(self, live: _Live, number: int, candidate: Candidate, kind: Any) -> None:
        endpoint, key = candidate.endpoint, live.number * ATTEMPTS + number
        assert live.open is not None
        live.open[number] = candidate, self.now
        live.fate.attempts += 1
        live.fate.hedges += kind is attempts.AttemptKind.HEDGE
        self.fleet.sent(key, candidate, live.estimate.pools[endpoint.pool], self.now, True, live.route.tpot.budget if live.route.tpot else None, live.estimate.output_tokens)
        self.room.departed(live.number)
        arrival = live.arrival
        request = EngineRequest(key, arrival.prompt_tokens, arrival.output_tokens, arrival.hashes)
        try:
            self.world.submit(endpoint.id, request, self.now)
        except Refused as refused:
            self._at(self.now, "refused", (live.number, number, refused))
        except ValueError:
            self._at(self.now, "refused", (live.number, number, Refused(400, "too long")))

    def _cancel(self, live: _Live, number: int, ending: Ending) -> None:
        assert live.open is not None
        candidate, _ = live.open.pop(number)
        key = live.number * ATTEMPTS + number
        self.world.abort(candidate.endpoint.id, key)
        self.fleet.ended(key, ending, self.now)

    def _fail(self, live: _Live, number: int, refused: Refused | None) -> None:
        """An attempt has died (None), or was refused."""
        assert live.open is not None
        if number not in live.open:
            return
        live.open.pop(number)
        status = 0 if refused is None else refused.status
        limited = status == 429
        reported = Reported(retry_after=refused.retry_after if refused else None, connected=refused is None or status != 0)
        ending = Ending.RATE_LIMITED if limited else Ending.FAILED
        self.fleet.ended(live.number * ATTEMPTS + number, ending, self.now, reported)
        if live.won == number:
            live.fate.lost = True
            self._close(live)
            return
        died = status == 0
        may_retry = died or self.retries.try_take()
        if may_retry and not died:
            self.retries.give_back()
        self._tell(live, attempts.Failed(number, status != 400, died, reported.retry_after), may_retry)

    def _close(self, live: _Live) -> None:
        self._live.pop(live.number, None)
        self.retries.ended()

    # ---------------------------------------------------------------- what happens

    def _hear(self, happened: Happened) -> None:
        event = happened.event
        number, attempt = divmod(int(event.id), ATTEMPTS)
        live = self._live.get(number)
        if live is None or live.open is None or attempt not in live.open:
            return
        if isinstance(event, FirstToken):
            self._first_token(live, attempt, event)
        else:
            self._finished(live, attempt, event)
        if self.room.held:
            self._release()

    def _first_token(self, live: _Live, attempt: int, event: FirstToken) -> None:
        assert live.open is not None
        candidate, sent_at = live.open[attempt]
        self.fleet.first_token(live.number * ATTEMPTS + attempt, self.now)
        fate = live.fate
        fate.first_at, fate.sent_at, fate.endpoint, fate.tier = self.now, sent_at, candidate.endpoint.id, candidate.tier
        fate.cached, fate.believed = event.cached_tokens, candidate.hit
        fate.p50, fate.p90 = candidate.forecast.p50, candidate.forecast.p90
        ranked = live.fate.decision.ranked if live.fate.decision else ()
        others = [other.forecast.p50 for other in ranked if other.endpoint.id != candidate.endpoint.id]
        fate.alternative = min(others, default=None)
        self._tell(live, attempts.FirstToken(attempt))

    def _finished(self, live: _Live, attempt: int, event: Finished) -> None:
        assert live.open is not None
        candidate, _ = live.open.pop(attempt)
        fate, arrival = live.fate, live.arrival
        fate.ended_at = self.now
        local = self._pools[candidate.endpoint.pool].local
        reported = Reported(arrival.prompt_tokens, fate.cached if local else None, event.output_tokens, fate.tpot)
        self.fleet.ended(live.number * ATTEMPTS + attempt, Ending.COMPLETED, self.now, reported)
        self.fleet.observe_output(fate.route, event.output_tokens)
        fate.cost = self._pools[candidate.endpoint.pool].price.of(arrival.prompt_tokens, event.output_tokens)
        self._close(live)

    # ---------------------------------------------------------------- timers

    def _on_wake(self, due: tuple[int, float]) -> None:
        live = self._live.get(due[0])
        if live is None or live.machine is None or live.wake != due[1] or live.won:
            return
        live.wake = FOREVER
        budget = self.hedges[live.route.name]
        paid, hedges = budget.try_take(), live.fate.hedges
        self._tell(live, attempts.Wake(), paid)
        if paid and live.fate.hedges == hedges:
            budget.give_back()

    def _on_refused(self, what: tuple[int, int, Refused]) -> None:
        live = self._live.get(what[0])
        if live is not None:
            self._fail(live, what[1], what[2])

    def _on_scrape(self, endpoint: str) -> None:
        load = self.world.load_of(endpoint, self._born[endpoint])
        if load is not None:
            self.fleet.scraped(endpoint, load, self.now)
        elif self._pools[endpoint.partition("/")[0]].local:
            self.fleet.unreachable(endpoint, self.now)
        self._at(self.now + SCRAPE, "scrape", endpoint)

    def _on_progress(self, endpoint: str) -> None:
        self.fleet.progress(self.world.progress(endpoint), self.now)
        self._at(self.now + PROGRESS, "progress", endpoint)

    def _on_fault(self, fault: Fault) -> None:
        if fault.what == "restart":
            self._born[fault.endpoint] = self.now
        for key in self.world.befall(fault, self.now):
            number, attempt = divmod(int(key), ATTEMPTS)
            if (live := self._live.get(number)) is not None:
                self._fail(live, attempt, None)


def estimate_of(arrival: Arrival, route: Route, expected: int) -> PromptEstimate:
    """As the gateway's estimator would have it, had it counted well."""
    hashes = arrival.hashes if isinstance(arrival.hashes, array) else array("Q", arrival.hashes)
    one = PoolEstimate(arrival.prompt_tokens, PrefixBlocks(hashes, BLOCK), arrival.prompt_tokens)
    return PromptEstimate({tier.pool: one for tier in route.tiers}, expected)


def play(setting: Setting, arrivals: Sequence[Arrival], seed: int = 0) -> Tally:
    """One replay."""
    return Player(setting, arrivals, seed).play()


def at_load(arrivals: Iterable[Arrival], factor: float) -> list[Arrival]:
    """The same requests in `factor` times less time."""
    return [replace(arrival, at=arrival.at / factor) for arrival in arrivals]
