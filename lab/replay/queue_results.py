"""Results of a replay at light load: waits for nothing, and a cold start beside the time after it.

An idle wait is time in the gateway's queue during which the engine that answers in the end would have had a short
prefill to do for the request, and had no other: no attempt there was without its first token. It counts from the moment
at which the engine had so much of the prompt in its cache. Engines that hold back for the pace of their answers are
idle too: a short prefill is borne by all.

A request is possible if an idle engine, with all in its cache that an earlier prompt began with, prefills it within the
TTFT budget: other misses are nobody's fault. Durations are those of the profile, without noise and without decodes
beside the prefill.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backends.server_profiles import EngineProfile
from lab.replay.results import Interval, RequestResult, Results, quantile
from lab.replay.sim_fleet import Scenario
from lab.traffic.traces import BLOCK, Arrival

SHORT = 0.2  # s of prefill
NOTICED = 0.1  # s of idle wait that one request in a hundred may have
FIRST, SETTLED = 60.0, 300.0  # s after the first arrival: the cold start is over, and the fleet is in its usual state


@dataclass(frozen=True, slots=True)
class QueueRow:
    """Waits of the requests with a prefill under SHORT. Quantiles of none are NaN."""

    short: int
    waits: tuple[float, ...] = ()  # s in the queue, of those above 0
    idle_waits: tuple[float, ...] = ()  # s of these, of those above 0


@dataclass(frozen=True, slots=True)
class ColdStartRow:
    """Requests of the first FIRST seconds, and those from SETTLED on."""

    offered: tuple[int, int]
    good: tuple[float, float]
    ttft_p99: tuple[float, float]  # s, of the answered
    refused: tuple[int, int]
    possible: tuple[int, int]  # requests
    possible_good: tuple[float, float]  # share of these
    possible_p99: tuple[float, float]  # s, TTFT of these


def queue_row(results: Results, arrivals: Sequence[Arrival], scenario: Scenario) -> QueueRow:
    waits = short_waits(results, arrivals, scenario)
    return QueueRow(len(waits), *(_positive(column) for column in zip(*waits.values(), strict=True)))


def short_waits(results: Results, arrivals: Sequence[Arrival], scenario: Scenario) -> dict[int, tuple[float, float]]:
    """Wait and idle wait, s, by number of each request with a short prefill."""
    busy = {endpoint: merged(prefills) for endpoint, prefills in results.prefills.items()}
    computed, found = blocks_computed(results, arrivals), dict[int, tuple[float, float]]()
    for result in results.requests:
        endpoint, queued = result.endpoint, result.queued
        profile = scenario.profiles.get(endpoint)
        if not isinstance(profile, EngineProfile) or queued is None:
            continue
        count = blocks_to_be_short(profile, result)
        if count * BLOCK > result.cached:
            continue
        last = arrivals[result.number - 1].hashes[count - 1] if count else None
        since = scenario.starts.get(endpoint, 0.0) if last is None else computed[endpoint][last]
        idle = min(max(queued[0], since), queued[1]), queued[1]
        found[result.number] = queued[1] - queued[0], idle[1] - idle[0] - overlap(busy[endpoint], idle)
    return found


def blocks_to_be_short(profile: EngineProfile, result: RequestResult) -> int:
    """Blocks of the prompt that must be cached for a prefill under SHORT."""
    return bisect_left(
        range(result.prompt_tokens // BLOCK + 1),
        True,
        key=lambda blocks: prefill_seconds(profile, result.prompt_tokens, blocks * BLOCK) < SHORT,
    )


def blocks_computed(results: Results, arrivals: Sequence[Arrival]) -> dict[str, dict[int, float]]:
    """Time at which each engine first had each block of a prompt in its cache."""
    found: dict[str, dict[int, float]] = {}
    answered = ((result.first_at, result) for result in results.requests if result.first_at is not None)
    for first_at, result in sorted(answered, key=lambda pair: pair[0]):
        here = found.setdefault(result.endpoint, {})
        for block in arrivals[result.number - 1].hashes:
            here.setdefault(block, first_at)
    return found


def _positive(seconds: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted(round(each, 4) for each in seconds if each > 1e-4))


def wait_quantile(rows: Sequence[QueueRow], q: float, idle: bool = True) -> float:
    """Of all short requests of several replays together."""
    waits = [wait for row in rows for wait in (row.idle_waits if idle else row.waits)]
    return quantile(waits + [0.0] * (sum(row.short for row in rows) - len(waits)), q)


def prefill_seconds(profile: EngineProfile, prompt: int, cached: int) -> float:
    """Of an idle engine, in chunks of its steps."""
    seconds = 0.0
    while cached < prompt:
        chunk = min(prompt - cached, profile.max_num_batched_tokens)
        seconds += profile.duration_ms(chunk, 1, chunk * (cached + chunk / 2)) * 1e-3
        cached += chunk
    return seconds


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, in order of time."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def overlap(intervals: Iterable[Interval], one: Interval) -> float:
    """Seconds of `one` within disjoint `intervals`."""
    return sum(max(min(end, one[1]) - max(start, one[0]), 0.0) for start, end in intervals)


def cold_start_row(results: Results, arrivals: Sequence[Arrival], scenario: Scenario) -> ColdStartRow | None:
    """None where nothing arrives from SETTLED on."""
    began = min((result.arrived for result in results.requests), default=0.0)
    possible = possible_requests(results, arrivals, scenario)
    first = [result for result in results.requests if result.arrived < began + FIRST]
    settled = [result for result in results.requests if result.arrived >= began + SETTLED]
    if not settled:
        return None
    rows = [results.row("", found) for found in (first, settled)]
    able = [results.row("", [one for one in found if one.number in possible]) for found in (first, settled)]
    return ColdStartRow(
        offered=(rows[0].offered, rows[1].offered),
        good=(rows[0].good, rows[1].good),
        ttft_p99=(rows[0].ttft[2], rows[1].ttft[2]),
        refused=(rows[0].refused, rows[1].refused),
        possible=(able[0].offered, able[1].offered),
        possible_good=(able[0].good, able[1].good),
        possible_p99=(able[0].ttft[2], able[1].ttft[2]),
    )


def possible_requests(results: Results, arrivals: Sequence[Arrival], scenario: Scenario) -> set[int]:
    """Numbers of the requests that the fastest engine of the scenario can answer in time, with nothing else to do."""
    engines = [profile for profile in scenario.profiles.values() if isinstance(profile, EngineProfile)]
    seen, possible = set[int](), set[int]()
    for result in results.requests:
        arrival = arrivals[result.number - 1]
        known = next((i for i, block in enumerate(arrival.hashes) if block not in seen), len(arrival.hashes))
        seen.update(arrival.hashes)
        cached = min(known * BLOCK, (arrival.prompt_tokens - 1) // BLOCK * BLOCK)
        budget = results.routes[result.route].ttft_budget(None, result.new_tokens)
        if min(one.overhead + prefill_seconds(one, arrival.prompt_tokens, cached) for one in engines) <= budget:
            possible.add(result.number)
    return possible
