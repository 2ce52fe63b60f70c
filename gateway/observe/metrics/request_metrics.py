"""Counts Records by the metric table.

Label values come from the configuration, never from callers. Each route's TTFT budget is a bucket, so attainment can be
read exactly from the histogram.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.observe.columns import Note
from gateway.observe.metrics.loop_lag import LoopLag
from gateway.observe.metrics.series import Observed, counter, histogram, observe_all
from gateway.observe.part_notes import (
    CACHE,
    DIAGNOSIS,
    LEFT_OUT,
    RESCUE,
    SHORTCOMING,
    SIGHT,
    TAGS,
    AnswerSight,
)
from gateway.observe.record import STAGE_NAMES, AttemptRecord, Record, RequestOutcome, goodput_met
from policies.diagnosis.diagnosis_report import Diagnosis
from policies.external_share.external_share import EXTERNAL_LIMIT
from policies.fleet.observations import PAUSE
from policies.routes.route import Route
from policies.types import AttemptKind, AttemptOutcome

STAGES_AND_PARTS = (*STAGE_NAMES, "engine_queue", "engine_prefill")  # the last two are parts of `upstream`
_JUDGED = {True: "met", False: "missed", None: "unjudged"}
OBJECTIVES = ("ttft", "tpot", "gap", "total", "goodput")  # as in `Record.verdicts`, and all of them
PERCENTILES = ("p50", "p90")
SIZES = (1_000, 4_000, 16_000, 64_000)  # tokens of prompt from which the next class begins
PROMPTS = ("<1k", "1k-4k", "4k-16k", "16k-64k", ">64k")


def budgets(routes: Iterable[Route]) -> tuple[float, ...]:
    """TTFT budgets of the routes."""
    return tuple(sorted({route.ttft.budget for route in routes if route.ttft is not None}))


class ServedLabels(NamedTuple):
    """Labels from the configuration. `models`: model names by pool; `keys`: names of keys that become a label."""

    models: Mapping[str, str]
    keys: Container[str]


NO_LABELS = ServedLabels({}, ())


class RequestMetrics:
    """Sink of Records. `loop_lag` is exported too; the owner of the event loop starts it. `flush`: hands over the
    Records that wait."""

    def __init__(self, registry: CollectorRegistry, routes: Iterable[Route], labels: ServedLabels = NO_LABELS) -> None:
        within = budgets(routes)
        self.requests = counter("firsttoken_requests_total")
        self.ttft = histogram("firsttoken_ttft_seconds", within)
        self.served = counter("firsttoken_served_total")
        self.served_ttft = histogram("firsttoken_served_ttft_seconds", within)
        self.reasoning = histogram("firsttoken_first_reasoning_seconds", within)
        self.answer = histogram("firsttoken_first_answer_seconds", within)
        self.by_prompt = histogram("firsttoken_ttft_by_prompt_seconds", within)
        self.tpot = histogram("firsttoken_tpot_seconds")
        self.longest_gap = histogram("firsttoken_longest_gap_seconds")
        self.long_gaps = counter("firsttoken_long_gaps_total")
        self.stage = histogram("firsttoken_stage_seconds")
        self.slo = counter("firsttoken_slo_total")
        self.slow = counter("firsttoken_slow_total")
        self.predicted = histogram("firsttoken_ttft_predicted_seconds")
        self.error = histogram("firsttoken_ttft_prediction_error_seconds")
        self.covered = counter("firsttoken_ttft_prediction_covered_total")
        self.whole = counter("firsttoken_total_prediction_covered_total")
        self.hit = histogram("firsttoken_prefix_hit_ratio")
        self.size_error = histogram("firsttoken_prompt_tokens_error_ratio")
        self.attempts = counter("firsttoken_attempts_total")
        self.hedges = counter("firsttoken_hedges_total")
        self.external_refused = counter("firsttoken_external_refused_total")
        self.escalations = counter("firsttoken_escalations_total")
        self.left_out = counter("firsttoken_left_out_total")
        self.repaired = counter("firsttoken_repaired_total")
        self.rescues = counter("firsttoken_rescues_total")
        self.sights = counter("firsttoken_picked_answers_total")
        self.cached = counter("firsttoken_answer_cache_total")
        self.junk = counter("firsttoken_junk_events_total")
        self.tokens = counter("firsttoken_tokens_total")
        self.cached_tokens = counter("firsttoken_cached_tokens_total")
        self.cost = counter("firsttoken_cost_usd_total")
        self.tagged = counter("firsttoken_tagged_requests_total")
        self.tagged_tokens = counter("firsttoken_tagged_tokens_total")
        self.tagged_cost = counter("firsttoken_tagged_cost_usd_total")
        self.loop_lag = LoopLag()
        self._all: list[Collector] = list(vars(self).values())
        self._labels = labels
        self._by_note: Mapping[Note[Any], Callable[[Record, Any], None]] = {
            DIAGNOSIS: self._count_cause,
            SHORTCOMING: self._count_escalation,
            CACHE: self._count_cached,
            RESCUE: self._count_rescue,
            SIGHT: self._count_sight,
            LEFT_OUT: self._count_left_out,
            TAGS: self._count_tags,
        }
        self.flush: Callable[[], None] = lambda: None
        registry.register(self)

    def reload(self, routes: Iterable[Route], labels: ServedLabels = NO_LABELS) -> None:
        """Add the budgets of the routes as buckets, beside the existing ones, and take the labels for later Records."""
        self.flush()
        self._labels = labels
        within = budgets(routes)
        self.ttft.refine(within)
        self.served_ttft.refine(within)
        self.by_prompt.refine(within)
        self.reasoning.refine(within)
        self.answer.refine(within)

    def collect(self) -> Iterable[Metric]:
        """Includes every request that has ended."""
        self.flush()
        for series in self._all:
            yield from series.collect()

    def __call__(self, record: Record) -> None:
        route, pool, verdicts = record.route.name, record.endpoint.pool, record.verdicts
        observed: Observed = []
        self.requests.of[route, pool, record.end._value_].value += 1  # an enumeration's own hash is Python
        times = (*record.spent, record.answer.engine_queue, record.answer.engine_prefill)
        stages = self.stage.of
        for stage, spent in zip(STAGES_AND_PARTS, times, strict=True):
            if spent is not None:
                observed.append((stages[route, stage], spent))
        good = goodput_met(record.end, verdicts)
        for objective, met in zip(OBJECTIVES, (*verdicts, good), strict=True):
            if met is not None:
                self.slo.of[route, objective, "true" if met else "false"].value += 1
        model, key = self._labels.models.get(pool, ""), record.tenant if record.tenant in self._labels.keys else ""
        self.served.of[route, model, record.endpoint.locality, key, _JUDGED[good]].value += 1
        if record.ttft is not None and record.asked.stream:
            observed.append((self.served_ttft.of[model, record.endpoint.locality, key], record.ttft))
        for attempt in record.attempts:
            self.attempts.of[attempt.pool, attempt.locality, attempt.kind.value, attempt.ending._value_].value += 1
            self.cost.of[route, attempt.pool].value += attempt.cost_usd
            if attempt.junk:
                self.junk.of[(attempt.pool,)].value += attempt.junk
            if attempt.kind is AttemptKind.HEDGE:
                self.hedges.of[route, _result(record, attempt)].value += 1
        if EXTERNAL_LIMIT.value in record.placed.rejected:
            self.external_refused.of[(route,)].value += 1
        if notes := record.notes:
            for note, value in zip(notes[::2], notes[1::2], strict=True):
                if note in self._by_note:
                    self._by_note[note](record, value)
        for rule in record.asked.prompt_changes:
            self.repaired.of[route, rule].value += 1
        if record.placed.total_p90 is not None and record.end is RequestOutcome.COMPLETED:
            predicted = record.placed.total_p50, record.placed.total_p90
            for percentile, total in zip(PERCENTILES, predicted, strict=True):
                self.whole.of[route, percentile, "true" if record.total <= (total or 0.0) else "false"].value += 1
        if (ttft := record.ttft) is not None:
            tally = self.ttft.of[route, pool]
            observed.append((tally, ttft))
            if record.trace_id and ((trace := record.trace) is None or trace.sampled or verdicts[0] is False):
                tally.examples[bisect_left(tally.bounds, ttft)] = record.trace_id, ttft, record.wall + ttft
            if record.answer.first_reasoning is not None:
                observed.append((self.reasoning.of[route, pool], record.answer.first_reasoning))
            if record.answer.first_answer is not None:
                observed.append((self.answer.of[route, pool], record.answer.first_answer))
            observed += self._count_answer(record, ttft, route, pool)
        observe_all(observed)

    # -- notes of parts ------------------------------------------------------------------------------

    def _count_cause(self, record: Record, found: Diagnosis) -> None:
        self.slow.of[record.route.name, found.verdict.cause.value].value += 1

    def _count_escalation(self, record: Record, shortcoming: str) -> None:
        self.escalations.of[record.route.name, shortcoming].value += 1

    def _count_cached(self, record: Record, found: str) -> None:
        self.cached.of[record.route.name, found].value += 1

    def _count_rescue(self, record: Record, state: str) -> None:
        self.rescues.of[record.route.name, state].value += 1

    def _count_sight(self, record: Record, sight: AnswerSight) -> None:
        self.sights.of[record.route.name, sight.value].value += 1

    def _count_left_out(self, record: Record, members: Mapping[str, str]) -> None:
        for member in set(members.values()):
            self.left_out.of[record.route.name, record.endpoint.pool, member].value += 1

    def _count_tags(self, record: Record, tags: Iterable[str]) -> None:
        for tag in tags:
            self.tagged.of[tag, record.end._value_].value += 1
            self.tagged_tokens.of[(tag,)].value += sum(attempt.tokens for attempt in record.attempts)
            self.tagged_cost.of[(tag,)].value += record.cost_usd

    def _count_answer(self, record: Record, ttft: float, route: str, pool: str) -> Observed:
        """Count the tokens of an answer; returns what the histograms are to observe."""
        observed: Observed = []
        if record.answer.tpot is not None:
            observed.append((self.tpot.of[route, pool], record.answer.tpot))
            observed.append((self.longest_gap.of[route, pool], record.answer.gaps.longest or 0.0))
            if record.answer.gaps.over_1s:
                self.long_gaps.of[route, pool].value += record.answer.gaps.over_1s
        estimated, reported = record.placed.prompt_tokens or 0, record.answer.prompt_tokens
        prompt = estimated if reported is None else reported
        self.tokens.of[route, pool, "input"].value += prompt
        self.tokens.of[route, pool, "output"].value += record.answer.output_tokens or 0
        predicted_hit, reported_hit = record.placed.cached_tokens, record.answer.cached_tokens
        cached = predicted_hit if reported_hit is None else reported_hit
        if cached is not None:
            self.cached_tokens.of[route, pool].value += cached
        if estimated and reported:
            observed.append((self.size_error.of[(pool,)], abs(estimated / reported - 1.0)))
        if estimated and predicted_hit is not None:
            observed.append((self.hit.of[pool, "predicted"], predicted_hit / estimated))
        if reported and reported_hit is not None:
            observed.append((self.hit.of[pool, "reported"], reported_hit / reported))
        if not record.asked.stream:  # the first byte comes with the last: nothing to compare with a prediction
            return observed
        observed.append((self.by_prompt.of[route, PROMPTS[bisect_right(SIZES, prompt)]], ttft))
        p50, p90 = record.placed.ttft_p50, record.placed.ttft_p90
        if record.loop_lag > PAUSE:  # the event loop was stalled, which no forecast counts
            return observed
        if p50 is not None:
            observed.append((self.predicted.of[(pool,)], p50))
            observed.append((self.error.of[(pool,)], ttft - p50))
            self.covered.of[pool, "p50", "true" if ttft <= p50 else "false"].value += 1
        if p90 is not None:
            self.covered.of[pool, "p90", "true" if ttft <= p90 else "false"].value += 1
        return observed


def _result(record: Record, hedge: AttemptRecord) -> str:
    """Result of a hedge; the last attempt of a Record has answered."""
    if record.ttft is not None and hedge is record.attempts[-1]:
        return "won"
    return "lost" if hedge.ending is AttemptOutcome.CANCELLED else "failed"
