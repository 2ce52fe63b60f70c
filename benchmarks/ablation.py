"""Ablation of the policies: the scenarios with every idea on, and with one idea off at a time.

    python -m benchmarks.ablation --traces DIR                    # all four, at LOADS
    python -m benchmarks.ablation --traces DIR a d --loads 1.1

An idea is patched out of the worker process for one replay: production code has no switches. Per cell the share of
offered requests within budget (TTFT and TPOT), the share within the TTFT budget, and the p99 of the TTFT.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.routing import floats
from benchmarks.scenarios import SCENARIOS, arrivals, setting
from gateway.replay.player import play
from gateway.replay.sim_fleet import Scenario
from policies.fleet import endpoint_state
from policies.prefix_cache.endpoint_cache import EndpointCache
from policies.queue.placement_round import PlacementRound, with_first
from policies.routes.route import Route
from policies.routing.candidates import QueuedRequest
from policies.scorers import scorers
from policies.types import FOREVER, Decision

LOADS = (0.9, 1.25)
ANY = 1e-9  # a probability which every endpoint offers

Patch = tuple[Any, str, Any]  # owner, attribute, replacement
Task = tuple[str, float, str, int, Path]  # scenario, load, disabled idea, seed, traces


@dataclass(frozen=True, slots=True)
class Idea:
    """`patches` disable the idea; `change` does so where the configuration can."""

    name: str
    patches: tuple[Patch, ...] = ()
    change: Callable[[Scenario], Scenario] | None = None
    scenarios: str = "abcd"  # scenarios in which the idea plays a part


@dataclass(frozen=True, slots=True)
class Cell:
    good: float
    met: float
    p99: float

    def __str__(self) -> str:
        return f"{self.good:.3f}, {self.met:.3f}, {self.p99:.1f} s"


_place_best_effort = PlacementRound._place_best_effort


def _late_at_once(turn: PlacementRound, queued: QueuedRequest, decision: Decision) -> Decision | None:
    """Late requests are dispatched at once; requests without a deadline still wait for an idle engine."""
    if queued.deadline == FOREVER:
        return _place_best_effort(turn, queued, decision)
    return with_first(decision, turn.best_effort_order(queued, decision)[0])


def _no_hit(*_: object) -> int:
    return 0


def _always(*_: object) -> bool:
    return True


def _nothing(*_: object) -> None:
    return None


def _forever(*_: object) -> float:
    return FOREVER


def _none(*_: object) -> float:
    return 0.0


def _no_hedges(found: Scenario) -> Scenario:
    routes = {name: route.model_copy(update={"hedge": "off"}) for name, route in found.routes.items()}
    return replace(found, routes=routes)


def _any_chance(found: Scenario) -> Scenario:
    """The first tier that fits is taken. The target also defines lateness, so no request is late."""
    return replace(found, routes={name: _aimless(route) for name, route in found.routes.items()})


def _aimless(route: Route) -> Route:
    ttft = route.ttft and route.ttft.model_copy(update={"target": ANY})
    return route.model_copy(update={"ttft": ttft})


OPEN: Patch = (endpoint_state, "reopens_in", _none)
ON = "everything on"
IDEAS = (
    Idea(ON),
    Idea("late binding", ((PlacementRound, "has_room", _always), OPEN)),
    Idea("TPOT pressure limit", (OPEN,)),
    Idea("price of TPOT misses", ((scorers, "TPOT_MISS", 0.0),)),
    Idea("price of engine time", ((scorers, "ENGINE_TIME", 0.0),)),
    Idea("rebalancing", ((PlacementRound, "rebalance", _nothing),)),
    Idea("spill at the last moment", ((PlacementRound, "_spill_at", _forever),)),
    Idea("late requests last", ((PlacementRound, "_place_best_effort", _late_at_once),)),
    Idea("prefix affinity", ((EndpointCache, "hit", _no_hit),)),
    Idea("hedging", change=_no_hedges),
    Idea("tier walk by probability", change=_any_chance, scenarios="c"),
)
BY_NAME = {idea.name: idea for idea in IDEAS}


def replay_one(task: Task) -> Cell:
    name, load, without, seed, traces = task
    idea, played = BY_NAME[without], setting(name)
    if idea.change is not None:
        played = idea.change(played)
    with ExitStack() as out:
        for owner, attribute, value in idea.patches:
            out.enter_context(patch.object(owner, attribute, value))
        row = play(played, arrivals(name, load, traces, seed), seed).rows()[-1]
    return Cell(row.good, row.attainment, row.ttft[2])


def tasks(names: Sequence[str], loads: Sequence[float], seed: int, traces: Path) -> Iterator[Task]:
    for name, load, idea in product(names, loads, IDEAS):
        if name in idea.scenarios:
            yield name, load, idea.name, seed, traces


def table(load: float, cells: dict[tuple[str, float, str], Cell]) -> Iterator[str]:
    """Markdown: an idea a row, a scenario a column."""
    names = list(dict.fromkeys(name for name, at, _ in cells if at == load))
    yield f"| off, at load {load:g} | " + " | ".join(f"({name})" for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for idea in IDEAS:
        found = (cells.get((name, load, idea.name)) for name in names)
        yield f"| {'nothing' if idea.name == ON else idea.name} | " + " | ".join(str(c or "") for c in found) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="a, b, c or d; all, if absent")
    parser.add_argument("--traces", type=Path, required=True, help="where the three public traces are")
    parser.add_argument("--loads", type=floats, default=list(LOADS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    todo = list(tasks(args.scenarios or list(SCENARIOS), args.loads, args.seed, args.traces))
    cells: dict[tuple[str, float, str], Cell] = {}
    with ProcessPoolExecutor() as workers:
        for (name, load, idea, *_), cell in zip(todo, workers.map(replay_one, todo), strict=True):
            cells[name, load, idea] = cell
            print(f"{name} {load:4.2f} {idea:20} {cell}", flush=True)
    for load in args.loads:
        print("\n".join(["", *table(load, cells)]))


if __name__ == "__main__":
    main()
