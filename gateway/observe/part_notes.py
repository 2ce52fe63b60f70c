"""Notes of parts about a request, and the columns of each note. One part alone writes a `Note`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from gateway.observe.columns import MS, Column, Note
from gateway.observe.record import Record
from policies.diagnosis.diagnosis_report import Diagnosis
from policies.prefix_doctor.prefix_ledger import NO_COST, NO_LINEAGE
from policies.prefix_doctor.prompt_outline import PARTS, Composition
from policies.quota.key_limits import Reservation

Own = tuple[Column[Record], ...]
HIT, MISS = "hit", "miss"


class AnswerSight(StrEnum):
    """Source of the end of an answer that another proxy carries. Values are the `sight` label of
    firsttoken_picked_answers_total."""

    BODY = "body"  # first token, end and usage
    ACCESS_LOG = "access_log"  # the end, and the first token from the body
    HEADERS = "headers"


DIAGNOSIS = Note[Diagnosis | None](None)  # of a request that missed a budget, or failed
COMPOSITION = Note[Composition | None](None)  # of the prompt, in tokens
LINEAGE = Note(NO_LINEAGE)  # earlier prompt of the same conversation, continued or broken by this prompt
BREAK_COST = Note(NO_COST)  # of the break in it
RESERVATION = Note[Reservation | None](None)  # against the key's limits, until settled
SHORTCOMING = Note("")
RESCUE = Note("")
CACHE = Note("")
TAGS = Note[Sequence[str]](())
SIGHT = Note[AnswerSight | None](None)
LEFT_OUT = Note[Mapping[str, str]]({})  # members lost in translation; the metric's label of each
ON_SCREEN = Note[float | None](None)


def cause_of(record: Record) -> str:
    """Of a request that missed a budget, or failed; empty for any other."""
    found = DIAGNOSIS.of(record)
    return "" if found is None else found.verdict.cause.value


def _name(hashed: int) -> str | None:
    return f"{hashed & _UNSIGNED:016x}" if hashed else None


def _tenths(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)


def _break(record: Record) -> dict[str, object] | None:
    broken = LINEAGE.of(record).broken
    return None if broken is None else broken.as_json() | BREAK_COST.of(record).as_json()


_UNSIGNED = (1 << 64) - 1
CAUSES: Own = (Column("cause", "", cause_of, "[cause](trouble.md) of a missed budget or failure; empty: none", csv=6),)
PREFIX_DOCTOR: Own = (
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
OTHERS: Own = (
    Column("escalated", "", SHORTCOMING.of, "shortcoming of an answer for which another pool was asked"),
    Column("rescue", "", RESCUE.of, "of a stream that broke: rescued, failed or refused"),
    Column("cache", "", CACHE.of, "hit or miss in the route's cache of answers"),
    Column("tags", "", TAGS.of, "listed tags that the caller named"),
    Column("sight", "", SIGHT.of, "what has shown the end of an answer that another proxy carries"),
    Column("left_out", "", lambda e: [*LEFT_OUT.of(e)], "members of the request that its translation has left out"),
    Column("on_screen_ms", MS, ON_SCREEN.of, "first token on screen, as the caller reported it"),
)
