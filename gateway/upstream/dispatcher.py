"""Performs what the attempt state machine asks: open, cancel, commit, give up. Decides nothing.

`carry` returns once an answer was relayed to its end, or raises the Refusal that the caller deserves. The
attempt that wins is joined to the relay in the very call in which its first token arrived. A caller that leaves
cancels the await, and with it every attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic

from backends.failures import TransportError
from backends.interface import BackendRequest, Failure, FailureKind
from gateway.api.inference_request import InferenceRequest
from gateway.fleet.monitor import Monitor
from gateway.upstream.relay import Relay
from gateway.upstream.routed_request import (
    RoutedRequest,
    Upstream,
    attempt_record,
    header_safe,
    priority_of,
    refusal_of,
)
from gateway.upstream.upstream_request import UpstreamRequest
from policies.attempts.attempt_machine import AttemptMachine
from policies.attempts.attempt_steps import (
    Begin,
    Cancel,
    ClientGone,
    Commit,
    Event,
    Failed,
    FirstToken,
    Open,
    TimerFired,
)
from policies.attempts.retry_budgets import HedgeBudget, RetryBudget
from policies.routes.route import Route
from policies.types import Attempt, AttemptKind, AttemptOutcome

OVERLOAD = (FailureKind.RATE_LIMITED, FailureKind.OVERLOADED, FailureKind.SERVER)
WHOLE_ANSWER = 600.0  # s that an answer which arrives whole may take: the SDKs' own default timeout
STALL, READ_FIRST = 0.005, 0.01  # s that an alarm may be late; s that sockets then get
DEATH = (FailureKind.CONNECT, FailureKind.RESET, FailureKind.TIMEOUT)


class Dispatcher:
    """Holds the budgets for retries and hedges, which all requests share."""

    def __init__(
        self,
        monitor: Monitor,
        retries: RetryBudget,
        *,
        on_departed: Callable[[InferenceRequest], None] = lambda request: None,
        saturated: Callable[[], bool] = lambda: False,
    ) -> None:
        self.monitor, self.retries = monitor, retries
        self.on_departed = on_departed  # told once the fleet knows of an attempt, or that there was none
        self.saturated = saturated  # a second copy would take another's place
        self.hedges: dict[str, HedgeBudget] = {}
        self.connecting: set[asyncio.Task[None]] = set()

    def reload(self, routes: Iterable[Route]) -> None:
        """Keeps what a route has saved up for hedges, unless its share is another one now."""
        budgets = ((route.name, HedgeBudget(_share(route)), self.hedges.get(route.name)) for route in routes)
        self.hedges = {name: old for name, new, old in budgets if old is not None and old.share == new.share}

    async def execute(self, job: RoutedRequest, relay: Relay) -> None:
        """Raises Refusal when every attempt has failed before its first token."""
        dispatch = AttemptRunner(self, job, self.hedges_of(job.route), relay)
        try:
            dispatch.begin()
            await relay.done
        except asyncio.CancelledError:
            dispatch.abandon()
            raise
        finally:
            dispatch.finish()
            dispatch.detach()
            relay.release()

    def hedges_of(self, route: Route) -> HedgeBudget:
        budget = self.hedges.get(route.name)
        if budget is None:
            budget = self.hedges[route.name] = HedgeBudget(_share(route))
        return budget


def _share(route: Route) -> float:
    """Of its requests, that may be sent twice."""
    return 0.0 if route.hedge == "off" else route.hedge.max_extra


class AttemptRunner:
    """The attempts of one request."""

    __slots__ = (
        "alarm",
        "failure",
        "hedges",
        "job",
        "loop",
        "machine",
        "pace",
        "relay",
        "retries",
        "runs",
        "settled",
        "shared",
    )

    def __init__(self, shared: Dispatcher, job: RoutedRequest, hedges: HedgeBudget, relay: Relay) -> None:
        self.shared, self.job, self.hedges, self.relay = shared, job, hedges, relay
        self.retries = 0  # taken from the shared budget
        self.settled = False  # it has come to an answer, or to none
        self.loop = relay.loop
        self.runs: dict[int, UpstreamRequest] = {}
        self.alarm: asyncio.TimerHandle | None = None
        self.failure: Failure | None = None
        route, request = job.route, job.request
        self.pace = route.tpot_budget(request.tpot_budget)
        self.machine = AttemptMachine(
            job.decision,
            max_attempts=route.max_attempts,
            stream=request.stream,
            hedge=route.hedge != "off",
            first_token_limit=job.first_token_limit if request.stream else WHOLE_ANSWER,
            now=monotonic(),
        )

    def begin(self) -> None:
        self.shared.retries.began()
        self.hedges.began()
        self._tell(Begin())

    def abandon(self) -> None:
        """The caller has left."""
        self._tell(ClientGone())
        for run in self.runs.values():  # the one that had won is the machine's no longer
            run.cancel()

    def finish(self) -> None:
        """Whatever it came to: what is shared with other requests is given back, once."""
        if self.settled:
            return
        self.settled = True
        if self.alarm is not None:
            self.alarm.cancel()
        self.shared.on_departed(self.job.request)
        self.shared.retries.ended()
        for _ in range(self.retries):
            self.shared.retries.give_back()

    def detach(self) -> None:
        """We, our attempts and those that they speak to hold each other. Left to the garbage collector, that was a
        tenth of a request's cost, and a pause of 18 ms for everybody now and then."""
        self.alarm = None
        for run in self.runs.values():
            run.detach()
        self.runs.clear()

    # -- the machine ----------------------------------------------------------------------

    def _tell(self, event: Event, may_retry: bool = True) -> None:
        step = self.machine.on(event, monotonic(), may_retry)
        for action in step.actions:
            if isinstance(action, Open):
                self._open(action.attempt)
            elif isinstance(action, Commit):
                self._commit(self.runs[action.number])
            elif isinstance(action, Cancel):
                self._cancel(action.number, action.ending)
            else:
                self._give_up(action.reason)
        self._wake_at(step.wake_at)

    def _wake_at(self, at: float | None) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None
        if at is not None and not self.settled:
            self.alarm = self.loop.call_later(max(at - monotonic(), 0.0), self._wake, at)

    def _wake(self, due: float) -> None:
        """Our own stall is not the engine's silence: after one, what waits in the sockets is read first."""
        if monotonic() - due > STALL:
            self.alarm = self.loop.call_later(READ_FIRST, self._look)
        else:
            self._look()

    def _look(self) -> None:
        """A hedge is paid for before the machine is asked, and given back if it was not sent."""
        self.alarm = None
        paid = not self.shared.saturated() and self.hedges.try_take()
        attempts = len(self.runs)
        self._tell(TimerFired(), paid)
        opened = list(self.runs.values())[attempts:]
        if paid and all(run.attempt.kind is not AttemptKind.HEDGE for run in opened):
            self.hedges.give_back()

    # -- its actions ------------------------------------------------------------------------

    def _open(self, attempt: Attempt) -> None:
        job, endpoint = self.job, attempt.candidate.endpoint
        upstream = self.job.upstreams[endpoint.id]
        forward = self._forward(upstream, attempt)
        backend = upstream.backend
        run = UpstreamRequest(
            attempt,
            upstream.origin,
            backend,
            backend.call(forward),
            backend.tap(forward),
            streams=job.request.stream,
            owner=self,
            monitor=self.shared.monitor,
        )
        self.runs[attempt.number] = run
        prompt = job.estimate.pools[endpoint.pool]
        self.shared.monitor.sent(
            run,
            attempt.candidate,
            prompt,
            run.opened,
            job.request.stream,
            session=forward.session_id,
            pace=self.pace,
            output=job.estimate.output_tokens,
        )
        self.shared.on_departed(job.request)
        exchange = upstream.origin.start(run.call, run)
        if exchange is not None:
            run.sent_on(exchange)
            return
        task = self.loop.create_task(self._connect(run))
        self.shared.connecting.add(task)
        task.add_done_callback(self.shared.connecting.discard)

    async def _connect(self, run: UpstreamRequest) -> None:
        try:
            exchange = await run.origin.open(run.call, run)
        except TransportError as error:
            if not run.over:
                run.on_failure(error.failure)
            return
        run.sent_on(exchange)
        if run.over:  # cancelled while it connected
            exchange.cancel()

    def _forward(self, upstream: Upstream, attempt: Attempt) -> BackendRequest:
        request, job = self.job.request, self.job
        name = request.request_id
        if attempt.number > 1:
            name = f"{name}-{attempt.number}"  # an engine may refuse an id it still knows
        traceparent, tracestate = self._trace(upstream, attempt)
        return BackendRequest(
            request.operation,
            request.body,
            self._model(upstream),
            request.stream,
            job.route.limits.output_tokens,
            name,
            traceparent,
            job.cache_group,
            priority=priority_of(job) if upstream.priority else None,
            session_id=name if upstream.kv_events else "",
            tracestate=tracestate,
        )

    def _trace(self, upstream: Upstream, attempt: Attempt) -> tuple[str, str]:
        """The attempt's own span; where there are no traces, what the caller sent."""
        trace = self.job.life.record.trace
        if trace is None:
            return self.job.request.traceparent, ""
        return (trace.sent_by(attempt.number), trace.state) if upstream.traced else ("", "")

    def _model(self, upstream: Upstream) -> str:
        return self.job.request.model if self.job.passthrough else upstream.model

    def _cancel(self, number: int, ending: AttemptOutcome) -> None:
        run = self.runs[number]
        run.stop(ending)
        self._note(run)

    def _commit(self, run: UpstreamRequest) -> None:
        if not self.settled:
            candidate = run.attempt.candidate
            self.finish()
            model = self._model(self.job.upstreams[candidate.endpoint.id])
            self.job.life.won(
                candidate,
                header_safe(model) if self.job.passthrough else model,
                opened=run.opened,
                connected=run.connected,
                sent=run.sent,
                first_in=run.first_in or run.sent,
            )
            try:
                self.relay.begin(run)
            except Exception as bug:  # ours: for the task that waits, not for the upstream's connection
                self.relay.done.set_exception(bug)

    def _give_up(self, reason: str) -> None:
        if not self.settled:
            self.finish()
            self.relay.done.set_exception(refusal_of(self.failure, reason))

    # -- what attempts come to ----------------------------------------------------------------

    def first_token(self, run: UpstreamRequest) -> None:
        self._tell(FirstToken(run.attempt.number))

    def failed(self, run: UpstreamRequest, failure: Failure) -> None:
        self.failure = failure
        self._note(run)
        died = failure.kind in DEATH
        may_retry = died or failure.kind not in OVERLOAD or self._take_retry()
        event = Failed(run.attempt.number, failure.retryable, died, failure.retry_after, died and run.accepted)
        self._tell(event, may_retry)

    def _take_retry(self) -> bool:
        taken = self.shared.retries.try_take()
        self.retries += taken
        return taken

    def _note(self, run: UpstreamRequest) -> None:
        """Lost attempts go into the Record at once; the one that won is added at the end."""
        life = self.job.life
        life.attempt_lost(attempt_record(run, life.record.arrival))
