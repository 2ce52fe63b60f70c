"""The line before the engines: gives the waiting room a clock, a timer and callers who wait.

Rules:
- A request that may go at once costs no task, no future and no timer.
- Those that wait are looked at again when another request enters or leaves, when an attempt begins to answer or
  ends, when an engine has told of itself, and when the room asks for it. Many events in one turn of the loop are
  one look.
- They go one at a time, as the room wants it: each is sent, and counted by the fleet, before the next is asked for.
- Whoever enters leaves: with a decision, with a refusal (held for too long, or the gateway goes away), or with its
  caller.
- Our own bug is one caller's error. The room that it happened in is given up, and the others enter a new one; where
  none of them is the cause, the room is, and all go as if there were none.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from time import monotonic

from gateway.admission.auth import Tenant
from gateway.api.api_error import ApiError, retry_later
from gateway.api.inference_request import InferenceRequest
from gateway.decider import ask_of
from gateway.fleet.monitor import Monitor
from policies.queue.queue_scheduler import QueueScheduler
from policies.routes.route import Route
from policies.routing.tiers import LONGEST_WAIT, decide
from policies.types import FOREVER, Decision, PromptEstimate, RequestView

log = logging.getLogger("firsttoken")

NO_HURRY = 600.0  # s that a request without a deadline may be held: the SDKs' own default timeout
SOONEST = 0.001  # s from one look to the next that the room asks for
ELSEWHERE = 1.0  # s after which a caller of a gateway that goes away may ask another


class QueueTimeout(ApiError):
    """It found no place while it could be held, for `limited` seconds of that because of a provider's rate limit."""

    def __init__(self, message: str, retry_after: float, limited: float) -> None:
        super().__init__(503, message, type="server_error", code="unavailable", headers=retry_later(retry_after))
        self.limited = limited


class Entrant:
    """One request in the room, held for `patience` s at most. `answer` is there once its caller waits."""

    __slots__ = ("answer", "ask", "entered", "estimate", "outcome", "route", "seed", "until")

    def __init__(
        self, ask: RequestView, estimate: PromptEstimate, route: Route, seed: int, entered: float, patience: float
    ) -> None:
        self.ask, self.estimate, self.route, self.seed, self.entered = ask, estimate, route, seed, entered
        self.until = entered + (patience if route.ttft else max(patience, NO_HURRY))  # nobody waits for the others
        self.outcome: Decision | Exception | None = None
        self.answer: asyncio.Future[None] | None = None

    def settled(self) -> Decision | None:
        """None: not yet."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class RequestQueue:
    """One per process. `patience`: s that a request may be held, read when it enters."""

    def __init__(
        self, monitor: Monitor, patience: Callable[[], float], rooms: Callable[[], QueueScheduler] = QueueScheduler
    ) -> None:
        self.room, self._rooms = rooms(), rooms
        self.monitor, self.patience = monitor, patience
        self.ordinal = 0  # of the last request that entered
        self._inside: dict[Hashable, Entrant] = {}  # in the order in which they entered
        self._expires = FOREVER  # no later than the first of them is held for too long
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = FOREVER
        self._soon: asyncio.Handle | None = None
        self._going = False  # one was let go whose task has yet to run: until the next look the room is asked nothing

    def depth(self) -> Mapping[str, int]:
        """Requests held now, by route."""
        return Counter(entrant.route.name for entrant in self._inside.values())

    @property
    def saturated(self) -> bool:
        """Somebody is held: no engine has time to spare."""
        return bool(self._inside)

    async def decide(
        self, request: InferenceRequest, route: Route, estimate: PromptEstimate, tenant: Tenant
    ) -> Decision:
        """Where the request goes, once it may go. `departed` is to be called when it has been sent, or will not be."""
        decision = self.decide_now(request, route, estimate, tenant)
        return await self.hold(request) if decision is None else decision

    def decide_now(
        self, request: InferenceRequest, route: Route, estimate: PromptEstimate, tenant: Tenant
    ) -> Decision | None:
        """Where it goes, if it may go at once. None: it is held, and `hold` is to be awaited before anything else."""
        self.ordinal += 1
        ticket, now, seed = id(request), monotonic(), self.ordinal
        ask = ask_of(request, route, tenant.cache_group)
        if self._inside or self._going:
            self.room.enter(ticket, ask, estimate, route, now, seed)
            entrant = self._admit(ticket, ask, estimate, route, now)
            self._look(now)
            return entrant.settled()
        try:
            decision = self.room.pass_through(ticket, ask, estimate, route, self.monitor.fleet, now, seed)
        except Exception:
            entrant = self._admit(ticket, ask, estimate, route, now)
            self._start_over(now)
            return entrant.settled()
        if decision is None:
            self._admit(ticket, ask, estimate, route, now)
            self._watch(now)
        return decision

    async def hold(self, request: InferenceRequest) -> Decision:
        """What becomes of one that is held."""
        ticket = id(request)
        entrant = self._inside[ticket]
        entrant.answer = asyncio.get_running_loop().create_future()
        try:
            await entrant.answer
        except asyncio.CancelledError:
            self._inside.pop(ticket, None)
            self.room.leave(ticket)
            self._look_soon()
            raise
        decision = entrant.settled()
        assert decision is not None
        return decision

    def on_dispatched(self, request: InferenceRequest) -> None:
        """The fleet knows of its first attempt, or there will be none."""
        self.room.on_dispatched(id(request))

    @property
    def dispatch_pending(self) -> bool:
        """One was let go and has not been sent yet: its decision stands, so the fleet must."""
        return self._going

    def close(self) -> None:
        """The gateway goes away: nobody is held any longer."""
        now = monotonic()
        for ticket in tuple(self._inside):
            self._turn_away(ticket, "The gateway is being stopped; try again.", ELSEWHERE, now)
        self._watch(now)

    # -- one request ------------------------------------------------------------------------

    def _admit(self, ticket: Hashable, ask: RequestView, estimate: PromptEstimate, route: Route, now: float) -> Entrant:
        entrant = self._inside[ticket] = Entrant(ask, estimate, route, self.ordinal, now, self.patience())
        self._expires = min(self._expires, entrant.until)
        return entrant

    def _settle(self, ticket: Hashable, outcome: Decision | Exception) -> bool:
        """Whether its caller had to be woken."""
        entrant = self._inside.pop(ticket)
        entrant.outcome = outcome
        if entrant.answer is None or entrant.answer.done():
            return False
        entrant.answer.set_result(None)
        return True

    def _turn_away(self, ticket: Hashable, message: str, retry_after: float, now: float) -> None:
        self._settle(ticket, QueueTimeout(message, retry_after, self.room.leave(ticket, now)))

    # -- all of them ------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Whoever may go now, goes."""
        self._expire(now)
        try:
            if self._inside and not self._going:
                self._release(now)
        except Exception:
            self._start_over(now)
        else:
            self._watch(now)

    def _release(self, now: float) -> None:
        """The loop calls in order: who is woken here has been sent by the time of the look that is asked for behind."""
        for ticket, decision in self.room.release(self.monitor.fleet, now):
            self._going = self._settle(ticket, decision) and decision.chosen is not None
            if decision.chosen is not None:
                self._look_behind()
                return

    def _expire(self, now: float) -> None:
        if now < self._expires:
            return
        for ticket, entrant in tuple(self._inside.items()):
            if now >= entrant.until:
                message = f"No server had time for this request within {entrant.until - entrant.entered:g} s."
                self._turn_away(ticket, message, LONGEST_WAIT, now)
        self._expires = min((entrant.until for entrant in self._inside.values()), default=FOREVER)

    def _start_over(self, now: float) -> None:
        """Who cannot be decided even alone is the cause: each time that one is found there are fewer left."""
        log.exception("the waiting room failed; its %d requests enter a new one", len(self._inside))
        self.room, before = self._rooms(), len(self._inside)
        decisions = self._decide_each(now)
        if len(decisions) < before:
            for ticket, one in self._inside.items():
                self.room.enter(ticket, one.ask, one.estimate, one.route, one.entered, one.seed)
            self._look(now)
        else:
            for ticket, decision in decisions.items():
                self._settle(ticket, decision)
            self._watch(now)

    def _decide_each(self, now: float) -> dict[Hashable, Decision]:
        fleet, decisions = self.monitor.fleet, dict[Hashable, Decision]()
        for ticket, one in tuple(self._inside.items()):
            try:
                decisions[ticket] = decide(one.ask, one.estimate, one.route, fleet.snapshot(now), fleet, now, one.seed)
            except Exception as error:
                self._settle(ticket, error)
        return decisions

    # -- when to look -----------------------------------------------------------------------

    def _watch(self, now: float) -> None:
        """Be told of news, and be woken, as long as somebody waits. An alarm that comes early does no harm."""
        due, self.monitor.on_news = FOREVER, None
        if self._inside:
            self.monitor.on_news = self._look_soon
            due = min(self.room.wake_at, self._expires)
        if self._alarm is not None and (due == FOREVER or due < self._alarm_at):
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None and due < FOREVER:
            self._alarm_at = due
            self._alarm = asyncio.get_running_loop().call_later(max(due - now, SOONEST), self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        self._look(monotonic())

    def _look_soon(self) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._on_soon)

    def _look_behind(self) -> None:
        """Behind all that the loop has been asked to call so far."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._inside or self._going:
            self._look_soon()

    def _on_soon(self) -> None:
        self._soon, self._going = None, False
        self._look(monotonic())
