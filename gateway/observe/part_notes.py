"""Notes of parts about a request, and the columns of each note. One part alone writes a `Note`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from gateway.observe.columns import MS, Column, Note
from gateway.observe.record import Record
from policies.diagnosis.diagnosis_report import Diagnosis
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


CAUSES: Own = (Column("cause", "", cause_of, "[cause](trouble.md) of a missed budget or failure; empty: none", csv=6),)
OTHERS: Own = (
    Column("escalated", "", SHORTCOMING.of, "shortcoming of an answer for which another pool was asked"),
    Column("rescue", "", RESCUE.of, "of a stream that broke: rescued, failed or refused"),
    Column("cache", "", CACHE.of, "hit or miss in the route's cache of answers"),
    Column("tags", "", TAGS.of, "listed tags that the caller named"),
    Column("sight", "", SIGHT.of, "what has shown the end of an answer that another proxy carries"),
    Column("left_out", "", lambda e: [*LEFT_OUT.of(e)], "members of the request that its translation has left out"),
    Column("on_screen_ms", MS, ON_SCREEN.of, "first token on screen, as the caller reported it"),
)
