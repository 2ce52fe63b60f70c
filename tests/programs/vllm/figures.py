"""Measured figures of this suite with their bounds, printed at the end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A line of the table. `bound` None: for information."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool:
        if self.bound is None:
            return True
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        required = "" if self.bound is None else f"{'>=' if self.at_least else '<='} {self.bound:g} {self.unit}"
        measured = f"{self.value:.2f}".rstrip("0").rstrip(".")
        return f"{self.name:<66} {measured:>9} {self.unit:<3} {required:>12}{'' if self.met else '  MISSED'}"


class Figures(list[Figure]):
    """Collected over the session."""

    def at_most(self, name: str, value: float, unit: str, bound: float) -> None:
        self._hold(Figure(name, value, unit, bound))

    def at_least(self, name: str, value: float, unit: str, bound: float) -> None:
        self._hold(Figure(name, value, unit, bound, at_least=True))

    def note(self, name: str, value: float, unit: str) -> None:
        """Adds a figure without a bound."""
        self.append(Figure(name, value, unit))

    def _hold(self, figure: Figure) -> None:
        self.append(figure)
        assert figure.met, str(figure)
