"""Queries of the admin port: GET /requests, GET /causes, GET /incidents, GET /windows.

Rules for the query of GET /requests:
- Unknown filters and values are refused with the known ones: an empty answer to a misspelt name would be misleading.
- Of all matches the latest `last` remain; `slowest` keeps those streams with the longest wait for a first token, and
  `worst` those that failed, then those that missed a budget, each with the most time over first.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain
from time import monotonic
from typing import Any
from urllib.parse import urlencode

from gateway.api.api_error import bad_request
from gateway.config.config_errors import did_you_mean
from gateway.observe.part_notes import DIAGNOSIS, cause_of
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.recorder import RECENT
from gateway.observe.slow_requests import KEPT
from gateway.observe.windows.count_history import WINDOWS
from policies.diagnosis.causes import Cause

DEFAULT_LAST = 200  # Records
LONGEST_WINDOW = KEPT // 2  # minutes of GET /causes, which compares with the window before
UNKNOWN = "-"  # route and pool of requests refused before routing
REQUEST_ID = re.compile(r"[0-9A-Za-z\-_.:]{1,128}")


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
    worst: int | None = None
    key: str = ""
    endpoint: str = ""
    cause: str = ""
    within: int | None = None  # s

    def select(self, recent: Iterable[Record], missed: Iterable[Record] = ()) -> list[Record]:
        """The newest last; with `slowest`, the slowest first, with `worst`, failures and then the most time over.
        `missed`: the latest that missed a budget or failed, which go further back."""
        if self.worst is not None:
            return sorted(filter(self._matches, missed), key=_over, reverse=True)[: self.worst]
        if self.id:
            recent = {id(record): record for record in chain(missed, recent)}.values()
        found = list(deque((record for record in recent if self._matches(record)), self.last))
        if self.slowest is None:
            return found
        return sorted((r for r in found if r.asked.stream), key=_waited, reverse=True)[: self.slowest]

    def merge(self, by_worker: Mapping[int, Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Merge the answers of several workers, in the order in which requests ended."""
        found = [{**record, "worker": worker} for worker, records in by_worker.items() for record in records]
        if self.slowest is not None:
            return sorted(found, key=_waited_ms, reverse=True)[: self.slowest]
        if self.worst is not None:
            return sorted(found, key=_over_ms, reverse=True)[: self.worst]
        found.sort(key=lambda record: record["wall"] + record["total_ms"] / 1e3)
        return list(deque(found, self.last))

    def url(self) -> str:
        """The same query for another admin port."""
        filters = {**asdict(self), "slow": int(self.slow) or None}
        return "/requests?" + urlencode({name: value for name, value in filters.items() if value not in ("", None)})

    def _matches(self, record: Record) -> bool:
        return (
            (not self.route or record.route.name == self.route)
            and (not self.pool or record.endpoint.pool == self.pool)
            and (not self.outcome or record.end == self.outcome)
            and (not self.id or record.request_id == self.id)
            and (not self.slow or record.ttft_met is False)
            and (not self.key or record.tenant == self.key)
            and (not self.endpoint or record.endpoint.id == self.endpoint)
            and (not self.cause or cause_of(record) == self.cause)
            and (self.within is None or record.arrival + record.total >= monotonic() - self.within)
        )


def parse_query(query: Mapping[str, str], routes: Collection[str], pools: Collection[str]) -> RequestQuery:
    """Raises ApiError. `routes`, `pools`: the configured names."""
    filters = [field.name for field in fields(RequestQuery)]
    for name in query:
        if name not in filters:
            hint = did_you_mean(name[:100], filters)
            raise bad_request(_sentence(f"There is no filter '{name[:100]}'{hint}"), param=name[:100])
    slowest, last = _number(query, "slowest"), _number(query, "last")
    request_id = query.get("id", "")
    if "id" in query and not REQUEST_ID.fullmatch(request_id):
        raise bad_request("id must be a request id: up to 128 letters, digits and -_.:", param="id")
    return RequestQuery(
        last=last if last is not None else DEFAULT_LAST if slowest is None else RECENT,
        slowest=slowest,
        route=_one_of(query, "route", {*routes, UNKNOWN}),
        pool=_one_of(query, "pool", {*pools, UNKNOWN}),
        outcome=_one_of(query, "outcome", list(RequestOutcome)),
        slow=_one_of(query, "slow", ("1",)) == "1",
        id=request_id,
        worst=_number(query, "worst"),
        key=query.get("key", ""),
        endpoint=query.get("endpoint", ""),
        cause=_one_of(query, "cause", list(Cause)),
        within=_number(query, "within"),
    )


def parse_window(query: Mapping[str, str], routes: Collection[str]) -> tuple[str, int]:
    """Route and minutes of GET /causes. Raises ApiError."""
    route = _one_of(query, "route", routes)
    if not route:
        raise bad_request("Name a route.", param="route")
    return route, parse_minutes(query)


def parse_minutes(query: Mapping[str, str]) -> int:
    """Window of GET /causes and GET /incidents. Raises ApiError."""
    minutes = _number(query, "minutes") or 0
    if not 1 <= minutes <= LONGEST_WINDOW:
        raise bad_request(f"minutes must be a whole number from 1 to {LONGEST_WINDOW}.", param="minutes")
    return minutes


def parse_format(query: dict[str, str]) -> str:
    """Form of the answer of GET /requests: json or csv. Takes the member from the query. Raises ApiError."""
    form = _one_of(query, "format", ("json", "csv")) or "json"
    query.pop("format", None)
    return form


def parse_span(query: Mapping[str, str]) -> str:
    """Name of the window of GET /windows. Raises ApiError."""
    return _one_of(query, "window", WINDOWS) or next(iter(WINDOWS))


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


def _over(record: Record) -> tuple[bool, float]:
    """Failures before late answers: the time over of a refusal is its own millisecond."""
    found = DIAGNOSIS.of(record)
    return (False, 0.0) if found is None else (found.verdict.failed, found.verdict.over)


def _over_ms(record: Mapping[str, Any]) -> tuple[bool, float]:
    return record["why"]["failed"], record["why"]["over_ms"]


def _waited(record: Record) -> float:
    """Seconds until the first token, or until the end without one."""
    return record.total if record.ttft is None else record.ttft


def _waited_ms(record: Mapping[str, Any]) -> Any:
    return record["total_ms"] if record["ttft_ms"] is None else record["ttft_ms"]


def _sentence(text: str) -> str:
    return text if text.endswith("?") else text + "."
