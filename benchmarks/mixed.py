"""Checks the gateway's own reports against its callers: `python -m benchmarks.mixed [REQUESTS]`.

So many requests of every kind, 64 at a time, over real sockets against simulated engines: streams and whole answers,
failed and late primaries, shed and refused requests, disconnecting callers, broken backends. Then, for every request:

- exactly one Record, and one line in the access log, and both agree with the caller;
- stages sum to the TTFT, and with the `stream` stage to the total, within 1 ms, and the time of lost attempts is in
  the `failover` stage;

and nothing leaks: gauges are zero, and no new connection, task or file is open. Exit code 1 if a check fails.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.mixture import EXPECTED_OUTCOMES, KINDS, SentRequest, ask, fleet
from gateway.app import Gateway
from gateway.observe.record import CONNECT, STREAM, Record
from gateway.process import loop_factory
from lab.engines.engine import Engine
from lab.servers.simulated_server import SimulatedServer
from policies.types import AttemptKind

AT_ONCE = 64
WITHIN = 1e-3  # s
SETTLING = 10.0  # s until abandoned requests are over
GAUGES = ("firsttoken_endpoint_in_flight", "firsttoken_endpoint_uncached_tokens_ahead", "firsttoken_queue_depth")


@dataclass
class CheckResults:
    """Results. `wrong` is empty if all checks passed."""

    asked: Sequence[SentRequest]
    records: Sequence[Record]
    seconds: float = 0.0
    worst: float = 0.0  # s between the sum of stages and the TTFT
    worst_total: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def summary(self) -> str:
        ends = Counter(f"{asked.kind.name}: {asked.seen}" for asked in self.asked)
        kinds = Counter(attempt.kind.value for record in self.records for attempt in record.attempts)
        lines = [f"{count:6} {name}" for name, count in sorted(ends.items())]
        lines += [f"{count:6} attempts: {name}" for name, count in sorted(kinds.items())]
        lines += [
            f"{len(self.asked)} requests in {self.seconds:.1f} s, {len(self.records)} Records",
            f"stages against TTFT: {self.worst * 1e6:.1f} us at worst; against total: {self.worst_total * 1e6:.1f} us",
            *(f"WRONG: {wrong}" for wrong in self.wrong[:50]),
            f"{len(self.wrong)} wrong",
        ]
        return "\n".join(lines)


async def measure(count: int, seed: int = 0) -> CheckResults:
    """Everything, from an empty process to an empty process."""
    gc.collect()
    before = asyncio.all_tasks(), open_files()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "access.jsonl"
        async with fleet(str(log)) as (gateway, servers):
            records: list[Record] = []
            gateway.recorder.sinks.append(records.append)
            truth = CheckResults(await traffic(gateway, count, seed), records)
            truth.seconds = max(record.arrival + record.total for record in records) - records[0].arrival
            await wait_until_settled(gateway, servers)
            truth.wrong += [*unfinished_work(gateway, servers), *counter_errors(gateway, records)]
        told = [json.loads(line) for line in log.read_text().splitlines()]
    truth.wrong += [
        *record_errors(truth.asked, records),
        *access_log_errors(truth.asked, told),
        *stage_sum_errors(truth),
    ]
    await asyncio.sleep(0.1)  # closed sockets are told so by the loop
    gc.collect()
    truth.wrong += leaks(*before)
    return truth


async def traffic(gateway: Gateway, count: int, seed: int) -> list[SentRequest]:
    random = Random(seed)
    kinds = random.choices(KINDS, [kind.weight for kind in KINDS], k=count)
    asked = [SentRequest(f"mixed-{seed}-{number}", kind) for number, kind in enumerate(kinds)]
    port, turns = int(gateway.url.rpartition(":")[2]), iter(asked)

    async def caller(number: int) -> None:
        own = Random(f"{seed} {number}")
        for one in turns:
            await ask(port, one, own)

    await asyncio.gather(*(caller(number) for number in range(AT_ONCE)))
    return asked


# --------------------------------------------------------------------------- per request


def record_errors(asked: Sequence[SentRequest], records: Sequence[Record]) -> list[str]:
    """Requests without exactly one Record, and Records which disagree with their callers."""
    by_id: dict[str, list[Record]] = {}
    for record in records:
        by_id.setdefault(record.request_id, []).append(record)
    wrong = [f"a Record of nobody: {name}" for name in by_id.keys() - {one.id for one in asked}]
    for one in asked:
        found = by_id.get(one.id, [])
        if len(found) != 1:
            wrong.append(f"{one.id} ({one.kind.name}) has {len(found)} Records")
        else:
            wrong += [f"{one.id} ({one.kind.name}): {what}" for what in _disagreements(one, found[0])]
    return wrong


def _disagreements(asked: SentRequest, record: Record) -> list[str]:
    wrong = []
    if record.end not in EXPECTED_OUTCOMES[asked.seen]:
        wrong.append(f"its caller saw {asked.seen} ({asked.status}); the Record says {record.end}: {record.error}")
    if asked.status and record.status != asked.status:
        wrong.append(f"status {asked.status}, Record {record.status}")
    if asked.status and asked.headers.get("x-request-id") != asked.id:
        wrong.append("its answer has another's id")
    if asked.status == 200 and int(asked.headers["x-firsttoken-attempts"]) != len(record.attempts):
        wrong.append(f"{asked.headers['x-firsttoken-attempts']} attempts, Record {len(record.attempts)}")
    return wrong


def access_log_errors(asked: Sequence[SentRequest], told: Sequence[dict[str, object]]) -> list[str]:
    """The access log says the same, once each."""
    lines = Counter(line["request_id"] for line in told)
    return [f"{one.id} ({one.kind.name}) has {lines[one.id]} lines" for one in asked if lines[one.id] != 1]


def stage_sum_errors(truth: CheckResults) -> list[str]:
    wrong = []
    for record in truth.records:
        spent = sum(seconds for seconds in record.spent if seconds is not None)
        if record.ttft is not None:
            off = abs(spent - (record.spent[STREAM] or 0.0) - record.ttft)
            off_total = abs(spent - record.total)
            truth.worst, truth.worst_total = max(truth.worst, off), max(truth.worst_total, off_total)
            wrong += failover_errors(record)
            if off > WITHIN or off_total > WITHIN:
                wrong.append(f"{record.request_id}: stages are off by {off * 1e3:.3f} and {off_total * 1e3:.3f} ms")
        elif spent > record.total + WITHIN:
            wrong.append(f"{record.request_id}: {spent} s in stages, {record.total} s in total")
    return wrong


def failover_errors(record: Record) -> list[str]:
    """The time of lost attempts is the `failover` stage, up to the opening of the winning attempt."""
    if len(record.attempts) < 2:
        return []
    opened, before = record.attempts[-1].opened, sum(seconds or 0.0 for seconds in record.spent[:CONNECT])
    return [] if abs(opened - before) < WITHIN else [f"{record.request_id}: {before} s until {opened} s after arrival"]


# --------------------------------------------------------------------------- leaks


async def wait_until_settled(gateway: Gateway, servers: Sequence[SimulatedServer]) -> None:
    """Wait until nothing is under way, or the time limit."""
    ends = monotonic() + SETTLING
    while monotonic() < ends and unfinished_work(gateway, servers):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def unfinished_work(gateway: Gateway, servers: Sequence[SimulatedServer]) -> list[str]:
    assert gateway.data_port.server is not None
    dispatcher = gateway.proxy.dispatcher
    counts = {
        "lives": gateway.recorder.live,
        "callers' connections": len(gateway.data_port.server.connections),
        "requests held back": sum(gateway.queue.depth().values()),
        "connections being made": len(dispatcher.tasks),
        "requests that may still be retried": dispatcher.retries.active,
        "retries not given back": dispatcher.retries.retrying,
        **{f"requests on {up.connections}": up.connections.active for up in gateway.runtime.current.upstreams.values()},
        **{f"requests in {server.url}": unfinished(server) for server in servers},
    }
    wrong = [f"{count} {what} left" for what, count in counts.items() if count]
    for family in text_string_to_metric_families(page(gateway)):
        wrong += [f"{s.name} {s.labels} is {s.value}" for s in family.samples if s.name in GAUGES and s.value]
    return wrong


def unfinished(server: SimulatedServer) -> int:
    assert isinstance(server.engine, Engine)
    return server.engine.unfinished


def page(gateway: Gateway) -> str:
    return generate_latest(gateway.admin.registry).decode()


def counter_errors(gateway: Gateway, records: Sequence[Record]) -> list[str]:
    """firsttoken_requests_total equals the number of Records by outcome."""
    counted: Counter[str] = Counter()
    for family in text_string_to_metric_families(page(gateway)):
        for sample in family.samples:
            if sample.name == "firsttoken_requests_total":
                counted[sample.labels["outcome"]] += int(sample.value)
    ended = Counter(record.end.value for record in records)
    return [] if counted == ended else [f"metrics count {dict(counted)}, Records {dict(ended)}"]


def open_files() -> set[str]:
    """Open files, without the interpreter's own."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            continue
    return found


def leaks(tasks: set[asyncio.Task[object]], open_before: set[str]) -> list[str]:
    more = asyncio.all_tasks() - tasks
    opened = {name for name in open_files() - open_before if "socket:" in name}
    return [f"a task is left: {task}" for task in more] + [f"a socket is left: {name}" for name in opened]


def main(count: int) -> int:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        truth = runner.run(measure(count))
    print(truth.summary())
    hedged = sum(attempt.kind is AttemptKind.HEDGE for record in truth.records for attempt in record.attempts)
    return 1 if truth.wrong or (count >= 1000 and not hedged) else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
