"""Replays of the latest traffic, in a process of their own: the loop that answers KEDA is not kept.

Rules:
- The process has the lowest priority, and MAX_MEMORY of address space: more ends it, and the next question starts
  another one.
- A question that fails, or takes more than MAX_CPU, has an answer that says so. One without an answer in TIMEOUT ends
  the process. What that cost is not known: its time, MAX_CPU at most.
- A prompt sent again within RETRY of an attempt without an answer is the same demand, not more of it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from statistics import mean
from time import monotonic, process_time

from backends.server_profiles import PROFILES, Profile
from lab.autoscale.demand import DemandRow
from lab.capacity.capacity_report import reason
from lab.capacity.learned_profile import representative
from lab.capacity.replica_law import KEPT
from lab.capacity.replicas_needed import ReplicasQuestion, replicas_needed
from lab.replay.sim_fleet import API, ENGINE, Scenario
from lab.traffic.session_sample import with_sessions
from lab.traffic.traces import USUAL_LENGTH, Arrival
from policies.latency.learned_state import LearnedEndpoint
from policies.routes.route import Route
from policies.types import Pool

NICE = 19
MAX_MEMORY = 2 << 30  # bytes
MAX_CPU = 30.0  # s of a question: the replays of a usual one take 3 s at most
TIMEOUT = 300.0  # s: a machine that is busy leaves a process of the lowest priority little
RETRY = 60.0  # s


@dataclass(frozen=True, slots=True)
class ReplicasJob:
    """`routes`: those of the pool; `pools`: all pools of these. `now`, `since`: Unix times, between which `rows` are
    complete; `seen`: share of all sessions among them."""

    pool: str
    current: int
    least: int
    most: int
    start_time: float
    now: float
    since: float
    cost: int
    rows: Sequence[DemandRow]
    pools: tuple[Pool, ...]
    routes: Mapping[str, Route]
    seen: float = 1.0
    first_token: float = 60.0
    profiles: Mapping[str, str] = field(default_factory=dict)  # by pool, where configured
    learned: Mapping[str, Sequence[LearnedEndpoint]] = field(default_factory=dict)  # by pool
    kv_tokens: Mapping[str, int] = field(default_factory=dict)  # by pool


@dataclass(frozen=True, slots=True)
class ReplicasAnswer:
    """`curve`: the share of the budget that is furthest from its target, by number of engines; `cpu`: s; `requests`:
    replayed; `error`: nothing else is known."""

    needed: int = 0
    reason: str = ""
    curve: Mapping[int, float] = field(default_factory=dict)
    cpu: float = 0.0
    requests: int = 0
    error: str = ""


class ReplayFailed(Exception):
    """There is no answer; the reason. `cpu`: s, at most."""

    def __init__(self, reason: str, cpu: float) -> None:
        super().__init__(reason)
        self.cpu = cpu


class ReplayTooDear(Exception):
    """A question has used up its CPU."""


class ReplayProcess:
    """Started on the first question. `serve`: answers questions in the process."""

    def __init__(self, serve: Callable[[Connection], None] | None = None) -> None:
        self._serve = serve or answer_questions
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._turn = asyncio.Lock()  # one question at a time

    async def ask(self, job: ReplicasJob) -> ReplicasAnswer:
        """Raises ReplayFailed."""
        began = monotonic()
        try:
            async with self._turn:
                answer = await asyncio.to_thread(self._ask, job)
        except TimeoutError:
            self.close()
            raise ReplayFailed(f"no answer within {TIMEOUT:g} s", MAX_CPU) from None
        except (OSError, EOFError) as error:
            self.close()
            spent = min(monotonic() - began, MAX_CPU)
            raise ReplayFailed(f"the process has ended ({type(error).__name__})", spent) from None
        if answer.error:
            raise ReplayFailed(answer.error, answer.cpu)
        return answer

    def _ask(self, job: ReplicasJob) -> ReplicasAnswer:
        if self._pipe is None or self._process is None or not self._process.is_alive():
            self._start()
        assert self._pipe is not None
        pipe = self._pipe
        pipe.send(job)
        if not pipe.poll(TIMEOUT):
            raise TimeoutError
        answer = pipe.recv()
        assert isinstance(answer, ReplicasAnswer)
        return answer

    def _start(self) -> None:
        context = get_context("spawn")  # a fork would copy sockets and threads
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def close(self) -> None:
        process, self._process, self._pipe = self._process, None, None
        if process is not None:
            process.kill()
            process.join()


def answer_questions(questions: Connection) -> None:
    """Until the other end is closed."""
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends this process
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    with suppress(EOFError):
        while True:
            questions.send(answered(questions.recv()))


def answered(job: ReplicasJob) -> ReplicasAnswer:
    began = process_time()
    try:
        with _limited(MAX_CPU):
            found = replicas_needed(question_of(job))
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


def question_of(job: ReplicasJob) -> ReplicasQuestion:
    start = job.now - KEPT
    known = {pool: representative(found) for pool, found in job.learned.items()}
    return ReplicasQuestion(
        scenario=Scenario(job.pools, job.routes, dict(_profiles(job)), first_token=job.first_token),
        arrivals=with_sessions(_arrivals((row for row in job.rows if start <= row.at <= job.now), start)),
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
