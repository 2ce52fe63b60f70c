"""First-token times measured by callers (on screen): POST /ttft.

Rules:
- A beacon refers to a request in progress or among the recent Records; any other id is unknown.
- Each request is reported and counted once, with the labels of the Record: nobody with access to the port can count
  more requests than there were.
- The value is a claim: shown beside the gateway's own measurement, never used by predictions or decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.api.api_error import ApiError, bad_request
from gateway.observe.metrics.series import histogram
from gateway.observe.record import Record
from gateway.observe.recorder import Recorder
from gateway.strict_json import BadJson, decode

MAX_BEACON = 4096  # bytes
LONGEST = 3_600_000.0  # ms
LONGEST_ID = 128  # characters


class Beacons(Collector):
    """firsttoken_ttft_on_screen_seconds. `bounds`: additional buckets."""

    def __init__(self, recorder: Recorder, bounds: Iterable[float]) -> None:
        self.recorder = recorder
        self.seconds = histogram("firsttoken_ttft_on_screen_seconds", bounds)

    def collect(self) -> Iterable[Metric]:
        yield from self.seconds.collect()

    def take(self, raw: bytes) -> None:
        """Count a beacon. Raises ApiError."""
        request_id, seconds = read(raw)
        record = self._record(request_id)
        if record is None:
            raise ApiError(404, "No recent request has this id.", param="request_id", code="unknown_request")
        if record.ttft is None:
            raise ApiError(409, "This request has no first token.", param="request_id", code="no_first_token")
        if record.on_screen is not None:
            raise ApiError(409, "The first token of this request was reported before.", code="reported_before")
        record.on_screen = seconds
        self.seconds.of[(record.route,)].observe(seconds)

    def _record(self, request_id: str) -> Record | None:
        """The latest request with the id: callers may use an id twice."""
        for life in self.recorder.lives:
            if life.record.request_id == request_id:
                return life.record
        for record in reversed(self.recorder.recent):
            if record.request_id == request_id:
                return record
        return None


def read(raw: bytes) -> tuple[str, float]:
    """The id of a request, and seconds. Raises ApiError."""
    try:
        said: Any = decode(raw)
    except BadJson as error:
        raise bad_request(f"The body is not valid JSON: {error}.") from None
    if not isinstance(said, dict):
        raise bad_request("The body must be a JSON object with request_id and ttft_ms.")
    request_id, ttft = said.get("request_id"), said.get("ttft_ms")
    if not (isinstance(request_id, str) and 0 < len(request_id) <= LONGEST_ID):
        raise bad_request(f"request_id must be a string of up to {LONGEST_ID} characters.", param="request_id")
    if (
        isinstance(ttft, bool)
        or not isinstance(ttft, int | float)
        or not (math.isfinite(ttft) and 0 <= ttft <= LONGEST)
    ):
        raise bad_request(f"ttft_ms must be a number from 0 to {LONGEST:.0f}.", param="ttft_ms")
    return request_id, ttft / 1e3
