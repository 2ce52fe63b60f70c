"""Two autoscalers on one episode in the simulator: desired replicas by replay, and llm-d's SLO law.

    python -m benchmarks.autoscaling              # the episode under both laws, and fixed fleets
    python -m benchmarks.autoscaling --laws ours  # a choice of LAWS
    python -m benchmarks.autoscaling --rest       # 40 minutes at a constant rate: reversals
    python -m benchmarks.autoscaling --bias       # thinned replays against whole ones

The episode is that of llm-d's guide (guides/workload-autoscaling, benchmark-templates/BENCHMARK.md): 4,000 prompt and
1,000 output tokens, steps of 2, 4, 6, 8, 10, 4 and 1 requests/s, 3 to 8 engines, 100 s from the decision to a ready
engine, budgets of 3 s and 100 ms. A simulated engine (32b-2xh100) carries about 1.1 requests/s of these, the
measured ones 1.4 to 1.5: rates are multiplied by RATE, so that eight engines are as busy at the peak.

llm-d's law is restated from the same guide, with its thresholds, clamp, average, credit and the rate limits of its
HorizontalPodAutoscaler. Its signal is what was measured in the last minute, with the wait so far of requests without a
first token; the guide uses predictions of the same, which rise earlier. Both laws get a value every 15 s and engines
that leave finish their requests.
"""

from __future__ import annotations

import argparse
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, floor
from random import Random
from statistics import fmean
from time import process_time

from gateway.config.models import Config
from lab.capacity.fleet_size import FleetSizeQuestion, FleetSizeResult, replayed
from lab.capacity.learned_profile import representative
from lab.capacity.replica_law import KEPT, ReplicaLaw
from lab.capacity.replicas_needed import ReplicasQuestion, replicas_needed
from lab.capacity.smallest_fleet import FleetSearch
from lab.replay.player import Player
from lab.replay.results import ReplayOutcome, quantile
from lab.replay.sim_fleet import Scenario, scenario_from
from lab.traffic.session_sample import with_sessions
from lab.traffic.traces import Agents, Arrival, agents
from policies.types import Pool

TTFT, TPOT, TARGET = 3.0, 0.1, 0.95
LEAST, MOST, START = 3, 8, 100.0
RATE = 0.75
STEPS = ((2, 330), (4, 360), (6, 360), (8, 360), (10, 360), (4, 360), (1, 300))  # requests/s, s
SYNC = 15.0  # s between two looks of a HorizontalPodAutoscaler
ASK = 60.0  # s between two replays
COST = 3_000  # requests of a question's replays: 5% of a core at 1 ms each
LAWS = ("ours", "llm-d", "8", "6")
REST = (2.5,)  # requests/s, times RATE
BIAS_RATES = (1.5,)  # sessions/s
SIMULATED = (None, 4, 2, 1)  # engines of a replay; None: all


def scenario() -> Scenario:
    pool = {"backend": "vllm", "model": "m", "profile": "32b-2xh100"}
    pool["endpoints"] = [f"http://e{i}:80" for i in range(MOST)]  # type: ignore[assignment]
    ttft = {"budget": f"{TTFT:g}s", "target": TARGET}
    route = {"tiers": ["main"], "ttft": ttft, "tpot": {"budget": f"{TPOT:g}s"}, "total": "off", "workload": "chat"}
    return scenario_from(Config.model_validate({"pools": {"main": pool}, "routes": {"chat": route}}))


def agent_scenario() -> Scenario:
    pool = {"backend": "vllm", "model": "m", "profile": "8b-h100", "endpoints": ["http://e0:80"]}
    ttft = {"budget": "1s", "target": TARGET}
    route = {"tiers": ["main"], "ttft": ttft, "tpot": {"budget": "50ms"}, "total": "off", "workload": "agent"}
    return scenario_from(Config.model_validate({"pools": {"main": pool}, "routes": {"chat": route}}))


def episode(steps: Sequence[tuple[float, float]], seed: int) -> list[Arrival]:
    """Evenly spaced, as inference-perf sends a constant rate, with a jitter of a tenth."""
    random, arrivals, begin = Random(seed), list[Arrival](), 0.0
    for rate, seconds in steps:
        for i in range(int(rate * RATE * seconds)):
            at = begin + (i + random.uniform(0, 0.1)) / (rate * RATE)
            prompt, output = (int(mean * random.uniform(0.9, 1.1)) for mean in (4_000, 1_000))
            number = len(arrivals) + 1
            arrivals.append(Arrival(at, prompt, output, array("Q", range(number << 20, (number << 20) + 7)), "chat"))
        begin += seconds
    return with_sessions(arrivals)


# ---------------------------------------------------------------- a fleet that changes


class ScaledFleet:
    """The engines of a replay: `asked` for, and the `ready` ones, START s later. Those that leave finish."""

    def __init__(self, player: Player, count: int) -> None:
        self._player = player
        self._pool: Pool = player.scenario.pools[0]
        self.asked = self.ready = count
        self.changes: list[tuple[float, int]] = [(0.0, count)]
        self._show()

    def ask(self, count: int) -> None:
        clock = self._player.clock
        if count == self.asked:
            return
        self.changes.append((clock.now, count))
        self.asked = count
        if count < self.ready:
            self.ready = count
            self._show()
        elif count > self.ready:
            clock.at(clock.now + START, self._on_started, count)

    def _on_started(self, count: int) -> None:
        if self.ready < (now_ready := min(count, self.asked)):
            self.ready = now_ready
            self._show()

    def _show(self) -> None:
        shown = replace(self._pool, endpoints=self._pool.endpoints[: self.ready])
        for gateway in self._player.gateways:
            gateway.fleet.reload([shown])

    def mean(self, end: float) -> float:
        times = [*(at for at, _ in self.changes), end]
        held = [(later - at) * count for (at, count), later in zip(self.changes, times[1:], strict=True)]
        return sum(held) / end

    def reversals(self) -> list[float]:
        """Times at which the direction of changes turned."""
        counts = self.changes
        signs = [(at, after - before) for (_, before), (at, after) in pairwise(counts)]
        return [at for (_, one), (at, other) in pairwise(signs) if one * other < 0]


# ---------------------------------------------------------------- laws


class ReplayLaw:
    """Ours: `replicas_needed` every minute on what has arrived so far, held by `ReplicaLaw`."""

    def __init__(self, player: Player, fleet: ScaledFleet, least: int = LEAST) -> None:
        self._player = player
        self._fleet = fleet
        self._least = least
        self._law = ReplicaLaw(least, MOST, fleet.asked, player.clock.now)
        self._asked_at = -ASK
        self.seconds: list[float] = []  # CPU of each question

    def desired(self, now: float) -> int:
        if now - self._asked_at >= ASK:
            self._asked_at, began = now, process_time()
            self._law.on_need(replicas_needed(self._question(now)).needed, now)
            self.seconds.append(process_time() - began)
        return self._law.desired

    def _question(self, now: float) -> ReplicasQuestion:
        start, player = max(now - KEPT, 0.0), self._player
        seen = [replace(each, at=each.at - start) for each in player.arrivals if start <= each.at < now]
        gateway = player.gateways[0]
        names = [endpoint.id for endpoint in player.scenario.pools[0].endpoints[: self._fleet.ready]]
        known = [learned for name in names if (learned := gateway.fleet.view.learned(name, now)) is not None]
        return ReplicasQuestion(
            scenario=player.scenario,
            arrivals=seen,
            pool="main",
            current=self._fleet.ready,
            least=self._least,
            most=MOST,
            start_time=START,
            now=now - start,
            cost=COST,
            learned={} if (found := representative(known)) is None else {"main": found},
        )


class SloLaw:
    """llm-d's."""

    UP, DOWN, CLAMP, SMOOTH, RATES = 0.55, 0.40, 2.0, 45.0, 60.0

    def __init__(self, player: Player, fleet: ScaledFleet, least: int = LEAST) -> None:
        self._player = player
        self._fleet = fleet
        self._least = least
        self._signals = deque[tuple[float, float]]()
        self._wanted = deque[tuple[float, int]]()  # of the last 180 s
        self._grown = deque[tuple[float, int]]()  # engines added in the last 60 s
        self._shrunk_at = -1e9
        self.seconds: list[float] = []

    def desired(self, now: float) -> int:
        self._signals.append((now, min(self._saturation(now), self.CLAMP)))
        while self._signals[0][0] <= now - self.SMOOTH:
            self._signals.popleft()
        wanted = min(max(self._formula(fmean(value for _, value in self._signals)), self._least), MOST)
        return self._limited(wanted, now)

    def _saturation(self, now: float) -> float:
        results = self._player.results.requests
        ttfts = [
            (result.first_at or now) - result.arrived
            for result in results
            if result.end is not ReplayOutcome.SHED and (result.first_at is None or result.first_at > now - self.RATES)
        ]
        tpots = [
            result.tpot
            for result in results
            if result.end is ReplayOutcome.COMPLETED and (result.ended_at or 0.0) > now - self.RATES and result.tpot
        ]
        return max(quantile(ttfts, 0.9) / TTFT if ttfts else 0.0, quantile(tpots, 0.9) / TPOT if tpots else 0.0)

    def _formula(self, s: float) -> int:
        n, ready = self._fleet.asked, self._fleet.ready
        credit = ready / n if 0 < ready < n else 1.0
        if s > self.UP:
            return n + max(ceil(n * (s * credit / self.UP - 1)), 0)
        return n - floor(n * (1 - s / self.DOWN)) if s < self.DOWN else n

    def _limited(self, wanted: int, now: float) -> int:
        """Of the HorizontalPodAutoscaler: least of 30 s upwards, most of 180 s downwards, and its rates."""
        self._wanted.append((now, wanted))
        while self._wanted[0][0] <= now - 180.0:
            self._wanted.popleft()
        n = self._fleet.asked
        up = min(value for at, value in self._wanted if at > now - 30.0)
        down = max(value for _, value in self._wanted)
        while self._grown and self._grown[0][0] <= now - 60.0:
            self._grown.popleft()
        if up > n:
            before = n - sum(count for _, count in self._grown)
            found = min(up, before + max(before, 4))
            if found > n:
                self._grown.append((now, found - n))
            return max(found, n)
        if down < n and now - self._shrunk_at >= 120.0:
            self._shrunk_at = now
            return n - 1
        return n


class FixedLaw:
    def __init__(self, count: int) -> None:
        self._count = count
        self.seconds: list[float] = []

    def desired(self, now: float) -> int:
        return self._count


# ---------------------------------------------------------------- runs


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    law: str
    seed: int
    attainment: float  # of both budgets, among all requests
    replicas: float  # mean, to the end of the episode
    reversals: list[float] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # CPU of each question
    missed: list[float] = field(default_factory=list)  # arrivals that missed, s

    def line(self) -> str:
        turns = ", ".join(f"{at:.0f}" for at in self.reversals) or "none"
        sizes = " ".join(f"{at:.0f}:{count}" for at, count in self.changes)
        cost = f"; CPU a question {fmean(self.seconds):.1f} s, at most {max(self.seconds):.1f}" if self.seconds else ""
        return (
            f"{self.law:6} seed {self.seed}: {self.attainment:.2%} at {self.replicas:.2f} engines; reversals: {turns}; "
            f"{sizes}{cost}"
        )


def run(law: str, steps: Sequence[tuple[float, float]], seed: int, least: int = LEAST) -> EpisodeResult:
    arrivals = episode(steps, seed)
    player = Player(scenario(), arrivals, seed)
    fleet = ScaledFleet(player, int(law) if law.isdigit() else least)
    made = {"ours": ReplayLaw, "llm-d": SloLaw}
    rule = FixedLaw(int(law)) if law.isdigit() else made[law](player, fleet, least)
    _every(player, SYNC, lambda now: fleet.ask(rule.desired(now)))
    results = player.play()
    missed = [result.arrived for result in results.requests if not results.is_good(result)]
    end = sum(seconds for _, seconds in steps)
    return EpisodeResult(
        law,
        seed,
        1 - len(missed) / len(arrivals),
        fleet.mean(end),
        fleet.reversals(),
        fleet.changes,
        rule.seconds,
        missed,
    )


def _every(player: Player, interval: float, act: Callable[[float], None]) -> None:
    def due() -> None:
        act(player.clock.now)
        if player.clock.now < player.arrivals[-1].at:
            player.clock.at(player.clock.now + interval, due)

    player.clock.at(interval, due)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--laws", default=",".join(LAWS), help="of the episode")
    arguments.add_argument("--seeds", type=int, default=1)
    arguments.add_argument("--rest", action="store_true", help="40 minutes at each of REST requests/s")
    arguments.add_argument("--bias", action="store_true", help="thinned replays against whole ones")
    args = arguments.parse_args()
    if args.bias:
        print_bias(args.seeds)
        return
    tasks = [(law, STEPS, seed, LEAST) for law in args.laws.split(",") for seed in range(1, args.seeds + 1)]
    if args.rest:
        tasks = [(law, ((rate, 2_400),), 1, 1) for law in args.laws.split(",") for rate in REST]
    with ProcessPoolExecutor() as processes:
        for result in processes.map(run_task, tasks):
            print(result.line(), flush=True)


def run_task(task: tuple[str, Sequence[tuple[float, float]], int, int]) -> EpisodeResult:
    return run(*task)


def print_bias(seeds: int) -> None:
    """Smallest fleets for five minutes of conversations, by the number of engines that are simulated."""
    tasks = [(rate, simulated, seed) for rate in BIAS_RATES for simulated in SIMULATED for seed in range(1, seeds + 1)]
    with ProcessPoolExecutor() as processes:
        for (rate, simulated, seed), (needed, attained, requests) in zip(
            tasks, processes.map(bias_of, tasks), strict=True
        ):
            shown = "all" if simulated is None else simulated
            print(
                f"{rate:g} sessions/s, seed {seed}, {shown} engines: {needed} needed, {attained:.1%}, {requests}",
                flush=True,
            )


def bias_of(task: tuple[float, int | None, int]) -> tuple[int, float, int]:
    """Needed engines, attainment with the number that whole replays find, and requests replayed."""
    rate, simulated, seed = task
    shape = Agents(seconds=300.0, sessions=rate, turns=8.0)
    arrivals = with_sessions([replace(each, route="chat") for each in agents(shape, seed)])
    asked = FleetSizeQuestion(agent_scenario(), arrivals, "main", MOST, slice=300.0)

    def replay(n: int) -> FleetSizeResult:
        cost = None if simulated is None else ceil(simulated / n * len(arrivals)) + 1
        return replayed(replace(asked, current=n, cost=cost), n)

    found = FleetSearch(replay, 1, 24).around(round(rate * 2.2))
    return found.needed, found.curve[found.needed].attainment, sum(each.requests for each in found.curve.values())


if __name__ == "__main__":
    main()
