"""benchmarks/ROUTING.md: results of `benchmarks.routing`, in a table per scenario.

Per load: the best baseline, ours and the reference, by the share of good requests (TTFT and TPOT within budget, of all
offered), means over the seeds; and the cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.replays import mean_points
from benchmarks.scenarios import SCENARIOS, Scenario
from lab.replay.queue_results import QueueRow, wait_quantile
from lab.replay.sim_fleet import BASELINES, OURS, POOLABLE, POOLED, REFERENCE, REFERENCE_LRU

Result = dict[str, Any]
HEADING = """\
# Routing

What `python -m benchmarks.routing` found: replays of public traces through the gateway's own decision code, against
simulated engines (`firsttoken replay` is the same workbench). A load of 1 is that at which round robin meets the
TTFT of half of the requests. *good*: TTFT and TPOT within budget, of all offered. The best baseline is chosen anew
at every load, after the fact, of two or three that were played (`lpwl`, `lmetric`, `argmin_ttft`, `least_load` or
`cache_aware`: the best ones of an earlier sweep of all fourteen; of (adapters) the one whose forecast knows adapters,
of (c) two that pool all tiers). *reference* is a clairvoyant scheduler with perfect caches (`lab/replay/clairvoyant.py`
says what it knows and why it bounds what is reachable), *real caches* the same with what each engine has computed and
not evicted: no bound. A dash: not played.

From a cold start, the gateway comes up before its engines, and requests come once these are up; an event of a stream
carries four tokens. *503s*: of ours, per replay. *idle wait*: time that a request with less than 200 ms to prefill
spends in our queue while the engine that answers it prefills nothing; p99. `python -m benchmarks.light_load` says more.
"""
COLUMNS = (
    "load",
    "best baseline",
    "ours",
    "reference",
    "real caches",
    "ours/best",
    "ours/ref",
    "p99 best",
    "p99 ours",
    "p90 held",
)
TROUBLED = ("lost", "in trouble: best", "ours", "reference")  # lost: before the first token
PEERS = frozenset((*BASELINES, *(POOLED + name for name in POOLABLE)))
LOADS = (0.2, 0.4, 0.7, 1.0, 1.5, 2.2)  # of the table of differences
DIFFERENCES = """\
## Ours less the best peer, at every load

In points of good requests; the peer is the best one of those that were played at that load. Bold: ours is below. One
seed, or their number in brackets, with the standard error of the differences of equal seeds. The peer of (c) pools all
tiers, and serves far fewer requests in the first one (*tier 1*, below). The command of a row is
`python -m benchmarks.routing --traces DIR SCENARIO --loads .2,.4,.7,1,1.5,2.2 --scorers ours,PEER,...`.
"""
TIERED = ("tier 1 best", "tier 1 ours", "tier 1 ref", "USD ours/ref")


class Cell:
    """All seeds of one load and scorer. `by_seed`: shares of good requests."""

    def __init__(self, scorer: str, results: Sequence[Result]) -> None:
        self.by_seed = {result["seed"]: result["rows"]["all"]["good"] for result in results}
        self.scorer, self.rows = scorer, [result["rows"] for result in results]
        self.queues = [QueueRow(**result["queue"]) for result in results if "queue" in result]

    def of(self, value: str, part: str = "all") -> float:
        return fmean(rows[part][value] for rows in self.rows)

    @property
    def good(self) -> float:
        return self.of("good")

    @property
    def p99(self) -> float:
        return fmean(rows["all"]["ttft"][2] for rows in self.rows)

    @property
    def idle_wait(self) -> float:
        """p99, s, of the requests with a short prefill."""
        return wait_quantile(self.queues, 0.99)

    @property
    def cost(self) -> float:
        """Of all routes: batch has no budget, and is no part of the whole."""
        parts = [part for part in self.rows[0] if part not in ("all", "trouble")]
        return sum(self.of("cost", part) for part in parts)


def page(results: Sequence[Result], before: str = "") -> str:
    """`before`: the page so far, of which the sections of scenarios without a result are kept."""
    found = sections(before)
    for name in {result["scenario"] for result in results}:
        found[name] = _section(name, results)
    names = sorted(found, key=lambda name: (SCENARIOS[name].cold, name))
    return "\n\n".join([HEADING.rstrip(), differences(results, before), *(found[name] for name in names)]) + "\n"


def sections(text: str) -> dict[str, str]:
    """By scenario."""
    parts = [part.rstrip() for part in re.split(r"^(?=## \()", text, flags=re.MULTILINE)[1:]]
    return {part[4 : part.index(")")]: part for part in parts}


def _section(name: str, results: Sequence[Result]) -> str:
    played = {len(cell.by_seed) for cells in by_load(name, shared(results)).values() for cell in cells.values()}
    few, most = min(played), max(played)
    means = f"Means over {f'{few} to ' * (few < most)}{most} seeds." if most > 1 else "One seed."
    return f"## ({name}) {SCENARIOS[name].title}\n\n{means}\n\n" + "\n".join(table(name, results))


def table(name: str, results: Iterable[Result]) -> list[str]:
    """Markdown, aligned for a terminal too."""
    scenario, cells = SCENARIOS[name], by_load(name, shared(results))
    if scenario.cold:
        return _aligned(_light_rows(scenario, cells))
    tiered = any(scorer.startswith(POOLED) for scorer in scenario.scorers)
    rows = [(*COLUMNS, *(TIERED if tiered else ()), *(TROUBLED if name == "b" else ()))]
    rows += [_row(scenario, load, at_load, tiered) for load, at_load in cells.items() if compares(at_load)]
    return _aligned(rows)


def shared(results: Iterable[Result]) -> list[Result]:
    """Of the seeds that every scorer has played at that load: seeds differ by more than scorers do."""
    seeds: dict[tuple[str, float], dict[str, set[int]]] = {}
    kept = list(results)
    for result in kept:
        played = seeds.setdefault((result["scenario"], result["load"]), {})
        played.setdefault(result["scorer"], set()).add(result["seed"])
    common = {place: set.intersection(*played.values()) for place, played in seeds.items()}
    return [result for result in kept if result["seed"] in common[result["scenario"], result["load"]]]


def by_load(name: str, results: Iterable[Result]) -> dict[float, dict[str, Cell]]:
    """Cells by scorer, at each load in order."""
    found: dict[float, dict[str, list[Result]]] = {}
    for result in results:
        if result["scenario"] == name:
            found.setdefault(result["load"], {}).setdefault(result["scorer"], []).append(result)
    return {load: {scorer: Cell(scorer, kept) for scorer, kept in found[load].items()} for load in sorted(found)}


def compares(cells: Mapping[str, Cell]) -> bool:
    """Ours and a peer were played."""
    return OURS in cells and not PEERS.isdisjoint(cells)


def best(cells: Mapping[str, Cell]) -> Cell:
    """Of the peers with the most seeds, by the share of good requests: a lucky seed alone makes no best peer."""
    peers = (cell for scorer, cell in cells.items() if scorer in PEERS)
    return max(peers, key=lambda cell: (len(cell.by_seed), cell.good))


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _light_rows(scenario: Scenario, cells: Mapping[float, Mapping[str, Cell]]) -> list[tuple[str, ...]]:
    """Share of good requests of every scorer; then refusals and waits in the queue of ours."""
    rows = [("load", *scenario.scorers, "p99 best", "p99 ours", "503s", "idle wait p99")]
    for load, at_load in cells.items():
        if not compares(at_load):
            continue
        ours = at_load[OURS]
        shares = (f"{at_load[scorer].good:.3f}" if scorer in at_load else "-" for scorer in scenario.scorers)
        p99 = (f"{cell.p99:.2f} s" for cell in (best(at_load), ours))
        rows.append((f"{load:.2f}", *shares, *p99, f"{ours.of('refused'):g}", f"{ours.idle_wait * 1e3:.0f} ms"))
    return rows


def _row(scenario: Scenario, load: float, cells: Mapping[str, Cell], tiered: bool) -> tuple[str, ...]:
    ours, reference, peer = cells[OURS], cells.get(REFERENCE), best(cells)
    row = [
        f"{load:.2f}",
        f"{peer.scorer} {peer.good:.3f}",
        f"{ours.good:.3f}",
        f"{reference.good:.3f}" if reference else "-",
        f"{cells[REFERENCE_LRU].good:.3f}" if REFERENCE_LRU in cells else "-",
        f"{ours.good / max(peer.good, 1e-9):.3f}",
        f"{ours.good / max(reference.good, 1e-9):.3f}" if reference else "-",
        f"{peer.p99:.2f} s",
        f"{ours.p99:.2f} s",
        f"{ours.of('coverage') * 100:.1f}%",
    ]
    played = (peer, ours, reference)
    if tiered:
        row += [f"{cell.of('preferred') * 100:.1f}%" if cell else "-" for cell in played]
        row += [f"{ours.cost / max(reference.cost, 1e-9):.3f}" if reference else "-"]
    if scenario.name == "b":
        row += [f"{ours.of('lost'):g}", *(f"{cell.of('good', 'trouble'):.3f}" if cell else "-" for cell in played)]
    return tuple(row)


# --------------------------------------------------------------------------- ours less the best peer


def differences(results: Sequence[Result], before: str) -> str:
    """`before`: the page so far, of which the rows of scenarios without a result are kept."""
    rows = {row[1]: row[0] for row in re.finditer(r"^\| \((\S+)\) \|.*$", before, re.MULTILINE)}
    for name in {result["scenario"] for result in results}:
        cells = by_load(name, results)
        rows[name] = f"| ({name}) | {' | '.join(_difference(cells.get(load, {})) for load in LOADS)} |"
    heading = f"| | {' | '.join(map(str, LOADS))} |"
    return "\n".join([DIFFERENCES, heading, "|---" * (len(LOADS) + 1) + "|", *(rows[name] for name in sorted(rows))])


def _difference(cells: Mapping[str, Cell]) -> str:
    """In points, of equal seeds. Bold: below the peer."""
    if not compares(cells):
        return "-"
    ours, peer = cells[OURS].by_seed, best(cells)
    points = [(ours[seed] - good) * 100 for seed, good in peer.by_seed.items() if seed in ours]
    text = f"{mean_points(points)} {peer.scorer}" + (f" ({len(points)})" if len(points) > 1 else "")
    return f"**{text}**" if text.startswith("-") else text
