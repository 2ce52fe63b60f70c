"""A figure, and the parameters of its measurement."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers import Proxy


@dataclass(frozen=True, slots=True)
class Goal:
    """At most `limit`, or so many times the peer's value; `least`: at least."""

    limit: float
    peer: str = ""
    least: bool = False

    def __str__(self) -> str:
        times = f" x {self.peer}" if self.peer else ""
        return f"{'≥' if self.least else '≤'} {self.limit:g}{times}"

    def met(self, ours: float, peers: Mapping[str, float]) -> bool:
        """Also true where there is nothing to compare with."""
        if self.peer and self.peer not in peers:
            return True
        bound = self.limit * (peers[self.peer] if self.peer else 1.0)
        return ours >= bound if self.least else ours <= bound


@dataclass(frozen=True, slots=True)
class Figure:
    """Less is better, unless `more`."""

    key: str
    title: str
    goals: Sequence[Goal] = ()
    added: bool = False  # the direct connection's value is subtracted
    digits: int = 0
    more: bool = False  # is better
    rate: float = 0.0  # requests per second offered; 0: not stated

    @property
    def achieved(self) -> str:
        """Key of the rate that was achieved."""
        return f"{self.key.rpartition('-')[0]}-rate"


@dataclass(frozen=True, slots=True)
class Engines:
    """The servers behind every proxy: one process with several ports. `turn` numbers the round: all peers get the same
    prompts in it, and none gets them twice."""

    ports: Sequence[int]
    pid: int
    turn: int = 0


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


@dataclass(frozen=True, slots=True)
class Block:
    """Scenarios shown as one table. `about`: what the reader must know of it, in Markdown."""

    title: str
    about: str
    scenarios: Sequence[Scenario]

    @property
    def figures(self) -> list[Figure]:
        return [figure for scenario in self.scenarios for figure in scenario.figures]
