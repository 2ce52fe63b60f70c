"""A Record as the spans of one trace: the request, its stages and its attempts, as OTLP says them.

Rules:
- Made from the Record, after the answer; nothing is noted on the way but ids.
- A SERVER span for the request; an INTERNAL child for each stage that was closed, laid end to end as in the Record; a
  CLIENT child for each attempt, lost ones included. Usage is told by the attempt that answered: once in a trace.
- Values come from the configuration, from the engine's figures and from the caller's ids. No text of a prompt, an
  answer or an error.
- Messages are made by protobuf's own C code. What requests have in common is a template, copied; the numbers in it are
  set anew each time. Text would pile up in a template's arena, so what is of one request alone goes into the copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from gateway.observe.otel import semconv as names
from gateway.observe.otel.trace_context import ATTEMPT, STAGE, Trace
from gateway.observe.record import STAGE_NAMES, UPSTREAM, AttemptRecord, Record, RequestOutcome
from policies.types import AttemptOutcome

KEPT = 2048  # templates: 10 MB
INTERNAL, SERVER, CLIENT = Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT
ERROR = Status(code=Status.STATUS_CODE_ERROR)
LOCAL, REMOTE = 0x100, 0x300  # SpanFlags: whether the parent is in another process is known, and whether it is
BLAMELESS = (RequestOutcome.COMPLETED, RequestOutcome.REFUSED, RequestOutcome.CLIENT_GONE)  # no error of a server's
WANTED = (AttemptOutcome.COMPLETED, AttemptOutcome.CANCELLED)  # no error of an engine's


class Served(NamedTuple):
    """What is at an endpoint."""

    provider: str
    model: str  # "": whatever the caller names
    address: str
    port: int


Told = Sequence[tuple[str, str | int | bool | None]]


class Layout(NamedTuple):
    """The numbers of one kind of span: names of attributes. Real ones come before whole ones."""

    real: tuple[str, ...]
    whole: tuple[str, ...]


OF_REQUEST = Layout(
    (
        names.TTFT,
        names.TTFT_BUDGET,
        names.TTFT_P50,
        names.TTFT_P90,
        names.TPOT,
        names.TPOT_BUDGET,
        names.TOTAL_BUDGET,
        names.CHANCE,
        names.LOOP_LAG,
        names.COST,
    ),
    (names.REQUEST_MAX_TOKENS, names.PROMPT_ESTIMATED, names.CACHED_PREDICTED),
)
_of_request = attrgetter(
    "ttft",
    "ttft_budget",
    "ttft_predicted_p50",
    "ttft_predicted_p90",
    "tpot",
    "tpot_budget",
    "total_budget",
    "chance",
    "loop_lag",
    "cost_usd",
    "max_tokens",
    "prompt_tokens_estimated",
    "cached_tokens_predicted",
)
OF_ANSWER = Layout(
    (names.TIME_TO_FIRST_CHUNK, names.ENGINE_QUEUE, names.ENGINE_TTFT),
    (names.INPUT_TOKENS, names.CACHE_READ_TOKENS, names.OUTPUT_TOKENS),
)
_of_answer = attrgetter(
    "engine_queue", "engine_ttft", "prompt_tokens_reported", "cached_tokens_reported", "output_tokens"
)
NO_ANSWER = (None,) * 6


class Template:
    """A span but for its ids and times. `present`: which of the layout's numbers there are."""

    __slots__ = ("reals", "span", "wholes")

    def __init__(
        self, name: str, kind: Span.SpanKind.ValueType, told: Told, layout: Layout, present: Sequence[bool], error: bool
    ) -> None:
        self.span = Span(name=name, kind=kind, status=ERROR if error else None)
        self.span.attributes.extend(attribute(key, value) for key, value in told if value not in ("", "-", None))
        there = dict(zip((*layout.real, *layout.whole), present, strict=True))
        self.reals = [self._number(name) for name in layout.real if there[name]]
        self.wholes = [self._number(name) for name in layout.whole if there[name]]

    def _number(self, name: str) -> Any:
        return self.span.attributes.add(key=name).value

    def filled(self, numbers: Sequence[float | None]) -> Span:
        """With these numbers, until the next."""
        there = [number for number in numbers if number is not None]
        for slot, number in zip(self.reals, there, strict=False):
            slot.double_value = number
        for slot, number in zip(self.wholes, there[len(self.reals) :], strict=True):
            slot.int_value = number
        return self.span


def attribute(name: str, value: str | int | bool | float) -> KeyValue:
    if isinstance(value, bool):
        return KeyValue(key=name, value=AnyValue(bool_value=value))
    if isinstance(value, int):
        return KeyValue(key=name, value=AnyValue(int_value=value))
    if isinstance(value, float):
        return KeyValue(key=name, value=AnyValue(double_value=value))
    return KeyValue(key=name, value=AnyValue(string_value=value))


class Spans:
    """Collects the spans of Records: `add` each, then `take` them all as bytes.

    What `take` returns are whole requests of the protocol; joined end to end they are one request again, as protobuf
    has it for every message.
    """

    def __init__(self, resource: Resource, scope: InstrumentationScope, served: Mapping[str, Served]) -> None:
        self._frame = ResourceSpans(resource=resource, scope_spans=[ScopeSpans(scope=scope)])
        self._served = served
        self._templates: dict[tuple[object, ...], Template] = {}
        self._begin()

    def _begin(self) -> None:
        self._request = ExportTraceServiceRequest(resource_spans=[self._frame])
        self._spans = self._request.resource_spans[0].scope_spans[0].spans
        self._add = self._spans.add

    def take(self) -> bytes:
        taken: bytes = self._request.SerializeToString()
        self._begin()
        return taken

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, record: Record, trace: Trace) -> None:
        id, own = bytes.fromhex(trace.id), trace.span.to_bytes(8, "big")
        arrived = int(record.wall * 1e9)
        operation = names.OPERATIONS.get(record.operation, record.operation)
        self._add(
            trace_id=id,
            span_id=own,
            parent_span_id=bytes.fromhex(trace.parent),
            trace_state=trace.state,
            flags=(REMOTE if trace.parent else LOCAL) | trace.flags | trace.sampled,
            start_time_unix_nano=arrived,
            end_time_unix_nano=arrived + int(record.total * 1e9),
            attributes=[KeyValue(key=names.REQUEST_ID, value=AnyValue(string_value=record.request_id))],
        ).MergeFrom(self._of_request(record, operation))
        first_in = self._stages(record, trace, id, own, arrived)
        for attempt in record.attempts:
            won = record.ttft is not None and attempt is record.attempts[-1]
            self._add(
                trace_id=id,
                span_id=(trace.span + ATTEMPT - 1 + attempt.number).to_bytes(8, "big"),
                parent_span_id=own,
                flags=LOCAL | trace.flags | trace.sampled,
                trace_state=trace.state,
                start_time_unix_nano=arrived + int(attempt.opened * 1e9),
                end_time_unix_nano=arrived + int(attempt.ended * 1e9),
            ).MergeFrom(self._of_attempt(record, attempt, operation, first_in if won else None))

    def _stages(self, record: Record, trace: Trace, id: bytes, own: bytes, arrived: int) -> float:
        """Seconds from arrival to the first token in."""
        flags, span, add = LOCAL | trace.flags | trace.sampled, trace.span + STAGE, self._add
        passed = first_in = 0.0
        began = arrived
        for place, spent in enumerate(record.spent):
            if spent is None:
                continue
            passed += spent
            ended = arrived + int(passed * 1e9)
            add(
                trace_id=id,
                span_id=(span + place).to_bytes(8, "big"),
                parent_span_id=own,
                flags=flags,
                name=STAGE_NAMES[place],
                kind=INTERNAL,
                start_time_unix_nano=began,
                end_time_unix_nano=ended,
            )
            began = ended
            if place == UPSTREAM:
                first_in = passed
        return first_in

    # -- what a span says -------------------------------------------------------------------

    def _of_request(self, record: Record, operation: str) -> Span:
        numbers = _of_request(record)
        present = tuple([number is not None for number in numbers])
        met = record.ttft_met, record.tpot_met, record.total_met
        key = (
            record.route,
            record.endpoint,
            record.tier,
            record.end,
            record.status,
            record.stream,
            record.tenant,
            record.scorer,
            record.model,
            operation,
            len(record.attempts),
            met,
            present,
        )
        template = self._templates.get(key)
        if template is None:
            name = operation if record.route == "-" else f"{operation} {record.route}"
            told = _said_of_request(record, self._served.get(record.endpoint), operation, met)
            template = Template(name, SERVER, told, OF_REQUEST, present, record.end not in BLAMELESS)
            self._keep(key, template)
        return template.filled(numbers)

    def _of_attempt(self, record: Record, attempt: AttemptRecord, operation: str, first_in: float | None) -> Span:
        """`first_in`: when its first token came, if it is the one that answered."""
        won = first_in is not None
        waited = first_in - attempt.opened if first_in is not None and record.stream else None
        numbers = (waited, *_of_answer(record)) if won else NO_ANSWER
        present = tuple([number is not None for number in numbers])
        model = record.model if won else ""
        key = (attempt.endpoint, attempt.kind, attempt.ending, attempt.number, record.stream, operation, model, present)
        template = self._templates.get(key)
        if template is None:
            served = self._served.get(attempt.endpoint)
            model = model if won or served is None else served.model
            told = _said_of_attempt(record, attempt, served, operation, model, won)
            name = f"{operation} {model}" if model else operation
            template = Template(name, CLIENT, told, OF_ANSWER, present, attempt.ending not in WANTED)
            self._keep(key, template)
        return template.filled(numbers)

    def _keep(self, key: tuple[object, ...], template: Template) -> None:
        """When there are too many it begins anew: a caller can name models."""
        if len(self._templates) >= KEPT:
            self._templates.clear()
        self._templates[key] = template


def _said_of_request(record: Record, served: Served | None, operation: str, verdicts: Sequence[bool | None]) -> Told:
    return (
        (names.OPERATION, operation),
        (names.PROVIDER, served.provider if served is not None else "firsttoken"),
        (names.REQUEST_MODEL, record.route),
        (names.REQUEST_STREAM, record.stream),
        (names.RESPONSE_MODEL, record.model),
        (names.HTTP_METHOD, "POST"),
        (names.HTTP_STATUS, record.status or None),
        (names.ROUTE, record.route),
        (names.WORKLOAD, record.workload),
        (names.TENANT, record.tenant),
        (names.OUTCOME, record.end.value),
        (names.ATTEMPTS, len(record.attempts)),
        (names.TIER, None if record.tier is None else record.tier + 1),
        (names.POOL, record.pool),
        (names.ENDPOINT, record.endpoint),
        (names.REGION, record.region),
        (names.SCORER, record.scorer),
        (names.ERROR_TYPE, error_type(record)),
        *zip((names.TTFT_MET, names.TPOT_MET, names.TOTAL_MET), verdicts, strict=True),
    )


def _said_of_attempt(
    record: Record, attempt: AttemptRecord, served: Served | None, operation: str, model: str, won: bool
) -> Told:
    kind, ending = attempt.kind.value, attempt.ending.value
    return (
        (names.OPERATION, operation),
        (names.PROVIDER, served.provider if served is not None else None),
        (names.REQUEST_MODEL, model),
        (names.REQUEST_STREAM, record.stream),
        (names.RESPONSE_MODEL, model if won else None),
        (names.SERVER_ADDRESS, served.address if served is not None else None),
        (names.SERVER_PORT, served.port if served is not None else None),
        (names.POOL, attempt.pool),
        (names.ENDPOINT, attempt.endpoint),
        (names.ATTEMPT_NUMBER, attempt.number),
        (names.ATTEMPT_KIND, kind),
        (names.ATTEMPT_ENDING, ending),
        (names.ERROR_TYPE, None if attempt.ending in WANTED else ending),
    )


def error_type(record: Record) -> str | None:
    """None where it was answered whole. Of the caller's own faults it is the status."""
    if record.end is RequestOutcome.COMPLETED:
        return None
    return str(record.status) if record.end is RequestOutcome.REFUSED else record.end.value
