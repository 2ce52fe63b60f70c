"""Performs the actions of the attempt state machine: open, cancel, commit, give up. Decides nothing.

`execute` returns once an answer was relayed to the end, or raises the ApiError for the caller. The winning attempt is
joined to the relay in the very call of the first token. A caller that leaves cancels the await, and so every attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterable
from dataclasses import replace
from time import monotonic
from typing import Any

from backends.interface import Failure, FailureKind
from gateway.api.inference_request import InferenceRequest
from gateway.observe.record import Stage
from gateway.upstream.answer_quality import shortcoming
from gateway.upstream.failure_rules import FailureRules, refusal_of
from gateway.upstream.operation_fit import OperationFit
from gateway.upstream.relay import LATE_TIMER, READ_FIRST, Relay
from gateway.upstream.routed_request import RoutedRequest, attempt_record, header_safe
from gateway.upstream.stream_rescue import StreamRescue
from gateway.upstream.upstream_request import EVERYWHERE, UpstreamRequest
from policies.attempts.attempt_events import (
    Begin,
    Broken,
    Cancel,
    ClientGone,
    Commit,
    EndpointDown,
    Event,
    Failed,
    FirstToken,
    Open,
    TimerFired,
)
from policies.attempts.attempt_machine import AttemptMachine, HedgeBudget, RetryBudget
from policies.fleet.fleet import Fleet
from policies.routes.route import Route
from policies.types import (
    FOREVER,
    Attempt,
    AttemptKind,
    Candidate,
    Health,
)

WHOLE_ANSWER = 600.0  # s for an answer without streaming: the SDKs' own default timeout
OVERTAKEN, LEAST_OVERTAKEN = 10.0, 15.0  # times the predicted time of a whole answer, and s


class Dispatcher:
    """Holds the budgets for retries and hedges, which all requests share."""

    def __init__(
        self,
        fleet: Fleet,
        retries: RetryBudget,
        *,
        on_dispatched: Callable[[InferenceRequest], None] = lambda request: None,
        saturated: Callable[[], bool] = lambda: False,
    ) -> None:
        self.fleet = fleet
        self.retries = retries
        self.on_dispatched = on_dispatched  # called once the fleet counts an attempt, and at the end
        self.saturated = saturated  # True: a hedge would take another request's place
        self.operations = OperationFit()
        self.hedges: dict[tuple[str, float], HedgeBudget] = {}  # by name and share of the route
        self.connecting: set[asyncio.Task[None]] = set()
        fleet.on_found_dead = self._on_found_dead

    def reload(self, routes: Iterable[Route]) -> None:
        """Keep the hedge budgets of routes with an unchanged share."""
        known = {(route.name, route.hedge_share) for route in routes}
        self.hedges = {key: budget for key, budget in self.hedges.items() if key in known}

    def is_closed(self, candidate: Candidate) -> bool:
        """True while an attempt has to wait. A method of the runner would close a reference cycle with its machine."""
        return self.fleet.is_closed(candidate, monotonic())

    async def execute(self, routed: RoutedRequest, relay: Relay) -> None:
        """Run the attempts of a request. Raises ApiError if every attempt failed before a first token."""
        runner = AttemptRunner(self, routed, relay)
        try:
            runner.begin()
            await relay.done
        except asyncio.CancelledError:
            runner.abandon()
            raise
        finally:
            runner.close()
            relay.release()

    def _on_found_dead(self, attempts: list[Hashable]) -> None:
        """Attempts without a first token at an endpoint that does not answer its probes any more."""
        for upstream_request in attempts:
            if isinstance(upstream_request, UpstreamRequest) and upstream_request.first_in is None:
                runner = upstream_request.listener
                if isinstance(runner, AttemptRunner):  # not a cache warming
                    runner.endpoint_down(upstream_request)

    def hedges_of(self, route: Route) -> HedgeBudget:
        key = route.name, route.hedge_share
        if key not in self.hedges:
            self.hedges[key] = HedgeBudget(route.hedge_share)
        return self.hedges[key]


class AttemptRunner:
    """The attempts of a request."""

    def __init__(self, dispatcher: Dispatcher, routed: RoutedRequest, relay: Relay) -> None:
        self.dispatcher = dispatcher
        self.routed = routed
        self.relay = relay
        self.hedges = dispatcher.hedges_of(routed.route)
        self.retries_taken = 0  # from the shared budget
        self.finished = False
        self.attempts: dict[int, UpstreamRequest] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.watch: asyncio.TimerHandle | None = None  # of an answer that is not streamed
        self.failure: Failure | None = None  # the last one
        self.kept: UpstreamRequest | None = None  # a whole answer with a shortcoming, while another pool is asked
        self.rules: FailureRules | None = None  # once an attempt has failed
        self.machine = AttemptMachine(
            routed.decision,
            max_attempts=routed.route.max_attempts,
            stream=routed.request.stream,
            hedge=routed.route.hedge != "off",
            first_token_limit=routed.first_token_limit if routed.request.stream else WHOLE_ANSWER,
            now=monotonic(),
            limit_at=routed.limit_at,
            is_closed=dispatcher.is_closed if dispatcher.fleet.closes else None,
        )
        self.rescue: StreamRescue | None = None
        if routed.route.rescue == "on" and routed.request.stream:
            self.rescue = relay.rescue = StreamRescue(routed.request, routed.timeline.record, self, relay.idle)

    def begin(self) -> None:
        self.dispatcher.retries.began()
        self.hedges.began()
        self._advance(Begin())

    def abandon(self) -> None:
        """The caller has left."""
        self._advance(ClientGone())
        for upstream_request in self.attempts.values():  # the machine has forgotten the winner
            upstream_request.cancel()
        if self.kept is not None:
            self._record_lost(self.kept)

    def _finish(self) -> None:
        """Return shares of budgets; called once, at the first token or without any."""
        self.finished = True
        self._cancel_timer()
        if self.watch is not None:
            self._cancel_watch()
        self.dispatcher.on_dispatched(self.routed.request)
        self.dispatcher.retries.ended()
        self._give_back_retries()

    def _give_back_retries(self) -> None:
        for _ in range(self.retries_taken):
            self.dispatcher.retries.give_back()
        self.retries_taken = 0

    def close(self) -> None:
        """Break the reference cycles between runner, attempts and listeners. Left to the garbage collector they cost a
        tenth of a request, and a pause of 18 ms for all requests now and then."""
        if not self.finished:
            self._finish()
        self._cancel_timer()
        self._give_back_retries()
        for upstream_request in self.attempts.values():
            upstream_request.detach()
        self.attempts.clear()
        if self.rescue is not None:
            self.rescue.runner = None

    # -- the state machine ------------------------------------------------------------------

    def _advance(self, event: Event, may_retry: bool = True) -> None:
        step = self.machine.on(event, monotonic(), may_retry)
        for action in step.actions:
            if isinstance(action, Open):
                self._open(action.attempt)
            elif isinstance(action, Commit):
                self._commit(self.attempts[action.number])
            elif isinstance(action, Cancel):
                loser = self.attempts[action.number]
                loser.stop(action.outcome)
                self._record_lost(loser)
            else:
                self._give_up(action.reason)
        self._cancel_timer()
        if step.wake_at is not None:
            delay = max(step.wake_at - monotonic(), 0.0)
            self.timer = self.relay.loop.call_later(delay, self._on_timer, step.wake_at)

    def _cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _on_timer(self, due: float) -> None:
        """A stall of this event loop is no silence of the engine: after one, sockets are read first."""
        if monotonic() - due > LATE_TIMER:
            self.timer = self.relay.loop.call_later(READ_FIRST, self._check_silence)
        else:
            self._check_silence()

    def _check_silence(self) -> None:
        """Take a hedge from the budget before the machine decides, and return a hedge not sent."""
        self.timer = None
        hedge_taken = not self.dispatcher.saturated() and self.hedges.try_take()
        known = len(self.attempts)
        self._advance(TimerFired(), hedge_taken)
        opened = list(self.attempts.values())[known:]
        if hedge_taken and all(each.attempt.kind is not AttemptKind.HEDGE for each in opened):
            self.hedges.give_back()

    # -- actions of the machine -------------------------------------------------------------

    def _open(self, attempt: Attempt) -> None:
        routed, endpoint, fleet = self.routed, attempt.candidate.endpoint, self.dispatcher.fleet
        upstream = routed.upstreams[endpoint.id]
        request = routed.backend_request(upstream, attempt)
        if self.rescue is not None and attempt.kind is AttemptKind.RESCUE:
            if routed.request.wants_usage:
                self._run(self.rescue.count_prompt(upstream, request))
            request = self.rescue.continued(upstream, request)
            candidate = attempt.candidate
            attempt.candidate = replace(candidate, prompt_tokens=candidate.prompt_tokens + self.rescue.tokens)
        answer = routed.rewritten_answer(endpoint, endpoint.pool in self.relay.masked_pools)
        upstream_request = UpstreamRequest(
            attempt, upstream, request, listener=self, fleet=fleet, idle=self.relay.idle, answer=answer
        )
        upstream_request.tap.strict = self.rescue is not None or answer is not None
        self.attempts[attempt.number] = upstream_request
        if not upstream_request.start():  # first of all: the rest is done while the engine reads the request
            upstream_request.connecting = self._run(upstream_request.connect())
        fleet.on_sent(
            upstream_request,
            attempt.candidate,
            routed.estimate.pools[endpoint.pool],
            upstream_request.opened,
            routed.request.stream,
            session=request.session_id,
            tpot_budget=routed.route.tpot_budget(routed.request.tpot_budget),
            output=routed.estimate.output_tokens,
            route=routed.route,
        )
        self.dispatcher.on_dispatched(routed.request)
        if not routed.request.stream:
            self._watch(upstream_request, self._patience(attempt.candidate))

    def _patience(self, candidate: Candidate) -> float:
        """Seconds in which the candidate would have written the longest answer many times over; FOREVER: not known."""
        forecast, request, limit = candidate.forecast, self.routed.request, self.routed.route.limits.output_tokens
        longest = min((each for each in (request.max_tokens, limit) if each), default=None)
        if longest is None or not forecast.tpot:
            return FOREVER
        return max(OVERTAKEN * (forecast.p90 + longest * forecast.tpot), LEAST_OVERTAKEN)

    def _watch(self, upstream_request: UpstreamRequest, patience: float, overtaken: bool = False) -> None:
        """Look after an answer that is not streamed: an engine may have lost the request, and answer others."""
        self._cancel_watch()
        if patience < WHOLE_ANSWER:
            self.watch = self.relay.loop.call_later(patience, self._on_watch, upstream_request, patience, overtaken)

    def _on_watch(self, upstream_request: UpstreamRequest, patience: float, overtaken: bool) -> None:
        """Leave an endpoint that has answered later requests, and has had the time for this one since."""
        if overtaken:
            self.endpoint_down(upstream_request)
        else:
            self._watch(upstream_request, patience, self.dispatcher.fleet.overtaken(upstream_request))

    def _cancel_watch(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
            self.watch = None

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.relay.loop.create_task(work)
        self.dispatcher.connecting.add(task)
        task.add_done_callback(self.dispatcher.connecting.discard)
        return task

    def _commit(self, winner: UpstreamRequest) -> None:
        if self.finished:
            return self._resume(winner)
        self._finish()
        if winner.operation not in EVERYWHERE:
            self.dispatcher.operations.served.add((winner.attempt.candidate.endpoint.pool, winner.operation))
        kept, self.kept = self.kept, None
        if kept is not None and kept is not winner:
            self._record_lost(kept)
        model = self.routed.model_at(winner.attempt.candidate.endpoint, winner.upstream)
        self.routed.timeline.won(
            winner.attempt.candidate,
            header_safe(model) if self.routed.passthrough else model,
            opened=winner.opened,
            connected=winner.connected,
            sent=winner.sent,
            first_in=winner.first_in or winner.sent,
        )
        if kept is winner:
            self.routed.timeline.close((Stage.FAILOVER, monotonic()))
        try:
            self.relay.begin(winner)
        except Exception as bug:  # raised by the waiting task, not within the upstream's connection
            self.relay.done.set_exception(bug)

    def _resume(self, winner: UpstreamRequest) -> None:
        """A peer continues a broken answer."""
        assert self.rescue is not None
        self._record_lost(self.relay.winner)
        try:
            self.relay.resume(winner, self.rescue.resumed())
        except Exception as bug:
            self.relay.done.set_exception(bug)

    def _give_up(self, reason: str) -> None:
        if self.finished:
            self.relay.give_up()
        elif self.kept is not None:
            self._commit(self.kept)
            self.relay.end()
        else:
            self._finish()
            self.relay.done.set_exception(refusal_of(self.failure, reason))

    # -- RescueRunner -------------------------------------------------------------------------

    def unable(self, tokens: int) -> dict[str, str]:
        """Candidates that cannot continue an answer of `tokens` now, with the reason."""
        loads, winner = self.dispatcher.fleet.snapshot(monotonic()).loads, self.relay.winner.attempt
        found: dict[str, str] = {}
        for endpoint in (candidate.endpoint for candidate in self.routed.decision.ranked):
            upstream = self.routed.upstreams[endpoint.id]
            if (load := loads.get(endpoint.id)) is None or load.health is not Health.UP:
                found[endpoint.id] = "no peer is up"
            elif obstacle := upstream.backend.obstacle(self.routed.backend_request(upstream, winner), tokens):
                found[endpoint.id] = obstacle
        return found

    def race_again(self, broken: Broken) -> None:
        self._advance(broken)

    # -- AttemptListener ----------------------------------------------------------------------

    def first_token(self, upstream_request: UpstreamRequest) -> None:
        if not (self.routed.route.escalate and self._escalates(upstream_request)):
            self._advance(FirstToken(upstream_request.attempt.number))

    def _escalates(self, upstream_request: UpstreamRequest) -> bool:
        """Ask another pool once, where the route wants better than this whole answer. The answer is kept: the caller
        gets it if no other comes."""
        if upstream_request.stream or not upstream_request.over or self.kept is not None:
            return False
        routed, attempt = self.routed, upstream_request.attempt
        pool = attempt.candidate.endpoint.pool
        if all(candidate.endpoint.pool == pool for candidate in routed.decision.ranked):
            return False
        reply = b"".join(upstream_request.buffered)
        lack = shortcoming(routed.request.operation, routed.request.body, reply, routed.route.escalate)
        if not lack:
            return False
        self.kept, routed.timeline.record.escalated = upstream_request, lack
        self._advance(Failed(attempt.number, retryable=True, avoid=frozenset({pool})))
        return True

    def endpoint_down(self, upstream_request: UpstreamRequest) -> None:
        self._advance(EndpointDown(upstream_request.attempt.number))

    def failed(self, upstream_request: UpstreamRequest, failure: Failure) -> None:
        self.failure = failure
        self._record_lost(upstream_request)
        attempt, rules = upstream_request.attempt, self._failure_rules()
        refused = self.rescue if upstream_request.continues and failure.kind is FailureKind.CLIENT else None
        restart = None if refused is None else refused.restart()
        event = rules.event_of(attempt, failure, accepted=upstream_request.accepted, restart=restart)
        if rules.is_charged(failure, attempt.candidate.endpoint):
            self._retry_on_budget(event, attempt.candidate.endpoint.pool)
        else:
            self._advance(event)

    def _failure_rules(self) -> FailureRules:
        if self.rules is None:
            routed, dispatcher = self.routed, self.dispatcher
            self.rules = FailureRules(
                request=routed.request,
                route=routed.route,
                decision=routed.decision,
                native=routed.native,
                fleet=dispatcher.fleet,
                operations=dispatcher.operations,
            )
        return self.rules

    def _retry_on_budget(self, event: Failed, pool: str) -> None:
        """Take a retry from the budget before the machine decides, and return one that was sent to another pool."""
        taken, known = self.dispatcher.retries.try_take(), len(self.attempts)
        self.retries_taken += taken
        self._advance(event, taken)
        opened = list(self.attempts.values())[known:]
        if taken and (self.finished or (opened and opened[0].attempt.candidate.endpoint.pool != pool)):
            self.dispatcher.retries.refund()
            if not self.finished:
                self.retries_taken -= 1
                self.dispatcher.retries.give_back()

    def _record_lost(self, upstream_request: UpstreamRequest) -> None:
        timeline = self.routed.timeline
        timeline.attempt_lost(attempt_record(upstream_request, timeline.record.arrival))
