"""An engine's answer as seen from the side: its first token, its end and its usage, for what the fleet learns."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from backends.interface import Tap
from gateway.observe.timeline import RequestTimeline
from gateway.upstream.routed_request import RoutedRequest
from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import Attempt, AttemptKind, AttemptOutcome, Candidate


class ServedAnswer:
    """In flight from its creation on, at the endpoint that got the request."""

    def __init__(self, fleet: Fleet, routed: RoutedRequest, candidate: Candidate) -> None:
        self._fleet = fleet
        self._routed = routed
        self._candidate = candidate
        self._upstream = routed.upstreams[candidate.endpoint.id]
        attempt = Attempt(1, AttemptKind.PRIMARY, candidate)
        self._request = routed.backend_request(self._upstream, attempt)
        self._tap: Tap | None = None
        self._status = 0
        self._first_in: float | None = None
        fleet.on_sent(
            self,
            candidate,
            routed.estimate.pools[candidate.endpoint.pool],
            monotonic(),
            self._request.stream,
            tpot_budget=routed.route.tpot_budget(routed.request.tpot_budget),
            output=routed.estimate.output_tokens,
            route=routed.route,
            caller=routed.request.caller,
        )

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        if 200 <= status < 300 and "content-encoding" not in headers:
            self._tap = self._upstream.backend.tap(self._request)

    def on_body(self, data: bytes, now: float, timeline: RequestTimeline) -> None:
        if self._tap is not None and self._tap.feed(data) and self._first_in is None and self._request.stream:
            self._first_in = now
            self._fleet.on_first_token(self, now)
            timeline.first_token_out(now, self._status)

    def end(self, now: float) -> bool:
        """False: the engine has failed."""
        if self._tap is not None:
            self._tap.close()
        failed = self._status >= 500 or (self._tap is not None and self._tap.failure is not None)
        outcome = AttemptOutcome.FAILED if failed else AttemptOutcome.COMPLETED
        if 400 <= self._status < 500:
            outcome = AttemptOutcome.RATE_LIMITED if self._status == 429 else AttemptOutcome.REFUSED
        self._fleet.on_ended(self, outcome, now, self._report())
        return not failed

    def leave(self, now: float) -> None:
        """The request went elsewhere, or its caller left."""
        self._fleet.on_ended(self, AttemptOutcome.CANCELLED, now)

    def _report(self) -> AttemptReport:
        if self._tap is None:
            return AttemptReport()
        usage = self._tap.usage
        return AttemptReport(
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            completion_tokens=usage.completion,
            output_tokens=self._tap.tokens if usage.completion is None else usage.completion,
            mean_itl=self._tap.times.mean_itl,
            engine_ttft=self._tap.times.ttft,
        )
