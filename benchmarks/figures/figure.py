"""A figure, and the parameters of its measurement."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers import Proxy


@dataclass(frozen=True, slots=True)
class Figure:
    """Less is better. `goal`: at most so much, or so many times nginx's where `times_nginx`."""

    key: str
    title: str
    goal: float | None = None
    times_nginx: bool = False
    added: bool = False  # the direct connection's value is subtracted
    digits: int = 0


@dataclass(frozen=True, slots=True)
class Engines:
    """The servers behind every proxy: one process with several ports."""

    ports: Sequence[int]
    pid: int


Measured = Mapping[str, float]  # by Figure.key


@dataclass(frozen=True, slots=True)
class Scenario:
    """One load, and its figures. `fresh`: needs a new process, for memory."""

    name: str
    figures: Sequence[Figure]
    measure: Callable[[Proxy, Engines], Awaitable[Measured]]
    fresh: bool = False

    @property
    def with_direct(self) -> bool:
        return any(figure.added for figure in self.figures)
