"""Tells the fleet (`policies.fleet.fleet`) the load and health of its endpoints, and the progress of running answers.

Rules:
- Each endpoint with a load or health page is polled. Attempts report to the fleet themselves, and so do cache events.
- With several workers, a single worker polls an endpoint and sends the results to all workers. Each worker draws its
  own conclusions, and polls by itself after STALLED seconds without a result.
- `gateway.fleet.endpoint_poll` interprets pages and failed polls: a failed connection may take an endpoint down, a
  failed load page does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import count
from time import monotonic
from typing import Protocol, cast

from gateway.fleet.endpoint_poll import EndpointPoll, PollFinding, PollResult, PollTarget
from gateway.lost_promises import LostPromises
from gateway.observe.metrics.series import counter
from policies.fleet.beliefs import ALL, Belief
from policies.fleet.circuit_breaker import BreakerState, CircuitBreaker
from policies.fleet.engine_load import EngineLoad, EngineRates
from policies.fleet.fleet import Fleet
from policies.fleet.observations import LINGER
from policies.rate_limit.endpoint_limits import PEER_REPORT
from policies.routes.route import Route
from policies.types import Endpoint, Load

log = logging.getLogger("firsttoken")

STALLED = 6.0  # s: a poll with a list of models, or of both pages, may take 4
FAULTS = 2  # pages in a row that fail, from which the load is not known
READS = 2  # of shared results, per interval of polling
MODEL_LINES = 60.0  # s between two lines about changes of model: two engines behind one URL would fill the log
PROGRESS = 0.2  # s between two counts of the tokens of running answers
PROMISES = 10  # such counts between two comparisons of TPOT budgets with what engines can do
PUBLISH_DELAY = 0.002  # s in which changes are joined into one message to peers: 7 us each, three per request otherwise


class Answering(Hashable, Protocol):
    """An attempt whose answer is being relayed."""

    @property
    def output_tokens(self) -> int: ...


class SharedPolls(Protocol):
    """Results of polls, shared by workers."""

    def in_charge(self, endpoint_id: str) -> bool:
        """This worker is to poll the endpoint."""

    def put_poll(self, endpoint_id: str, result: PollResult) -> None: ...

    def latest_poll(self, endpoint_id: str) -> PollResult | None:
        """Of the worker in charge."""


class Monitor:
    """Polls load and health pages, and reports to the fleet. One per process."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        shared: SharedPolls | None = None,
        routes: Callable[[], Iterable[Route]] = tuple,
    ) -> None:
        self.fleet = fleet
        self.lost_promises = LostPromises()
        self.limit_log = LimitLog(fleet.view.limits_in_force)
        self._routes = routes
        self._shared = shared
        self._polled: dict[str, tuple[EndpointPoll, asyncio.Task[None]]] = {}
        self.ejections = counter("firsttoken_endpoint_ejections_total")
        fleet.on_breaker = self._on_breaker
        self._counting: asyncio.Task[None] | None = None

    def loads(self) -> Mapping[str, Load]:
        """By endpoint id, now."""
        return self.fleet.snapshot(monotonic()).loads

    def engine_loads(self) -> Mapping[str, EngineLoad]:
        """Recent loads as reported by the engines, by endpoint id."""
        return self.fleet.view.engine_loads(monotonic())

    def engine_rates(self) -> Mapping[str, EngineRates]:
        """By endpoint id, of engines with a recent report."""
        return self.fleet.view.engine_rates(monotonic())

    def learn_soon(self) -> None:
        """Learn what attempts have shown, behind the work in hand."""
        asyncio.get_running_loop().call_later(LINGER, self.fleet.learn)

    def publish_soon(self) -> None:
        """Publish changed loads to peers."""
        asyncio.get_running_loop().call_later(PUBLISH_DELAY, self.fleet.publish)

    def watch(self, endpoints: Mapping[str, PollTarget], interval: float) -> None:
        """Poll every endpoint that has a health or load page, each `interval` seconds, spread evenly. On another
        call, polling of unchanged endpoints continues."""
        if self._counting is None:
            self._counting = asyncio.create_task(self._count_forever())
        wanted = {id: target for id, target in endpoints.items() if target.backend.load() or target.backend.probe()}
        for endpoint, (poll, task) in [*self._polled.items()]:
            if (wanted.get(endpoint), interval) != (poll.target, poll.interval):
                task.cancel()
                del self._polled[endpoint]
        for gone in [labels for labels in self.ejections.of if labels[1] not in endpoints]:
            del self.ejections.of[gone]  # else every pod that ever was is a series
        for number, (endpoint, target) in enumerate(wanted.items()):
            if endpoint not in self._polled:
                poll = EndpointPoll(endpoint, target, interval)
                polling = self._poll_forever(poll, offset=interval * number / len(wanted))
                self._polled[endpoint] = poll, asyncio.create_task(polling)

    async def close(self) -> None:
        tasks = [task for _, task in self._polled.values()]
        if self._counting is not None:
            tasks.append(self._counting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _count_forever(self) -> None:
        """Report the progress of running answers, and every few seconds what routes promise in vain."""
        for counts in count(1):
            await asyncio.sleep(PROGRESS)
            if counts % PROMISES == 0:
                self._check_promises()
                self.fleet.expire(monotonic())
                self.limit_log.look(monotonic())
            if answering := cast("Iterable[Answering]", self.fleet.view.answering()):
                self.fleet.on_progress([(attempt, attempt.output_tokens) for attempt in answering], monotonic())

    def _check_promises(self) -> None:
        """A line for each change."""
        for promise in self.lost_promises.update(self._routes(), self.fleet.view.tpot_alone, monotonic()):
            names = promise.pool, promise.route, promise.alone * 1e3, promise.budget * 1e3
            if self.lost_promises.is_lost[promise.route, promise.pool]:
                log.warning(
                    "pool %s cannot keep the tpot of route %s: an answer alone takes %.1f ms per token there,"
                    " and the budget is %.1f ms",
                    *names,
                )
            else:
                log.warning(
                    "pool %s can keep the tpot of route %s again: an answer alone takes %.1f ms per token there,"
                    " and the budget is %.1f ms",
                    *names,
                )

    async def _poll_forever(self, poll: EndpointPoll, offset: float) -> None:
        """Poll at once, as a dead endpoint must not wait, then at the endpoint's turn of each interval. A page that
        cannot be parsed is logged once and does not end the polling."""
        while True:
            pause = offset + poll.interval
            try:
                if self._follows(poll):
                    pause = poll.interval / READS
                else:
                    offset = 0.0
                    await self.poll(poll)
            except Exception:
                if not poll.unparsable:
                    log.exception("the load of endpoint %s could not be read", poll.endpoint)
                poll.unparsable = True
            await asyncio.sleep(pause)

    def _follows(self, poll: EndpointPoll) -> bool:
        """Use the result of the worker in charge of the endpoint. False: this worker has to poll."""
        if self._shared is None or self._shared.in_charge(poll.endpoint):
            poll.heard_at = monotonic()
            return False
        result = self._shared.latest_poll(poll.endpoint)
        if result is not None and result.at > poll.heard_at:
            poll.heard_at = result.at
            self._use(poll, result)
        return monotonic() - poll.heard_at < STALLED

    async def poll(self, poll: EndpointPoll) -> None:
        """Poll an endpoint once."""
        result = await poll.ask()
        if self._shared is not None:
            self._shared.put_poll(poll.endpoint, result)
        self._use(poll, result)

    def _use(self, poll: EndpointPoll, result: PollResult) -> None:
        endpoint, fleet = poll.endpoint, self.fleet
        if result.model:
            self._on_model(poll, result)
        if result.found is not PollFinding.GONE:  # of which the breaker tells
            self._note_fault(poll, result)
        if result.wrong_model:
            fleet.on_wrong_model(endpoint, result.at)
        elif result.other_ranks:
            fleet.on_other_ranks(endpoint, result.fault, result.at)
        elif result.found is PollFinding.GONE:
            fleet.on_probe_failed(endpoint, result.at, result.fault, lost=result.refused)
        elif result.found is PollFinding.UNWELL:
            fleet.on_probe_unwell(endpoint, result.at, result.fault)
        else:
            self._on_answer(poll, result)
        if fleet.on_news is not None:
            fleet.on_news()

    def _on_breaker(self, endpoint: Endpoint, breaker: CircuitBreaker) -> None:
        """A line for each change, and the reason."""
        if breaker.state is BreakerState.OPEN:
            self.ejections.of[endpoint.pool, endpoint.id, breaker.cause.value].value += 1
            wait = max(breaker.until - monotonic(), 0.0)
            log.warning("endpoint %s is down for %.0f s: %s", endpoint.id, wait, breaker.why)
        else:
            log.warning("endpoint %s is %s", endpoint.id, "up" if breaker.state is BreakerState.CLOSED else "on trial")

    def _on_model(self, poll: EndpointPoll, result: PollResult) -> None:
        before = self.fleet.on_model(poll.endpoint, result.model)
        found_wrong = result.wrong_model and not poll.wrong_model
        if (before or found_wrong) and result.at - poll.logged_at > MODEL_LINES:
            poll.logged_at = result.at
            if before:
                log.warning("endpoint %s serves %s now, and served %s before", poll.endpoint, result.model, before)
            if found_wrong:
                names = poll.endpoint, result.model, poll.target.model
                log.error("endpoint %s serves %s, and not %s as configured: no request goes there", *names)
        poll.wrong_model = result.wrong_model
        poll.served_model |= result.model == poll.target.model

    def _on_answer(self, poll: EndpointPoll, result: PollResult) -> None:
        """The server answers, or was not asked."""
        if result.load is not None:
            self.fleet.on_scrape(poll.endpoint, result.load, result.at)
            self._log_sleep(poll, asleep=bool(result.load.asleep), now=result.at)
        elif result.found is PollFinding.ALIVE:
            self.fleet.on_probe_answered(poll.endpoint, result.at)
        if poll.fault:
            self.fleet.on_load_unknown(poll.endpoint, poll.fault, result.at)

    def _note_fault(self, poll: EndpointPoll, result: PollResult) -> None:
        """A line for each change. A single page that fails may be an accident, and the load before is not old yet."""
        poll.faults = poll.faults + 1 if result.fault else 0
        if not result.fault or poll.faults >= FAULTS or result.other_ranks:
            poll.fault = result.fault
        if poll.fault == poll.told_fault or not poll.may_tell(result.at):
            return
        poll.told_fault = poll.fault
        if poll.fault:
            told = "the load of endpoint %s is not known: %s; its own requests are counted"
            log.warning(told, poll.endpoint, poll.fault)
        else:
            log.warning("endpoint %s tells its load", poll.endpoint)

    def _log_sleep(self, poll: EndpointPoll, *, asleep: bool, now: float) -> None:
        if asleep != poll.asleep and poll.may_tell(now):
            poll.asleep = asleep
            told = "is asleep: it gets no request until it is woken" if asleep else "is awake, with an empty cache"
            log.warning("endpoint %s %s", poll.endpoint, told)


# -- log lines of limits ---------------------------------------------------------------------------
#
# Logs when a limit closes an endpoint to callers, and when the endpoint reopens.
#
# Rules:
# - A limit is a provider's, or the configuration's (`policies.rate_limit`): of all callers, or of those whose requests
#   alone are the evidence.
# - A line when a limit begins and a line when the limit ends, none per request. A limit of less than SHORT seconds is
#   ordinary pacing, and is not logged.
# - A limit that returns within QUIET seconds of the previous line is logged only after LONG seconds.
# - A limit that a peer process has met is in the log of that process.


SHORT, LONG = 1.0, 10.0  # s
QUIET = 60.0  # s

Limits = Mapping[str, Sequence[Belief]]


class LimitLog:
    """`limits`: those in force at a time, by endpoint. `on_begin` is called at each line of a beginning."""

    def __init__(self, limits: Callable[[float], Limits]) -> None:
        self._limits = limits
        self.on_begin: Callable[[], None] = lambda: None
        self._told: dict[str, str] = {}  # limits in force that have a line, by endpoint
        self._told_at: dict[str, float] = {}  # latest line of a beginning

    def look(self, now: float) -> None:
        """Compare the limits in force with those told. Called every few seconds."""
        limits = self._limits(now)
        for endpoint, found in limits.items():
            mine = [each for each in found if each.why != PEER_REPORT]
            if mine and endpoint not in self._told:
                self._begin(endpoint, max(mine, key=lambda each: each.until), now)
        for endpoint in self._told.keys() - limits.keys():
            log.warning("endpoint %s is no longer %s", endpoint, self._told.pop(endpoint))
        self._told_at = {name: at for name, at in self._told_at.items() if name in self._told or now - at < QUIET}

    def _begin(self, endpoint: str, limit: Belief, now: float) -> None:
        left = limit.until - now
        is_quiet = now - self._told_at.get(endpoint, -QUIET) >= QUIET
        if left >= (SHORT if is_quiet else LONG):
            whom = "" if limit.callers == ALL else f" for {limit.callers} of the callers"
            log.warning("endpoint %s is %s for %.0f s%s: %s", endpoint, limit.what, left, whom, limit.why)
            self._told[endpoint] = limit.what
            self._told_at[endpoint] = now
            self.on_begin()
