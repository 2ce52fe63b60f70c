"""What a figure is, and what those that measure it are given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers import Proxy


@dataclass(frozen=True, slots=True)
class Figure:
    """Less is better, in all of them. `goal`: at most so much, or so many times nginx's where `times_nginx`."""

    key: str
    title: str
    goal: float | None = None
    times_nginx: bool = False
    added: bool = False  # what there is without a proxy is taken off
    digits: int = 0


@dataclass(frozen=True, slots=True)
class Engines:
    """The servers behind every proxy: one process with several ports."""

    ports: Sequence[int]
    pid: int


Measured = Mapping[str, float]  # by Figure.key


@dataclass(frozen=True, slots=True)
class Scenario:
    """One load, and the figures that it gives. `fresh`: of a process that has done nothing else, for memory's sake."""

    name: str
    figures: Sequence[Figure]
    measure: Callable[[Proxy, Engines], Awaitable[Measured]]
    fresh: bool = False

    @property
    def with_direct(self) -> bool:
        return any(figure.added for figure in self.figures)
