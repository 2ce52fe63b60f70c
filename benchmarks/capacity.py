"""Capacity: the load at which the good requests fall to 90% of all offered, per scenario and scorer.

    python -m benchmarks.capacity --traces DIR d --scorers ours,lpwl,lmetric --seeds 2
    python -m benchmarks.capacity --page                      # the page again, from the stored results

Attainment at a load says little where nearly all is good, or nearly nothing; capacity is the unit of papers on serving.
Good is TTFT and TPOT within budget, or with `--of attainment` TTFT alone. Loads are those of `benchmarks.routing`:
steps of STEP from 1 find a bracket, and bisection narrows it to NEAR. At each load the mean over the seeds counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.replays import command, names, parsed, rules, stored, sweep
from benchmarks.routing import replay_one
from benchmarks.scenarios import SCENARIOS
from lab.replay.sim_fleet import OURS, REFERENCE, REFERENCES

GOAL = 0.9  # share of all offered
STEP, NEAR = 1.5, 1.03  # factors of the load: between two looks for a bracket, and of the result
LEAST, MOST = 0.2, 6.0  # loads that are tried
RESULTS, PAGE = Path(".cache/capacity.jsonl"), Path(__file__).parent / "CAPACITY.md"
MEASURES = ("good", "attainment")
HEADING = """\
# Capacity

What `python -m benchmarks.capacity` found: the load, and the requests per second, up to which {goal:.0%} of all offered
requests are good (TTFT and TPOT within budget). Beside it the shares at a load of 1, as in [ROUTING.md](ROUTING.md).
Of recorded sessions the load is new sessions per second. *rules*: the newest decision record when the row was
measured, kept by git; "longest first" is a rule from 0093 on: older rows of ours predate it.
"""
MANNER = {"good": "", "attainment": ", by TTFT alone"}

Task = tuple[str, str, str, int, Path]  # scenario, scorer, measure, seeds, traces


@dataclass(frozen=True, slots=True)
class Capacity:
    """`load` 0: below LEAST; `rate`: offered requests/s at `load`; `good`, `met`: shares at a load of 1; `rules`: the
    newest decision record when measured."""

    scenario: str
    scorer: str
    measure: str
    seeds: int
    load: float
    rate: float
    good: float
    met: float
    rules: str = "-"


def highest(share: Callable[[float], float]) -> float:
    """The load up to which `share` is at least GOAL, to within NEAR; 0 where it is less at LEAST, at most MOST."""
    low = high = 1.0
    if share(1.0) >= GOAL:
        while share(high := min(high * STEP, MOST)) >= GOAL:
            if (low := high) == MOST:
                return MOST
    else:
        while share(low := max(low / STEP, LEAST)) < GOAL:
            if (high := low) == LEAST:
                return 0.0
    while high / low > NEAR:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if share(middle) >= GOAL else (low, middle)
    return low


class Replays:
    """Mean figures over the seeds of one scenario and scorer, by load."""

    def __init__(self, scenario: str, scorer: str, seeds: int, traces: Path) -> None:
        self._tasks = [(scenario, scorer, seed, traces) for seed in range(seeds)]
        self._found: dict[float, dict[str, float]] = {}

    def at(self, load: float) -> dict[str, float]:
        if load not in self._found:
            rows = [
                replay_one((scenario, load, scorer, seed, traces))["rows"]["all"]
                for scenario, scorer, seed, traces in self._tasks
            ]
            self._found[load] = {name: fmean(row[name] for row in rows) for name in ("good", "attainment", "goodput")}
        return self._found[load]


def measured(task: Task) -> Capacity:
    scenario, scorer, measure, seeds, traces = task
    replays = Replays(scenario, scorer, seeds, traces)
    load = highest(lambda load: replays.at(load)[measure])
    there, usual = replays.at(load) if load else {}, replays.at(1.0)
    rate = there["goodput"] / there["good"] if there else 0.0
    return Capacity(scenario, scorer, measure, seeds, load, rate, usual["good"], usual["attainment"], rules())


def read(results: Path) -> list[Capacity]:
    """Of repeated measurements, the last."""
    return [Capacity(**row) for row in stored(results, "scenario", "scorer", "measure")]


def page(found: Iterable[Capacity], before: str = "") -> str:
    """`before`: the page so far, of which the rows without a result are kept."""
    parts, groups = sections(before), dict[str, dict[str, Capacity]]()
    for one in found:
        name = title(one.scenario, one.measure)
        earlier = {row.scorer: row for row in shown(parts.get(name, ""), one.scenario, one.measure)}
        groups.setdefault(name, earlier)[one.scorer] = one
    for name, group in groups.items():
        parts[name] = f"{name}\n\n{verdict(group.values())}" + "\n".join(table(group.values()))
    return "\n\n## ".join([HEADING.format(goal=GOAL).rstrip(), *(parts[name] for name in sorted(parts))]) + "\n"


def sections(page: str) -> dict[str, str]:
    """By title."""
    return {part.partition("\n")[0]: part.rstrip() for part in page.split("\n## ")[1:]}


def title(scenario: str, measure: str = "good") -> str:
    return f"({scenario}) {SCENARIOS[scenario].title}{MANNER[measure]}"


def shown(section: str, scenario: str, measure: str) -> Iterator[Capacity]:
    """Rows of a section, as rounded as they are there."""
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith("| scorer"):
            scorer, load, rate, good, met, seeds, *more = (cell.strip() for cell in line.strip()[1:-1].split("|"))
            known = (float(load), float(rate)) if rate else (0.0, 0.0)
            yield Capacity(scenario, scorer, measure, int(seeds), *known, float(good), float(met), *more)


def verdict(found: Iterable[Capacity]) -> str:
    """The load that ours carries, over the best peer's and the reference's; empty without ours or a peer."""
    loads = {one.scorer: one.load for one in found}
    peers = {scorer: load for scorer, load in loads.items() if scorer not in (OURS, *REFERENCES)}
    if OURS not in loads or not peers:
        return ""
    best = max(peers, key=peers.__getitem__)
    parts = [f"{_ratio(loads[OURS], peers[best])} times the load of the best peer, {best}"]
    parts += [f"{_ratio(loads[OURS], loads[REFERENCE])} times that of the reference"] if REFERENCE in loads else []
    return f"Ours carries {', and '.join(parts)}.\n\n"


def loads_of(page: str, scorer: str = OURS) -> dict[str, float]:
    """Capacity for good requests by scenario, as the page has it; LEAST where it is less."""
    row = re.compile(rf"^\| {scorer} \| (?:< )?([\d.]+)", re.MULTILINE)
    found = {name: row.search(sections(page).get(title(name), "")) for name in SCENARIOS}
    return {name: float(match[1]) for name, match in found.items() if match}


def _ratio(load: float, other: float) -> str:
    """A load of 0 is known to be below LEAST."""
    if not load:
        return f"at most {LEAST / other:.2f}" if other else "an unknown number of"
    return f"{load / other:.2f}" if other else f"more than {load / LEAST:.2f}"


def table(found: Iterable[Capacity]) -> Iterator[str]:
    """Markdown, the highest capacity first."""
    yield "| scorer | capacity (load) | requests/s | good at load 1 | TTFT met at load 1 | seeds | rules |"
    yield "|---" * 7 + "|"
    for one in sorted(found, key=lambda one: (-one.load, -one.good)):
        load = f"{one.load:.2f} | {one.rate:.1f}" if one.load else f"< {LEAST:g} |"
        yield f"| {one.scorer} | {load} | {one.good:.3f} | {one.met:.3f} | {one.seeds} | {one.rules} |"


def main() -> None:
    parser = command(__doc__, 2, RESULTS, PAGE)
    parser.add_argument("--scorers", type=names)
    parser.add_argument("--of", choices=MEASURES, default="good", dest="measure")
    args = parsed(parser)
    if args.page:
        PAGE.write_text(page(read(args.results), PAGE.read_text()))
        return
    tasks: list[Task] = [
        (name, scorer, args.measure, args.seeds, args.traces)
        for name in args.scenarios or SCENARIOS
        for scorer in args.scorers or SCENARIOS[name].scorers
    ]
    for one in sweep(measured, tasks, args.jobs, args.results):
        print("\t".join(map(str, asdict(one).values())), flush=True)
    print("\n" + page(read(args.results)))


if __name__ == "__main__":
    main()
