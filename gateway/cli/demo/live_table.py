"""The live table: Records of the last WINDOW seconds, by route."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich import box
from rich.table import Table

from gateway.observe.record import Record, RequestOutcome

WINDOW = 30.0  # s


@dataclass(frozen=True, slots=True)
class RouteRow:
    """A route. Times in seconds; shares from 0 to 1; None without any Record."""

    route: str
    per_second: float
    budget: float | None
    p50: float | None
    p99: float | None
    attainment: float | None
    tiers: Mapping[str, float]
    hit: float | None
    shed: float
    failed: int


def rows(records: Iterable[Record], routes: Iterable[str], now: float, since: float) -> list[RouteRow]:
    """`since`: start of counting, so the first seconds are not divided by a whole window."""
    recent = [r for r in records if r.arrival + r.total >= now - WINDOW]
    span = max(min(WINDOW, now - since), 1.0)
    return [_row(route, [r for r in recent if r.route == route], span) for route in routes]


def _row(route: str, records: list[Record], span: float) -> RouteRow:
    ttfts = sorted(r.ttft for r in records if r.ttft is not None and r.stream)
    judged = [r.ttft_met for r in records if r.ttft_met is not None]
    pools = Counter(r.pool for r in records if r.ttft is not None)
    prompt = sum(r.prompt_tokens_reported or 0 for r in records)
    cached = sum(r.cached_tokens_reported or 0 for r in records)
    return RouteRow(
        route=route,
        per_second=len(records) / span,
        budget=next((r.ttft_budget for r in reversed(records) if r.ttft_budget), None),
        p50=_quantile(ttfts, 0.5),
        p99=_quantile(ttfts, 0.99),
        attainment=sum(judged) / len(judged) if judged else None,
        tiers={pool: count / pools.total() for pool, count in pools.most_common()},
        hit=cached / prompt if prompt else None,
        shed=sum(r.end is RequestOutcome.SHED for r in records) / max(len(records), 1),
        failed=sum(
            r.end in (RequestOutcome.FAILED, RequestOutcome.UPSTREAM_BROKE, RequestOutcome.INTERNAL) for r in records
        ),
    )


def _quantile(ordered: list[float], q: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


COLUMNS = ("route", "req/s", "budget", "TTFT p50", "p99", "met", "answered by", "hit", "shed", "failed")


def render(found: list[RouteRow], title: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in COLUMNS:
        table.add_column(
            name, justify="left" if name in ("route", "answered by") else "right", no_wrap=name != "answered by"
        )
    for row in found:
        table.add_row(*_cells(row))
    return table


def _cells(row: RouteRow) -> tuple[str, ...]:
    return (
        row.route,
        f"{row.per_second:.1f}",
        _ms(row.budget),
        _ms(row.p50),
        _ms(row.p99),
        _share(row.attainment),
        "  ".join(f"{pool} {share:.0%}" for pool, share in row.tiers.items()),
        _share(row.hit),
        f"{row.shed:.0%}",
        str(row.failed),
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
