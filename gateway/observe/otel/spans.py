"""Converts a Record into the spans of one trace, as values of opentelemetry-sdk.

Rules:
- Spans are made after the answer, from the Record alone; during a request only ids exist.
- One SERVER span for the request; an INTERNAL child for each stage, end to end as in the Record; a CLIENT child for
  each attempt, lost attempts included. Only the attempt that answered carries the usage, so sums count tokens once.
- Attribute values come from the configuration, the engine's figures, the caller's ids and requested tier, and ids,
  reasons and tiers as the server writes them (MAX_TEXT characters): never text of a prompt, an answer or an error.
  `gen_ai.*` and `openai.*` are of OpenTelemetry's semantic-conventions-genai v0.1.0, in
  development; times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode
from opentelemetry.util.types import AttributeValue

from gateway.observe.part_notes import cause_of
from gateway.observe.record import STAGE_NAMES, UPSTREAM, AttemptRecord, Record, RequestOutcome
from gateway.observe.trace_context import ATTEMPT, SAMPLED, STAGE, Trace, trace_state
from policies.routes.when import EFFORT
from policies.types import AttemptOutcome

# Outcomes that are no error of a server, and of an engine.
NO_SERVER_ERROR = (RequestOutcome.COMPLETED, RequestOutcome.REFUSED, RequestOutcome.CLIENT_GONE)
NO_ENGINE_ERROR = (AttemptOutcome.COMPLETED, AttemptOutcome.CANCELLED)
NO_FINISH = (RequestOutcome.UPSTREAM_BROKE, RequestOutcome.CLIENT_GONE)  # of an answer that has begun
UNSET, ERROR = Status(), Status(StatusCode.ERROR)
MAX_TEXT = 128  # characters of an id or a reason that a server has written
# By operation, where the conventions' name differs: all three dialects of a chat are one operation.
OPERATIONS = {"completion": "text_completion", "messages": "chat", "responses": "chat"}
PROVIDERS = {  # by kind of backend, likewise
    "azure": "azure.ai.openai",
    "gemini": "gcp.gemini",
    "mistral": "mistral_ai",
    "xai": "x_ai",
}

Attributes = dict[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class ServedEndpoint:
    """Span attributes of an endpoint. `model` is empty where the caller names the model."""

    provider: str
    model: str
    address: str
    port: int


UNKNOWN = ServedEndpoint("", "", "", 0)


@dataclass(slots=True)
class SpanFactory:
    """Makes the spans of Records. `endpoints` may grow at a reload."""

    resource: Resource
    scope: InstrumentationScope
    endpoints: dict[str, ServedEndpoint]

    def spans(self, record: Record, trace: Trace) -> Iterator[ReadableSpan]:
        """Yields the request's span first. All spans are marked as sampled: the exporter drops others."""
        start = int(record.wall * 1e9)
        own = _context(trace, trace.span)
        attributes = request_attributes(record, self.endpoints.get(record.endpoint.id))
        attributes |= _asked_attributes(record) | _outcome_attributes(record)
        span = partial(ReadableSpan, resource=self.resource, instrumentation_scope=self.scope)
        yield span(
            _name(record, attributes),
            own,
            _context(trace, int(trace.parent, 16), is_remote=True) if trace.parent else None,
            kind=SpanKind.SERVER,
            attributes=attributes,
            status=UNSET if record.end in NO_SERVER_ERROR else ERROR,
            start_time=start,
            end_time=start + int(record.total * 1e9),
        )
        passed = first_token_in = 0.0
        for place, seconds in enumerate(record.spent):
            if seconds is not None:
                began, context = start + int(passed * 1e9), _context(trace, trace.span + STAGE + place)
                passed += seconds
                ended = start + int(passed * 1e9)
                yield span(STAGE_NAMES[place], context, own, attributes={}, start_time=began, end_time=ended)
            if place == UPSTREAM:
                first_token_in = passed
        for attempt in record.attempts:
            endpoint = self.endpoints.get(attempt.endpoint, UNKNOWN)
            attributes = attempt_attributes(record, attempt, endpoint)
            attributes |= _asked_attributes(record) | _placement_attributes(attempt, endpoint)
            if record.ttft is not None and attempt is record.attempts[-1]:
                attributes |= _answer_attributes(record, first_token_in - attempt.opened)
                attributes |= tier_attributes(record, endpoint)
                if endpoint.provider == "openai":
                    attributes |= known({"openai.request.service_tier": _text(record.asked.service_tier)})
            yield span(
                _name(record, attributes),
                _context(trace, trace.span + ATTEMPT - 1 + attempt.number),
                own,
                kind=SpanKind.CLIENT,
                attributes=attributes,
                status=UNSET if attempt.ending in NO_ENGINE_ERROR else ERROR,
                start_time=start + int(attempt.opened * 1e9),
                end_time=start + int(attempt.ended * 1e9),
            )


def _context(trace: Trace, span: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(int(trace.id, 16), span, is_remote, TraceFlags(trace.flags | SAMPLED), trace_state(trace.state))


def _name(record: Record, attributes: Attributes) -> str:
    """Operation and requested model."""
    operation, model = OPERATIONS.get(record.operation, record.operation), attributes.get("gen_ai.request.model")
    return f"{operation} {model}" if model else operation


def known(attributes: Mapping[str, AttributeValue | None]) -> Attributes:
    """Without unknown values."""
    return {name: value for name, value in attributes.items() if value is not None and value not in ("", "-")}


def request_attributes(record: Record, endpoint: ServedEndpoint | None) -> Attributes:
    """Attributes of a request, shared by spans and metrics. `error.type`: the status for a caller's own fault."""
    error = str(record.status) if record.end is RequestOutcome.REFUSED else record.end.value
    return known(
        {
            "gen_ai.operation.name": OPERATIONS.get(record.operation, record.operation),
            "gen_ai.provider.name": "firsttoken" if endpoint is None else endpoint.provider,
            "gen_ai.request.model": record.route.name,
            "error.type": None if record.end is RequestOutcome.COMPLETED else error,
        }
    )


def attempt_attributes(record: Record, attempt: AttemptRecord, endpoint: ServedEndpoint) -> Attributes:
    """Attributes of an attempt, shared by spans and metrics."""
    return known(
        {
            "gen_ai.operation.name": OPERATIONS.get(record.operation, record.operation),
            "gen_ai.provider.name": endpoint.provider,
            "gen_ai.request.model": endpoint.model,
            "error.type": None if attempt.ending in NO_ENGINE_ERROR else attempt.ending.value,
        }
    )


def tier_attributes(record: Record, endpoint: ServedEndpoint) -> Attributes:
    """OpenAI's own extension, shared by spans and metrics: the tier that has served the answer."""
    if endpoint.provider != "openai":
        return {}
    return known({"openai.response.service_tier": _text(record.answer.facts.service_tier)})


def _text(value: object) -> str | None:
    return value[:MAX_TEXT] if isinstance(value, str) else None


def _asked_attributes(record: Record) -> Attributes:
    """Attributes of the request as its caller sent it."""
    return known(
        {
            "gen_ai.conversation.id": record.asked.conversation,
            "gen_ai.request.stream": record.asked.stream,
            "gen_ai.request.max_tokens": record.asked.max_tokens,
            "gen_ai.request.choice.count": record.asked.choices if record.asked.choices != 1 else None,
            "gen_ai.request.reasoning.level": record.asked.members.get(EFFORT),
        }
    )


def _finish_reasons(record: Record) -> tuple[str, ...] | None:
    """One for each choice: `error` where the answer ended without one. None: the answer told of none."""
    reasons = record.answer.facts.finish_reasons
    if not reasons:
        return ("error",) * record.asked.choices if record.end in NO_FINISH else None
    return tuple(_text(reasons.get(number)) or "error" for number in range(record.asked.choices))


def _outcome_attributes(record: Record) -> Attributes:
    return known(
        {
            "gen_ai.response.model": record.answer.model,
            "http.request.method": "POST",
            "http.response.status_code": record.status or None,
            "firsttoken.request.id": record.request_id,
            "firsttoken.route": record.route.name,
            "firsttoken.workload": record.route.workload,
            "firsttoken.tenant": record.tenant,
            "firsttoken.outcome": record.end.value,
            "firsttoken.attempts": len(record.attempts),
            "firsttoken.tier": None if record.placed.tier is None else record.placed.tier + 1,
            "firsttoken.pool": record.endpoint.pool,
            "firsttoken.endpoint": record.endpoint.id,
            "firsttoken.region": record.endpoint.locality,
            "firsttoken.scorer": record.placed.scorer,
            "firsttoken.ttft": record.ttft,
            "firsttoken.first_reasoning": record.answer.first_reasoning,
            "firsttoken.first_answer": record.answer.first_answer,
            "firsttoken.ttft.budget": record.budgets.ttft,
            "firsttoken.ttft.predicted.p50": record.placed.ttft_p50,
            "firsttoken.ttft.predicted.p90": record.placed.ttft_p90,
            "firsttoken.ttft.met": record.ttft_met,
            "firsttoken.tpot": record.answer.tpot,
            "firsttoken.tpot.budget": record.budgets.tpot,
            "firsttoken.tpot.met": record.tpot_met,
            "firsttoken.gap.budget": record.budgets.gap,
            "firsttoken.gap.met": record.gap_met,
            "firsttoken.total.budget": record.budgets.total,
            "firsttoken.total.met": record.total_met,
            "firsttoken.chance": record.placed.chance,
            "firsttoken.prompt_tokens.estimated": record.placed.prompt_tokens,
            "firsttoken.cached_tokens.predicted": record.placed.cached_tokens,
            "firsttoken.cause": cause_of(record),
            "firsttoken.loop_lag": record.loop_lag,
            "firsttoken.cost_usd": record.cost_usd,
        }
    )


def _placement_attributes(attempt: AttemptRecord, endpoint: ServedEndpoint) -> Attributes:
    return known(
        {
            "server.address": endpoint.address,
            "server.port": endpoint.port or None,
            "http.response.status_code": attempt.status or None,
            "firsttoken.pool": attempt.pool,
            "firsttoken.endpoint": attempt.endpoint,
            "firsttoken.attempt.number": attempt.number,
            "firsttoken.attempt.kind": attempt.kind.value,
            "firsttoken.attempt.ending": attempt.ending.value,
            "firsttoken.attempt.cause": attempt.cause or None,
            "firsttoken.attempt.upstream_id": attempt.upstream_id,
        }
    )


def _answer_attributes(record: Record, first_chunk: float) -> Attributes:
    """`first_chunk`: seconds from the attempt's start to the first token."""
    return known(
        {
            "gen_ai.request.model": record.answer.model,
            "gen_ai.response.model": record.answer.model,
            "gen_ai.response.id": _text(record.answer.facts.id),
            "gen_ai.response.finish_reasons": _finish_reasons(record),
            "gen_ai.response.time_to_first_chunk": first_chunk if record.asked.stream else None,
            "gen_ai.usage.input_tokens": record.answer.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.answer.cached_tokens,
            "gen_ai.usage.cache_write.input_tokens": record.answer.cache_write_tokens,
            "gen_ai.usage.output_tokens": record.answer.output_tokens,
            "gen_ai.usage.reasoning.output_tokens": record.answer.reasoning_tokens,
            "firsttoken.engine.queue": record.answer.engine_queue,
            "firsttoken.engine.ttft": record.answer.engine_ttft,
        }
    )
