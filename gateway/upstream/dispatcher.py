"""State shared by all requests in progress: retry budgets, known operations, work spread over time.

Endpoints that fail health probes are reported here, and on to the requests that wait for such an endpoint.

`Waker` wakes sleeping engines for requests that no other endpoint can take.

Rules:
- One request to wake an engine at a time, whoever waits for it. Its end does not depend on those who wait.
- A failure to wake is logged, and is the failure of the requests that have waited.

`StreamObstacles`: endpoints whose streams cannot be assembled into a whole answer, or not exactly.

Rules:
- After the first such stream, the endpoint gets the caller's requests unstreamed, and after a second caller's such
  stream all requests. A fault in tool calls concerns only requests with tools.
- Streams are tried again after KEPT seconds: servers are upgraded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Protocol

from backends.failures import NOT_WOKEN, TransportError
from backends.interface import Failure, Operation
from gateway.api.inference_request import InferenceRequest
from gateway.api.operation_fit import OperationFit
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.routed_request import Upstream
from gateway.upstream.usage_bounds import DisbelievedReports
from policies.attempts.budgets import HedgeBudget, RetryBudget
from policies.fleet.fleet import Fleet
from policies.routes.route import Route

log = logging.getLogger("firsttoken")

KEPT = 86_400.0  # s
WITNESSES = 2  # callers, after whom all callers are concerned
MOST = 1000  # endpoints, operations and kinds of request

Kind = tuple[str, Operation, bool]  # endpoint, operation of the caller, with tools


@dataclass(slots=True)
class _Obstacle:
    until: float
    callers: set[str] = field(default_factory=set)


class StreamObstacles:
    """Knowledge of the streams of endpoints. `bought_twice`: whole answers that were asked for again."""

    def __init__(self) -> None:
        self.bought_twice = 0
        self._known: dict[Kind, _Obstacle] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def concerned(self, request: InferenceRequest, now: float) -> frozenset[str]:
        """The endpoints to be asked for a whole answer."""
        asked = [request.operation, bool(request.tools)]
        return frozenset(
            endpoint
            for (endpoint, *kind), known in self._known.items()
            if kind == asked and _counts(known, request.caller, now)
        )

    def note_lost(self, endpoint: str, request: InferenceRequest, what: str, now: float, *, calls: bool) -> None:
        """A stream could not be put together: its answer is bought again, at the gateway's expense."""
        self.bought_twice += 1
        self._note(endpoint, request, now, calls)
        log.warning(
            "endpoint %s: the stream of a whole answer cannot be put together (%s); it is asked again, which no key is "
            "charged for; such answers are asked for whole from now on",
            endpoint,
            what,
        )

    def note_odd(self, endpoint: str, request: InferenceRequest, what: str, now: float, *, calls: bool) -> None:
        """An answer was used that may differ from the server's own."""
        self._note(endpoint, request, now, calls)
        log.info(
            "endpoint %s: the stream of a whole answer differs from a whole answer (%s); it was used, and such answers "
            "are asked for whole from now on",
            endpoint,
            what,
        )

    def _note(self, endpoint: str, request: InferenceRequest, now: float, calls: bool) -> None:
        for tools in (True,) if calls else (True, False):
            kind = endpoint, request.operation, tools
            known = self._known.pop(kind, None)
            if known is None or known.until <= now:
                known = _Obstacle(now + KEPT)
            if len(known.callers) < WITNESSES:
                known.callers.add(request.caller)
            self._known[kind] = known
        while len(self._known) > MOST:
            del self._known[next(iter(self._known))]


def _counts(known: _Obstacle, caller: str, now: float) -> bool:
    return now < known.until and (caller in known.callers or len(known.callers) >= WITNESSES)


log = logging.getLogger("firsttoken")

TIMEOUT = 300.0  # s: weights of hundreds of GB may come from a disk


class Waker:
    """The wakings in progress, by endpoint."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tasks: dict[str, asyncio.Task[Failure | None]] = {}

    def wake(self, endpoint: str, upstreams: Mapping[str, Upstream]) -> asyncio.Task[Failure | None]:
        """Wake an engine, or join a waking. The task ends once it is awake, or with a failure."""
        if (task := self._tasks.get(endpoint)) is None:
            task = asyncio.get_running_loop().create_task(self._wake(endpoint, upstreams[endpoint]))
            self._tasks[endpoint] = task
            task.add_done_callback(lambda done: self._tasks.pop(endpoint, None))
        return task

    async def close(self) -> None:
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wake(self, endpoint: str, upstream: Upstream) -> Failure | None:
        began, call = monotonic(), upstream.backend.wake()
        if call is None:
            return None
        log.warning("endpoint %s is being woken", endpoint)
        try:
            reply = await upstream.connections.fetch(call, TIMEOUT)
            said = "" if reply.status < 300 else f"its {call.path} answers {reply.status}"
        except TransportError as error:
            said = error.failure.said
        if said:
            log.error("endpoint %s could not be woken: %s", endpoint, said)
            return NOT_WOKEN
        now = monotonic()
        self._fleet.on_woken(endpoint, now - began, now)
        log.warning("endpoint %s was woken in %.1f s", endpoint, now - began)
        return None


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
