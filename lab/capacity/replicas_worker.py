"""`firsttoken replicas`: the child of a gateway that replays its latest traffic, a question at a time.

Rules:
- A question is lines on standard input, the answer a line on standard output (`gateway.autoscale.replay_messages`). The
  end of the input ends the child.
- It has the lowest priority, and MAX_MEMORY of address space: more ends it, and the gateway starts another one.
- A question that fails, or takes more than MAX_CPU, has an answer that says so.
- A prompt sent again within RETRY of an attempt without an answer is the same demand, not more of it.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import mean
from time import process_time
from typing import BinaryIO

from backends.server_profiles import PROFILES, Profile
from gateway.autoscale.replay_messages import (
    MAX_CPU,
    DemandRow,
    ReplicasAnswer,
    ReplicasJob,
    decode_job,
    decode_row,
    encode,
)
from lab.capacity.capacity_report import reason
from lab.capacity.learned_profile import representative
from lab.capacity.replicas_needed import ReplicasQuestion, replicas_needed
from lab.replay.sim_fleet import API, ENGINE, Scenario
from lab.traffic.session_sample import with_sessions
from lab.traffic.traces import USUAL_LENGTH, Arrival
from policies.autoscale.replica_law import KEPT
from policies.routes.route import DUMPED, Route

NICE = 19
MAX_MEMORY = 2 << 30  # bytes
RETRY = 60.0  # s


class ReplayTooDear(Exception):
    """A question has used up its CPU."""


def serve(args: argparse.Namespace) -> int:
    """Returns exit code 0 at the end of the input."""
    os.nice(NICE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    answer_questions(sys.stdin.buffer, sys.stdout.buffer)
    return 0


def answer_questions(asked: BinaryIO, answers: BinaryIO) -> None:
    began = process_time()
    for line in asked:
        answers.write(encode(_answered(line, asked, began)) + b"\n")
        answers.flush()
        began = process_time()


def _answered(line: bytes, asked: BinaryIO, began: float) -> ReplicasAnswer:
    try:
        job = decode_job(line)
        rows = [decode_row(asked.readline()) for _ in range(job.rows)]
        with _limited(MAX_CPU):
            found = replicas_needed(question_of(job, rows))
    except Exception as error:
        return ReplicasAnswer(error=f"{type(error).__name__}: {error}", cpu=process_time() - began)
    curve = {n: round(result.attainment, 4) for n, result in found.curve.items()}
    requests = sum(result.requests for result in found.curve.values())
    return ReplicasAnswer(found.needed, reason(found), curve, process_time() - began, requests)


@contextmanager
def _limited(cpu: float) -> Iterator[None]:
    """Raises ReplayTooDear in the main thread after so many s of CPU."""

    def stop(*_: object) -> None:
        raise ReplayTooDear(f"the replays took more than {cpu:g} s of CPU")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def question_of(job: ReplicasJob, rows: Sequence[DemandRow]) -> ReplicasQuestion:
    start = job.now - KEPT
    routes = {name: Route.model_validate(raw, context=DUMPED) for name, raw in job.routes.items()}
    known = {pool: representative(found) for pool, found in job.learned.items()}
    return ReplicasQuestion(
        scenario=Scenario(job.pools, routes, dict(_profiles(job)), first_token=job.first_token),
        arrivals=with_sessions(_arrivals((row for row in rows if row.at >= start), start)),
        pool=job.pool,
        current=job.current,
        least=job.least,
        most=job.most,
        start_time=job.start_time,
        now=KEPT,
        since=max(job.since - start, 0.0),
        seen=job.seen,
        cost=job.cost,
        learned={pool: learned for pool, learned in known.items() if learned is not None},
        kv_tokens=job.kv_tokens,
    )


def _profiles(job: ReplicasJob) -> Iterator[tuple[str, Profile]]:
    """By endpoint id."""
    for pool in job.pools:
        profile = PROFILES[job.profiles.get(pool.name) or (ENGINE if pool.local else API)]
        yield from ((endpoint.id, profile) for endpoint in pool.endpoints)


def _arrivals(rows: Iterable[DemandRow], start: float) -> list[Arrival]:
    """Demand in order of time, which counts from `start`. Answers of unknown length get the mean of their route's, else
    of all."""
    asked = list(_without_retries(rows))
    known: dict[str, list[int]] = {"": []}
    for row in asked:
        if row.output_tokens and row.is_answered:
            known[""].append(row.output_tokens)
            known.setdefault(row.route, []).append(row.output_tokens)
    means = {route: round(mean(lengths)) for route, lengths in known.items() if lengths}
    usual = means.get("", USUAL_LENGTH)
    return [_arrival(row, start, row.output_tokens or means.get(row.route, usual)) for row in asked]


def _arrival(row: DemandRow, start: float, output_tokens: int) -> Arrival:
    hashes = array("Q", row.prefix)
    return Arrival(row.at - start, max(row.prompt_tokens, 1), output_tokens, hashes, row.route, row.tenant, row.session)


def _without_retries(rows: Iterable[DemandRow]) -> Iterator[DemandRow]:
    unanswered: dict[tuple[str, str, bytes], float] = {}
    for row in rows:
        key = row.route, row.tenant, row.prefix
        is_retry = bool(row.prefix) and row.at - unanswered.get(key, -RETRY - 1) <= RETRY
        if not row.is_answered:
            unanswered[key] = row.at
        if not is_retry:
            yield row
