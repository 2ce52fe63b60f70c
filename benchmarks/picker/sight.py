"""Goodput of picked requests beside `serve`'s, by how much of an answer the picker sees, in replays of public traces.

    python -m benchmarks.picker.sight --traces DIR [a d] [--loads .75,1.0] [--seeds N] [--write]

The decision code is the gateway's own, as in `benchmarks.routing`. A picker differs from `serve` so: it sends nothing
twice and gives up no silent engine; what it learns of an answer is by `Sight`. Requests are held as by `serve`, which
takes `pick.hold`; those of SHORT for no longer than WITHIN, and the best engine of that moment is named, or the least
loaded one where all are at their cap.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.picker.page import SightRow, write_sights
from benchmarks.replays import floats
from benchmarks.scenarios import arrivals, setting
from gateway.parts.picker.envoy_request import WATCHED
from gateway.parts.picker.picker import WITHIN, UncountedPicks
from lab.replay.player import Player
from lab.replay.sim_fleet import Scenario
from lab.replay.sim_gateway import ActiveRequest, SimGateway
from policies.fleet.fleet import AttemptReport, Fleet
from policies.queue.queued_request import QueuedRequest
from policies.routing.decide import decide
from policies.types import FOREVER, AttemptOutcome, Candidate, Decision, Placement, PoolEstimate, RequestView


class Sight(Enum):
    """What is seen of an answer."""

    SERVE = "serve"
    BODY = "first token, tokens, end and usage"
    ACCESS_LOG = "first token, and end with the number of tokens"
    SHORT = "as BODY, held for WITHIN"


class SightedFleet(Fleet):
    """Is told what the picker sees. `uncounted`: attempts that were named an engine by load alone."""

    def __init__(self, scenario: Scenario, sight: Sight) -> None:
        super().__init__(scenario.pools)
        self.uncounted: set[Hashable] = set()
        self._is_logged = sight is Sight.ACCESS_LOG
        self._away: dict[Hashable, tuple[float, float]] = {}  # first token, and s per token then
        self._endpoints: dict[Hashable, str] = {}
        self._ended = 0

    def on_sent(
        self, key: Hashable, candidate: Candidate, prompt: PoolEstimate, now: float, stream: bool, **more: Any
    ) -> None:
        if key in self.uncounted:
            return
        super().on_sent(key, candidate, prompt, now, stream, **more)
        self._endpoints[key] = candidate.endpoint.id

    def on_first_token(self, key: Hashable, now: float, engine_ttft: float | None = None) -> None:
        super().on_first_token(key, now, engine_ttft)
        if self._is_logged and key in self._endpoints:
            self._away[key] = now, self.snapshot(now).loads[self._endpoints[key]].tpot

    def on_progress(self, tokens: Iterable[tuple[Hashable, int]], now: float) -> None:
        super().on_progress([(key, self._expected(key, now)) for key, _ in tokens] if self._is_logged else tokens, now)

    def _expected(self, key: Hashable, now: float) -> int:
        """Tokens of an answer that is not read, as `ServedAnswer.output_tokens`."""
        since, pace = self._away.get(key, (now, 1.0))
        return 1 + int((now - since) / pace)

    def on_ended(self, key: Hashable, outcome: AttemptOutcome, now: float, report: AttemptReport | None = None) -> None:
        self._ended += 1
        self._away.pop(key, None)
        self._endpoints.pop(key, None)
        is_watched = not self._is_logged or self._ended % WATCHED == 0
        if report is not None and not is_watched and outcome is AttemptOutcome.COMPLETED:
            report = AttemptReport(mean_itl=report.mean_itl, output_tokens=report.output_tokens)
        super().on_ended(key, outcome, now, report)


class PickedGateway(SimGateway):
    def __init__(self, sight: Sight, scenario: Scenario, *more: Any) -> None:
        super().__init__(scenario, *more)
        self.fleet = self._sighted = SightedFleet(scenario, sight)
        self._spread = UncountedPicks()
        self._within = WITHIN if sight is Sight.SHORT else FOREVER

    def arrive(self, number: int, arrival: Any) -> None:
        super().arrive(number, arrival)
        if (request := self.active.get(number)) is not None and request.decision is None and self._within < FOREVER:
            self.clock.at(self.clock.now + self._within, self._decide_at_once, number)

    def on_decision(self, request: ActiveRequest, decision: Decision) -> None:
        super().on_decision(request, replace(decision, deadline=FOREVER))

    def _decide_at_once(self, number: int) -> None:
        request = self.active.get(number)
        if request is None or request.decision is not None or request.machine is not None:
            return None
        now = self.clock.now
        self.queue.leave(number, now)
        view, tenant = RequestView(request.entered_at, stream=True), request.arrival.tenant
        queued = QueuedRequest(number, view, request.estimate, request.route, number, tenant)
        decision = decide(queued, self.fleet.snapshot(now), self.fleet.view, now)
        if decision.ranked and not decision.ranked[0].load.full:
            return self.on_decision(request, replace(decision, outcome=Placement.PLACE))
        self._sighted.uncounted.add(request.key(1))
        named = least_loaded(self.fleet, request, self._spread, now)
        return self.on_decision(request, Decision(Placement.PLACE, now, FOREVER, [named]))


def least_loaded(fleet: Fleet, request: ActiveRequest, spread: UncountedPicks, now: float) -> Candidate:
    loads, pools = fleet.snapshot(now).loads, [tier.pool for tier in request.route.tiers]
    chosen = spread.take({id: load for id, load in loads.items() if fleet.view.pool_of(id) in pools})[0]
    pool = fleet.view.pool_of(chosen)
    prompt = request.estimate.pools[pool]
    (candidate,) = fleet.view.candidates({chosen: loads[chosen]}, prompt, pools.index(pool), 0.0, now, FOREVER)
    return candidate


@dataclass(frozen=True, slots=True)
class Task:
    scenario: str
    load: float
    seed: int
    sight: Sight
    traces: Path


def good(task: Task) -> float:
    """Share of all offered requests."""
    played, offered = setting(task.scenario), arrivals(task.scenario, task.load, task.traces, task.seed)
    if task.sight is Sight.SERVE:
        player = Player(played, offered, task.seed)
    else:
        once = {"hedge": "off", "max_attempts": 1}
        routes = {name: route.model_copy(update=once) for name, route in played.routes.items()}
        gateway = partial(PickedGateway, task.sight)
        player = Player(replace(played, routes=routes), offered, task.seed, gateway=gateway)
    return next(row.good for row in player.play().rows() if row.name == "all")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", default=["a", "d"])
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--loads", type=floats, default=[0.75, 1.0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="keep the results, and write the page")
    args = parser.parse_args(arguments)
    rows = []
    with ProcessPoolExecutor() as workers:
        for name in args.scenarios:
            for load in args.loads:
                tasks = [Task(name, load, seed, sight, args.traces) for sight in Sight for seed in range(args.seeds)]
                found = list(workers.map(good, tasks))
                means = [fmean(found[at : at + args.seeds]) for at in range(0, len(found), args.seeds)]
                rows.append(SightRow(name, load, means))
                print(rows[-1].line(), flush=True)
    if args.write:
        write_sights(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
