"""Which of the recent Records are asked for: the query of GET /requests.

Rules:
- What cannot be meant is refused, with the values that can: an empty answer to a misspelt name would be believed.
- Of all that match, the last are shown; or with `slowest` those streams that waited longest for their first token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.api.api_error import ApiError, bad_request
from gateway.config.config_errors import did_you_mean
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.recorder import RECENT

USUAL = 200  # Records, where no number is asked for
UNKNOWN = "-"  # the route of what was refused before it had one
FILTERS = ("last", "slowest", "route", "pool", "outcome", "slow", "id")
_ID = re.compile(r"[0-9A-Za-z\-_.:]{1,128}")


@dataclass(frozen=True, slots=True)
class RequestQuery:
    """Empty or None: whatever it is."""

    last: int = USUAL
    slowest: int | None = None
    route: str = ""
    pool: str = ""
    outcome: str = ""
    slow: bool = False  # those that missed their TTFT budget
    id: str = ""

    def of(self, recent: Iterable[Record]) -> list[Record]:
        """The newest last; with `slowest`, the slowest first."""
        found = [record for record in recent if self._fits(record)]
        found = found[max(0, len(found) - self.last) :]
        if self.slowest is None:
            return found
        return sorted((r for r in found if r.stream), key=_waited, reverse=True)[: self.slowest]

    def merged(self, told: Mapping[int, Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """What several workers say, as one. The newest is the one that ended last."""
        found = [{**record, "worker": worker} for worker, records in told.items() for record in records]
        if self.slowest is not None:
            return sorted(found, key=_waited_ms, reverse=True)[: self.slowest]
        found.sort(key=lambda record: record["wall"] + record["total_ms"] / 1e3)
        return found[max(0, len(found) - self.last) :]

    def _fits(self, record: Record) -> bool:
        return (
            (not self.route or record.route == self.route)
            and (not self.pool or record.pool == self.pool)
            and (not self.outcome or record.end == self.outcome)
            and (not self.id or record.request_id == self.id)
            and (not self.slow or record.ttft_met is False)
        )


def wanted(query: Mapping[str, str], routes: Collection[str], pools: Collection[str]) -> RequestQuery:
    """Raises Refusal. `routes`, `pools`: the names that there are."""
    for name in query:
        if name not in FILTERS:
            raise bad_request(
                f"There is no filter '{name[:100]}'{_end(did_you_mean(name[:100], FILTERS))}", param=name[:100]
            )
    slowest = _number(query, "slowest", -1)
    return RequestQuery(
        last=_number(query, "last", USUAL if slowest < 0 else RECENT),
        slowest=slowest if slowest >= 0 else None,
        route=_one_of(query, "route", {*routes, UNKNOWN}),
        pool=_one_of(query, "pool", {*pools, UNKNOWN}),
        outcome=_one_of(query, "outcome", list(RequestOutcome)),
        slow=_one_of(query, "slow", ("1",)) == "1",
        id=_id(query),
    )


def _number(query: Mapping[str, str], name: str, otherwise: int) -> int:
    given = query.get(name)
    if given is None:
        return otherwise
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise bad_request(f"{name} must be a whole number.", param=name)
    return int(given)


def _one_of(query: Mapping[str, str], name: str, known: Collection[str]) -> str:
    given = query.get(name)
    if given is None:
        return ""
    if given not in known:
        raise bad_request(f"{name} '{given[:100]}' is none{_end(did_you_mean(given[:100], sorted(known)))}", param=name)
    return given


def _id(query: Mapping[str, str]) -> str:
    given = query.get("id")
    if given is None:
        return ""
    if not _ID.fullmatch(given):
        raise ApiError(400, "id must be a request id: up to 128 letters, digits and -_.:", param="id")
    return given


def _waited(record: Record) -> float:
    """For a first token, or for nothing."""
    return record.total if record.ttft is None else record.ttft


def _waited_ms(record: Mapping[str, Any]) -> float:
    waited: float = record["total_ms"] if record["ttft_ms"] is None else record["ttft_ms"]
    return waited


def _end(sentence: str) -> str:
    return sentence if sentence.endswith("?") else sentence + "."
