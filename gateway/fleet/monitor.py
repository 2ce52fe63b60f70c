"""Tells the fleet (`policies.fleet.fleet`) the load and health of its endpoints, and the progress of running answers.

Rules:
- Each endpoint with a load or health page is polled. Attempts report to the fleet themselves, and so do cache events
  (`gateway.fleet.kv_event_listener`).
- Of several workers a single one polls an endpoint and sends the results to the others. Each worker draws its own
  conclusions, and polls by itself where it has heard no result for STALLED seconds.
- An engine that names another model than configured is asked for all its models: the configured name may be a second
  name, or an adapter. If the name is unknown there, the endpoint is down until the engine knows it. An engine that
  takes requests for any name (SGLang) is down only if it served the configured model before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import count
from time import monotonic
from typing import Protocol, cast

from backends.failures import TransportError
from backends.http.connection_pool import BufferedReply, ConnectionPool
from backends.interface import Backend, HttpCall
from gateway.fleet.limit_log import LimitLog
from gateway.lost_promises import LostPromises
from gateway.observe.metrics.series import counter
from policies.fleet.circuit_breaker import BreakerState, CircuitBreaker
from policies.fleet.engine_load import EngineLoad
from policies.fleet.engine_rates import EngineRates
from policies.fleet.fleet import Fleet
from policies.routes.route import Route
from policies.types import NEVER, Endpoint, Load

log = logging.getLogger("firsttoken")

PROBE_TIMEOUT = 2.0  # s
NOT_IMPLEMENTED = 501  # llama.cpp, started without a page of the load
MODELS_INTERVAL = 10.0  # s between two lists of models of an engine that names another than configured
STALLED = 6.0  # s: a poll with a list of models may take 4
READS = 2  # of shared results, per interval of polling
MODEL_LINES = 60.0  # s between two lines about changes of model: two engines behind one URL would fill the log
PROGRESS = 0.2  # s between two counts of the tokens of running answers
PROMISES = 10  # such counts between two comparisons of TPOT budgets with what engines can do
PUBLISH_DELAY = 0.002  # s in which changes are joined into one message to peers: 7 us each, three per request otherwise
_LOAD_FIELDS = frozenset(f.name for f in fields(EngineLoad))
_COUNTS = frozenset({"running", "waiting", "block_size", "kv_blocks"})
_MOST = 1e9  # larger counts are ignored


class Answering(Hashable, Protocol):
    """An attempt whose answer is being relayed."""

    @property
    def output_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PollTarget:
    """An endpoint of `pool` with a load or health page. `model`: as configured; empty: any."""

    connections: ConnectionPool
    backend: Backend
    pool: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class PollResult:
    """`at`: monotonic time, the same in all processes. `load`: None without a page of the load."""

    at: float
    answered: bool = True
    load: EngineLoad | None = None
    model: str = ""  # by the engine's own word; empty: not named
    wrong_model: bool = False  # the configured model is unknown there


class SharedPolls(Protocol):
    """Results of polls, shared by workers."""

    def in_charge(self, endpoint_id: str) -> bool:
        """This worker is to poll the endpoint."""

    def put_poll(self, endpoint_id: str, result: PollResult) -> None: ...

    def latest_poll(self, endpoint_id: str) -> PollResult | None:
        """Of the worker in charge."""


class EndpointPoll:
    """Polls of one endpoint, and the state for the choice of the next page."""

    def __init__(self, endpoint: str, target: PollTarget, interval: float) -> None:
        self.endpoint, self.interval = endpoint, interval
        self.target = target
        self.unparsable = False  # with a logged failure
        self.wrong_model = self.served_model = False  # now; the configured one, ever
        self.heard_at = monotonic()  # latest shared result
        self.logged_at = NEVER  # latest change of model
        self._listed_at = NEVER
        self._listed_for: tuple[str, float | None] = "", None  # model and start of the engine, when it was asked
        self._lists_model = True

    async def ask(self) -> PollResult:
        backend = self.target.backend
        call = backend.load() or backend.probe()
        assert call is not None
        reply = await self._fetch(call)
        if reply is None or (reply.status >= 500 and reply.status != NOT_IMPLEMENTED):
            return PollResult(monotonic(), answered=False)
        if reply.status != 200 or backend.load() is None:
            return PollResult(monotonic())
        at, load, model = monotonic(), engine_load(backend.read_load(reply.body)), backend.read_model(reply.body)
        adapters, slots = backend.read_adapters(reply.body)
        if adapters or slots:
            load = replace(load, adapters=adapters, adapter_slots=slots)
        return PollResult(at, True, load, model, not await self._knows_model(model, load.started_at))

    async def _knows_model(self, named: str, started_at: float | None) -> bool:
        """True if the engine serves the configured model. `named`: the model in its page."""
        wanted = self.target.model
        if not named or wanted in ("", named):
            self._listed_at, self._lists_model = NEVER, True
            return True
        if (named, started_at) != self._listed_for or monotonic() - self._listed_at > MODELS_INTERVAL:
            if (models := await self._models()) is None:
                return self._lists_model
            refused = self.target.backend.refuses_models or self.served_model
            self._lists_model = not models or wanted in models or not refused
            self._listed_at, self._listed_for = monotonic(), (named, started_at)
        return self._lists_model

    async def _models(self) -> frozenset[str] | None:
        """Names of all models; empty: the engine has no list; None: no answer now."""
        backend = self.target.backend
        if (call := backend.models()) is None:
            return frozenset()
        reply = await self._fetch(call)
        if reply is None or reply.status >= 500:
            return None
        return backend.read_models(reply.body) if reply.status == 200 else frozenset()

    async def _fetch(self, call: HttpCall) -> BufferedReply | None:
        try:
            return await self.target.connections.fetch(call, PROBE_TIMEOUT)
        except TransportError:
            return None


class Monitor:
    """One per process."""

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
        """Poll one endpoint once."""
        result = await poll.ask()
        if self._shared is not None:
            self._shared.put_poll(poll.endpoint, result)
        self._use(poll, result)

    def _use(self, poll: EndpointPoll, result: PollResult) -> None:
        endpoint = poll.endpoint
        if result.model:
            self._on_model(poll, result)
        if result.wrong_model:
            self.fleet.on_wrong_model(endpoint, result.at)
        elif not result.answered:
            self.fleet.on_probe_failed(endpoint, result.at)
        else:
            self._on_answer(poll, result)
        if self.fleet.on_news is not None:
            self.fleet.on_news()

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
        if (load := result.load) is None:
            self.fleet.on_probe_answered(poll.endpoint, result.at)
            return
        self.fleet.on_scrape(poll.endpoint, load, result.at)


def engine_load(reported: Mapping[str, float | None]) -> EngineLoad:
    """Build an EngineLoad from the known fields; counts are whole numbers, and impossible ones are dropped."""
    known = {name: value for name, value in reported.items() if name in _LOAD_FIELDS and value is not None}
    for name in _COUNTS & known.keys():
        if 0 <= known[name] <= _MOST:
            known[name] = int(known[name])
        else:
            del known[name]
    if not 0 <= known.get("kv_usage", 0.0) <= 1:  # a percentage is no share: the engine would seem full for ever
        del known["kv_usage"]
    return EngineLoad(**known)  # type: ignore[arg-type]
