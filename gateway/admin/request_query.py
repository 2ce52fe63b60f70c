"""The query of GET /requests: filters on recent Records.

Rules:
- Unknown filters and values are refused with the known ones: an empty answer to a misspelt name would be misleading.
- Of all matches the latest `last` remain; `slowest` keeps those streams with the longest wait for a first token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

from gateway.api.api_error import bad_request
from gateway.config.config_errors import did_you_mean
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.recorder import RECENT

DEFAULT_LAST = 200  # Records
UNKNOWN = "-"  # route and pool of requests refused before routing
FILTERS = ("last", "slowest", "route", "pool", "outcome", "slow", "id")
REQUEST_ID = re.compile(r"[0-9A-Za-z\-_.:]{1,128}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestQuery:
    """Empty and None match everything."""

    last: int = DEFAULT_LAST
    slowest: int | None = None
    route: str = ""
    pool: str = ""
    outcome: str = ""
    slow: bool = False  # missed the TTFT budget
    id: str = ""

    def select(self, recent: Iterable[Record]) -> list[Record]:
        """The newest last; with `slowest`, the slowest first."""
        found = _last([record for record in recent if self._matches(record)], self.last)
        if self.slowest is None:
            return found
        return sorted((r for r in found if r.stream), key=_waited, reverse=True)[: self.slowest]

    def merge(self, by_worker: Mapping[int, Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Merge the answers of several workers, in the order in which requests ended."""
        found = [{**record, "worker": worker} for worker, records in by_worker.items() for record in records]
        if self.slowest is not None:
            return sorted(found, key=_waited_ms, reverse=True)[: self.slowest]
        found.sort(key=lambda record: record["wall"] + record["total_ms"] / 1e3)
        return _last(found, self.last)

    def url(self) -> str:
        """The same query for another admin port."""
        filters = {"last": self.last, "slowest": self.slowest, "route": self.route, "pool": self.pool}
        filters |= {"outcome": self.outcome, "slow": int(self.slow) or None, "id": self.id}
        return "/requests?" + urlencode({name: value for name, value in filters.items() if value not in ("", None)})

    def _matches(self, record: Record) -> bool:
        return (
            (not self.route or record.route == self.route)
            and (not self.pool or record.pool == self.pool)
            and (not self.outcome or record.end == self.outcome)
            and (not self.id or record.request_id == self.id)
            and (not self.slow or record.ttft_met is False)
        )


def parse_query(query: Mapping[str, str], routes: Collection[str], pools: Collection[str]) -> RequestQuery:
    """Raises ApiError. `routes`, `pools`: the configured names."""
    for name in query:
        if name not in FILTERS:
            hint = did_you_mean(name[:100], FILTERS)
            raise bad_request(_sentence(f"There is no filter '{name[:100]}'{hint}"), param=name[:100])
    slowest = _number(query, "slowest")
    last = _number(query, "last")
    return RequestQuery(
        last=last if last is not None else DEFAULT_LAST if slowest is None else RECENT,
        slowest=slowest,
        route=_one_of(query, "route", {*routes, UNKNOWN}),
        pool=_one_of(query, "pool", {*pools, UNKNOWN}),
        outcome=_one_of(query, "outcome", list(RequestOutcome)),
        slow=_one_of(query, "slow", ("1",)) == "1",
        id=_id(query),
    )


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise bad_request(f"{name} must be a whole number.", param=name)
    return int(text)


def _one_of(query: Mapping[str, str], name: str, known: Collection[str]) -> str:
    text = query.get(name, "")
    if name in query and text not in known:
        hint = did_you_mean(text[:100], sorted(known))
        raise bad_request(_sentence(f"{name} '{text[:100]}' is unknown{hint}"), param=name)
    return text


def _id(query: Mapping[str, str]) -> str:
    text = query.get("id", "")
    if "id" in query and not REQUEST_ID.fullmatch(text):
        raise bad_request("id must be a request id: up to 128 letters, digits and -_.:", param="id")
    return text


def _last(items: list[T], count: int) -> list[T]:
    return items[max(0, len(items) - count) :]


def _waited(record: Record) -> float:
    """Seconds until the first token, or until the end without one."""
    return record.total if record.ttft is None else record.ttft


def _waited_ms(record: Mapping[str, Any]) -> float:
    waited: float = record["total_ms"] if record["ttft_ms"] is None else record["ttft_ms"]
    return waited


def _sentence(text: str) -> str:
    return text if text.endswith("?") else text + "."
