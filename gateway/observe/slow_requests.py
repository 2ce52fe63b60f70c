"""Finds the cause of each slow request (a missed budget, or a failure) once, when the request ends.

A request within budget adds a sample to the usual values of the route, leaves a trace of the prompt, and is counted, in
O(1). Constants bound everything kept.

Counts of slow requests by route, cause and culprit, by the minute: windows to compare, and incidents.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from gateway.observe.record import FAULTS, STAGE_NAMES, UNROUTED, Record, RequestOutcome
from gateway.observe.request_facts import (
    Surroundings,
    over_budget,
    prompt_tokens,
    request_facts,
    thinking_time,
)
from policies.diagnosis.diagnose import diagnose
from policies.diagnosis.diagnosis_report import Alternatives, Diagnosis
from policies.diagnosis.facts import Objective, hit_tokens
from policies.diagnosis.incident_groups import IncidentGroup, as_json, from_json, incidents, joined
from policies.diagnosis.prompt_trail import PromptTrail, SentPrompt
from policies.diagnosis.usual import Sample, Usual

MINUTE = 60.0  # s
KEPT = 120  # minutes
MOST = 256  # kinds of misses in a minute, above which a kind loses its culprit: there are as many routes and causes

Kind = tuple[str, str, str, str, bool]  # route, cause, culprit, caller at fault itself, failed


class MinuteCounts:
    """One minute. `requests`: by route; `slow`: of each kind of miss."""

    def __init__(self, minute: int) -> None:
        self.minute = minute
        self.requests: dict[str, int] = {}
        self.slow: dict[Kind, IncidentGroup] = {}

    def add(self, miss: IncidentGroup) -> None:
        kind = miss.route, miss.cause, miss.culprit, miss.caller, miss.failed > 0
        if kind not in self.slow and len(self.slow) >= MOST:
            kind = miss.route, miss.cause, "", "", miss.failed > 0
        self.slow[kind] = joined(self.slow[kind], miss) if kind in self.slow else miss


class SlowCounts:
    """The last KEPT minutes, bounded."""

    def __init__(self) -> None:
        self._minutes: deque[MinuteCounts] = deque(maxlen=KEPT)

    def count(self, route: str, miss: IncidentGroup | None, now: float) -> None:
        """`miss`: of a slow or failed request."""
        minute = int(now // MINUTE)
        if not self._minutes or self._minutes[-1].minute != minute:
            self._minutes.append(MinuteCounts(minute))
        current = self._minutes[-1]
        current.requests[route] = current.requests.get(route, 0) + 1
        if miss is not None:
            current.add(miss)

    def window(self, route: str, now: float, minutes: int, back: int = 0) -> dict[str, Any]:
        """Requests of a route in `minutes` minutes up to now, or up to `back` minutes ago; slow ones by cause, with
        the sum of ms over."""
        requests, causes = 0, dict[str, tuple[int, float]]()
        for each in self._within(now, minutes, back):
            requests += each.requests.get(route, 0)
            for miss in each.slow.values():
                if miss.route == route:
                    before = causes.get(miss.cause, (0, 0.0))
                    causes[miss.cause] = before[0] + miss.requests, before[1] + miss.over
        shown = {
            cause: {"requests": number, "over_ms": round(over * 1e3, 1)} for cause, (number, over) in causes.items()
        }
        return {"requests": requests, "causes": shown}

    def incidents(self, now: float, minutes: int) -> dict[str, Any]:
        """Requests by route, and the incidents of all routes, in `minutes` minutes up to now."""
        requests: dict[str, int] = {}
        found = list[IncidentGroup]()
        for each in self._within(now, minutes):
            for route, number in each.requests.items():
                requests[route] = requests.get(route, 0) + number
            found += each.slow.values()
        return _shown(requests, found)

    def _within(self, now: float, minutes: int, back: int = 0) -> Iterator[MinuteCounts]:
        end = int(now // MINUTE) - back
        return (each for each in self._minutes if end - minutes < each.minute <= end)


def merge_incidents(answers: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The incidents of several workers."""
    requests: dict[str, int] = {}
    for each in answers:
        for route, number in each["requests"].items():
            requests[route] = requests.get(route, 0) + number
    return _shown(requests, [from_json(shown) for each in answers for shown in each["incidents"]])


def merge_windows(windows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The same window of several workers."""
    causes: dict[str, dict[str, float]] = {}
    for window in windows:
        for cause, found in window["causes"].items():
            before = causes.get(cause, {"requests": 0, "over_ms": 0.0})
            causes[cause] = {name: round(before[name] + value, 1) for name, value in found.items()}
    return {"requests": sum(window["requests"] for window in windows), "causes": causes}


def _shown(requests: dict[str, int], found: list[IncidentGroup]) -> dict[str, Any]:
    return {"requests": requests, "incidents": [as_json(each, requests) for each in incidents(found)]}


log = logging.getLogger("firsttoken")

SAMPLES = 128  # latest requests of a route that are usual
STALE = 16  # new samples after which usual values are computed again
AROUND = 200  # latest Records that a diagnosis looks at: 0.2 ms
LOOKED_INTO = 100  # slow requests a second: 1.6% of a core; others take the latest verdict of their route and objective
OBJECTIVES = (Objective.TTFT, Objective.TPOT, Objective.GAP, Objective.TOTAL)  # in the order of `Record.verdicts`
ENDPOINTS = 1024  # with a known time of their last cache loss


def missed_objective(record: Record) -> Objective | None:
    """The first promise that was missed; None: the request is not slow."""
    if record.end in FAULTS:
        return Objective.ANSWER
    verdicts = record.verdicts
    return OBJECTIVES[verdicts.index(False)] if False in verdicts else None


class RouteSamples:
    """Latest samples of a route, and their usual values, a little stale."""

    __slots__ = ("_added", "_usual", "samples")

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._added = STALE
        self._usual = Usual()

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        self._added += 1

    def usual(self) -> Usual:
        if self._added >= STALE and self.samples:
            self._usual, self._added = Usual.of(STAGE_NAMES, self.samples), 0
        return self._usual


class SlowRequests:
    """Samples, prompts and counts of requests. `recent`: ended Records, oldest first; `live`: Records in progress."""

    def __init__(self, recent: Sequence[Record], live: Callable[[], Sequence[Record]]) -> None:
        self._recent = recent
        self._live = live
        self._samples: dict[tuple[str, bool], RouteSamples] = defaultdict(RouteSamples)  # streamed or not
        self._trail = PromptTrail()
        self._lost_at: dict[str, float] = {}
        self._counts = SlowCounts()
        self._second = self._in_second = 0  # present second, and slow requests in it
        self._latest: dict[tuple[str, Objective], Diagnosis] = {}  # of this second

    def on_cache_lost(self, endpoint: str) -> None:
        self._lost_at.pop(endpoint, None)
        self._lost_at[endpoint] = monotonic()
        if len(self._lost_at) > ENDPOINTS:
            del self._lost_at[next(iter(self._lost_at))]

    def note(self, records: Iterable[Record]) -> None:
        """Note requests that are not slow. A bug here loses the sample only."""
        now = monotonic()
        for record in records:
            if record.route is UNROUTED or record.end is RequestOutcome.REFUSED:  # neither usual nor slow
                continue
            try:
                if record.ttft is not None:
                    self._samples[record.route.name, record.asked.stream].add(_sample(record))
                    if record.prefix:  # else it is too short for the trail
                        self._trail.note(_prompt(record))
                self._counts.count(record.route.name, None, now)
            except Exception:
                log.exception("a request could not be noted")

    def diagnosed(self, record: Record, objective: Objective) -> Diagnosis | None:
        """The diagnosis of a slow request, which is noted too. A bug here loses the diagnosis only."""
        if record.route is UNROUTED or record.end is RequestOutcome.REFUSED:
            return None
        try:
            return self._diagnosed(record, objective)
        except Exception:
            log.exception("slow request could not be diagnosed")
            return None

    def windows(self, route: str, minutes: int) -> Mapping[str, Any]:
        """Slow requests of a route by cause, in the last `minutes` and in as many before."""
        now, count = monotonic(), self._counts.window
        return {"now": count(route, now, minutes), "before": count(route, now, minutes, minutes)}

    def incidents(self, minutes: int) -> Mapping[str, Any]:
        """Requests and incidents of all routes in the last `minutes`."""
        return self._counts.incidents(monotonic(), minutes)

    def _diagnosed(self, record: Record, objective: Objective) -> Diagnosis:
        prompt, alike = _prompt(record), self._latest_of_crowd(record.route.name, objective)
        found = self._look_into(record, objective, prompt) if alike is None else _as(alike, record, objective)
        if record.ttft is not None:
            self._trail.note(prompt)
        miss = IncidentGroup.of(record.route.name, found.verdict, record.wall + record.total, record.request_id)
        self._counts.count(record.route.name, miss, monotonic())
        return found

    def _latest_of_crowd(self, route: str, objective: Objective) -> Diagnosis | None:
        """The verdict to take over, where enough slow requests were looked into in this second; None: look into it."""
        second = int(monotonic())
        if second != self._second:
            self._second, self._in_second = second, 0
            self._latest.clear()
        self._in_second += 1
        return self._latest.get((route, objective)) if self._in_second > LOOKED_INTO else None

    def _look_into(self, record: Record, objective: Objective, prompt: SentPrompt) -> Diagnosis:
        earlier = self._trail.earlier(prompt, self._lost_at)
        usual = self._samples[record.route.name, record.asked.stream].usual()
        facts = request_facts(record, objective, self._surroundings(record), earlier)
        found = Diagnosis(diagnose(facts, usual), usual, Alternatives.of(record.decision))
        self._latest[record.route.name, objective] = found
        return found

    def _surroundings(self, record: Record) -> Surroundings:
        recent = [*self._recent][-AROUND:]
        live = [other for other in self._live() if other is not record]
        return Surroundings(recent, live[-AROUND:], self._lost_at)


def _prompt(record: Record) -> SentPrompt:
    return SentPrompt(prompt_tokens(record), record.prefix, record.endpoint.id, record.asked.session, record.arrival)


def _as(alike: Diagnosis, record: Record, objective: Objective) -> Diagnosis:
    """The diagnosis of a request in a crowd of slow ones, taken over from `alike`; the evidence says so."""
    evidence = f"one of more than {LOOKED_INTO} slow requests in a second, as another one: {alike.verdict.evidence}"
    verdict = replace(alike.verdict, evidence=evidence, over=over_budget(record, objective))
    return Diagnosis(verdict, alike.usual, Alternatives())


def _sample(record: Record) -> Sample:
    answer, placed = record.answer, record.placed
    prompt = answer.prompt_tokens or placed.prompt_tokens or 0
    return Sample(
        record.spent,
        prompt,
        prompt - hit_tokens(prompt, answer.cached_tokens, placed.cached_tokens),
        (placed.cached_tokens or 0) / max(prompt, 1),
        answer.output_tokens or 0,
        answer.tpot,
        answer.engine_queue,
        answer.engine_prefill,
        thinking_time(record) if record.route.promises_answer else 0.0,
        record.loop_lag,
    )
