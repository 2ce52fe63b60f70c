"""Light load and cold starts: waits for nothing, refusals without need, and the first minute beside the fifth.

    python -m benchmarks.light_load --traces DIR                            # all cold scenarios, 4 seeds: four minutes
    python -m benchmarks.light_load --traces DIR agents --loads .6 --scorers ours,lpwl --seeds 2

Goals: of requests with a prefill under 200 ms, one in a hundred waits in the gateway's queue for more than 100 ms while
the engine that answers it has nothing to prefill; one refusal in twenty is wrong; the share of good requests is within
three points of its usual value in the first minute, and the p99 TTFT within one and a half times.
`warm` is ours with a restored state of learning, engines up before the gateway: the difference is what the gateway's
own start costs, apart from that of engines with empty caches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev
from time import process_time

from benchmarks.replays import Replay, add_replays, command, replays, sweep
from benchmarks.scenarios import SCENARIOS, arrivals, setting
from gateway.cli.tables import aligned
from lab.replay.counterfactual import RefusalRow, play_refused
from lab.replay.player import Player
from lab.replay.queue_results import (
    NOTICED,
    ColdStartRow,
    QueueRow,
    cold_start_row,
    queue_row,
    short_waits,
    wait_quantile,
)
from lab.replay.results import Results
from lab.replay.sim_fleet import OURS, Scenario
from lab.traffic.traces import Arrival

SEEDS = 4
WARM = "warm"  # scorer: ours, by a gateway that has learned before
LEARNED = 1000  # added to the seed of the replay that it has learned from
COLD_LOAD = 0.6  # of the comparison of the first minute with the fifth


@dataclass(frozen=True, slots=True)
class LightLoad:
    """One replay. `took`: s of CPU."""

    scenario: str
    load: float
    scorer: str
    seed: int
    good: float
    ttft_p99: float
    queue: QueueRow
    refusals: RefusalRow
    cold_start: ColdStartRow | None
    named: tuple[str, ...]  # requests that waited for nothing, or were refused wrongly
    took: float


def replay_one(task: Replay) -> LightLoad:
    began = process_time()
    name, load, scorer, seed, traces = task
    offered, played = arrivals(name, load, traces, seed), setting(name)
    if scorer == WARM:
        played = replace(played, starts={})
        results = warm_replay(played, offered, arrivals(name, load, traces, seed + LEARNED), seed)
        refused = sum(bool(result.refusals) for result in results.requests)
        refusals = RefusalRow(len(results.requests), refused)
    else:
        played = played.with_scorer(scorer)
        results, refusals = play_refused(played, offered, seed)
    row, queue, cold = results.overall(), queue_row(results, offered, played), cold_start_row(results, offered, played)
    named, took = tuple(_named(results, offered, played, refusals)), process_time() - began
    return LightLoad(name, load, scorer, seed, row.good, row.ttft[2], queue, refusals, cold, named, took)


def _named(results: Results, offered: Sequence[Arrival], played: Scenario, refusals: RefusalRow) -> Iterator[str]:
    waits = short_waits(results, offered, played)
    for result in results.requests:
        number = result.number
        what = f"#{number} at {result.arrived:.2f} s, {result.prompt_tokens} tokens"
        waited, idle = waits.get(number, (0.0, 0.0))
        if idle > NOTICED:
            yield f"{what}, {result.cached} cached at {result.endpoint}: waited {waited:.2f} s, {idle:.2f} s idle"
        if number in refusals.wrong_from_arrival:
            when = "at the refusal" if number in refusals.wrong else "from arrival on"
            yield f"{what}: refused after {result.refusals[0]:.2f} s, wrong {when}"


def warm_replay(scenario: Scenario, offered: Sequence[Arrival], before: Sequence[Arrival], seed: int) -> Results:
    """By a gateway with the state that another has learned from the requests `before`, as after a restart."""
    teacher, player = Player(scenario, before, seed + LEARNED), Player(scenario, offered, seed)
    teacher.play()
    known, now = teacher.gateways[0].fleet, teacher.clock.now
    learned = {endpoint: known.view.learned(endpoint, now) for endpoint in scenario.profiles}
    for gateway in player.gateways:
        gateway.fleet.restore({endpoint: one for endpoint, one in learned.items() if one is not None}, 0.0, 0.0)
        gateway.fleet.answer_lengths.restore(known.answer_lengths.learned(), 0.0)
    return player.play()


# ---------------------------------------------------------------- tables


def report(found: Sequence[LightLoad], each: bool = False) -> Iterator[str]:
    """Means over the seeds; waits and refusals of all seeds together. `each`: requests by number, too."""
    groups: dict[tuple[str, float, str], list[LightLoad]] = {}
    for one in found:
        groups.setdefault((one.scenario, one.load, one.scorer), []).append(one)
    heading = ("", "load", "good", "p99 TTFT", "refused", "wrong", "from arrival")
    waits = ("short", "idle wait p99", f"> {NOTICED:g} s", "wait p99", "CPU")
    rows = [_row(*key, group) for key, group in groups.items() if key[2] != WARM]
    yield from aligned([(*heading, *waits), *rows])
    starts = [_start(*key, group) for key, group in groups.items() if group[0].cold_start is not None]
    if starts:
        columns = ("good", "p99 TTFT", "refused", "good if possible", "p99 if possible")
        yield ""
        yield from aligned([("first minute / from the fifth on", "load", *columns), *starts])
    for one in found if each else ():
        yield from (f"{one.scenario} {one.load:g} {one.scorer} seed {one.seed}: {line}" for line in one.named)


def _row(scenario: str, load: float, scorer: str, group: Sequence[LightLoad]) -> tuple[str, ...]:
    queues = [one.queue for one in group]
    refused = sum(one.refusals.refused for one in group)
    noticed = sum(wait > NOTICED for row in queues for wait in row.idle_waits)
    return (
        f"{scenario} {scorer}",
        f"{load:g}",
        _mean([one.good for one in group]),
        f"{fmean(one.ttft_p99 for one in group):.2f} s",
        f"{refused} of {sum(one.refusals.offered for one in group)}",
        _share(sum(len(one.refusals.wrong) for one in group), refused),
        _share(sum(len(one.refusals.wrong_from_arrival) for one in group), refused),
        f"{sum(row.short for row in queues)}",
        f"{wait_quantile(queues, 0.99):.3f} s",
        f"{noticed}",
        f"{wait_quantile(queues, 0.99, idle=False):.3f} s",
        f"{sum(one.took for one in group):.0f} s",
    )


def _start(scenario: str, load: float, scorer: str, group: Sequence[LightLoad]) -> tuple[str, ...]:
    rows = [one.cold_start for one in group if one.cold_start is not None]

    def pair(value: Callable[[ColdStartRow], tuple[float, float]], form: str) -> str:
        return " / ".join(format(fmean(value(row)[i] for row in rows), form) for i in range(2))

    return (
        f"{scenario} {scorer}",
        f"{load:g}",
        pair(lambda row: row.good, ".3f"),
        pair(lambda row: row.ttft_p99, ".2f"),
        " / ".join(f"{sum(row.refused[i] for row in rows)} of {sum(row.offered[i] for row in rows)}" for i in range(2)),
        pair(lambda row: row.possible_good, ".3f"),
        pair(lambda row: row.possible_p99, ".2f"),
    )


def _mean(values: Sequence[float]) -> str:
    """With the standard error, where there are several."""
    error = f" ± {stdev(values) / sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{error}"


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.0%})" if whole else "-"


# ---------------------------------------------------------------- command


def chosen(args: argparse.Namespace) -> Iterator[Replay]:
    args.scenarios = args.scenarios or [name for name, one in SCENARIOS.items() if one.cold]
    for name, load, scorer, seed, traces in replays(args):
        yield name, load, scorer, seed, traces
        if not args.scorers and (name, load, scorer) == ("agents", COLD_LOAD, OURS):
            yield name, load, WARM, seed, traces


def main() -> None:
    parser = command(__doc__, SEEDS)
    add_replays(parser)
    parser.add_argument("--each", action="store_true", help="name each idle wait and each wrong refusal")
    args = parser.parse_args()
    print("\n".join(report(list(sweep(replay_one, chosen(args), args.jobs)), args.each)))


if __name__ == "__main__":
    main()
