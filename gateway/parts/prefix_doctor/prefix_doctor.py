"""Follows the prompts of callers, at the end of each request: composition, session and step, breaks and their price.

Text is read only where a break is seen: a window of 400 bytes, of which digests are kept (`policies.prefix_doctor`). At
most MARKS windows, of prompts of MARKED bytes together, are read in a second; a break without one has the class of the
one before. Prompts of more than PARTS messages are not followed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic, time
from typing import Any

from gateway.api.inference_request import InferenceRequest
from gateway.observe.columns import Note
from gateway.observe.record import Record, RequestOutcome
from policies.prefix_doctor.break_class import BEFORE, WINDOW, BreakMark, mark
from policies.prefix_doctor.lineage import NOTICEABLE, Lineages, PrefixBreak, ReadBreakMark, SentNow
from policies.prefix_doctor.prefix_ledger import NO_COST, NO_LINEAGE, BreakCost, LedgerEntry, PrefixLedger
from policies.prompt_outline import Composition, PromptOutline
from policies.types import Candidate, PoolEstimate, Price

log = logging.getLogger("firsttoken")

MARKS = 50  # windows read in a second: 0.1 ms each, of a prompt of 20 KB
MARKED = 2_000_000  # bytes of prompts whose windows are read in a second: up to 40 ms of tools
PARTS = 4096  # messages: 3 us each, on the event loop
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
        if len(request.prompt.digests) > PARTS:
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
