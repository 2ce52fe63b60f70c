"""Plays a trace in real time against an OpenAI-compatible address.

Rules:
- Open loop: a request is sent at its recorded time, whatever became of those before. A prompt is made before its time
  comes. More than MAX_IN_FLIGHT requests are never in progress: the next one is late, and the report says so.
- Requests take the gateway's own path to a server, and the first token is the one that a gateway would count. Times
  count from the opening of the connection.
- A failure that every request would meet (refused connection, refused key, unknown path or model) ends the replay while
  no request has been answered. Any other failure is a miss of its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

from backends.interface import Failure, FailureKind, Operation
from gateway.config.models import Config
from gateway.runtime import build_runtime
from gateway.synthetic_request import send_synthetic, synthetic
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.routed_request import Upstream
from lab.live.trace_prompts import TracePrompts
from lab.traffic.traces import Arrival
from policies.fleet.fleet import Fleet
from policies.types import AttemptOutcome, Endpoint, PoolEstimate

POOL = "live"  # of the configuration of a replay
MAX_IN_FLIGHT = 4_096
LASTING = frozenset(
    {FailureKind.CONNECT, FailureKind.AUTH, FailureKind.MISCONFIGURED, FailureKind.UNSUPPORTED, FailureKind.PROTOCOL}
)


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """The end of a request. Times in s; None: there is none. `late`: time from the recorded arrival to the sending."""

    arrival: Arrival
    late: float = 0.0
    first: float | None = None  # token of any kind
    first_answer: float | None = None  # token after all reasoning
    tpot: float | None = None
    prompt_tokens: int | None = None  # reported
    output_tokens: int = 0
    failure: str = ""  # kind, and the server's words


class ReplayAborted(Exception):
    """A failure that every request would meet."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.said)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class LiveServer:
    """The address to play against."""

    fleet: Fleet
    endpoint: Endpoint
    upstream: Upstream
    timeout: float  # s of one request


@asynccontextmanager
async def live_server(config: Config, timeout: float) -> AsyncIterator[LiveServer]:
    """`config`: with the address as the only endpoint of POOL."""
    runtime = build_runtime(config)
    [endpoint] = runtime.pools[POOL].endpoints
    try:
        yield LiveServer(Fleet(config.fleet()), endpoint, runtime.upstreams[endpoint.id], timeout)
    finally:
        await asyncio.gather(*(pool.close() for pool in runtime.connections.values()))


class LivePlayer:
    """`answers`: gets those of ended requests. `model`: name for all; empty: that of the route."""

    def __init__(self, server: LiveServer, prompts: TracePrompts, answers: list[LiveAnswer], model: str = "") -> None:
        self.answers = answers
        self._server = server
        self._prompts = prompts
        self._model = model
        self._places = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def play(self, arrivals: Sequence[Arrival]) -> None:
        """Raises ReplayAborted."""
        began = monotonic()
        try:
            async with asyncio.TaskGroup() as tasks:
                for arrival in arrivals:
                    body = self._prompts.body(arrival)
                    await asyncio.sleep(max(began + arrival.at - monotonic(), 0.0))
                    await self._places.acquire()
                    task = tasks.create_task(self._send(arrival, body, began + arrival.at))
                    task.add_done_callback(lambda _: self._places.release())
        except ExceptionGroup as group:
            aborted, others = group.split(ReplayAborted)
            if aborted is None or others is not None:
                raise
            raise aborted.exceptions[0] from None

    async def _send(self, arrival: Arrival, body: dict[str, object], due: float) -> None:
        server = self._server
        request = synthetic(
            server.upstream, Operation.CHAT, body, self._model or arrival.route, max_tokens=arrival.output_tokens
        )
        estimate = PoolEstimate(arrival.prompt_tokens)
        wire = await send_synthetic(server.fleet, server.endpoint, server.upstream, request, estimate, server.timeout)
        lasting = wire.failure is not None and wire.failure.kind in LASTING
        if wire.failure is not None and lasting and not any(answer.first is not None for answer in self.answers):
            raise ReplayAborted(wire.failure)
        self.answers.append(_answer(arrival, wire, wire.times.opened - due, server.timeout))


def _answer(arrival: Arrival, wire: WireAttempt, late: float, timeout: float) -> LiveAnswer:
    times, report = wire.times, wire.report
    failure = ""
    if wire.failure is not None:
        failure = wire.failure.said
    elif wire.outcome is not AttemptOutcome.COMPLETED:
        failure = f"no end within {timeout:g} s" if times.first_in is not None else f"no token within {timeout:g} s"
    return LiveAnswer(
        arrival,
        late=max(late, 0.0),
        first=None if times.first_in is None else times.first_in - times.opened,
        first_answer=None if times.answer_in is None else times.answer_in - times.opened,
        tpot=wire.tpot(),
        prompt_tokens=None if report is None else report.prompt_tokens,
        output_tokens=wire.output_tokens,
        failure=failure,
    )
