"""Records the GenAI metrics of OpenTelemetry (semantic-conventions-genai v0.1.0) by the SDK's instruments.

- `gen_ai.server.*` is the callers' view, once per request; `gen_ai.client.*` is the endpoints' work, once per attempt.
- Recorded from the Record, after the last byte. Nothing is measured per chunk, so there is no `time_per_output_chunk`:
  `gen_ai.server.time_per_output_token` has the mean of each answer.
- Attribute values come from the configuration, and of pools of kind `openai` the tier that the server names: a model
  that a caller named (passthrough) is left out, and so are addresses, of which pods would bring ever more (spans have
  both).
- Token counts are those of the reply that answered. Of one that reports none only output tokens are recorded, as the
  gateway has counted them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from opentelemetry.metrics import Counter, Histogram, Meter
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData

from gateway.observe.otel.spans import (
    UNKNOWN,
    Attributes,
    ServedEndpoint,
    attempt_attributes,
    known,
    request_attributes,
    tier_attributes,
)
from gateway.observe.record import UPSTREAM, AttemptRecord, Record

log = logging.getLogger("firsttoken")

# Bucket bounds of the conventions: s, s, s, tokens.
DURATION_BUCKETS = tuple(0.01 * 2**n for n in range(14))
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKEN_BUCKETS = tuple(float(4**n) for n in range(14))

USAGE = {  # counters of tokens, by fact of the answer
    "prompt_tokens": "input_tokens",
    "cached_tokens": "cache_read.input_tokens",
    "cache_write_tokens": "cache_write.input_tokens",
    "output_tokens": "output_tokens",
    "reasoning_tokens": "reasoning.output_tokens",
}
UNKNOWN_MODALITY = {"gen_ai.token.modality": "unknown"}  # servers rarely tell text from images and audio


class GenAiMetrics:
    """`count` each Record. `endpoints` may grow at a reload."""

    def __init__(self, meter: Meter, endpoints: Mapping[str, ServedEndpoint]) -> None:
        self._endpoints = endpoints
        self._meter = meter
        self._server_duration = self._seconds("gen_ai.server.request.duration", DURATION_BUCKETS)
        self._server_ttft = self._seconds("gen_ai.server.time_to_first_token", TTFT_BUCKETS)
        self._server_tpot = self._seconds("gen_ai.server.time_per_output_token", TPOT_BUCKETS)
        self._duration = self._seconds("gen_ai.client.inference.duration", DURATION_BUCKETS)
        self._first_chunk = self._seconds("gen_ai.client.inference.time_to_first_chunk", DURATION_BUCKETS)
        self._usage = {member: self._tokens(name) for member, name in USAGE.items()}
        self._input_sizes = self._sizes("gen_ai.client.inference.operation.input_tokens")
        self._output_sizes = self._sizes("gen_ai.client.inference.operation.output_tokens")
        self._embedding_duration = self._seconds("gen_ai.client.embeddings.duration", DURATION_BUCKETS)
        self._embedding_sizes = self._sizes("gen_ai.client.embeddings.operation.input_tokens")

    def _seconds(self, name: str, bounds: tuple[float, ...]) -> Histogram:
        return self._meter.create_histogram(name, "s", explicit_bucket_boundaries_advisory=bounds)

    def _sizes(self, name: str) -> Histogram:
        return self._meter.create_histogram(name, "{token}", explicit_bucket_boundaries_advisory=TOKEN_BUCKETS)

    def _tokens(self, name: str) -> Counter:
        return self._meter.create_counter(f"gen_ai.client.inference.usage.{name}", "{token}")

    def count(self, record: Record) -> None:
        endpoint = self._endpoints.get(record.endpoint.id)
        of_request = request_attributes(record, endpoint)
        of_request |= known({"gen_ai.response.model": None if endpoint is None else endpoint.model})
        self._server_duration.record(record.total, of_request)
        if record.ttft is not None and record.asked.stream:
            self._server_ttft.record(record.ttft, of_request)
        if record.answer.tpot is not None:
            self._server_tpot.record(record.answer.tpot, of_request)
        duration = self._embedding_duration if record.operation == "embeddings" else self._duration
        for attempt in record.attempts:
            attributes = self._of_attempt(record, attempt)
            duration.record(attempt.ended - attempt.opened, attributes)
            if record.ttft is not None and attempt is record.attempts[-1]:
                self._count_answer(record, attempt, attributes)

    def _count_answer(self, record: Record, attempt: AttemptRecord, attributes: Attributes) -> None:
        if record.operation == "embeddings":
            if record.answer.prompt_tokens is not None:
                self._embedding_sizes.record(record.answer.prompt_tokens, attributes)
            return
        if record.asked.stream:
            first_token_in = sum(seconds for seconds in record.spent[: UPSTREAM + 1] if seconds is not None)
            self._first_chunk.record(first_token_in - attempt.opened, attributes)
        typed = attributes | UNKNOWN_MODALITY
        for member, counter in self._usage.items():
            if tokens := getattr(record.answer, member):
                counter.add(tokens, typed)
        if record.answer.prompt_tokens is not None:
            self._input_sizes.record(record.answer.prompt_tokens, attributes)
        if record.answer.output_tokens is not None:
            self._output_sizes.record(record.answer.output_tokens, attributes)

    def _of_attempt(self, record: Record, attempt: AttemptRecord) -> Attributes:
        endpoint = self._endpoints.get(attempt.endpoint, UNKNOWN)
        found = attempt_attributes(record, attempt, endpoint) | known({"gen_ai.response.model": endpoint.model})
        if attempt is record.attempts[-1]:
            found |= tier_attributes(record, endpoint)
        return found


class ExportReason(Protocol):
    """Of the latest failure of an exporter."""

    @property
    def text(self) -> str: ...


class ExportWatch:
    """Counts the failed exports of a metric exporter, and logs when exports start to fail and when they work again.

    The exporter itself is kept, and its method replaced: the SDK's reader asks the exporter for more than it documents.
    """

    def __init__(self, exporter: MetricExporter, reason: ExportReason) -> None:
        self.failed = 0  # exports
        self._is_failing = False
        self._reason = reason
        self._export = exporter.export
        exporter.export = self.export  # type: ignore[method-assign]

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """After a failure the next export has the same sums and more."""
        try:
            result = self._export(metrics_data, timeout_millis, **kwargs)
        except Exception:
            log.exception("the metric exporter failed")
            result = MetricExportResult.FAILURE
        is_failing = result is not MetricExportResult.SUCCESS
        self.failed += is_failing
        if is_failing and not self._is_failing:
            log.warning("metric export fails: the collector gets no GenAI metrics (%s)", self._reason.text)
        elif self._is_failing and not is_failing:
            log.warning("metric export works again")
        self._is_failing = is_failing
        return result
