"""State shared by all requests in progress: retry budgets, known operations, work spread over time.

Endpoints that fail health probes are reported here, and on to the requests that wait for such an endpoint.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable
from functools import partial
from time import monotonic
from typing import Any, Protocol

from gateway.api.inference_request import InferenceRequest
from gateway.api.operation_fit import OperationFit
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.stream_obstacles import StreamObstacles
from gateway.upstream.usage_bounds import DisbelievedReports
from gateway.upstream.waker import Waker
from policies.attempts.budgets import HedgeBudget, RetryBudget
from policies.fleet.fleet import Fleet
from policies.routes.route import Route

TURN = 0.004  # s of work on losses of connections in one turn of the loop


class WorkQueue:
    """Does work at once while the turn of the event loop has time for it, and the rest in later turns, in order.

    An engine that dies loses a thousand connections within one turn. Each loss means another attempt: done in a row,
    these would stall all other requests for as long.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._spent = 0.0  # s in this turn
        self._scheduled = False
        self._working = False

    def do(self, work: Callable[..., None], *given: Any) -> None:
        self._waiting.append(partial(work, *given))
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._work()

    def _work(self) -> None:
        while self._waiting and self._spent < TURN and not self._working:
            began, self._working = monotonic(), True
            try:
                self._waiting.popleft()()
            finally:
                self._working = False
                self._spent += monotonic() - began

    def _next_turn(self) -> None:
        self._spent, self._scheduled = 0.0, bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._work()


class HedgeBudgets(dict[tuple[str, float], HedgeBudget]):
    """By name and hedged share of the route, each made when it is asked for first."""

    def __missing__(self, key: tuple[str, float]) -> HedgeBudget:
        return self.setdefault(key, HedgeBudget(key[1]))


class Carrier(Protocol):
    """Carries out the request of an attempt."""

    def endpoint_down(self, wire: WireAttempt) -> None: ...


class Dispatcher:
    """The budgets for retries and hedges, the operations that pools lack, and the losses of connections."""

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
        self.on_dispatched = on_dispatched  # called once the fleet counts an attempt, or at an end without any
        self.saturated = saturated  # True: a hedge would take another request's place
        self.waker = Waker(fleet)
        self.operations = OperationFit()
        self.hedges = HedgeBudgets()
        self.obstacles = StreamObstacles()  # to the putting together of whole answers
        self.reports = DisbelievedReports()
        self.losses = WorkQueue()  # an engine that dies or hangs loses many streams at a time
        self.races: dict[WireAttempt, Carrier] = {}  # by attempt, until the end of its request
        self.tasks: set[asyncio.Task[None]] = set()
        fleet.on_found_dead = self._on_found_dead

    def reload(self, routes: Iterable[Route]) -> None:
        """Keep the hedge budgets of routes with an unchanged share."""
        known = {(route.name, route.hedge_share) for route in routes}
        for key in self.hedges.keys() - known:
            del self.hedges[key]

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _on_found_dead(self, attempts: list[Hashable]) -> None:
        """Fail attempts without a first token at an endpoint that no longer answers probes."""
        for attempt in attempts:
            if isinstance(attempt, WireAttempt):
                self.losses.do(self._lose, attempt)

    def _lose(self, attempt: WireAttempt) -> None:
        race = self.races.get(attempt)
        if race is not None and attempt.times.first_in is None:  # not a cache warming
            race.endpoint_down(attempt)
