"""The request as its attempts see it, and their results as the Record and the caller see them. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backends.interface import Failure, FailureKind
from gateway.api.api_error import ApiError, retry_later
from gateway.api.inference_request import InferenceRequest
from gateway.observe.record import AttemptRecord
from gateway.observe.timeline import RequestTimeline
from gateway.upstream.upstream_request import Upstream, UpstreamRequest
from policies.routes.route import Route
from policies.types import FOREVER, AttemptOutcome, Decision, PromptEstimate

NO_DEADLINE = 2**53 - 1  # ms; after every deadline, and exact where JSON numbers are doubles


@dataclass(slots=True, kw_only=True)
class RoutedRequest:
    """A request with its routing decision. `upstreams`: by endpoint id; `first_token_limit`: s."""

    request: InferenceRequest
    route: Route
    estimate: PromptEstimate
    decision: Decision
    timeline: RequestTimeline
    upstreams: Mapping[str, Upstream]
    first_token_limit: float
    passthrough: bool = False  # the model name is the caller's
    cache_group: str = ""  # tenants with shared prefix caches; empty: all

    def model_at(self, upstream: Upstream) -> str:
        """Model name to send to an endpoint."""
        return self.request.model if self.passthrough else upstream.model


def priority_of(job: RoutedRequest) -> int:
    """Deadline as Unix time in ms, which orders the requests of several gateways: vLLM takes the smallest first, and
    any 64-bit integer."""
    if job.decision.deadline == FOREVER:
        return NO_DEADLINE
    record = job.timeline.record
    return int((record.wall + job.decision.deadline - record.arrival) * 1e3)


def header_safe(model: str) -> str:
    """A caller's model name (passthrough), unless it could write header fields."""
    return model if model.isascii() and model.isprintable() and len(model) <= 128 else "-"


def attempt_record(upstream_request: UpstreamRequest, arrival: float) -> AttemptRecord:
    attempt = upstream_request.attempt
    endpoint = attempt.candidate.endpoint
    return AttemptRecord(
        attempt.number,
        attempt.kind,
        endpoint.id,
        endpoint.pool,
        opened=upstream_request.opened - arrival,
        ended=upstream_request.ended_at - arrival,
        ending=upstream_request.ending or AttemptOutcome.CANCELLED,
    )


def refusal_of(failure: Failure | None, reason: str) -> ApiError:
    """The last failure as the caller's error. SDKs need not retry at once what the gateway has retried itself."""
    if failure is None:
        return ApiError(504, f"No backend answered in time: {reason}.", type="server_error", code="timeout")
    headers: dict[str, str] = {"x-should-retry": "false"}
    if failure.kind is FailureKind.CLIENT:
        headers = {}
    elif failure.kind in (FailureKind.RATE_LIMITED, FailureKind.OVERLOADED):
        headers = retry_later(min(max(failure.retry_after or 1.0, 0.1), 60.0))
    return ApiError(
        failure.status,
        failure.message,
        type=failure.type,
        code=failure.code,
        param=failure.param,
        headers=headers,
        logged=f"the backend's {failure.kind.value}",
    )
