"""Follows prompts from turn to turn, at the end of each request: composition, session and step, breaks and their price;
columns and metrics of them, and the sums for `GET /advise`.

Text is read only where a break is seen: a window of 400 bytes, of which digests are kept (`policies.prefix_doctor`). At
most MARKS windows, of prompts of MARKED bytes together, are read in a second; a break without one has the class of the
one before. Prompts of more than MOST_MESSAGES are not followed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from time import monotonic, time
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.api.inference_request import InferenceRequest
from gateway.core.part import Part
from gateway.observe.columns import Column, Note
from gateway.observe.metrics.series import counter, histogram
from gateway.observe.record import Record, RequestOutcome
from gateway.wiring import Core
from policies.prefix_doctor.break_class import BEFORE, WINDOW, BreakMark, mark
from policies.prefix_doctor.lineage import NOTICEABLE, Lineage, Lineages, PrefixBreak, ReadBreakMark, SentNow
from policies.prefix_doctor.prefix_ledger import NO_COST, NO_LINEAGE, BreakCost, LedgerEntry, PrefixLedger
from policies.prompt_outline import PARTS, Composition, PromptOutline
from policies.types import Candidate, PoolEstimate, Price

log = logging.getLogger("firsttoken")

MARKS = 50  # windows read in a second: 0.1 ms each, of a prompt of 20 KB
MARKED = 2_000_000  # bytes of prompts whose windows are read in a second: up to 40 ms of tools
MOST_MESSAGES = 4096  # of a prompt: 3 us each, on the event loop
PriceOf = Callable[[str], Price | None]  # by pool
PrefillSeconds = Callable[[str, int, int], float]  # at an endpoint, of tokens behind so many cached ones

COMPOSITION = Note[Composition | None](None)  # of the prompt, in tokens
LINEAGE = Note(NO_LINEAGE)  # earlier prompt of the same conversation, continued or broken by this prompt
BREAK_COST = Note(NO_COST)  # of the break in it


class PrefixDoctor:
    """`price_of`: the price of a pool; None: the pool is gone. `prefill_seconds`: engine time, as learned."""

    def __init__(
        self,
        price_of: PriceOf = lambda pool: None,
        prefill_seconds: PrefillSeconds = lambda endpoint, tokens, hit: 0.0,
    ) -> None:
        self._price_of, self._prefill_seconds = price_of, prefill_seconds
        self._lineages = Lineages()
        self._ledger = PrefixLedger(monotonic())
        self._second = self._marks = self._marked = 0  # present second, and windows and bytes read in it

    def on_ended(self, record: Record, request: InferenceRequest | None, estimate: PoolEstimate | None) -> None:
        """A bug here loses what is known of this prompt only."""
        if request is None or estimate is None or estimate.outline is None or record.end is RequestOutcome.REFUSED:
            return
        if len(request.prompt.digests) > MOST_MESSAGES:
            return
        try:
            self._follow(record, request, estimate.outline())
        except Exception:
            log.exception("a prompt could not be followed")

    def advice(self) -> dict[str, Any]:
        return self._ledger.as_json(monotonic(), time())

    def _follow(self, record: Record, request: InferenceRequest, outline: PromptOutline) -> None:
        total = record.answer.prompt_tokens or record.placed.prompt_tokens or 0
        composition, lineage, cost = outline.composition.scaled_to(total), NO_LINEAGE, NO_COST
        if record.ttft is not None and total >= NOTICEABLE:  # the prompt was computed, and may break a prefix
            sent = SentNow(
                request.caller or record.tenant,
                record.route.name,
                request.session if request.is_conversation else "",
                record.arrival,
                record.arrival + record.total,
            )
            lineage = self._lineages.follow(sent, outline, self._bounded(outline))
            LINEAGE.put(record, lineage)
            if (broken := lineage.broken) is not None:
                cost = self._cost(record, broken)
                BREAK_COST.put(record, cost)
        COMPOSITION.put(record, composition)
        entry = LedgerEntry(
            route=record.route.name,
            caller=request.caller or record.tenant,
            wall=record.wall,
            composition=composition,
            lineage=lineage,
            cost=cost,
            repaired=record.asked.prompt_changes,
        )
        self._ledger.note(entry, monotonic())

    def _cost(self, record: Record, broken: PrefixBreak) -> BreakCost:
        """Of computing the lost tokens again, at the learned speed of the endpoint: as far off as its first tokens are,
        on average. Less what was cached all the same, of an older prompt."""
        candidate, cached = _candidate(record), record.answer.cached_tokens
        if candidate is None:
            return NO_COST
        forecast, hit = candidate.forecast, max(candidate.hit if cached is None else cached, broken.at)
        lost = max(broken.at + broken.lost - hit, 0)
        seconds = self._prefill_seconds(record.endpoint.id, lost, hit) * forecast.p50 / (forecast.point_estimate or 1.0)
        price = self._price_of(record.endpoint.pool)
        usd = 0.0 if price is None else price.of(lost, 0) - price.of(lost, 0, cached=lost)
        return BreakCost(seconds, _missed_by(record, seconds), max(usd, 0.0))

    def _bounded(self, outline: PromptOutline) -> ReadBreakMark:
        def read(part: int, start: int, block: int) -> BreakMark | None:
            if not self._may_read(outline.parts[-1].size):
                return None
            found = outline.read_window(part, start, block, BEFORE, WINDOW)
            return None if found is None else mark(found.text, found.tools)

        return read

    def _may_read(self, size: int) -> bool:
        if (second := int(monotonic())) != self._second:
            self._second = second
            self._marks = self._marked = 0
        if self._marks >= MARKS or self._marked + size > MARKED:
            return False
        self._marks, self._marked = self._marks + 1, self._marked + size
        return True


def _missed_by(record: Record, seconds: float) -> bool:
    """The TTFT budget was missed, and would have been met without these."""
    budget, came = record.budgets.ttft, record.promised
    return record.ttft_met is False and budget is not None and came is not None and came - seconds <= budget


def _candidate(record: Record) -> Candidate | None:
    ranked: Sequence[Candidate] = () if record.decision is None else record.decision.ranked
    return next((each for each in ranked if each.endpoint.id == record.endpoint.id), None)


# --------------------------------------------------------------------------- the part

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
