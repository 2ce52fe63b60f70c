"""Levels of a route's tiers: tiers beside each other are equals, of which one comes first by the share of its weight.

What the tiers say of the attempts after the first is here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import log
from typing import Literal

FailureCause = Literal["failure", "context", "content_filter"]
MOST_RETRIES, MOST_ATTEMPTS = 10, 30


@dataclass(frozen=True, slots=True)
class AttemptRules:
    """Rules of a route for attempts after the first. By number of the tier: its level, and its `after`."""

    levels: tuple[int, ...]
    after: tuple[frozenset[FailureCause], ...]
    retries: int | None = None


def drawn_order(levels: Sequence[int], names: Sequence[str], weights: Sequence[float], sequence: int) -> list[int]:
    """Indices of tiers, by level; those of one level in an order drawn for the request with this sequence number."""
    return sorted(range(len(levels)), key=lambda i: (levels[i], _drawn(names[i], weights[i], sequence)))


def _drawn(name: str, weight: float, sequence: int) -> float:
    """A draw from the exponential distribution with this rate: of several, each is the least by its weight's share."""
    digest = blake2b(f"{sequence} {name}".encode(errors="surrogatepass"), digest_size=8).digest()
    return -log((int.from_bytes(digest) + 1) / 2**64) / weight
