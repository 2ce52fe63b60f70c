"""What the attempts of a request are given, and how they are told of: to the engine, to the caller, in the Record.

Values, and functions of values: to open, cancel and give up is the dispatcher's (`gateway.upstream.dispatcher`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backends.http.connection_pool import ConnectionPool
from backends.interface import Backend, Failure, FailureKind
from gateway.api.api_error import ApiError, retry_later
from gateway.api.inference_request import InferenceRequest
from gateway.observe.record import AttemptRecord
from gateway.observe.timeline import RequestTimeline
from gateway.upstream.upstream_request import UpstreamRequest
from policies.routes.route import Route
from policies.types import FOREVER, AttemptOutcome, Decision, PromptEstimate
from policies.value import value

NO_DEADLINE = 2**53 - 1  # ms; behind every deadline, and still exact where JSON numbers are doubles


@dataclass(frozen=True, slots=True)
class Upstream:
    """How to reach and speak to one endpoint."""

    origin: ConnectionPool
    backend: Backend
    model: str
    kv_events: bool = False  # the engine publishes them, and is to name our attempts in them
    priority: bool = False  # the engine takes what is due first
    traced: bool = True  # it is told of the trace, where traces are on


@value
class RoutedRequest:
    """A decided request: all that its attempts need. `upstreams`: by endpoint id; `first_token_limit`: s."""

    request: InferenceRequest
    route: Route
    estimate: PromptEstimate
    decision: Decision
    life: RequestTimeline
    upstreams: Mapping[str, Upstream]
    first_token_limit: float
    passthrough: bool = False  # the caller's model name is the backend's
    cache_group: str = ""  # the name of its tenant's caches


def priority_of(job: RoutedRequest) -> int:
    """The deadline as Unix time in ms, so that the requests of several gateways stand in one order: vLLM takes the
    smallest first, and any 64-bit integer."""
    if job.decision.deadline == FOREVER:
        return NO_DEADLINE
    record = job.life.record
    return int((record.wall + job.decision.deadline - record.arrival) * 1e3)


def header_safe(model: str) -> str:
    """Where a caller names the model (passthrough) it must not be able to write headers."""
    return model if model.isascii() and model.isprintable() and len(model) <= 128 else "-"


def attempt_record(run: UpstreamRequest, arrival: float) -> AttemptRecord:
    attempt = run.attempt
    endpoint = attempt.candidate.endpoint
    ending = run.ending or AttemptOutcome.CANCELLED
    return AttemptRecord(
        attempt.number, attempt.kind, endpoint.id, endpoint.pool, run.opened - arrival, run.ended_at - arrival, ending
    )


def refusal_of(failure: Failure | None, reason: str) -> ApiError:
    """The last failure, as the caller should see it. Ours to have tried: an SDK need not try again at once."""
    if failure is None:
        return ApiError(504, f"No backend answered in time: {reason}.", type="server_error", code="timeout")
    headers: dict[str, str] = {}
    if failure.kind is FailureKind.CLIENT:
        pass
    elif failure.kind in (FailureKind.RATE_LIMITED, FailureKind.OVERLOADED):
        headers = retry_later(min(max(failure.retry_after or 1.0, 0.1), 60.0))
    else:
        headers = {"x-should-retry": "false"}
    return ApiError(
        failure.status,
        failure.message,
        type=failure.type,
        code=failure.code,
        param=failure.param,
        headers=headers,
        logged=f"the backend's {failure.kind.value}",
    )
