"""Reads first token, end and usage from an answer that Envoy carries, and reports them to the fleet and the Record.

Of an answer that is read to its first token only (`look_away`), the tokens are counted by bytes: events of a stream
carry a token each, and are as long as the first one within some percent. Usage is unknown then.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from backends.interface import EngineTimes, Tap
from gateway.observe.record import NO_FACTS, AttemptRecord
from gateway.upstream.attempt_figures import AttemptTimes
from gateway.upstream.routed_request import RoutedRequest
from policies.fleet.engine_load import EngineLoad
from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import Attempt, AttemptKind, AttemptOutcome, Candidate, Load

OVERDUE, LEAST = 10.0, 6.0  # times the forecast, and s of it at least, after which an answer counts as over
POLL = 1.0  # s that a poll of the engine may take
UNTOLD = EngineLoad()


class ServedAnswer:
    """An attempt of the fleet, in flight from its creation on at the endpoint that got the request."""

    def __init__(self, fleet: Fleet, routed: RoutedRequest, candidate: Candidate) -> None:
        self._fleet = fleet
        self._routed = routed
        self._candidate = candidate
        self._upstream = routed.upstreams[candidate.endpoint.id]
        self._prompt = routed.estimate.pools[candidate.endpoint.pool]
        self._request = routed.backend_request(self._upstream, Attempt(1, AttemptKind.PRIMARY, candidate))
        self._tap: Tap | None = None
        self._shows_pace = False  # the body comes as the engine writes it
        self._status = 0
        self._bytes = 0  # of the body, as far as it was read
        self._event = 0  # bytes of an event with a token; 0: unknown
        self._unread = 0  # tokens that were not read
        self._away: tuple[float, float] | None = None  # since when nothing is read, and s per token at that time
        self._is_broken = False
        now = monotonic()
        self._times = AttemptTimes(opened=now, connected=now, sent=now)
        fleet.on_sent(
            self,
            candidate,
            self._prompt,
            now,
            self._request.stream,
            tpot_budget=routed.route.tpot_budget(routed.request.tpot_budget),
            output=routed.estimate.output_tokens,
            route=routed.route,
            caller=routed.request.caller,
        )

    @property
    def output_tokens(self) -> int:
        """So far: counts for the fleet's view of answers in progress. Expected by the engine's pace where nothing is
        read."""
        tokens = self._unread + (0 if self._tap is None else self._tap.tokens)
        if self._away is None or self._unread or self._away[1] <= 0:
            return tokens
        since, pace = self._away
        return tokens + int((monotonic() - since) / pace)

    @property
    def is_begun(self) -> bool:
        """The first token of a stream was seen."""
        return self._times.first_in is not None and self._request.stream

    def on_head(self, status: int, headers: Mapping[str, str], *, shows_body: bool, shows_pace: bool) -> None:
        """`shows_body`: `on_body` follows; `shows_pace`: as the engine writes it, not whole at the end."""
        self._status, self._shows_pace = status, shows_pace
        if shows_body and 200 <= status < 300 and "content-encoding" not in headers:
            self._tap = self._upstream.backend.tap(self._request)

    def on_body(self, data: bytes, now: float) -> None:
        self._bytes += len(data)
        if self._tap is None or not self._tap.feed(data) or not self._shows_pace:
            return
        self._event = size_of_last_event(data)
        if (gap := now - self._times.last_token) > self._times.gap_floor and self._times.first_in is not None:
            self._times.note_gap(gap)
        self._times.last_token = now
        if self._times.first_in is None and self._request.stream:
            self._fleet.on_first_token(self, now)
            self._begin_answer(now)

    def look_away(self, now: float) -> None:
        """Nothing more is read of the answer."""
        self._away = now, self._load(now).tpot

    def is_over_by_load(self, now: float) -> bool:
        """The engine has said since that it is idle; or, where it says nothing, the answer takes OVERDUE times as long
        as forecast."""
        if self._away is None:
            return False
        since, pace = self._away
        engine = self._fleet.view.engine_loads(now).get(self._candidate.endpoint.id, UNTOLD)
        if engine.running is None:
            return now - since > OVERDUE * max(pace * self._routed.estimate.output_tokens, LEAST)
        return not engine.running and not engine.waiting and self._load(now).scraped_at > since + POLL

    def _load(self, now: float) -> Load:
        return self._fleet.snapshot(now).loads.get(self._candidate.endpoint.id, Load())

    def on_logged(self, status: int, body_bytes: int, at: float, *, is_broken: bool) -> None:
        """Notes what the access log tells of the answer; `at`: of its last byte. `end` follows."""
        self._status, self._is_broken = status, is_broken
        self._times.last_token = at
        if self._event:
            self._unread = max(body_bytes - self._bytes, 0) // self._event

    def end(self, now: float) -> bool:
        """Reports the end of the answer. False: the engine has failed."""
        if self._tap is not None:
            if self._away is None:
                self._tap.close()
            if self._times.first_in is None and not self._request.stream:
                self._begin_answer(now)
        if self._times.first_in is None and not (self._tap is not None and self._shows_pace):
            self._routed.timeline.unseen()
        if self._tap is None or not self._shows_pace or self._away is not None:
            self._routed.timeline.gaps_unseen()
        failed = self._status >= 500 or self._is_broken or (self._tap is not None and self._tap.failure is not None)
        outcome = AttemptOutcome.FAILED if failed else AttemptOutcome.COMPLETED
        if 400 <= self._status < 500:
            outcome = AttemptOutcome.RATE_LIMITED if self._status == 429 else AttemptOutcome.REFUSED
        report = self._report()
        self._fleet.on_ended(self, outcome, now, report)
        self._routed.timeline.answered(
            self._recorded(outcome, now),
            report,
            EngineTimes() if self._tap is None else self._tap.times,
            output_tokens=report.output_tokens,
            tpot=self._tpot(report.output_tokens),
            gaps=self._times.gaps(report.output_tokens),
            blocks=self._prompt.blocks,
            usage=None if self._tap is None else self._tap.usage,
            facts=NO_FACTS if self._tap is None else self._tap.facts,
        )
        return not failed

    def leave(self, now: float) -> None:
        """Reports a request that went to another endpoint, or a caller that left."""
        self._fleet.on_ended(self, AttemptOutcome.CANCELLED, now)
        self._routed.timeline.attempt_ended(self._recorded(AttemptOutcome.CANCELLED, now))

    def _begin_answer(self, now: float) -> None:
        times, self._times.first_in = self._times, now
        self._routed.timeline.won(
            self._candidate,
            self._request.model,
            opened=times.opened,
            connected=times.connected,
            sent=times.opened,
            first_in=now,
        )
        self._routed.timeline.first_token_out(now, self._status)

    def _tpot(self, tokens: int) -> float | None:
        return self._times.tpot(tokens) if self._request.stream else None

    def _report(self) -> AttemptReport:
        if self._tap is None:
            return AttemptReport()
        usage, times = self._tap.usage, self._tap.times
        output = usage.completion
        if output is None:
            output = self._tap.tokens + self._unread if self._away is None or self._unread else 0
        return AttemptReport(
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            completion_tokens=usage.completion,
            output_tokens=output,
            mean_itl=times.mean_itl or self._tpot(output),
            engine_ttft=times.ttft,
        )

    def _recorded(self, outcome: AttemptOutcome, now: float) -> AttemptRecord:
        arrival, endpoint = self._routed.timeline.record.arrival, self._candidate.endpoint
        return AttemptRecord(
            1,
            AttemptKind.PRIMARY,
            endpoint.id,
            endpoint.pool,
            opened=self._times.opened - arrival,
            ended=now - arrival,
            ending=outcome,
            upstream_id=self._routed.timeline.record.request_id,
            tokens=(self._prompt.tokens + self._tap.tokens + self._unread) if self._tap is not None else 0,
            status=self._status,
            locality=endpoint.locality,
        )


def size_of_last_event(data: bytes) -> int:
    """Bytes of the last event of a stream; 0: it is not whole, or its beginning is not in `data` for sure."""
    if not data.endswith(b"\n\n"):
        return 0
    return len(data) - (data.rfind(b"\n\n", 0, -2) + 2 if b"\n\n" in data[:-2] else 0)
