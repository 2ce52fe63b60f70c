"""Follows prompts from turn to turn: columns and metrics of sessions and breaks, and the sums for `GET /advise`."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.core.part import Part
from gateway.observe.columns import Column
from gateway.observe.metrics.series import counter, histogram
from gateway.observe.record import Record
from gateway.parts.prefix_doctor.prefix_doctor import BREAK_COST, COMPOSITION, LINEAGE, PrefixDoctor
from gateway.wiring import Core
from policies.prefix_doctor.lineage import Lineage
from policies.prompt_outline import PARTS

_UNSIGNED = (1 << 64) - 1


def _name(hashed: int) -> str | None:
    return f"{hashed & _UNSIGNED:016x}" if hashed else None


def _tenths(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)


def _break(record: Record) -> dict[str, object] | None:
    broken = LINEAGE.of(record).broken
    return None if broken is None else broken.as_json() | BREAK_COST.of(record).as_json()


class PrefixDoctorPart(Part):
    columns = (
        Column("composition", "tokens", COMPOSITION.of, "of the prompt, by part", members=PARTS),
        Column("session", "", lambda e: _name(LINEAGE.of(e).conversation), "its conversation, as a keyed hash"),
        Column("template", "", lambda e: _name(LINEAGE.of(e).template), "its template, as a keyed hash"),
        Column("step", "", lambda e: LINEAGE.of(e).step, "of the conversation, from 1"),
        Column("since_last_ms", "", lambda e: _tenths(LINEAGE.of(e).since), "ms since the step before"),
        Column("kept_tokens", "tokens", lambda e: LINEAGE.of(e).kept, "at the beginning, as the prompt before"),
        Column("previous_tokens", "tokens", lambda e: LINEAGE.of(e).previous, "of the prompt before"),
        Column("continues", "", lambda e: LINEAGE.of(e).link.value, "what the prompt continues"),
        Column("prefix_break", "", _break, "where the prompt broke with the one before, and what that cost"),
    )

    def __init__(self, core: Core) -> None:
        runtime = core.runtime
        doctor = PrefixDoctor(lambda pool: runtime.current.price_of(pool), core.fleet.view.prefill_seconds)
        counts = PromptCounts()
        self.annotators = (doctor.on_ended,)
        self.collectors, self.readers = (counts,), (counts.count,)
        core.admin.advice_sums = doctor.advice


class PromptCounts(Collector):
    """Sessions, breaks and parts of prompts, as noted in Records."""

    def __init__(self) -> None:
        self._parts = counter("firsttoken_prompt_part_tokens_total")
        self._breaks = counter("firsttoken_prefix_breaks_total")
        self._steps = histogram("firsttoken_session_steps")
        self._pause = histogram("firsttoken_session_pause_seconds")
        self._kept = histogram("firsttoken_session_kept_ratio")
        self._all: tuple[Collector, ...] = (self._parts, self._breaks, self._steps, self._pause, self._kept)

    def count(self, record: Record) -> None:
        notes, route = record.notes, record.route.name
        for note, value in zip(notes[::2], notes[1::2], strict=True):
            if note is COMPOSITION:
                for part, found in zip(PARTS, value, strict=True):
                    if found:
                        self._parts.of[route, part].value += found
            elif note is LINEAGE:
                self._count_lineage(value, route)

    def _count_lineage(self, lineage: Lineage, route: str) -> None:
        if lineage.conversation:
            self._count_session(lineage, route)
        if (broken := lineage.broken) is not None:
            self._breaks.of[route, broken.cls._value_].value += 1

    def collect(self) -> Iterable[Metric]:
        for series in self._all:
            yield from series.collect()

    def _count_session(self, lineage: Lineage, route: str) -> None:
        self._steps.of[(route,)].observe(lineage.step)
        if lineage.since is not None:
            self._pause.of[(route,)].observe(lineage.since)
            if lineage.kept_share is not None:
                self._kept.of[(route,)].observe(lineage.kept_share)
