"""Variants of a pool's model: further models that its engines serve by name, and have to load before they answer.

A pool tells which (`Variants`), and the fleet keeps for each engine what it is believed to hold (`VariantSlots`). Both
are made by the feature that knows how engines do it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

UNKNOWN = 10.0  # s for which an engine is not asked for a variant that it does not know


@dataclass(frozen=True, slots=True)
class VariantWait:
    """Wait of a request for its variant."""

    seconds: float = 0.0
    load_s: float = 0.0  # of these, for a load that the request causes


LOADED = VariantWait()


class VariantSlots(Protocol):
    """Variants believed loaded in one engine. `load_s`: s to load another; `unknown`: those that the engine does not
    know, until when."""

    load_s: float
    unknown: dict[str, float]

    @property
    def loaded(self) -> tuple[str, ...]:
        """Least recently used first."""

    def wait(self, variant: str, now: float) -> VariantWait:
        """For the variant, of a request sent now."""

    def on_sent(self, variant: str, now: float) -> VariantWait:
        """A request for the variant is sent."""

    def on_ended(self, variant: str, seconds: float) -> None:
        """A request for the variant has ended, so long after its sending."""

    def on_answer(self, variant: str) -> None:
        """The variant answers."""

    def learn(self, load_s: float) -> None:
        """A request waited for the load of its variant for so long, s."""

    def on_unknown(self, variant: str, now: float) -> None:
        """The engine has refused the variant's name."""

    def on_scrape(self, running: Collection[str], slots: int | None) -> None:
        """`running`: variants of the engine's running requests; `slots`: that the engine has; None: not reported."""

    def clear(self) -> None:
        """The engine has restarted."""


class Variants(Protocol):
    """Variants of a pool's engines. `slots`: held by an engine at a time, until reported; `load_s`: s to load one,
    until learned."""

    @property
    def names(self) -> frozenset[str]: ...

    @property
    def slots(self) -> int: ...

    @property
    def load_s(self) -> float: ...

    def new_slots(self) -> VariantSlots:
        """Of an engine that holds none."""
