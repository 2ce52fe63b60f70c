"""Ablation of the policies: the scenarios with every idea on, and with one idea off at a time.

    python -m benchmarks.ablation --traces DIR                    # all scenarios, each at its capacity, and the page
    python -m benchmarks.ablation --traces DIR a d --loads 1.1 --ideas "late binding,hedging"
    python -m benchmarks.ablation --page                          # the page again, from the stored results

An idea is patched out of the worker process for one replay: production code has no switches. A patch of what nobody
calls any more would show that the idea is worth nothing. So a patch of a missing name fails, calls of patched functions
are counted, and the page says where a patched function was not called, or not a single placement has changed.

Results are appended to RESULTS. Remove it after a change of the policies: a row is compared with the first row.
The page keeps columns without a result: each says the newest decision record when it was played.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

from benchmarks.ablation_page import Ablated, page
from benchmarks.capacity import PAGE as CAPACITIES
from benchmarks.capacity import loads_of
from benchmarks.replays import Replay, command, floats, names, parsed, rules, stored, sweep
from benchmarks.scenarios import arrivals, setting
from lab.replay.player import play
from lab.replay.results import Results
from lab.replay.sim_fleet import Scenario
from policies.fleet import endpoint_state
from policies.prefix_cache.endpoint_cache import EndpointCache
from policies.queue import hold_rules, late_work
from policies.queue.hold_rules import HoldRules
from policies.queue.placement_round import PlacementRound, with_first
from policies.queue.queued_request import HoldRule, QueuedRequest
from policies.routes.route import Route
from policies.routing import ranking
from policies.types import FOREVER, Candidate, Decision, Endpoint

SEEDS = 4
RESULTS, PAGE = Path(".cache/ablation.jsonl"), Path(__file__).parent / "ABLATION.md"
ANY = 1e-9  # a probability which every endpoint offers

Patch = tuple[Any, str, Any]  # owner, attribute, replacement


def _everywhere(_: Scenario) -> bool:
    return True


def _with_tiers(scenario: Scenario) -> bool:
    return any(len(route.tiers) > 1 for route in scenario.routes.values())


def _with_hedges(scenario: Scenario) -> bool:
    return any(route.hedge != "off" for route in scenario.routes.values())


@dataclass(frozen=True, slots=True)
class Idea:
    """`off`: what is done in its place. `patches` disable the idea; `change` does so where the configuration can."""

    name: str
    off: str
    patches: tuple[Patch, ...] = ()
    change: Callable[[Scenario], Scenario] | None = None
    plays_in: Callable[[Scenario], bool] = _everywhere


_place_late = PlacementRound._place_late


def _late_at_once(
    turn: PlacementRound, queued: QueuedRequest, decision: Decision, candidate: Candidate, rule: HoldRule
) -> Decision | None:
    """Late requests are dispatched at once; requests without a deadline still wait for an idle engine."""
    if queued.deadline == FOREVER:
        return _place_late(turn, queued, decision, candidate, rule)
    return with_first(decision, candidate)


def _zero(*_: object, **named: object) -> int:
    return 0


def _nothing(*_: object, **named: object) -> None:
    return None


def _never(*_: object, **named: object) -> bool:
    return False


def _of_more_value(turn: PlacementRound, queued: QueuedRequest, decision: Decision, here: Endpoint) -> Candidate | None:
    first = decision.ranked[0]
    return None if queued.route.is_same_part(first.endpoint, here) else first


def _no_hedges(found: Scenario) -> Scenario:
    return _with_routes(found, lambda route: {"hedge": "off"})


def _any_chance(found: Scenario) -> Scenario:
    return _with_routes(found, lambda route: {"ttft": route.ttft and route.ttft.model_copy(update={"target": ANY})})


def _with_routes(found: Scenario, update: Callable[[Route], dict[str, Any]]) -> Scenario:
    return replace(found, routes={name: _updated(route, update(route)) for name, route in found.routes.items()})


def _updated(route: Route, update: dict[str, Any]) -> Route:
    """Without the cached properties: a copy of a used route would keep those of before."""
    copy = route.model_copy(update=update)
    for name in copy.__dict__.keys() - Route.model_fields.keys():
        del copy.__dict__[name]
    return copy


OPEN: Patch = (endpoint_state, "reopens_in", _zero)
ON = "nothing"
IDEAS = (
    Idea(ON, "every idea is on"),
    Idea(
        "late binding",
        "requests are dispatched at once, as if there were always room",
        ((hold_rules, "no_room", _nothing), OPEN),
    ),
    Idea("TPOT pressure limit", "answers in progress never close an engine", (OPEN,)),
    Idea(
        "price of TPOT misses",
        "answers that a prefill stalls cost nothing",
        ((ranking, "expected_tpot_misses", _zero),),
    ),
    Idea("near ties", "values that are nearly equal are not", ((ranking, "EQUAL", 0.0), (ranking, "NEAR", 0.0))),
    Idea("soon is better", "a first token in time is as good as a sooner one", ((ranking, "SOON", 0.0),)),
    Idea("price of engine time", "a long prefill costs others no time", ((ranking, "ENGINE", 0.0),)),
    Idea(
        "spilling",
        "a queued request never moves to another tier",
        ((PlacementRound, "move", _nothing),),
        plays_in=_with_tiers,
    ),
    Idea(
        "spill at the last moment",
        "a queued request moves only to a tier of more value",
        ((PlacementRound, "_other_place", _of_more_value),),
        plays_in=_with_tiers,
    ),
    Idea(
        "late requests last",
        "requests that cannot make their deadline are dispatched at once",
        ((PlacementRound, "_place_late", _late_at_once),),
    ),
    Idea(
        "longest first",
        "of a queue that is too long, the last requests are late, whatever their prefills",
        ((HoldRules, "longest_in_the_way", _nothing),),
    ),
    Idea(
        "harm of late requests",
        "late requests go to idle engines whatever answers they stall",
        ((hold_rules, "HARMLESS", FOREVER),),
    ),
    Idea("calm engine for late prefills", "an idle engine is enough for any", ((hold_rules, "CALM", FOREVER),)),
    Idea(
        "early refusals",
        "late requests wait to the queue's limit",
        ((late_work, "PATIENCE", FOREVER),),
    ),
    Idea("knowledge of caches", "nothing is believed cached", ((EndpointCache, "hit", _zero),)),
    Idea("hedging", "no second attempt before the first has failed", change=_no_hedges, plays_in=_with_hedges),
    Idea(
        "chances of tiers",
        "the first tier that fits is taken, late or not, and no request counts as late",
        change=_any_chance,
        plays_in=_with_tiers,
    ),
    Idea(
        "TPOT in the choice of a tier",
        "tiers are compared by their TTFT alone",
        ((ranking, "_pace", _nothing),),
        plays_in=_with_tiers,
    ),
)
BY_NAME = {idea.name: idea for idea in IDEAS}


@contextmanager
def without(idea: Idea) -> Iterator[Counter[str]]:
    """The process without the idea. Counts the calls of each patched function."""
    calls: Counter[str] = Counter()
    with ExitStack() as out:
        for owner, attribute, value in idea.patches:
            name = f"{owner.__name__.rpartition('.')[2]}.{attribute}"
            if callable(value):
                calls[name] = 0
                value = _counted(value, name, calls)
            out.enter_context(patch.object(owner, attribute, value))
        yield calls


def _counted(function: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    def counting(*args: Any, **named: Any) -> Any:
        calls[name] += 1
        return function(*args, **named)

    return counting


def placements(results: Results) -> int:
    """Checksum of where and when every request was sent and answered."""
    return crc32(repr([(r.endpoint, r.sent_at, r.first_at, r.ended_at) for r in results.requests]).encode())


def replay_one(task: Replay) -> Ablated:
    name, load, off, seed, traces = task
    idea, played = BY_NAME[off], setting(name)
    if idea.change is not None:
        played = idea.change(played)
    offered = arrivals(name, load, traces, seed)
    with without(idea) as calls:
        results = play(played, offered, seed)
    uncalled = tuple(function for function, count in calls.items() if not count)
    row = results.overall()
    return Ablated(name, load, off, seed, row.good, placements(results), uncalled, rules(), row.ttft[:2])


def tasks(
    names: Sequence[str], loads: Sequence[float], ideas: Sequence[str], seeds: int, traces: Path
) -> Iterator[Replay]:
    """`loads`: empty for the capacity of each scenario, which has to be known."""
    capacities = loads_of(CAPACITIES.read_text())
    for name in names:
        played = setting(name)
        playing = [idea for idea in ideas if BY_NAME[idea].plays_in(played)]
        for load, idea, seed in product(loads or [capacities[name]], playing, range(seeds)):
            yield name, load, idea, seed, traces


def read(results: Path) -> list[Ablated]:
    """Of repeated replays, the last; of ideas that there still are."""
    rows = stored(results, "scenario", "load", "idea", "seed", "rules")
    tuples = ("uncalled", "ttft")
    return [
        Ablated(**{**row, **{name: tuple(row.get(name, ())) for name in tuples}})
        for row in rows
        if row["idea"] in BY_NAME
    ]


def named(text: str) -> list[str]:
    """Ideas by name, and ON, to compare with."""
    return list(dict.fromkeys([ON, *names(text)]))


def main() -> None:
    parser = command(__doc__, SEEDS, RESULTS, PAGE)
    parser.add_argument("--loads", type=floats, default=[], help="if absent, the capacity of each scenario")
    parser.add_argument("--ideas", type=named, default=list(BY_NAME), help="names, separated by commas; all, if absent")
    args = parsed(parser)
    if unknown := set(args.ideas) - set(BY_NAME):
        parser.error(f"--ideas: no idea {', '.join(sorted(unknown))}; known: {', '.join(BY_NAME)}")
    if not args.page:
        scenarios = args.scenarios or list(loads_of(CAPACITIES.read_text()))
        todo = tasks(scenarios, args.loads, args.ideas, args.seeds, args.traces)
        for one in sweep(replay_one, todo, args.jobs, args.results):
            print("\t".join(map(str, asdict(one).values())), flush=True)
    PAGE.write_text(page({idea.name: idea.off for idea in IDEAS}, ON, read(args.results), PAGE.read_text()))


if __name__ == "__main__":
    main()
