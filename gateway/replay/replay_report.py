"""The results of replays, for people (120 columns) and for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from math import isfinite, isnan
from typing import Any

from gateway.cli.explain import table
from gateway.config.check_report import aligned
from gateway.replay.results import ResultRow
from gateway.replay.scenario import OURS, REFERENCE
from gateway.replay.sweep import Result, mean
from policies.routes.route import Route

OTHER = "config b"  # what the results of --config-b are called
NAMES = {OURS: "this config"}
Column = tuple[str, Callable[[ResultRow], str]]


def _percent(share: float) -> str:
    return "-" if isnan(share) else f"{share * 100:.1f}%"


def _seconds(value: float) -> str:
    digits = 3 if value < 1 else 2 if value < 100 else 0
    return "-" if isnan(value) else f"{value:.{digits}f}s"


def _ms(value: float) -> str:
    return "-" if isnan(value) else f"{value * 1e3:.0f}ms"


def _number(value: float) -> str:
    return f"{value:g}" if value == round(value) else f"{value:.1f}"


def _tiers(row: ResultRow) -> str:
    return "/".join(f"{share * 100:.0f}" for share in row.tiers) + "%"


def _failed(row: ResultRow) -> str:
    return "/".join(map(_number, (row.sheds, row.lost, row.broken)))


MEASURED: tuple[Column, ...] = (
    ("p50", lambda row: _seconds(row.ttft[0])),
    ("p90", lambda row: _seconds(row.ttft[1])),
    ("p99", lambda row: _seconds(row.ttft[2])),
    ("TPOT", lambda row: _ms(row.tpot[1])),
    ("hit", lambda row: _percent(row.hit)),
    ("tiers", _tiers),
    ("USD", lambda row: f"{row.cost:.2f}"),
    ("failed", _failed),
)
COMPARED: tuple[Column, ...] = (
    ("good/s", lambda row: f"{row.goodput:.2f}"),
    ("met", lambda row: _percent(row.attainment)),
    *MEASURED,
)
OF_ROUTE: tuple[Column, ...] = (
    *MEASURED,
    ("hedges", lambda row: _number(row.extra)),
    ("regret", lambda row: _seconds(row.regret)),
)
SAY_NOTHING = {"-", "0", "0.00", "0/0/0", "100%"}  # a column of one of these is left out
LEGEND = """\
good: TTFT and TPOT within budget, of all that came; of ref: of what the reference makes good; met: TTFT alone;
p50, p90, p99: of the TTFT; TPOT: its p90; hit: prompt tokens found cached; tiers: shares of the answered;
failed: refused/lost before their first token/broken after it; regret: mean TTFT beyond the best alternative's"""


def report(results: Sequence[Result], routes: Mapping[str, Route], others: Mapping[str, Route]) -> str:
    """One block per load: all that was compared, then the routes. `others`: those of --config-b."""
    blocks = []
    for load in sorted({result.load for result in results}):
        at_load = [result for result in results if result.load == load]
        blocks.append("\n".join(_block(load, at_load, {OURS: routes, OTHER: others})))
    return "\n\n".join([*blocks, LEGEND])


def _block(load: float, results: Sequence[Result], routes: Mapping[str, Mapping[str, Route]]) -> Iterable[str]:
    by_name: dict[str, list[Result]] = {}
    for result in results:
        by_name.setdefault(result.name, []).append(result)
    rows = {name: mean(found) for name, found in by_name.items()}
    yield _heading(load, by_name)
    yield from _table([("", "good", "of ref", *(name for name, _ in COMPARED)), *_compared(rows)])
    for name in (OURS, OTHER):
        if name in rows:
            yield ""
            yield from _table([_route_heading(name), *(_route(row, routes[name][row.name]) for row in rows[name][:-1])])
            yield from (_completed(row) for row in rows[name][:-1] if not _has_budget(routes[name][row.name]))
            yield from ("", *_calibration(by_name[name]))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    columns = list(zip(*rows, strict=True))
    kept = [column for column in columns if len(set(column[1:])) > 1 or column[1] not in SAY_NOTHING]
    return aligned(list(zip(*kept, strict=True)))


def _heading(load: float, by_name: Mapping[str, Sequence[Result]]) -> str:
    first = next(iter(by_name.values()))
    offered, seconds = sum(row.offered for row in first[0].rows[:-1]), first[0].seconds
    seeds = f", mean of {len(first)} seeds" if len(first) > 1 else ""
    played, took = (sum(getattr(r, a) for found in by_name.values() for r in found) for a in ("played", "took"))
    pace = f"{played / max(took, 1e-9):.0f} times as fast as it happens"
    return f"load {load:g}: {offered:g} requests in {seconds:.0f} s, {offered / seconds:.2f} a second{seeds}; {pace}"


def _compared(rows: Mapping[str, Sequence[ResultRow]]) -> Iterable[tuple[str, ...]]:
    best = rows[REFERENCE][-1].good if REFERENCE in rows else float("nan")
    for name, found in rows.items():
        row = found[-1]
        of_reference = row.good / best if best else float("nan")
        yield (NAMES.get(name, name), _percent(row.good), _percent(of_reference), *(text(row) for _, text in COMPARED))


def _route_heading(name: str) -> tuple[str, ...]:
    return (NAMES.get(name, name), "asked", "good", "met", "total", *(column for column, _ in OF_ROUTE))


def _route(row: ResultRow, route: Route) -> tuple[str, ...]:
    shares = (
        _percent(row.good) if _has_budget(route) else "-",
        _percent(row.attainment) if route.ttft is not None else "-",
        _percent(row.total),
    )
    return (row.name, _number(row.offered), *shares, *(text(row) for _, text in OF_ROUTE))


def _has_budget(route: Route) -> bool:
    return route.ttft is not None or route.tpot is not None


def _completed(row: ResultRow) -> str:
    """Where there are no budgets there is nothing to miss."""
    done = f"{_number(row.completed)} of {_number(row.offered)}"
    return f"{row.name}: {done} complete, {row.output_rate:.0f} tokens a second"


def _calibration(results: Sequence[Result]) -> list[str]:
    """Of the first seed."""
    told = [(c.pool, str(c.samples), _percent(c.coverage), _percent(c.error)) for c in results[0].calibration]
    return aligned([("predictions", "answers", "within p90", "median error"), *told])


def worst(results: Sequence[Result]) -> str:
    """The decisions with the most regret, each as `firsttoken explain` would show it."""
    return "\n\n".join(_story(result, told) for result in results for told in result.worst)


def _story(result: Result, told: Mapping[str, Any]) -> str:
    return (
        f"{NAMES.get(result.name, result.name)}, load {result.load:g}: regret of {told['regret_ms']:.0f} ms\n"
        f"request {told['request']} on {told['route']}, which came at {told['arrived_s']:.1f} s, was sent to "
        f"{told['endpoint']}, {told['cached_tokens']} tokens cached;\nfirst token {told['upstream_ms']:.0f} ms after "
        f"that and {told['ttft_ms']:.0f} ms after it came\n{table(dict(told))}"
    )


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Every replay by itself; what is not a number is null."""
    return [_plain(asdict(result)) for result in results]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value
