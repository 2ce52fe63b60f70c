"""Report of `firsttoken capacity`: a table, bars, a sentence with the reason, and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gateway.cli.tables import BAR, aligned
from lab.capacity.budget_shares import BudgetShare
from lab.capacity.fleet_size import FleetSizeResult
from lab.capacity.smallest_fleet import SmallestFleet


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """`carried`: largest multiple of the trace's rate on `present` engines; `rate`: requests/s of the trace."""

    pool: str
    present: int
    load: float
    found: SmallestFleet
    carried: float | None
    rate: float


def report(answer: CapacityAnswer) -> str:
    curve = answer.found.curve.values()
    keys = [(share.route, share.budget) for share in next(iter(curve)).shares]
    head = ("engines", *(f"{route} {budget}" for route, budget in keys), "")
    rows = [(str(result.n), *map(_cell, result.shares), "enough" if result.is_enough else "") for result in curve]
    return "\n".join([*aligned([head, *rows]), "", *_bars(answer), "", *_sentences(answer)])


def _cell(share: BudgetShare) -> str:
    return f"{share.share:.1%} (>= {share.lower:.1%})"


def _bars(answer: CapacityAnswer) -> Iterator[str]:
    """The attainment furthest from its target: full up to the lower bound, half up to the share."""
    for n, result in answer.found.curve.items():
        share = result.worst
        low, high = (0, BAR) if share is None else (round(BAR * share.lower), round(BAR * share.share))
        shown = "no budget" if share is None else f"{share.share:.1%} {share.route} {share.budget}"
        yield f"{n:>7}  {'█' * low}{'▒' * (high - low)}{'·' * (BAR - high)} {shown}"


def _sentences(answer: CapacityAnswer) -> Iterator[str]:
    yield reason(answer.found)
    present = f"the {answer.present} engines of {answer.pool} carry"
    if answer.carried is not None:
        yield f"{present} {answer.carried:.2f} times the trace: {answer.carried * answer.rate:.2f} requests/s"


def reason(found: SmallestFleet) -> str:
    """The number, and why it is no smaller."""
    engines = f"{found.needed} engine{'' if found.needed == 1 else 's'}"
    if not found.possible:
        last = found.curve[max(found.curve)]
        return f"{engines}: no number up to {last.n} is enough; {_shortfall(last)} with {last.n}"
    fewer = found.curve.get(found.needed - 1)
    return engines if fewer is None else f"{engines}: {_shortfall(fewer)} with {fewer.n}"


def _shortfall(result: FleetSizeResult) -> str:
    share = result.worst
    if share is None:
        return "no route has a budget"
    least = f", surely {share.lower:.0%}" if share.share >= share.target else ""
    return f"{share.route} would meet {share.share:.0%} of {share.target:.0%} ({share.budget}{least})"


def as_json(answer: CapacityAnswer) -> dict[str, Any]:
    return {
        "pool": answer.pool,
        "engines": answer.found.needed,
        "possible": answer.found.possible,
        "reason": reason(answer.found),
        "present": answer.present,
        "carried_load": answer.carried,
        "curve": [
            {"engines": n, "enough": result.is_enough, **asdict(result)} for n, result in answer.found.curve.items()
        ],
    }
