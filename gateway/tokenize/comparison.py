"""Texts on which encoders are compared, and the speed of an encoder. Both at load, on fixed texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from itertools import chain
from time import thread_time

SEGMENT = 4000  # characters of a compared text
SLOWEST, FASTEST = 2e6, 80e6  # characters per second: bounds of a measured speed
TICK = 1e-7  # s: below the resolution of the clock
ROUNDS = 5  # of a measurement; the fastest counts, so a busy machine does not
RUNS = ("a", " ", "\n", "=", "0", "\t", "é", "好", "😀", "\0", "\r\n", "ab", " a", "'s", "\n\n  ", "(" * 63 + ")")

Pack = Callable[[str], bytes]


def texts(samples: Sequence[str]) -> list[str]:
    """Prose, code, scripts, special tokens, runs, and `samples`, cut into segments."""
    plain, runs = _plain(), [run * (SEGMENT // len(run)) for run in RUNS]
    lines = plain.splitlines(keepends=True)
    return [*lines, *chain.from_iterable(map(_cut, (plain, *runs, *samples)))]


def seconds(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """CPU time of `work`, the least of several rounds. `before` precedes each and does not count."""
    found = []
    for _ in range(ROUNDS):
        before()
        started = thread_time()
        work()
        found.append(thread_time() - started)
    return max(min(found), TICK)


def speed(pack: Pack, before: Callable[[], object] = lambda: None) -> float:
    """ASCII characters of prose and code encoded per second."""
    text = "".join(filter(str.isascii, _plain().splitlines(keepends=True)))
    return min(max(len(text) / seconds(lambda: pack(text), before), SLOWEST), FASTEST)


def _cut(text: str) -> list[str]:
    return [text[start : start + SEGMENT] for start in range(0, len(text), SEGMENT)]


@cache
def _plain() -> str:
    return resources.files("gateway.tokenize").joinpath("data", "comparison.txt").read_bytes().decode()
