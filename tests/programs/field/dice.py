"""Chance of the bench, from a seed, and whether it makes what few clients send and few models answer."""

from __future__ import annotations

from random import Random
from typing import TypeVar

T = TypeVar("T")


class Dice(Random):
    """`odd`: the unusual happens."""

    odd = True

    def among(self, usual: T, *unusual: T) -> T:
        """One of all, each as likely."""
        found = self.choice((usual, *unusual))
        return found if self.odd else usual

    def rarely(self, share: float) -> bool:
        """Something unusual happens."""
        return self.random() < share and self.odd


def dice(seed: int, *, odd: bool) -> Dice:
    found = Dice(seed)
    found.odd = odd
    return found
