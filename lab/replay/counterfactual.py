"""Refusals that were wrong: the same replay, in which one refused request is dispatched instead.

Two questions per refusal: would the fastest engine have answered within the TTFT budget, had it received the request at
the moment of the refusal; and at the moment of its arrival? A policy that holds a request until it is lost, and then
refuses it, is right by the first and wrong by the second.

A replay is forked at that moment (POSIX): the child dispatches the request, goes on to the deadline, and reports; the
parent goes on as if nothing had happened. So the past is the same to the bit, and costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from traceback import print_exc

from lab.replay.player import Player
from lab.replay.results import RequestResult, Results
from lab.replay.sim_fleet import Scenario
from lab.replay.sim_gateway import ActiveRequest, DecisionOverride, SimGateway
from lab.traffic.traces import Arrival
from policies.types import Candidate, Decision, Placement

AT_ONCE = 0.01  # s: a refusal earlier than that after the arrival is the same moment
IN_TIME, LATE = b"1", b"0"


@dataclass(frozen=True, slots=True)
class RefusalRow:
    """Refusals of a replay. `wrong`, `wrong_from_arrival`: numbers of the requests that would have been in time, had
    they been dispatched at the refusal, or at the arrival."""

    offered: int
    refused: int
    wrong: tuple[int, ...] = ()
    wrong_from_arrival: tuple[int, ...] = ()


class Fork:
    """A replay, and copies of the replay in each of which one request fares otherwise: one that is held or refused is
    dispatched at once. `holds`: what a copy reports of that request; by default, that it met its TTFT budget."""

    def __init__(self, player: Player, holds: Callable[[RequestResult], bool] | None = None) -> None:
        self.player = player
        self.in_time: dict[int, bool] = {}  # by number of the request
        self._holds = holds or player.results.met_ttft
        self._tried: tuple[ActiveRequest, int] | None = None  # in a child: the request, and the pipe to the parent

    def play(self) -> Results:
        """Returns in the parent alone: a child reports, and ends."""
        try:
            results = self.player.play()
            if self._tried is not None:
                self._report(*self._tried)
        except BaseException:
            if self._tried is None:
                raise
            print_exc()
        if self._tried is not None:
            os._exit(0)
        return results

    @property
    def is_copy(self) -> bool:
        return self._tried is not None

    def tries(self, request: ActiveRequest, end: float | None = None) -> bool:
        """True in a child, which is to treat the request otherwise, and plays to `end` (s; by default, the deadline).
        In the parent, the child's answer is in `in_time`."""
        if self.is_copy:
            return False
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            self._tried = request, writing
            self.player.end = deadline(self.player.results, request) if end is None else end
            return True
        os.close(writing)
        with os.fdopen(reading, "rb") as answer:
            told = answer.read()
        os.waitpid(child, 0)
        if told not in (IN_TIME, LATE):
            raise RuntimeError(f"the replay without the refusal of request {request.number} has failed")
        self.in_time[request.number] = told == IN_TIME
        return False

    def _report(self, request: ActiveRequest, writing: int) -> None:
        os.write(writing, IN_TIME if self._holds(request.result) else LATE)


def deadline(results: Results, request: ActiveRequest) -> float:
    """Of the first token, as results are scored."""
    result = request.result
    return result.arrived + results.routes[result.route].ttft_budget(None, result.new_tokens)


class TriesRefused(DecisionOverride):
    """Forks at every refusal."""

    def __init__(self, gateway: SimGateway, fork: Fork) -> None:
        self._gateway = gateway
        self._fork = fork

    def on_refusal(self, request: ActiveRequest, refusal: Decision) -> Decision:
        forced = dispatched(self._gateway, request)
        return forced if forced.chosen is not None and self._fork.tries(request) else refusal


class TriesAtArrival(DecisionOverride):
    """Forks at the arrival of the requests of these numbers."""

    def __init__(self, gateway: SimGateway, fork: Fork, numbers: set[int]) -> None:
        self._gateway = gateway
        self._fork = fork
        self._numbers = numbers

    def on_entry(self, request: ActiveRequest) -> Decision | None:
        if request.number not in self._numbers:
            return None
        forced = dispatched(self._gateway, request)
        return forced if forced.chosen is not None and self._fork.tries(request) else None


def dispatched(gateway: SimGateway, request: ActiveRequest) -> Decision:
    """To the server with the earliest first token, by the gateway's forecast, among all that are alive."""
    now, fleet, due = gateway.clock.now, gateway.fleet, deadline(gateway.results, request)
    snapshot = fleet.snapshot(now)
    found: list[Candidate] = []
    for number, tier in enumerate(request.route.tiers):
        alive = [each.id for each in snapshot.pools[tier.pool].endpoints if gateway.servers.servers[each.id].alive]
        loads = {name: snapshot.loads[name] for name in alive}
        found += fleet.view.candidates(loads, request.estimate.pools[tier.pool], number, 0.0, now, due - now)
    return Decision(Placement.PLACE, now, due, sorted(found, key=lambda candidate: candidate.forecast.p50))


def play_refused(scenario: Scenario, arrivals: Sequence[Arrival], seed: int) -> tuple[Results, RefusalRow]:
    """The replay, and its refusals: a short replay per refusal, and where a request was refused later than it arrived,
    a second whole replay with a short one per such request. A refusal after the deadline is never wrong by then."""
    first = Fork(Player(scenario, arrivals, seed))
    for gateway in first.player.gateways:
        gateway.override = TriesRefused(gateway, first)
    results = first.play()
    refused = [result for result in results.requests if result.refusals]
    from_arrival = dict(first.in_time)
    if later := {result.number for result in refused if result.refusals[0] > AT_ONCE}:
        second = Fork(Player(scenario, arrivals, seed))
        for gateway in second.player.gateways:
            gateway.override = TriesAtArrival(gateway, second, later)
        second.play()
        from_arrival |= second.in_time
    return results, RefusalRow(len(results.requests), len(refused), _true(first.in_time), _true(from_arrival))


def _true(found: Mapping[int, bool]) -> tuple[int, ...]:
    return tuple(sorted(number for number, holds in found.items() if holds))
