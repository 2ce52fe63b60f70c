"""From a parsed request to its placement: the gateway's queue in the event loop.

`RequestQueue` drives `policies.queue.queue_scheduler` with a clock, a timer and waiting callers. Rules:
- A request placed at once costs no task, no future and no timer.
- The queue is checked when a request enters or leaves, at news of the fleet, and when the scheduler asks for it. Many
  events in one turn of the loop are one check.
- Requests are released one at a time: each is dispatched, and counted by the fleet, before the next is released.
- An exception in the scheduler is one caller's error. The scheduler is replaced and the other requests enter the new
  one; where no single request is the cause, all are placed without a queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from time import monotonic

from gateway.admission.auth import Tenant
from gateway.api.api_error import ApiError, retry_later
from gateway.api.inference_request import InferenceRequest
from gateway.request_steps import queued_request
from policies.fleet.fleet import Fleet
from policies.queue.queue_scheduler import QueueScheduler
from policies.queue.queued_request import Hold, QueuedRequest
from policies.routes.route import Route
from policies.routing.decide import LONGEST_WAIT, decide
from policies.types import FOREVER, Decision, PromptEstimate

log = logging.getLogger("firsttoken")

NO_DEADLINE_PATIENCE = 600.0  # s to hold a request without a deadline: the SDKs' own default timeout
SHORTEST_TIMER = 0.001  # s between two checks asked for by the scheduler
WOKEN = 16  # requests in one turn of the loop that are decided again after a reload: 5 ms
SHUTDOWN_RETRY = 1.0  # s after which a caller may try another gateway
FAILED = "request queue failed; its requests are queued again"


class QueueTimeout(ApiError):
    """A request found no place within the patience."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(503, message, type="server_error", code="unavailable", headers=retry_later(retry_after))


@dataclass(slots=True, eq=False)
class Waiter:
    """A queued request and the caller."""

    queued: QueuedRequest
    patience: float  # s from the first entry
    expires_at: float
    decided: asyncio.Future[Decision | None]
    awaited: bool = False  # the task of the caller is suspended


class RequestQueue:
    """The queue of a process. `patience`: s to hold a request with a deadline, read at entry."""

    def __init__(
        self,
        fleet: Fleet,
        patience: Callable[[], float],
        new_scheduler: Callable[[], QueueScheduler],
    ) -> None:
        self.fleet = fleet
        self.patience = patience
        self.scheduler = new_scheduler()
        self._new_scheduler = new_scheduler
        self.sequence = 0  # of the last request to enter
        self._waiters: dict[Hashable, Waiter] = {}  # in order of arrival
        self._replaced: deque[Waiter] = deque()  # to be decided again
        self._next_expiry = FOREVER  # no later than the earliest `expires_at`
        self._timer: asyncio.TimerHandle | None = None
        self._check_handle: asyncio.Handle | None = None
        self.dispatch_pending = False  # a released request is not dispatched yet: nothing is released meanwhile

    def depth(self) -> Mapping[str, int]:
        """Requests held now, by route."""
        return Counter(waiter.queued.route.name for waiter in self._waiters.values())

    def queued(
        self, request: InferenceRequest, route: Route, estimate: PromptEstimate, tenant: Tenant
    ) -> QueuedRequest:
        """The next request to enter, as `decide` takes it. Changes nothing."""
        return queued_request(self.fleet, request, route, estimate, tenant, self.sequence + 1, monotonic())

    def would_place(self, queued: QueuedRequest) -> tuple[Decision, Hold | None]:
        """The decision of a request that would come now, and the rule that would hold it. Changes nothing."""
        return self.scheduler.would_place(queued, self.fleet, monotonic())

    @property
    def saturated(self) -> bool:
        """Requests are held: no engine has time to spare."""
        return bool(self._waiters)

    async def decide(self, queued: QueuedRequest, entered_at: float) -> Decision | None:
        """The placement of a request, once found; `on_dispatched` must follow. Raises QueueTimeout.

        None: a reload has replaced the route; decide again with the new route and an estimate for its pools.
        `entered_at`: when the request came to the queue for the first time. However the wait ends, `held_s` of the
        request tells which rules have held it.
        """
        self.sequence, now = queued.sequence, monotonic()
        proceed = self._schedule_check
        if self._waiters or self.dispatch_pending:
            self.scheduler.enter(queued)
            proceed = self._check
        else:
            try:
                if (decision := self.scheduler.pass_through(queued, self.fleet, now)) is not None:
                    return decision
            except Exception:
                log.exception(FAILED)
                proceed = self._restart
        waiter = self._hold(queued, entered_at)
        proceed(now)
        waiter.awaited = True
        try:
            return await waiter.decided
        except asyncio.CancelledError:
            self._waiters.pop(queued.request_key, None)
            self.scheduler.leave(queued.request_key, monotonic())
            self._check_soon()
            raise

    def on_dispatched(self, request: InferenceRequest) -> None:
        """The fleet counts the request's first attempt, or there will be none."""
        self.scheduler.on_dispatched(id(request))

    def reload(self, replaced: Collection[str]) -> None:
        """Requests held for these routes are decided again by their callers, in order of arrival."""
        now, waking = monotonic(), bool(self._replaced)
        for key, waiter in self._waiters.items():
            if waiter.queued.route.name in replaced:
                self.scheduler.leave(key, now)
                self._replaced.append(waiter)
        self._schedule_check(now)
        if not waking:
            self._wake_replaced()

    def close(self) -> None:
        """Shutdown: rejects all held requests."""
        now = monotonic()
        for key in tuple(self._waiters):
            self._reject(key, "The gateway is being stopped; try again.", SHUTDOWN_RETRY, now)
        self._schedule_check(now)

    # -- queued requests --------------------------------------------------------------------

    def _hold(self, queued: QueuedRequest, entered_at: float) -> Waiter:
        route, patience = queued.route, self.patience()
        if route.ttft is None and route.total is None:
            patience = max(patience, NO_DEADLINE_PATIENCE)
        if queued.due < FOREVER:
            patience = max(queued.due - entered_at, 0.0)
        decided = asyncio.get_running_loop().create_future()
        waiter = self._waiters[queued.request_key] = Waiter(queued, patience, entered_at + patience, decided)
        self._next_expiry = min(self._next_expiry, waiter.expires_at)
        return waiter

    def _finish(self, key: Hashable, outcome: Decision | Exception | None) -> bool:
        """True: the caller's task is woken, and runs in a later turn of the loop."""
        waiter = self._waiters.pop(key)
        if waiter.decided.done():  # cancelled
            return False
        if isinstance(outcome, Exception):
            waiter.decided.set_exception(outcome)
        else:
            waiter.decided.set_result(outcome)
        return waiter.awaited

    def _reject(self, key: Hashable, message: str, retry_after: float, now: float) -> None:
        self.scheduler.leave(key, now)
        self._finish(key, QueueTimeout(message, retry_after))

    def _wake_replaced(self) -> None:
        """Some in each turn of the loop, so that a long queue does not stall streams."""
        for _ in range(min(len(self._replaced), WOKEN)):
            waiter = self._replaced.popleft()
            if self._waiters.get(waiter.queued.request_key) is waiter:
                self._finish(waiter.queued.request_key, None)
        if self._replaced:
            asyncio.get_running_loop().call_soon(self._wake_replaced)

    # -- all requests -----------------------------------------------------------------------

    def _check(self, now: float) -> None:
        """Rejects expired requests and releases the next request with a place."""
        self._expire(now)
        try:
            if self._waiters and not self.dispatch_pending:
                self._release(now)
        except Exception:
            log.exception(FAILED)
            self._restart(now)
        else:
            self._schedule_check(now)

    def _release(self, now: float) -> None:
        """Callbacks run in order: a task woken here has dispatched the request by the next check."""
        for key, decision in self.scheduler.release(self.fleet, now):
            woken = self._finish(key, decision)
            if decision.chosen is not None:
                self.dispatch_pending = woken
                self._check_after_callbacks()
                return

    def _expire(self, now: float) -> None:
        if now < self._next_expiry:
            return
        for key, waiter in tuple(self._waiters.items()):
            if now >= waiter.expires_at:
                message = f"No server had time for this request within {waiter.patience:g} s."
                self._reject(key, message, LONGEST_WAIT, now)
        self._next_expiry = min((waiter.expires_at for waiter in self._waiters.values()), default=FOREVER)

    def _restart(self, now: float) -> None:
        """Replaces a scheduler that raised. A request with an error even when decided alone ends with the error."""
        self.scheduler, before = self._new_scheduler(), len(self._waiters)
        decisions = self._decide_each(now)
        if len(decisions) < before:
            for waiter in self._waiters.values():
                self.scheduler.enter(waiter.queued)
            self._check(now)
        else:
            for key, decision in decisions.items():
                self._finish(key, decision)
            self._schedule_check(now)

    def _decide_each(self, now: float) -> dict[Hashable, Decision]:
        decisions: dict[Hashable, Decision] = {}
        for key, waiter in tuple(self._waiters.items()):
            try:
                fleet = self.fleet.snapshot_for(waiter.queued.request.caller, now)
                decisions[key] = decide(waiter.queued, fleet, self.fleet.view, now)
            except Exception as error:
                self._finish(key, error)
        return decisions

    # -- timer ------------------------------------------------------------------------------

    def _schedule_check(self, now: float) -> None:
        """Subscribes to news and sets the timer while requests are held."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.fleet.on_news = None
        if self._waiters:
            self.fleet.on_news = self._check_soon
            delay = max(min(self.scheduler.wake_at, self._next_expiry) - now, SHORTEST_TIMER)
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._check(monotonic())

    def _check_soon(self) -> None:
        if self._check_handle is None:
            self._check_handle = asyncio.get_running_loop().call_soon(self._on_check)

    def _check_after_callbacks(self) -> None:
        """Checks again after all callbacks scheduled so far."""
        if self._check_handle is not None:
            self._check_handle.cancel()
            self._check_handle = None
        if self._waiters or self.dispatch_pending:
            self._check_soon()

    def _on_check(self) -> None:
        self._check_handle = None
        self.dispatch_pending = False
        self._check(monotonic())
