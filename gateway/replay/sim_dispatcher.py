"""The attempts of a replay: what the gateway's dispatcher does with sockets, done with simulated machines.

The decisions are the same code (`policies.attempts.attempt_machine` and the budgets for trying again); so is what
the fleet is
told, and when. A clairvoyant's request that was lost enters its room again: it needs no second choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from backends.simulated.events import EngineFirstToken, EngineRequest, Finished, Refused
from gateway.replay.clairvoyant import Clairvoyant
from gateway.replay.results import ReplayOutcome, RequestResult, Results
from gateway.replay.scenario import OURS, Scenario
from gateway.replay.sim_fleet import Happened, SimFleet
from gateway.replay.traces import Arrival
from gateway.replay.virtual_clock import Clock
from policies.attempts import attempt_steps as steps
from policies.attempts.attempt_machine import AttemptMachine
from policies.attempts.retry_budgets import HedgeBudget, RetryBudget
from policies.fleet.fleet import AttemptReport, Fleet
from policies.queue.queue_scheduler import QueueScheduler
from policies.routes.route import Route
from policies.scorers.scorer import tie_break
from policies.types import (
    FOREVER,
    Attempt,
    AttemptKind,
    AttemptOutcome,
    Candidate,
    Decision,
    Placement,
    PromptEstimate,
)

ATTEMPTS = 16  # keys of one request's attempts


@dataclass(slots=True)
class Live:
    """A request under way. The mutable twin of what the gateway holds in a task."""

    number: int
    arrival: Arrival
    route: Route
    estimate: PromptEstimate
    fate: RequestResult
    decision: Decision | None = None
    machine: AttemptMachine | None = None
    open: dict[int, tuple[Candidate, float]] = field(default_factory=dict)  # attempts, and when they were sent
    won: int = 0
    retries: int = 0  # taken from the shared budget
    wake: float = FOREVER

    def key(self, attempt: int) -> int:
        return self.number * ATTEMPTS + attempt


class SimDispatcher:
    """All requests under way. `lost`: what to do with one of a clairvoyant's whose attempt was lost."""

    def __init__(
        self,
        setting: Scenario,
        clock: Clock,
        world: SimFleet,
        fleet: Fleet,
        room: QueueScheduler | Clairvoyant,
        tally: Results,
        lost: Callable[[Live], None],
    ) -> None:
        self.setting, self.clock, self.world, self.fleet, self.tally = setting, clock, world, fleet, tally
        self.room, self.lost = room, lost
        self.oracle = room if isinstance(room, Clairvoyant) else None
        self.live: dict[int, Live] = {}
        self.racing: set[int] = set()  # requests with more than one attempt, or an attempt's end on its way
        self._retries = RetryBudget()
        self._hedges = {name: HedgeBudget(_extra(route)) for name, route in setting.routes.items()}
        self._pools = {pool.name: pool for pool in setting.pools}

    def decided(self, live: Live, decision: Decision) -> None:
        live.decision, live.fate.outcome = decision, decision.outcome
        if decision.outcome is not Placement.PLACE:
            return self.refuse(live)
        route = live.route
        if self.setting.pooled:
            decision = _without_tiers(decision, live.number)
        if self.setting.scorer != OURS:  # a yardstick leaves nothing for being silent: that is our brain's
            decision = replace(decision, deadline=FOREVER)
        live.decision = decision
        live.machine = AttemptMachine(
            decision,
            max_attempts=route.max_attempts,
            stream=True,
            hedge=route.hedge != "off",
            first_token_limit=self.setting.patience,
            now=self.clock.now,
        )
        self._retries.began()
        self._hedges[route.name].began()
        return self._tell(live, steps.Begin())

    def refuse(self, live: Live) -> None:
        self.room.on_dispatched(live.number)
        live.fate.end = ReplayOutcome.SHED
        del self.live[live.number]

    # ---------------------------------------------------------------- what the machine asks for

    def _tell(self, live: Live, event: steps.Event, may_retry: bool = True) -> None:
        assert live.machine is not None
        step = live.machine.on(event, self.clock.now, may_retry)
        for action in step.actions:
            match action:
                case steps.Open(attempt):
                    self._open(live, attempt)
                case steps.Cancel(number, ending):
                    self._cancel(live, number, ending)
                case steps.Commit(number):
                    live.won = number
                    self._settled(live)
                case steps.GiveUp():
                    self._settled(live)
                    self._close(live, ReplayOutcome.LOST)
        if step.wake_at is not None and step.wake_at not in (live.wake, FOREVER):
            live.wake = step.wake_at
            self.clock.at(step.wake_at, self._wake, (live.number, step.wake_at))

    def _open(self, live: Live, attempt: Attempt) -> None:
        candidate, now = attempt.candidate, self.clock.now
        endpoint, key = candidate.endpoint, live.key(attempt.number)
        live.open[attempt.number] = candidate, now
        live.fate.attempts += 1
        live.fate.hedges += attempt.kind is AttemptKind.HEDGE
        if len(live.open) > 1:
            self.racing.add(live.number)
        prompt, pace = live.estimate.pools[endpoint.pool], live.route.tpot.budget if live.route.tpot else None
        self.fleet.on_sent(key, candidate, prompt, now, True, tpot_budget=pace, output=live.estimate.output_tokens)
        self.room.on_dispatched(live.number)
        arrival = live.arrival
        request = EngineRequest(key, arrival.prompt_tokens, arrival.output_tokens, arrival.hashes)
        try:
            self.world.submit(endpoint.id, request, now)
        except Refused as refused:
            self.clock.at(now, self._refused, (live.number, attempt.number, refused))
        except ValueError:
            self.clock.at(now, self._refused, (live.number, attempt.number, Refused(400, "too long")))

    def _cancel(self, live: Live, number: int, ending: AttemptOutcome) -> None:
        """The engine hears of it as late as it would hear of a request."""
        candidate, _ = live.open.pop(number)
        self.racing.add(live.number)
        heard = self.clock.now + self.world.overhead
        self.clock.at(heard, self._abort, (live.number, candidate.endpoint.id, live.key(number)))
        self.fleet.on_ended(live.key(number), ending, self.clock.now)

    def _abort(self, what: tuple[int, str, int]) -> None:
        number, endpoint, key = what
        self.world.abort(endpoint, key)
        live = self.live.get(number)
        if live is None or len(live.open) < 2:
            self.racing.discard(number)

    def _wake(self, due: tuple[int, float]) -> None:
        """A hedge is paid for before the machine is asked, and given back if it was not sent."""
        live = self.live.get(due[0])
        if live is None or live.wake != due[1] or live.won:
            return
        live.wake = FOREVER
        budget = self._hedges[live.route.name]
        paid, hedges = not self.room.held and budget.try_take(), live.fate.hedges
        self._tell(live, steps.TimerFired(), paid)
        if paid and live.fate.hedges == hedges:
            budget.give_back()

    # ---------------------------------------------------------------- what happens

    def hear(self, happened: Happened) -> None:
        event = happened.event
        number, attempt = divmod(int(event.id), ATTEMPTS)
        live = self.live.get(number)
        if live is None or attempt not in live.open:
            return
        if isinstance(event, EngineFirstToken):
            self._first_token(live, attempt, event)
        else:
            self._finished(live, attempt, event)

    def _first_token(self, live: Live, attempt: int, event: EngineFirstToken) -> None:
        (candidate, sent_at), now = live.open[attempt], self.clock.now
        self.fleet.on_first_token(live.key(attempt), now)
        fate, decision = live.fate, live.decision
        assert decision is not None
        fate.first_at, fate.sent_at, fate.endpoint, fate.tier = now, sent_at, candidate.endpoint.id, candidate.tier
        fate.cached, fate.believed = event.cached_tokens, candidate.hit
        if self.oracle is not None:
            self.oracle.began(live.number, live.key(attempt), now)
        else:
            fate.p50, fate.p90 = candidate.forecast.p50, candidate.forecast.p90
            others = (other.forecast.p50 for other in decision.ranked if other.endpoint != candidate.endpoint)
            fate.alternative = min(others, default=None)
        self.tally.answered(fate, decision, live.estimate)
        self._tell(live, steps.FirstToken(attempt))
        live.decision = None

    def _finished(self, live: Live, attempt: int, event: Finished) -> None:
        candidate, _ = live.open.pop(attempt)
        fate, arrival, pool = live.fate, live.arrival, self._pools[candidate.endpoint.pool]
        fate.ended_at = self.clock.now
        reported = AttemptReport(
            arrival.prompt_tokens, fate.cached if pool.local else None, event.output_tokens, fate.tpot
        )
        self.fleet.on_ended(live.key(attempt), AttemptOutcome.COMPLETED, self.clock.now, reported)
        self.fleet.observe_output(fate.route, event.output_tokens)
        fate.cost = pool.price.of(arrival.prompt_tokens, event.output_tokens)
        self._close(live, ReplayOutcome.COMPLETED)

    def died(self, key: int) -> None:
        """The engine did, with the request in its hands."""
        number, attempt = divmod(key, ATTEMPTS)
        live = self.live.get(number)
        if live is None or attempt not in live.open:
            return
        if live.won == attempt:
            live.open.pop(attempt)
            self.fleet.on_ended(key, AttemptOutcome.BROKEN, self.clock.now, AttemptReport())
            self._close(live, ReplayOutcome.BROKEN)
        else:
            self._failed(live, steps.Failed(attempt, connection_lost=True, taken=True), AttemptOutcome.FAILED)

    def _refused(self, what: tuple[int, int, Refused]) -> None:
        number, attempt, refused = what
        live, status = self.live.get(number), refused.status
        if live is None or attempt not in live.open:
            return
        ending = {0: AttemptOutcome.FAILED, 400: AttemptOutcome.REFUSED}.get(status, AttemptOutcome.RATE_LIMITED)
        self._failed(live, steps.Failed(attempt, status != 400, status == 0, refused.retry_after), ending)

    def _failed(self, live: Live, failure: steps.Failed, ending: AttemptOutcome) -> None:
        live.open.pop(failure.number)
        reached = failure.taken or not failure.connection_lost
        reported = AttemptReport(retry_after=failure.retry_after, connected=reached)
        self.fleet.on_ended(live.key(failure.number), ending, self.clock.now, reported)
        if self.oracle is not None and failure.retryable:
            self.oracle.ended(live.number)
            live.decision = None
            return self.lost(live)
        may_retry = failure.connection_lost or not failure.retryable
        if not may_retry and (may_retry := self._retries.try_take()):
            live.retries += 1
        return self._tell(live, failure, may_retry)

    def _settled(self, live: Live) -> None:
        """Committed, or given up: it counts no longer among those that may be tried again."""
        self._retries.ended()
        for _ in range(live.retries):
            self._retries.give_back()

    def _close(self, live: Live, end: ReplayOutcome) -> None:
        live.fate.end = end
        del self.live[live.number]
        if self.oracle is not None:
            self.oracle.ended(live.number)


def _extra(route: Route) -> float:
    return 0.0 if route.hedge == "off" else route.hedge.max_extra


def _without_tiers(decision: Decision, seed: int) -> Decision:
    """All endpoints of all tiers in one order, by a score that means the same in every pool."""
    ranked = sorted(decision.ranked, key=lambda c: (c.score, tie_break(seed, c.endpoint.id)))
    return replace(decision, ranked=tuple(ranked))
