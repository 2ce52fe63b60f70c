"""benchmarks/ROUTING.md: results of `benchmarks.routing`, in a table per scenario.

Per load: the best baseline, ours and the references, by the share of good requests (TTFT and TPOT within budget, of all
offered), means over the seeds; the TTFT of the answered requests; and the cost. A row is of one run: a load that is
played again replaces its row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import fmean
from typing import Any

from benchmarks.replays import mean_points
from benchmarks.scenarios import SCENARIOS, Scenario
from lab.replay.queue_results import QueueRow, wait_quantile
from lab.replay.sim_fleet import BASELINES, OURS, POOLABLE, POOLED, REFERENCE, REFERENCE_LRU

Result = dict[str, Any]
Row = dict[str, str]  # cells by column
HEADING = """\
# Routing

What `python -m benchmarks.routing` found: replays of public traces through the gateway's own decision code, against
simulated engines (`firsttoken replay` is the same workbench). A load of 1 is that at which round robin meets the
TTFT of half of the requests. *good*: TTFT and TPOT within budget, of all offered. The best baseline is chosen anew
at every load, after the fact, of two or three that were played (`lpwl`, `lmetric`, `argmin_ttft`, `least_load` or
`cache_aware`: the best ones of an earlier sweep of all fourteen; of (adapters) the one whose forecast knows adapters,
of (c) two that pool all tiers). *reference* is a clairvoyant scheduler with perfect caches (`lab/replay/clairvoyant.py`
says what it knows and why it bounds what is reachable), *real caches* the same with what each engine has computed and
not evicted: no bound. *rules*: the newest decision record when the row was played, kept by git; "longest first at
overload" is in the rows from 0093 on. A dash: not played.

From a cold start, the gateway comes up before its engines, and requests come once these are up; an event of a stream
carries four tokens. *503s*: of ours, per replay. *idle wait*: time that a request with less than 200 ms to prefill
spends in our queue while the engine that answers it prefills nothing; p99. `python -m benchmarks.light_load` says more.
*p50*, *p90*, *p99*: TTFT of the answered requests, so a policy that refuses more looks faster: read them beside the
share of good ones.
[CLOSED_LOOP.md](CLOSED_LOOP.md) has whole sessions of (e-closed), and refused callers who come back.
"""
TTFTS = tuple(f"{quantile} {who}" for quantile in ("p50", "p90", "p99") for who in ("best", "ours"))
COLUMNS = (
    "load",
    "best baseline",
    "ours",
    "reference",
    "real caches",
    "ours/best",
    "ours/ref",
    "ours/real",
    *TTFTS,
    "p90 held",
)
TROUBLED = ("lost", *(f"in trouble: {who}" for who in ("best", "ours", "reference")))  # lost: before the first token
PEERS = frozenset((*BASELINES, *(POOLED + name for name in POOLABLE)))
LOADS = (0.2, 0.4, 0.7, 1.0, 1.5, 2.2)  # of the table of differences
POINTS = """\
## Ours less the best peer, at every load

In points of good requests; the peer is the best one of those that were played at that load. Bold: ours is below. One
seed, or their number in brackets, with the standard error of the differences of equal seeds: where more seeds were
played earlier, these, by the rules of that time. The peer of (c) pools all tiers, and serves far fewer requests in the
first one (*tier 1*, below). The command of a row is
`python -m benchmarks.routing --traces DIR SCENARIO --loads .2,.4,.7,1,1.5,2.2 --scorers ours,PEER,...`.
"""
MEDIANS = """\
## Median TTFT, ours less that of the best peer

Of the answered requests, in ms, beside the peer of the table above. Bold: ours is slower.
"""
LEAST_SHOWN = 0.02  # share of good requests below which a ratio to it says nothing
TIERED = ("tier 1 best", "tier 1 ours", "tier 1 ref", "USD ours/ref")


class Cell:
    """All seeds of one load and scorer. `by_seed`: shares of good requests; `medians`: TTFT, s."""

    def __init__(self, scorer: str, results: Sequence[Result]) -> None:
        self.by_seed = {result["seed"]: result["rows"]["all"]["good"] for result in results}
        self.medians = {result["seed"]: result["rows"]["all"]["ttft"][0] for result in results}
        self.scorer, self.rows = scorer, [result["rows"] for result in results]
        self.rules = min((result.get("rules", "-") for result in results), default="-")
        self.queues = [QueueRow(**result["queue"]) for result in results if "queue" in result]

    def of(self, value: str, part: str = "all") -> float:
        return fmean(rows[part][value] for rows in self.rows)

    @property
    def good(self) -> float:
        return self.of("good")

    @property
    def ttft(self) -> tuple[float, ...]:
        """p50, p90 and p99, s."""
        return tuple(map(fmean, zip(*(rows["all"]["ttft"] for rows in self.rows), strict=True)))

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
    """`before`: the page so far, of which the rows of loads without a result are kept."""
    found = sections(before)
    for name in {result["scenario"] for result in results}:
        found[name] = f"## ({name}) {SCENARIOS[name].title}\n\n" + "\n".join(table(name, results, found.get(name, "")))
    names = sorted(found, key=lambda name: (SCENARIOS[name].cold, name))
    tables = (differences(results, before, table) for table in (IN_POINTS, IN_MILLISECONDS))
    return "\n\n".join([HEADING.rstrip(), *tables, *(found[name] for name in names)]) + "\n"


def sections(text: str) -> dict[str, str]:
    """By scenario."""
    parts = [part.rstrip() for part in re.split(r"^(?=## \()", text, flags=re.MULTILINE)[1:]]
    return {part[4 : part.index(")")]: part for part in parts}


def table(name: str, results: Iterable[Result], before: str = "") -> list[str]:
    """Markdown, aligned for a terminal too. `before`: the section so far, of which other rows are kept."""
    scenario, cells = SCENARIOS[name], by_load(name, shared(results))
    played = {load: at_load for load, at_load in cells.items() if compares(at_load)}
    tiered = any(scorer.startswith(POOLED) for scorer in scenario.scorers)
    rows = _light_rows(scenario, played) if scenario.cold else _rows(scenario, played, tiered)
    kept = rows_of(before)
    columns = list(dict.fromkeys(column for row in (*rows[:1], *kept.values()) for column in row))
    merged = {**kept, **{row["load"]: row for row in rows}}
    ordered = sorted(merged.values(), key=lambda row: float(row["load"]))
    return _aligned([tuple(columns), *(tuple(row.get(column, "-") for column in columns) for row in ordered)])


def rows_of(section: str) -> dict[str, Row]:
    """Rows of the table of a section by load, each by column."""
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    stripped = [[cell.strip() for cell in line] for line in lines]
    return {row[0]: dict(zip(stripped[0], row, strict=True)) for row in stripped[1:]}


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


def _light_rows(scenario: Scenario, cells: Mapping[float, Mapping[str, Cell]]) -> list[Row]:
    """Share of good requests of every scorer; then refusals and waits in the queue of ours."""
    rows = []
    for load, at_load in cells.items():
        ours, peer = at_load[OURS], best(at_load)
        row = {"load": f"{load:.2f}", **{scorer: _good(at_load.get(scorer)) for scorer in scenario.scorers}}
        row |= {"reference": _good(at_load.get(REFERENCE)), "real caches": _good(at_load.get(REFERENCE_LRU))}
        row |= {"ours/real": _ratio(ours, at_load.get(REFERENCE_LRU))}
        row |= dict(zip(TTFTS, _ttfts(peer, ours), strict=True))
        row |= {"503s": f"{ours.of('refused'):g}", "idle wait p99": f"{ours.idle_wait * 1e3:.0f} ms"}
        rows.append(row | _played(ours))
    return rows


def _rows(scenario: Scenario, cells: Mapping[float, Mapping[str, Cell]], tiered: bool) -> list[Row]:
    columns = (*COLUMNS, *(TIERED if tiered else ()), *(TROUBLED if scenario.name == "b" else ()))
    return [
        dict(zip(columns, _row(scenario, load, at_load, tiered), strict=True)) | _played(at_load[OURS])
        for load, at_load in cells.items()
    ]


def _row(scenario: Scenario, load: float, cells: Mapping[str, Cell], tiered: bool) -> tuple[str, ...]:
    ours, reference, peer = cells[OURS], cells.get(REFERENCE), best(cells)
    row = [
        f"{load:.2f}",
        f"{peer.scorer} {peer.good:.3f}",
        _good(ours),
        _good(reference),
        _good(cells.get(REFERENCE_LRU)),
        _ratio(ours, peer),
        _ratio(ours, reference),
        _ratio(ours, cells.get(REFERENCE_LRU)),
        *_ttfts(peer, ours),
        f"{ours.of('coverage') * 100:.1f}%",
    ]
    played = (peer, ours, reference)
    if tiered:
        row += [f"{cell.of('preferred') * 100:.1f}%" if cell else "-" for cell in played]
        row += [f"{ours.cost / max(reference.cost, 1e-9):.3f}" if reference else "-"]
    if scenario.name == "b":
        row += [f"{ours.of('lost'):g}", *(f"{cell.of('good', 'trouble'):.3f}" if cell else "-" for cell in played)]
    return tuple(row)


def _ttfts(peer: Cell, ours: Cell) -> tuple[str, ...]:
    """In the order of TTFTS."""
    pairs = zip(peer.ttft, ours.ttft, strict=True)
    return tuple(f"{value:.3f} s" if value < 1 else f"{value:.2f} s" for pair in pairs for value in pair)


def _good(cell: Cell | None) -> str:
    return f"{cell.good:.3f}" if cell else "-"


def _ratio(ours: Cell, other: Cell | None) -> str:
    """Of good requests; a dash beside next to none."""
    return f"{ours.good / other.good:.3f}" if other and other.good > LEAST_SHOWN else "-"


def _played(ours: Cell) -> Row:
    return {"seeds": f"{len(ours.by_seed)}", "rules": ours.rules}


# --------------------------------------------------------------------------- ours less the best peer


@dataclass(frozen=True, slots=True)
class Difference:
    """A table of differences. `by_seed`: values of a cell, in the unit of the table; `worse`: sign of the bold ones."""

    heading: str
    by_seed: Callable[[Cell], Mapping[int, float]]
    unit: str
    digits: int
    worse: str


def _points(cell: Cell) -> Mapping[int, float]:
    return {seed: good * 100 for seed, good in cell.by_seed.items()}


def _milliseconds(cell: Cell) -> Mapping[int, float]:
    return {seed: median * 1e3 for seed, median in cell.medians.items()}


IN_POINTS = Difference(POINTS, _points, "", 1, "-")
IN_MILLISECONDS = Difference(MEDIANS, _milliseconds, " ms", 0, "+")


def differences(results: Sequence[Result], before: str, table: Difference = IN_POINTS) -> str:
    """`before`: the page so far, of which the loads without a result are kept."""
    found = re.finditer(r"^\| \((\S+)\) \| (.*) \|$", _section(before, table.heading), re.MULTILINE)
    kept = {row[1]: row[2].split(" | ") for row in found}
    for name in {result["scenario"] for result in results}:
        cells, earlier = by_load(name, results), kept.get(name, ["-"] * len(LOADS))
        kept[name] = [_difference(cells.get(load, {}), old, table) for load, old in zip(LOADS, earlier, strict=True)]
    rows = {name: f"| ({name}) | {' | '.join(row)} |" for name, row in kept.items()}
    heading = f"| | {' | '.join(map(str, LOADS))} |"
    return "\n".join([table.heading, heading, "|---" * (len(LOADS) + 1) + "|", *(rows[name] for name in sorted(rows))])


def _section(page: str, heading: str) -> str:
    """Of a page, from the first line of `heading` to the next heading."""
    _, _, section = page.partition(heading.partition("\n")[0] + "\n")
    return section.partition("\n## ")[0]


def _difference(cells: Mapping[str, Cell], before: str, table: Difference) -> str:
    """Of equal seeds. Bold: worse than the peer. `before`: as it was, kept where it is of more seeds."""
    if not compares(cells):
        return before
    ours, peer = table.by_seed(cells[OURS]), best(cells)
    pairs = ((ours[seed], value) for seed, value in table.by_seed(peer).items() if seed in ours)
    points = [one - other for one, other in pairs if not isnan(one - other)]
    if not points or ((earlier := re.search(r"\((\d+)\)", before)) and int(earlier[1]) > len(points)):
        return before
    text = f"{mean_points(points, table.digits)}{table.unit}"
    is_worse = text.startswith(table.worse) and not text.startswith(("+0.0", "+0 "))
    text += f" {peer.scorer}" + (f" ({len(points)})" if len(points) > 1 else "")
    return f"**{text}**" if is_worse else text
