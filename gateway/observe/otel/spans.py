"""Converts a Record into the spans of one trace, as values of opentelemetry-sdk.

Rules:
- Spans are made after the answer, from the Record alone; during a request only ids exist.
- One SERVER span for the request; an INTERNAL child for each stage, end to end as in the Record; a CLIENT child for
  each attempt, lost ones included. Only the attempt that answered carries the usage, so sums count it once.
- Attribute values come from the configuration, the engine's figures and the caller's ids: never text of a prompt, an
  answer or an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode
from opentelemetry.util.types import AttributeValue

from gateway.observe.otel import semconv as names
from gateway.observe.record import STAGE_NAMES, UPSTREAM, AttemptRecord, Record, RequestOutcome
from gateway.observe.trace_context import ATTEMPT, SAMPLED, STAGE, Trace, trace_state
from policies.types import AttemptOutcome

# Outcomes that are no error of a server, and of an engine.
NO_SERVER_ERROR = (RequestOutcome.COMPLETED, RequestOutcome.REFUSED, RequestOutcome.CLIENT_GONE)
NO_ENGINE_ERROR = (AttemptOutcome.COMPLETED, AttemptOutcome.CANCELLED)
UNSET, ERROR = Status(), Status(StatusCode.ERROR)

Attributes = dict[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class ServedEndpoint:
    """Span attributes of an endpoint. `model` is empty where the caller names the model."""

    provider: str
    model: str
    address: str
    port: int


@dataclass(slots=True)
class SpanFactory:
    """Makes the spans of Records. `endpoints` may grow at a reload."""

    resource: Resource
    scope: InstrumentationScope
    endpoints: dict[str, ServedEndpoint]

    def spans(self, record: Record, trace: Trace) -> Iterator[ReadableSpan]:
        """Yields the request's span first. All of them are marked as sampled: the exporter drops others."""
        start = int(record.wall * 1e9)
        operation = names.OPERATIONS.get(record.operation, record.operation)
        own = _context(trace, trace.span)
        yield self._span(
            f"{operation} {record.route}" if record.route != "-" else operation,
            SpanKind.SERVER,
            own,
            _context(trace, int(trace.parent, 16), is_remote=True) if trace.parent else None,
            (start, start + int(record.total * 1e9)),
            _request_attributes(record, self.endpoints.get(record.endpoint), operation),
            UNSET if record.end in NO_SERVER_ERROR else ERROR,
        )
        passed = first_token_in = 0.0
        for place, seconds in enumerate(record.spent):
            if seconds is not None:
                times = start + int(passed * 1e9), start + int((passed + seconds) * 1e9)
                context = _context(trace, trace.span + STAGE + place)
                yield self._span(STAGE_NAMES[place], SpanKind.INTERNAL, context, own, times, {}, UNSET)
                passed += seconds
            if place == UPSTREAM:
                first_token_in = passed
        for attempt in record.attempts:
            answered = record.ttft is not None and attempt is record.attempts[-1]
            endpoint = self.endpoints.get(attempt.endpoint)
            attributes = _attempt_attributes(record, attempt, endpoint, operation)
            if answered:
                attributes |= _answer_attributes(record, first_token_in - attempt.opened)
            model = attributes.get(names.REQUEST_MODEL)
            yield self._span(
                f"{operation} {model}" if model else operation,
                SpanKind.CLIENT,
                _context(trace, trace.span + ATTEMPT - 1 + attempt.number),
                own,
                (start + int(attempt.opened * 1e9), start + int(attempt.ended * 1e9)),
                attributes,
                UNSET if attempt.ending in NO_ENGINE_ERROR else ERROR,
            )

    def _span(
        self,
        name: str,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[int, int],
        attributes: Attributes,
        status: Status,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=self.resource,
            attributes=attributes,
            kind=kind,
            instrumentation_scope=self.scope,
            status=status,
            start_time=times[0],
            end_time=times[1],
        )


def _context(trace: Trace, span: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(int(trace.id, 16), span, is_remote, TraceFlags(trace.flags | SAMPLED), trace_state(trace.state))


def _known(attributes: Mapping[str, AttributeValue | None]) -> Attributes:
    """Without the values that never became known."""
    return {name: value for name, value in attributes.items() if value is not None and value not in ("", "-")}


def _request_attributes(record: Record, endpoint: ServedEndpoint | None, operation: str) -> Attributes:
    return _known(
        {
            names.REQUEST_ID: record.request_id,
            names.OPERATION: operation,
            names.PROVIDER: "firsttoken" if endpoint is None else endpoint.provider,
            names.REQUEST_MODEL: record.route,
            names.REQUEST_STREAM: record.stream,
            names.REQUEST_MAX_TOKENS: record.max_tokens,
            names.RESPONSE_MODEL: record.model,
            names.HTTP_METHOD: "POST",
            names.HTTP_STATUS: record.status or None,
            names.ERROR_TYPE: error_type(record),
            names.ROUTE: record.route,
            names.WORKLOAD: record.workload,
            names.TENANT: record.tenant,
            names.OUTCOME: record.end.value,
            names.ATTEMPTS: len(record.attempts),
            names.TIER: None if record.tier is None else record.tier + 1,
            names.POOL: record.pool,
            names.ENDPOINT: record.endpoint,
            names.REGION: record.region,
            names.SCORER: record.scorer,
            names.TTFT: record.ttft,
            names.TTFT_BUDGET: record.ttft_budget,
            names.TTFT_P50: record.ttft_predicted_p50,
            names.TTFT_P90: record.ttft_predicted_p90,
            names.TTFT_MET: record.ttft_met,
            names.TPOT: record.tpot,
            names.TPOT_BUDGET: record.tpot_budget,
            names.TPOT_MET: record.tpot_met,
            names.TOTAL_BUDGET: record.total_budget,
            names.TOTAL_MET: record.total_met,
            names.PROBABILITY: record.chance,
            names.PROMPT_ESTIMATED: record.prompt_tokens_estimated,
            names.CACHED_PREDICTED: record.cached_tokens_predicted,
            names.LOOP_LAG: record.loop_lag,
            names.COST: record.cost_usd,
        }
    )


def _attempt_attributes(
    record: Record, attempt: AttemptRecord, endpoint: ServedEndpoint | None, operation: str
) -> Attributes:
    return _known(
        {
            names.OPERATION: operation,
            names.PROVIDER: None if endpoint is None else endpoint.provider,
            names.REQUEST_MODEL: None if endpoint is None else endpoint.model,
            names.REQUEST_STREAM: record.stream,
            names.SERVER_ADDRESS: None if endpoint is None else endpoint.address,
            names.SERVER_PORT: None if endpoint is None else endpoint.port,
            names.ERROR_TYPE: None if attempt.ending in NO_ENGINE_ERROR else attempt.ending.value,
            names.POOL: attempt.pool,
            names.ENDPOINT: attempt.endpoint,
            names.ATTEMPT_NUMBER: attempt.number,
            names.ATTEMPT_KIND: attempt.kind.value,
            names.ATTEMPT_ENDING: attempt.ending.value,
        }
    )


def _answer_attributes(record: Record, first_chunk: float) -> Attributes:
    """`first_chunk`: seconds from the attempt's start to its first token."""
    return _known(
        {
            names.REQUEST_MODEL: record.model,
            names.RESPONSE_MODEL: record.model,
            names.TIME_TO_FIRST_CHUNK: first_chunk if record.stream else None,
            names.INPUT_TOKENS: record.prompt_tokens_reported,
            names.CACHE_READ_TOKENS: record.cached_tokens_reported,
            names.OUTPUT_TOKENS: record.output_tokens,
            names.ENGINE_QUEUE: record.engine_queue,
            names.ENGINE_TTFT: record.engine_ttft,
        }
    )


def error_type(record: Record) -> str | None:
    """The value of `error.type`: the status for a caller's own fault, else the outcome; None for success."""
    if record.end is RequestOutcome.COMPLETED:
        return None
    return str(record.status) if record.end is RequestOutcome.REFUSED else record.end.value
