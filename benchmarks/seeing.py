"""What it costs to see a request: `python -m benchmarks.seeing [RECORDS] [--traces]` prints microseconds of CPU each.

Rows: the Record itself (a Life from its beginning to its end, with all stages), metrics, the access log; and all three
as they follow one another in a gateway. Warm is a loop of nothing else, in which they must take BUDGET at most. Cold:
between two requests COLD bytes of other memory are read, so that nothing of the last one is left in the core's own
caches. A gateway lies between the two.

CPU is that of the thread, plus that of the log's own. A figure is the least of ROUNDS, each the median of groups of
GROUP requests, which is what metrics and log take at a time: a busy machine only adds. The clock's own time is off.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from tempfile import NamedTemporaryFile
from time import clock_gettime, monotonic, pthread_getcpuclockid, thread_time
from typing import Any

from prometheus_client import CollectorRegistry

from backends.interface import EngineTimes
from gateway.observe.logs import AccessLog
from gateway.observe.metrics.loop_lag import LoopLag
from gateway.observe.metrics.request_metrics import RequestMetrics
from gateway.observe.record import (
    ADMIT,
    DECIDE,
    ESTIMATE,
    PARSE,
    READ,
    AskedFacts,
    AttemptRecord,
    Budgets,
    Record,
    RequestOutcome,
)
from gateway.observe.recorder import Recorder
from gateway.observe.timeline import RequestTimeline
from policies.fleet.fleet import AttemptReport
from policies.routes.route import Route
from policies.types import AttemptKind, AttemptOutcome, Candidate, Decision, Endpoint, Forecast, Placement, PrefixBlocks

BUDGET = 40.0  # us
RECORDS = 4_096
ROUNDS = 5
GROUP = 16  # requests
LET_GO = 512  # requests after which the log is waited for
COLD = 2 << 20  # bytes: more than a core's own caches hold
LINE = 64  # bytes of a cache line
ROUTES = ("chat", "agent", "task")
BY_NAME = {
    name: Route.model_validate({"name": name, "tiers": ["small", "large"], "ttft": {"budget": "800ms"}})
    for name in ROUTES
}
BLOCKS = PrefixBlocks((0x123456789ABCDEF0, 0x0FEDCBA987654321), 512)
ENDPOINTS = tuple(Endpoint(f"{pool}/10.0.0.{i}:8000", pool, "eu-west") for pool in ("small", "large") for i in range(4))

Sink = Callable[[Record], None]
Row = Callable[[int], None]  # does its part of the request with this number


# -- a request -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lived:
    """What happens to a request, decided beforehand."""

    number: int
    route: str
    candidate: Candidate
    decision: Decision
    lost: AttemptRecord | None
    ttft: float
    tokens: int


def lives(count: int) -> Sequence[Lived]:
    """Chat and agents, a tenth of them after a failed attempt."""
    random = Random(1)
    return [_lived(number, random) for number in range(count)]


def _lived(number: int, random: Random) -> Lived:
    endpoint, ttft = random.choice(ENDPOINTS), random.lognormvariate(-1.5, 0.6)
    prompt, lost = int(random.lognormvariate(7, 1)), random.random() < 0.1
    forecast = Forecast(ttft * random.lognormvariate(0, 0.2), tpot=0.02, samples=100, prefill=ttft)
    candidate = Candidate(endpoint, 0, prompt, prompt // 2, forecast, 0.97, 0.001, value=0.9)
    failed = AttemptRecord(1, AttemptKind.PRIMARY, "small/10.0.0.9:8000", "small", 0.001, 0.003, AttemptOutcome.FAILED)
    decision = Decision(Placement.PLACE, 0.0, 1.0, (candidate,), scorer="predicted")  # its time is set when it is used
    return Lived(
        number, random.choice(ROUTES), candidate, decision, failed if lost else None, ttft, random.randint(2, 400)
    )


def live(recorder: Recorder, lived: Lived) -> None:
    """All that the straight line, the dispatcher, the relay and the settlement ask of a Life."""
    arrival = monotonic()
    with recorder.timeline(arrival) as life:
        record = life.record
        record.request_id, record.operation = f"req_0123456789abcdef{lived.number:08x}", "chat"
        life.end_stage(READ)
        life.end_stage(PARSE)
        record.route, record.tenant, record.asked = BY_NAME[lived.route], "web-app", AskedFacts(stream=True)
        record.budgets = Budgets(ttft=0.8, tpot=0.05, total=30.0)
        record.trace_id = "0af7651916cd43dd8448eb211c80319c"
        life.end_stage(ESTIMATE)
        life.end_stage(ADMIT)
        lived.decision.at = monotonic()  # type: ignore[misc]
        life.decided(lived.decision)
        life.end_stage(DECIDE)
        if lived.lost is not None:
            life.attempt_ended(lived.lost)
        first_in = arrival + lived.ttft
        at = {"opened": arrival + 0.002, "connected": arrival + 0.002, "sent": arrival + 0.0021, "first_in": first_in}
        life.won(lived.candidate, "qwen3-8b", **at)
        life.first_token_out(first_in + 0.00002, 200)
        settle(life, lived)
        life.finished(RequestOutcome.COMPLETED, first_in + 0.02 * lived.tokens)


def settle(life: RequestTimeline, lived: Lived) -> None:
    endpoint, prompt = lived.candidate.endpoint, lived.candidate.prompt_tokens
    number, cost = 1 + (lived.lost is not None), 0.0004
    ended = AttemptRecord(
        *(number, AttemptKind.PRIMARY, endpoint.id, endpoint.pool, 0.002, lived.ttft + 1.0, AttemptOutcome.COMPLETED),
        cost_usd=cost,
    )
    life.answered(
        ended,
        AttemptReport(prompt_tokens=prompt + 4, cached_tokens=prompt // 2, engine_ttft=lived.ttft * 0.9),
        EngineTimes(queue=lived.ttft * 0.2, prefill=lived.ttft * 0.7),
        output_tokens=lived.tokens,
        tpot=0.02,
        blocks=BLOCKS,
    )


def finished(count: int) -> Sequence[Record]:
    """Their Records."""
    records: list[Record] = []
    recorder = Recorder([records.append], lag=LoopLag())
    for lived in lives(count):
        live(recorder, lived)
    return records


# -- the rows ------------------------------------------------------------------------------


def record_row(count: int) -> Row:
    recorder, requests = Recorder(lag=LoopLag()), lives(count)
    return lambda number: live(recorder, requests[number])


def metrics_row(count: int) -> Row:
    metrics, records = RequestMetrics(CollectorRegistry(), BY_NAME.values()), finished(count)
    return lambda number: metrics(records[number])


def log_row(count: int, log: AccessLog) -> Row:
    records = finished(count)
    return lambda number: log(records[number])


def all_of_them(count: int, log: AccessLog) -> Row:
    """As it is in a gateway: each Record is counted and written when it ends."""
    metrics = RequestMetrics(CollectorRegistry(), BY_NAME.values())
    recorder, requests = Recorder([], [metrics, log], LoopLag()), lives(count)
    return lambda number: live(recorder, requests[number])


def rows(count: int, log: AccessLog) -> Mapping[str, Row]:
    """By the name of the line in the table. Another sink is a line more: a function that makes its Row."""
    return {
        "Record": record_row(count),
        "metrics": metrics_row(count),
        "access log": log_row(count, log),
        "all three": all_of_them(count, log),
    }


# -- measuring -----------------------------------------------------------------------------


class Cold:
    """Other memory, a byte of each line of which is read in one call; every time from another place."""

    def __init__(self, size: int = COLD) -> None:
        self.memory = memoryview(bytearray(size * 2))
        self.size = size

    def walk(self, number: int) -> None:
        start = number * LINE % self.size
        self.memory[start : start + self.size : LINE].tobytes()


def nothing(number: int) -> None:
    """What takes the clock's own time."""


async def timed(row: Row, count: int, log: AccessLog, between: Row) -> float:
    """Seconds of CPU for one, the log's thread included."""
    writer, began = writer_clock(log), 0.0
    before, groups = clock_gettime(writer), []
    for start in range(0, count, GROUP):
        spent = 0.0
        for number in range(start, start + GROUP):
            between(number)
            began = thread_time()
            row(number)
            spent += thread_time() - began
        groups.append(spent / GROUP)
        if not start % LET_GO:
            await written(log)
    await written(log)
    return median(groups) + (clock_gettime(writer) - before) / count


async def written(log: AccessLog) -> None:
    """All that waits, by its thread."""
    log.flush()
    while log.behind:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def writer_clock(log: AccessLog) -> int:
    ident = log._thread.ident
    assert ident is not None
    return pthread_getcpuclockid(ident)


async def measure(count: int) -> Mapping[str, tuple[float, float]]:
    """Microseconds each, warm and cold."""
    found: dict[str, tuple[float, float]] = {}
    with NamedTemporaryFile() as file:
        log = AccessLog(file.name)
        for name, row in rows(count, log).items():
            await timed(row, count, log, nothing)
            ways = (nothing, Cold().walk)
            least = [min([await _each(row, count, log, between) for _ in range(ROUNDS)]) for between in ways]
            found[name] = (least[0] * 1e6, least[1] * 1e6)
        log.close()
    return found


async def _each(row: Row, count: int, log: AccessLog, between: Row) -> float:
    clock = await timed(nothing, count, log, nothing)
    return await timed(row, count, log, between) - clock


def table(found: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    yield "| us of CPU per request | warm | cold |"
    yield "|---|---:|---:|"
    for name, (warmly, coldly) in found.items():
        yield f"| {name} | {warmly:.1f} | {coldly:.1f} |"


def main(arguments: Sequence[Any]) -> int:
    numbers = [int(argument) for argument in arguments if argument != "--traces"]
    found = asyncio.run(measure(*numbers or [RECORDS]))
    print("\n".join(table(found)))
    if "--traces" in arguments:
        from benchmarks.tracing_cost import traces  # needs the extra `otel`

        print(f"| traces at 100%, paced | {traces():.1f} | |")
    return 0 if found["all three"][0] <= BUDGET else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
