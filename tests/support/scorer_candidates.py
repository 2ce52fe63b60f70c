"""Candidates for tests of scorers, and the scorer's choice."""

from __future__ import annotations

from collections.abc import Mapping

from policies.routes.route import Route
from policies.scorers.scorers import SCORERS, Scorer
from policies.types import Candidate, Endpoint, Forecast, Load, PrefixBlocks

NAMES = "abcdefgh"
NO_BLOCKS = PrefixBlocks()


def candidates(
    *loads: Load,
    hits: tuple[int, ...] = (),
    ttft: tuple[float, ...] = (),
    seconds: tuple[float, ...] = (),
    pace: tuple[float, ...] = (),
    chances: tuple[float, ...] = (),
    tokens: int = 1000,
    blocks: PrefixBlocks = NO_BLOCKS,
) -> list[Candidate]:
    """Endpoints a, b, c ... of one pool, with these loads, hits (tokens), median TTFTs, prefill times, TPOTs (s), and
    chances of making the TTFT budget."""
    return [
        Candidate(
            endpoint=Endpoint(NAMES[i], "pool"),
            tier=0,
            prompt_tokens=tokens,
            hit=hits[i] if hits else 0,
            forecast=Forecast(
                ttft[i] if ttft else 0.2, tpot=pace[i] if pace else 0.0, prefill=seconds[i] if seconds else 0.0
            ),
            probability=chances[i] if chances else 1.0,
            price=0.0,
            load=load,
            blocks=blocks,
        )
        for i, load in enumerate(loads)
    ]


ROUTE = Route.model_validate({"tiers": ["pool"], "ttft": {"budget": "1s"}, "tpot": {"budget": "50ms"}})


def best(scorer: str, found: list[Candidate], sequence: int = 0, scorers: Mapping[str, Scorer] = SCORERS) -> str:
    """The endpoints with the least score."""
    scores = scorers[scorer](found, sequence, ROUTE)
    return "".join(p.endpoint.id for p, score in zip(found, scores, strict=True) if score == min(scores))


IDLE = Load()


def blocks(*hashes: int) -> PrefixBlocks:
    return PrefixBlocks(hashes, 16)
