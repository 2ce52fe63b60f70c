"""Replay results as text (120 columns) and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite, isnan
from typing import Any

from gateway.cli.explain import decision_table
from gateway.cli.tables import aligned
from lab.replay.player import ReplayResult, mean_rows, mean_sessions
from lab.replay.results import ResultRow, has_budget
from lab.replay.session_results import SessionRow
from lab.replay.sim_fleet import OURS, REFERENCE, REFERENCES, SCORERS
from policies.routes.route import Route

OTHER = "config b"  # label of --config-b
QUANTILES = ("p50", "p90", "p99")  # of `ResultRow.ttft`
Column = tuple[str, Callable[[ResultRow], str]]


def label(name: str) -> str:
    """Of a policy, as shown."""
    return "this config" if name == OURS else name


def _percent(share: float) -> str:
    return "-" if isnan(share) else f"{share * 100:.1f}%"


def _seconds(value: float) -> str:
    digits = 3 if value < 1 else 2 if value < 100 else 0
    return "-" if isnan(value) else f"{value:.{digits}f}s"


def _ms(value: float) -> str:
    return "-" if isnan(value) else f"{value * 1e3:.0f}ms"


def _number(value: float) -> str:
    return f"{value:g}" if value == round(value) else f"{value:.1f}"


MEASURED: tuple[Column, ...] = (
    ("p50", lambda row: _seconds(row.ttft[0])),
    ("p90", lambda row: _seconds(row.ttft[1])),
    ("p99", lambda row: _seconds(row.ttft[2])),
    ("TPOT", lambda row: _ms(row.tpot[1])),
    ("hit", lambda row: _percent(row.hit)),
    ("tiers", lambda row: "/".join(f"{share * 100:.0f}" for share in row.tiers) + "%"),
    ("USD", lambda row: f"{row.cost:.2f}"),
    ("failed", lambda row: "/".join(map(_number, (row.sheds, row.lost, row.broken)))),
)
COMPARED: tuple[Column, ...] = (
    ("good/s", lambda row: f"{row.goodput:.2f}"),
    ("met", lambda row: _percent(row.attainment)),
    ("95%", lambda row: f"{row.interval[0] * 100:.0f}-{row.interval[1] * 100:.0f}%"),
    *MEASURED,
)
PER_ROUTE: tuple[Column, ...] = (
    *MEASURED,
    ("hedges", lambda row: _number(row.extra)),
    ("regret", lambda row: _seconds(row.regret)),
)
UNINFORMATIVE = {"-", "0", "0.00", "0/0/0", "100%"}  # a column with only one of these values is omitted
PER_SESSION: tuple[tuple[str, Callable[[SessionRow], str]], ...] = (
    ("sessions", lambda row: _number(row.sessions)),
    ("turns", lambda row: f"{row.turns:.1f}"),
    ("good", lambda row: _percent(row.good)),
    ("answered", lambda row: _percent(row.answered)),
    ("time p50", lambda row: f"{row.slowdown[0]:.2f}x"),
    ("p90", lambda row: f"{row.slowdown[1]:.2f}x"),
)
LEGEND = """\
good: requests with TTFT and TPOT within budget / offered; of ref: good relative to the reference; met: TTFT alone;
95%: its interval, of all seeds; p50, p90, p99: TTFT; TPOT: p90; hit: share of prompt tokens cached; tiers: shares of
the answered requests; failed: shed/lost before the first token/broken after it; regret: mean excess of TTFT over the
best alternative"""


SESSIONS_LEGEND = """
by session: turns offered, mean; good, answered: sessions with all offered turns good, or answered to the end; time:
of the answered sessions, answers and thoughts, relative to an idle fleet"""


def report(results: Sequence[ReplayResult], routes: Mapping[str, Mapping[str, Route]]) -> str:
    """One block per load: the comparison, then each route. `routes`: by policy, of those shown by route."""
    blocks = []
    for load in sorted({result.load for result in results}):
        by_name: dict[str, list[ReplayResult]] = {}
        for result in results:
            if result.load == load:
                by_name.setdefault(result.name, []).append(result)
        blocks.append("\n".join(_block(load, by_name, routes)))
    legend = LEGEND + (SESSIONS_LEGEND if any(result.sessions for result in results) else "")
    return "\n\n".join([*blocks, legend])


def _block(
    load: float, by_name: Mapping[str, Sequence[ReplayResult]], routes: Mapping[str, Mapping[str, Route]]
) -> Iterable[str]:
    own_first = sorted(by_name.items(), key=lambda pair: pair[0] not in routes)
    rows = {name: mean_rows(found) for name, found in own_first}
    yield _heading(load, by_name)
    yield from _table([("", "good", "of ref", *(name for name, _ in COMPARED)), *_comparison(rows)])
    yield from _less_best(rows)
    sessions = {name: row for name, found in by_name.items() if (row := mean_sessions(found)) is not None}
    if sessions:
        yield ""
        yield from _table([("by session", *(name for name, _ in PER_SESSION)), *_per_session(sessions)])
    for name in routes:
        if name in rows:
            heading = (label(name), "requests", "good", "met", "total", *(name for name, _ in PER_ROUTE))
            yield ""
            yield from _table([heading, *(_route(row, routes[name][row.name]) for row in rows[name][:-1])])
            yield from (_throughput(row) for row in rows[name][:-1] if not has_budget(routes[name][row.name]))
            yield from ("", *_calibration(by_name[name][0]))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    columns = list(zip(*rows, strict=True))
    kept = [column for column in columns if len(set(column[1:])) > 1 or column[1] not in UNINFORMATIVE]
    return aligned(list(zip(*kept, strict=True)))


def _heading(load: float, by_name: Mapping[str, Sequence[ReplayResult]]) -> str:
    first = next(iter(by_name.values()))
    offered, seconds = sum(row.offered for row in first[0].rows[:-1]), first[0].seconds
    seeds = f", mean of {len(first)} seeds" if len(first) > 1 else ""
    every = [result for found in by_name.values() for result in found]
    speed = sum(result.played for result in every) / max(sum(result.took for result in every), 1e-9)
    rate = f"{offered:g} requests in {seconds:.0f} s, {offered / seconds:.2f} per second"
    return f"load {load:g}: {rate}{seeds}; replayed at {speed:.0f} times real time"


def _comparison(rows: Mapping[str, Sequence[ResultRow]]) -> Iterable[tuple[str, ...]]:
    best = rows[REFERENCE][-1].good if REFERENCE in rows else float("nan")
    for name, found in rows.items():
        row = found[-1]
        of_reference = row.good / best if best else float("nan")
        yield (label(name), _percent(row.good), _percent(of_reference), *(text(row) for _, text in COMPARED))


def _less_best(rows: Mapping[str, Sequence[ResultRow]]) -> Iterator[str]:
    """Ours less the best baseline, by good requests."""
    peers = {name: found[-1] for name, found in rows.items() if name in SCORERS and name not in (OURS, *REFERENCES)}
    if OURS in rows and peers:
        best, peer = max(peers.items(), key=lambda item: item[1].good)
        ours = rows[OURS][-1]
        quantiles = zip(QUANTILES, ours.ttft, peer.ttft, strict=True)
        slower = (
            f", {name} {(mine - other) * 1e3:+.0f} ms" for name, mine, other in quantiles if not isnan(mine - other)
        )
        yield f"{label(OURS)} less {best}: good {(ours.good - peer.good) * 100:+.1f} points{''.join(slower)}"


def _per_session(rows: Mapping[str, SessionRow]) -> Iterable[tuple[str, ...]]:
    for name, row in rows.items():
        yield (label(name), *(text(row) for _, text in PER_SESSION))


def _route(row: ResultRow, route: Route) -> tuple[str, ...]:
    good = _percent(row.good) if has_budget(route) else "-"
    met = _percent(row.attainment) if route.ttft is not None else "-"
    return (row.name, _number(row.offered), good, met, _percent(row.total), *(text(row) for _, text in PER_ROUTE))


def _throughput(row: ResultRow) -> str:
    completed = f"{_number(row.completed)} of {_number(row.offered)}"
    return f"{row.name}: {completed} completed, {row.output_rate:.0f} output tokens per second"


def _calibration(result: ReplayResult) -> list[str]:
    rows = [(c.pool, str(c.samples), _percent(c.coverage), _percent(c.error)) for c in result.calibration]
    return aligned([("predictions", "answers", "within p90", "median error"), *rows])


def worst_decisions(results: Sequence[ReplayResult]) -> str:
    """The decisions with the most regret, each with the table of `firsttoken explain`."""
    return "\n\n".join(_decision(result, found) for result in results for found in result.worst)


def _decision(result: ReplayResult, found: Mapping[str, Any]) -> str:
    return (
        f"{label(result.name)}, load {result.load:g}: regret of {found['regret_ms']:.0f} ms\n"
        f"request {found['request']} on route {found['route']}, arrived at {found['arrived_s']:.1f} s, sent to "
        f"{found['endpoint']}, {found['cached_tokens']} tokens cached\nfirst token {found['upstream_ms']:.0f} ms after "
        f"sending, {found['ttft_ms']:.0f} ms after arrival\n{decision_table(dict(found))}"
    )


def as_json(results: Sequence[ReplayResult]) -> list[dict[str, Any]]:
    """One object per replay; NaN and infinity become null."""
    return [_without_nan(asdict(result)) for result in results]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value
