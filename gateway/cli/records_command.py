"""Records on disk, as commands read them. `firsttoken records` prints them as lines of the access log."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import time
from typing import Any

from gateway.config.config_errors import ConfigError
from gateway.observe.record import FAULTS
from gateway.records.record_file import UnreadableRecords, stored_records
from policies.diagnosis.incident_groups import IncidentGroup, as_json, incidents

MINUTE = 60  # s
Causes = dict[str, dict[str, float]]


def records(args: argparse.Namespace) -> int:
    """`args`: folder, last (s) or None, route, slow. Raises ConfigError."""
    since = 0.0 if args.last is None else time() - args.last
    for view in _stored(args.folder, since=since, route=args.route):
        if not args.slow or view["cause"]:
            print(json.dumps(view))
    return 0


def stored_request(folder: Path, request_id: str) -> Mapping[str, Any]:
    """The latest with this id. Raises ConfigError."""
    found = [*_stored(folder, request_id=request_id)]
    if not found:
        told = "it is in progress, older than all records here, or of another gateway"
        raise ConfigError([f"{folder}: no request has the id {request_id}: {told}"])
    return found[-1]


def stored_causes(folder: Path, route: str, minutes: int) -> Mapping[str, Any]:
    """Slow requests of a route by cause, in the last `minutes` and in as many before, as GET /causes has them."""
    now, length = time(), minutes * MINUTE
    return {
        "now": _window(_stored(folder, route=route, since=now - length)),
        "before": _window(_stored(folder, route=route, since=now - 2 * length, until=now - length)),
    }


def stored_incidents(folder: Path, route: str, minutes: int) -> list[dict[str, Any]]:
    """Incidents of a route in the last `minutes`, as GET /incidents has them."""
    requests, found = 0, list[IncidentGroup]()
    for view in _stored(folder, route=route, since=time() - minutes * MINUTE):
        requests += view["end"] != "refused"
        if "why" in view:
            found.append(_miss(view))
    return [as_json(each, {route: requests}) for each in incidents(found)]


def _miss(view: Mapping[str, Any]) -> IncidentGroup:
    """Records of older versions name neither culprit nor failure."""
    why, failed = view["why"], view["end"] in FAULTS
    return IncidentGroup(
        route=view["route"],
        cause=why["cause"],
        culprit=why.get("culprit", ""),
        failed=int(failed),
        late=int(not failed),
        over=why["over_ms"] / 1e3,
        since=view["wall"] + view["total_ms"] / 1e3,
        last=view["wall"] + view["total_ms"] / 1e3,
        evidence=why["evidence"],
        mend=why["mend"],
        request_id=view["request_id"],
        caller=why.get("own", ""),
        witnessed=why.get("witnessed", True),
    )


def _window(found: Iterator[Mapping[str, Any]]) -> Mapping[str, Any]:
    requests, causes = 0, Causes()
    for view in found:
        if view["end"] != "refused":
            requests += 1
        if "why" in view:
            cause = causes.setdefault(view["why"]["cause"], {"requests": 0, "over_ms": 0.0})
            cause["requests"] += 1
            cause["over_ms"] += view["why"]["over_ms"]
    return {"requests": requests, "causes": causes}


def _stored(folder: Path, **wanted: Any) -> Iterator[dict[str, Any]]:
    try:
        yield from stored_records(folder, **wanted)
    except UnreadableRecords as error:
        raise ConfigError([f"firsttoken: {error}"]) from None
