"""A Record as the spans of one trace: the request, its stages and its attempts, as OTLP says them.

Rules:
- Made from the Record, after the answer; nothing is noted on the way but ids.
- A SERVER span for the request; an INTERNAL child for each stage that was closed, laid end to end as in the Record; a
  CLIENT child for each attempt, lost ones included. Usage is told by the attempt that answered: once in a trace.
- Values come from the configuration, from the engine's figures and from the caller's ids. No text of a prompt, an
  answer or an error.
- Messages are made by protobuf's own C code, and attributes that repeat are made once: they would be most of the cost.
  Those that hold numbers are set anew each time; text would pile up in their arena, so it is made anew, or kept by
  its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from gateway.observe import semconv as names
from gateway.observe.record import STAGE_NAMES, UPSTREAM, AttemptRecord, End, Record
from gateway.observe.tracecontext import ATTEMPT, STAGE, Trace
from policies.facts import Ending

KEPT = 4096  # attributes, or lists of them, that are kept for the next request
INTERNAL, SERVER, CLIENT = Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT
ERROR = Status(code=Status.STATUS_CODE_ERROR)
LOCAL, REMOTE = 0x100, 0x300  # SpanFlags: whether the parent is in another process is known, and whether it is
BLAMELESS = (End.COMPLETED, End.REFUSED, End.CLIENT_GONE)  # no error of a server's
WANTED = (Ending.COMPLETED, Ending.CANCELLED)  # no error of an engine's


class Served(NamedTuple):
    """What is at an endpoint."""

    provider: str
    model: str  # "": whatever the caller names
    address: str
    port: int


class Numbered:
    """An attribute that is set anew for each span: `real` and `whole` return it."""

    __slots__ = ("attribute", "value")

    def __init__(self, name: str) -> None:
        self.attribute = KeyValue(key=name)
        self.value = self.attribute.value

    def real(self, number: float) -> KeyValue:
        self.value.double_value = number
        return self.attribute

    def whole(self, number: int) -> KeyValue:
        self.value.int_value = number
        return self.attribute


# What a Record says of a request, by attribute.
_REAL = tuple((Numbered(name), field) for name, field in (
    (names.TTFT, "ttft"), (names.TTFT_BUDGET, "ttft_budget"), (names.TTFT_P50, "ttft_predicted_p50"),
    (names.TTFT_P90, "ttft_predicted_p90"), (names.TPOT, "tpot"), (names.TPOT_BUDGET, "tpot_budget"),
    (names.TOTAL_BUDGET, "total_budget"), (names.CHANCE, "chance"), (names.LOOP_LAG, "loop_lag"),
    (names.COST, "cost_usd"),
))  # fmt: skip
_WHOLE = tuple((Numbered(name), field) for name, field in (
    (names.REQUEST_MAX_TOKENS, "max_tokens"), (names.PROMPT_ESTIMATED, "prompt_tokens_estimated"),
    (names.CACHED_PREDICTED, "cached_tokens_predicted"),
))  # fmt: skip
_USED = tuple((Numbered(name), field) for name, field in (
    (names.INPUT_TOKENS, "prompt_tokens_reported"), (names.CACHE_READ_TOKENS, "cached_tokens_reported"),
    (names.OUTPUT_TOKENS, "output_tokens"),
))  # fmt: skip
_ENGINE = tuple((Numbered(name), field) for name, field in (
    (names.ENGINE_QUEUE, "engine_queue"), (names.ENGINE_TTFT, "engine_ttft"),
))  # fmt: skip
_ATTEMPTS, _NUMBER, _FIRST_CHUNK = map(Numbered, (names.ATTEMPTS, names.ATTEMPT_NUMBER, names.TIME_TO_FIRST_CHUNK))


class Kept(dict[tuple[str, str | int | bool], KeyValue]):
    """Attributes by name and value. When there are too many it begins anew: a caller can name models."""

    def __missing__(self, key: tuple[str, str | int | bool]) -> KeyValue:
        if len(self) >= KEPT:
            self.clear()
        made = self[key] = attribute(*key)
        return made


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
        self._kept = Kept()
        self._of_requests: dict[tuple[object, ...], list[KeyValue]] = {}
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
            trace_id=id, span_id=own, parent_span_id=bytes.fromhex(trace.parent), trace_state=trace.state,
            flags=(REMOTE if trace.parent else LOCAL) | trace.flags | trace.sampled,
            name=operation if record.route == "-" else f"{operation} {record.route}", kind=SERVER,
            start_time_unix_nano=arrived, end_time_unix_nano=arrived + int(record.total * 1e9),
            attributes=self._of_request(record, operation),
            status=None if record.end in BLAMELESS else ERROR,
        )  # fmt: skip
        first_in = self._stages(record, trace, id, own, arrived)
        for attempt in record.attempts:
            won = record.ttft is not None and attempt is record.attempts[-1]
            self._attempt(record, attempt, trace, (id, own, arrived, operation), first_in if won else None)

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
                trace_id=id, span_id=(span + place).to_bytes(8, "big"), parent_span_id=own, flags=flags,
                name=STAGE_NAMES[place], kind=INTERNAL, start_time_unix_nano=began, end_time_unix_nano=ended,
            )  # fmt: skip
            began = ended
            if place == UPSTREAM:
                first_in = passed
        return first_in

    def _attempt(
        self, record: Record, attempt: AttemptRecord, trace: Trace, of: tuple[bytes, bytes, int, str],
        first_in: float | None,
    ) -> None:  # fmt: skip
        """`first_in`: when its first token came, if it is the one that answered."""
        id, own, arrived, operation = of
        served = self._served.get(attempt.endpoint)
        model = record.model if first_in is not None else served.model if served is not None else ""
        found = [*self._of_attempt(record, attempt, served, operation), _NUMBER.whole(attempt.number)]
        if model:
            found.append(self._kept[names.REQUEST_MODEL, model])
        if first_in is not None:
            found.append(self._kept[names.RESPONSE_MODEL, model])
            found += [slot.whole(value) for slot, field in _USED if (value := getattr(record, field)) is not None]
            found += [slot.real(value) for slot, field in _ENGINE if (value := getattr(record, field)) is not None]
            if record.stream:
                found.append(_FIRST_CHUNK.real(first_in - attempt.opened))
        self._add(
            trace_id=id, span_id=(trace.span + ATTEMPT - 1 + attempt.number).to_bytes(8, "big"), parent_span_id=own,
            flags=LOCAL | trace.flags | trace.sampled, trace_state=trace.state,
            name=f"{operation} {model}" if model else operation, kind=CLIENT,
            start_time_unix_nano=arrived + int(attempt.opened * 1e9),
            end_time_unix_nano=arrived + int(attempt.ended * 1e9),
            attributes=found, status=None if attempt.ending in WANTED else ERROR,
        )  # fmt: skip

    # -- attributes -----------------------------------------------------------------------

    def _of_request(self, record: Record, operation: str) -> list[KeyValue]:
        verdicts = record.ttft_met, record.tpot_met, record.total_met
        found = [
            *self._same(record, operation, verdicts),
            KeyValue(key=names.REQUEST_ID, value=AnyValue(string_value=record.request_id)),
            _ATTEMPTS.whole(len(record.attempts)),
        ]
        found += [slot.real(value) for slot, field in _REAL if (value := getattr(record, field)) is not None]
        found += [slot.whole(value) for slot, field in _WHOLE if (value := getattr(record, field)) is not None]
        if record.model != "-":
            found.append(self._kept[names.RESPONSE_MODEL, record.model])
        return found

    def _same(self, record: Record, operation: str, verdicts: tuple[bool | None, ...]) -> list[KeyValue]:
        """What many requests have in common."""
        key = (
            record.route, record.endpoint, record.tier, record.end, record.status, record.stream, record.tenant,
            record.scorer, operation, verdicts,
        )  # fmt: skip
        found = self._of_requests.get(key)
        if found is None:
            if len(self._of_requests) >= KEPT:
                self._of_requests.clear()
            found = self._of_requests[key] = self._in_common(record, operation, verdicts)
        return found

    def _in_common(self, record: Record, operation: str, verdicts: tuple[bool | None, ...]) -> list[KeyValue]:
        served = self._served.get(record.endpoint)
        met = zip((names.TTFT_MET, names.TPOT_MET, names.TOTAL_MET), verdicts, strict=True)
        told: list[tuple[str, str | int | bool | None]] = [
            (names.OPERATION, operation), (names.PROVIDER, served.provider if served is not None else "firsttoken"),
            (names.REQUEST_MODEL, record.route), (names.REQUEST_STREAM, record.stream),
            (names.HTTP_METHOD, "POST"), (names.HTTP_STATUS, record.status or None), (names.ROUTE, record.route),
            (names.WORKLOAD, record.workload), (names.TENANT, record.tenant), (names.OUTCOME, record.end.value),
            (names.TIER, None if record.tier is None else record.tier + 1), (names.POOL, record.pool),
            (names.ENDPOINT, record.endpoint), (names.REGION, record.region), (names.SCORER, record.scorer),
            (names.ERROR_TYPE, error_type(record)), *met,
        ]  # fmt: skip
        return [self._kept[name, value] for name, value in told if value not in ("", "-", None)]

    def _of_attempt(
        self, record: Record, attempt: AttemptRecord, served: Served | None, operation: str
    ) -> list[KeyValue]:
        kind, ending = attempt.kind, attempt.ending
        key = (attempt.endpoint, kind, ending, record.stream, operation)
        found = self._of_requests.get(key)
        if found is None:
            told: list[tuple[str, str | int | bool]] = [
                (names.OPERATION, operation), (names.REQUEST_STREAM, record.stream), (names.POOL, attempt.pool),
                (names.ENDPOINT, attempt.endpoint), (names.ATTEMPT_KIND, kind.value),
                (names.ATTEMPT_ENDING, ending.value),
            ]  # fmt: skip
            if served is not None:
                told += [(names.PROVIDER, served.provider), (names.SERVER_ADDRESS, served.address)]
                told.append((names.SERVER_PORT, served.port))
            if ending not in WANTED:
                told.append((names.ERROR_TYPE, ending.value))
            found = self._of_requests[key] = [self._kept[name, value] for name, value in told]
        return found


def error_type(record: Record) -> str | None:
    """None where it was answered whole. Of the caller's own faults it is the status."""
    if record.end is End.COMPLETED:
        return None
    return str(record.status) if record.end is End.REFUSED else record.end.value
