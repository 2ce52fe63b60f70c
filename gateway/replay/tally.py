"""What became of the requests of a replay, and the figures that follow from it.

Definitions are those of measurement: attainment is met / all offered, so shedding cannot inflate it;
good is TTFT and TPOT met; under two tokens there is no TPOT, which counts as met. A route without
budgets has no misses: it is shown by what it completed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from policies.facts import Decision
from policies.route import Route


@dataclass(slots=True)
class Fate:
    """One request of a replay. Times are seconds of the replay's clock; None: it never happened."""

    route: str
    arrived: float
    prompt_tokens: int
    output_tokens: int
    decision: Decision | None = None
    sent_at: float | None = None  # of the attempt that won
    first_at: float | None = None
    ended_at: float | None = None
    shed: bool = False
    lost: bool = False  # gave up, or broke off
    attempts: int = 0
    hedges: int = 0
    tier: int = 0
    endpoint: str = ""
    cached: int = 0  # tokens, as the engine found
    believed: int = 0
    p50: float = 0.0  # predicted from the sending on, s
    p90: float = 0.0
    alternative: float | None = None  # the least p50 among the others, s
    cost: float = 0.0  # USD

    @property
    def ttft(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.arrived

    @property
    def tpot(self) -> float | None:
        if self.first_at is None or self.ended_at is None or self.output_tokens < 2:
            return None
        return (self.ended_at - self.first_at) / (self.output_tokens - 1)

    @property
    def upstream(self) -> float | None:
        """From the sending of the attempt that won to its first token, s."""
        return None if self.first_at is None or self.sent_at is None else self.first_at - self.sent_at

    @property
    def regret(self) -> float:
        """Seconds by which the best alternative, as predicted then, would have been faster."""
        upstream = self.upstream
        return 0.0 if upstream is None or self.alternative is None else max(upstream - self.alternative, 0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one route, or of all."""

    name: str
    offered: int
    attainment: float  # TTFT met / offered
    good: float  # TTFT and TPOT met / offered
    goodput: float  # good requests per second
    ttft: tuple[float, float, float]  # p50, p90, p99, s
    tpot: tuple[float, float]  # p50, p90, s
    hit: float  # cached / prompt tokens
    tiers: tuple[float, ...]  # share of the answered
    preferred: float  # share of the first tier among the good
    cost: float
    sheds: int
    lost: int
    extra: int  # hedges
    coverage: float  # share of TTFTs under the predicted p90
    error: float  # median |actual / p50 - 1|
    regret: float  # mean, s
    completed: int
    output_rate: float  # tokens/s of those completed


@dataclass(slots=True)
class Tally:
    """All fates of one replay. `seconds` is the offered duration."""

    routes: dict[str, Route]
    seconds: float
    fates: list[Fate] = field(default_factory=list)

    def met_ttft(self, fate: Fate) -> bool:
        route = self.routes[fate.route]
        return fate.ttft is not None and (route.ttft is None or fate.ttft <= route.ttft.budget)

    def is_good(self, fate: Fate) -> bool:
        route = self.routes[fate.route]
        if not self.met_ttft(fate) or fate.lost:
            return False
        return route.tpot is None or (fate.ended_at is not None and (fate.tpot or 0.0) <= route.tpot.budget)

    def has_budget(self, name: str) -> bool:
        return self.routes[name].ttft is not None or self.routes[name].tpot is not None

    def rows(self) -> list[Row]:
        """Every route, and `all` routes with a budget."""
        names = [name for name in self.routes if any(fate.route == name for fate in self.fates)]
        rows = [self.row(name, [fate for fate in self.fates if fate.route == name]) for name in names]
        return [*rows, self.overall()]

    def overall(self) -> Row:
        return self.row("all", [fate for fate in self.fates if self.has_budget(fate.route)])

    def row(self, name: str, fates: Sequence[Fate]) -> Row:
        answered = [fate for fate in fates if fate.first_at is not None]
        done = [fate for fate in fates if fate.ended_at is not None]
        good = [fate for fate in fates if self.is_good(fate)]
        ttfts = [fate.first_at - fate.arrived for fate in answered if fate.first_at is not None]
        tpots = [fate.tpot for fate in done if fate.tpot is not None]
        told = [(fate, fate.upstream) for fate in answered if fate.p50]
        errors = [abs(upstream / fate.p50 - 1) for fate, upstream in told if upstream is not None]
        offered, prompts = max(len(fates), 1), sum(fate.prompt_tokens for fate in answered)
        return Row(
            name=name,
            offered=len(fates),
            attainment=sum(map(self.met_ttft, fates)) / offered,
            good=len(good) / offered,
            goodput=len(good) / self.seconds,
            ttft=(quantile(ttfts, 0.5), quantile(ttfts, 0.9), quantile(ttfts, 0.99)),
            tpot=(quantile(tpots, 0.5), quantile(tpots, 0.9)),
            hit=sum(fate.cached for fate in answered) / max(prompts, 1),
            tiers=_shares(answered),
            preferred=sum(fate.tier == 0 for fate in good) / max(len(good), 1),
            cost=sum(fate.cost for fate in fates),
            sheds=sum(fate.shed for fate in fates),
            lost=sum(fate.lost for fate in fates),
            extra=sum(fate.hedges for fate in fates),
            coverage=_share(told, lambda pair: pair[1] is not None and pair[1] <= pair[0].p90),
            error=quantile(errors, 0.5),
            regret=sum(fate.regret for fate in answered) / max(len(answered), 1),
            completed=len(done),
            output_rate=sum(fate.output_tokens for fate in done) / self.seconds,
        )

    def between(self, start: float, end: float) -> Row:
        """Those with a budget that arrived in this time."""
        chosen = [fate for fate in self.fates if start <= fate.arrived < end and self.has_budget(fate.route)]
        return self.row("between", chosen)


def quantile(values: Iterable[float], q: float) -> float:
    """Nearest rank; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def _share(items: Sequence[tuple[Fate, float | None]], holds: Callable[[tuple[Fate, float | None]], bool]) -> float:
    return sum(map(holds, items)) / len(items) if items else float("nan")


def _shares(answered: Sequence[Fate]) -> tuple[float, ...]:
    tiers = max((fate.tier for fate in answered), default=0) + 1
    return tuple(sum(fate.tier == tier for fate in answered) / max(len(answered), 1) for tier in range(tiers))
