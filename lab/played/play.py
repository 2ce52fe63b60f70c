"""Plays a scenario through a whole gateway, over real sockets and in virtual time.

Gateway, simulated servers and callers share an event loop whose clock jumps over waits (`lab.virtual_time`), so that
nothing depends on the machine: `Gateway(Config)` parses, estimates, queues, decides, connects, streams and records as
it does for users, while a replay (`lab.replay`) calls the decision code alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import seed as seed_random
from typing import Any

from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.record import Record
from lab.played.callers import Callers, request_id
from lab.played.play_fleet import Document, play_fleet
from lab.replay.results import RequestResult, ResultRow, Results
from lab.replay.sim_fleet import Scenario
from lab.traffic.traces import Arrival
from lab.virtual_time import SerialLoop, virtual_clock
from policies.types import AttemptKind

COLD_START = 4.0  # s after the gateway at which requests begin to come, where the scenario is not cold by itself
DRAIN = 60.0  # s after the last arrival
LIMITED = 429  # status of an API at its rate limit


@dataclass(frozen=True, slots=True)
class PlayedRow:
    """A route. `tpot_met`: share of the answers with a TPOT; `held`: s, by rule; `attempts`: by ending; `limited`:
    attempts that a rate limit refused."""

    row: ResultRow
    tpot_met: float
    held: Mapping[str, float]
    attempts: Mapping[str, int]
    limited: int


@dataclass(frozen=True, slots=True)
class Played:
    """`late`: s that a request was sent after it was due, at most; `lost_records`: requests without a Record."""

    rows: Sequence[PlayedRow]  # of each route, and of all with a budget
    late: float
    lost_records: int


def played(scenario: Scenario, configured: Document, arrivals: Sequence[Arrival], seed: int = 0) -> Played:
    """`configured`: the document of the scenario's configuration. In a process of its own: for equal runs its hashes of
    strings must be those of the run before (PYTHONHASHSEED)."""
    seed_random(seed)
    with asyncio.Runner(loop_factory=SerialLoop) as runner, virtual_clock():
        return runner.run(_play(scenario, configured, arrivals, seed))


async def _play(scenario: Scenario, configured: Document, arrivals: Sequence[Arrival], seed: int) -> Played:
    shift = 0.0 if scenario.starts else COLD_START
    shifted = [replace(arrival, at=arrival.at + shift) for arrival in arrivals]
    results, records = Results(scenario.scored_routes, scenario.seconds or shifted[-1].at), list[Record]()
    async with play_fleet(scenario, seed) as fleet, _gateway(fleet.document(configured)) as gateway:
        gateway.recorder.sinks.append(records.append)
        servers = asyncio.create_task(fleet.run(shift))
        callers = Callers(gateway.url, shifted, results, seed, scenario.returns)
        await callers.play(DRAIN)
        servers.cancel()
    by_id = {record.request_id: record for record in records}
    found = [(result, by_id.get(request_id(result.number))) for result in results.requests]
    for result, record in found:
        _join(result, record, scenario)
    kept = [(result, record) for result, record in found if record is not None]
    return Played(_rows(results, kept), callers.latest, len(found) - len(kept))


@asynccontextmanager
async def _gateway(document: Mapping[str, Any]) -> AsyncIterator[Gateway]:
    gateway = Gateway(Config.model_validate(document))
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


def _join(result: RequestResult, record: Record | None, scenario: Scenario) -> None:
    """Add what the gateway knows of a request."""
    if record is not None:
        result.tier = record.placed.tier or 0
        result.endpoint, result.pool = record.endpoint.id, record.endpoint.pool
        result.external = any(pool.name == record.endpoint.pool and not pool.local for pool in scenario.pools)
        result.cached, result.cost = record.answer.cached_tokens or 0, record.cost_usd
        result.attempts = len(record.attempts)
        result.hedges = sum(attempt.kind is AttemptKind.HEDGE for attempt in record.attempts)


def _rows(results: Results, found: Sequence[tuple[RequestResult, Record]]) -> list[PlayedRow]:
    return [
        PlayedRow(
            row,
            _tpot_met(results, row.name),
            _held(record for _, record in chosen),
            Counter(attempt.ending.value for _, record in chosen for attempt in record.attempts),
            sum(attempt.status == LIMITED for _, record in chosen for attempt in record.attempts),
        )
        for row in results.rows()
        for chosen in [[each for each in found if row.name in (each[0].route, "all")]]
    ]


def _tpot_met(results: Results, route: str) -> float:
    """Of the answers of routes with a TPOT budget. NaN without."""
    met = [
        result.tpot <= budget.budget
        for result in results.requests
        if route in (result.route, "all")
        and (budget := results.routes[result.route].tpot) is not None
        and result.tpot is not None
    ]
    return sum(met) / len(met) if met else float("nan")


def _held(records: Iterable[Record]) -> Mapping[str, float]:
    """Seconds by rule, the longest first."""
    held: Counter[str] = Counter()
    for record in records:
        held.update(record.held)
    return dict(held.most_common())
