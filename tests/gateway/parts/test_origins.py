"""Makers of signatures in memory: bounded, by caller, whatever the number of callers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.core.hooks import Ask
from gateway.parts.origins import part
from gateway.parts.origins.part import Origins
from gateway.upstream.race import Race


class Memory:
    """The part, as ended requests call it."""

    def __init__(self) -> None:
        self._part = Origins(cast("Any", SimpleNamespace(dispatcher=SimpleNamespace(operations=SimpleNamespace()))))

    def answered(self, caller: str, *signatures: str) -> None:
        tap = SimpleNamespace(facts=SimpleNamespace(signatures=list(signatures)))
        endpoint = SimpleNamespace(pool="a")
        attempt = SimpleNamespace(candidate=SimpleNamespace(endpoint=endpoint))
        race = SimpleNamespace(winner=SimpleNamespace(tap=tap, attempt=attempt))
        runtime = SimpleNamespace(maker=lambda model, pool: "maker")
        ask = SimpleNamespace(runtime=runtime, named=SimpleNamespace(model=""), request=SimpleNamespace(caller=caller))
        self._part.ended(cast("Ask", ask), cast("Race", race))

    def knows(self, signature: str) -> bool:
        return self._part.recall(signature) == "maker"

    @property
    def callers(self) -> int:
        return len(self._part._by_caller)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "MOST", 4)


def test_the_caller_with_most_gives_up_its_oldest() -> None:
    memory = Memory()
    memory.answered("a", "a1", "a2", "a3")
    memory.answered("b", "b1")
    memory.answered("c", "c1")
    assert [memory.knows(each) for each in ("a1", "a2", "a3", "b1", "c1")] == [False, True, True, True, True]
    memory.answered("c", "c2", "c3")
    assert sum(map(memory.knows, ("a2", "a3", "b1", "c1", "c2", "c3"))) == 4
    assert memory.knows("b1")
    assert memory.knows("c3")


def test_a_caller_without_signatures_is_forgotten() -> None:
    """Callers are addresses where no key is asked for: there is no end of them."""
    memory = Memory()
    for number in range(100):
        memory.answered(f"caller-{number}", f"signature-{number}")
        assert memory.callers <= 4


def test_a_full_memory_of_many_callers_takes_a_signature_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ended request looks at no other caller's signatures, but at those of the one with most."""
    monkeypatch.setattr(part, "MOST", 1_000)
    memory = Memory()
    sizes = 0

    class Counted(dict[bytes, None]):
        def __len__(self) -> int:
            nonlocal sizes
            sizes += 1
            return super().__len__()

    for number in range(1_000):
        memory.answered(f"caller-{number}", f"signature-{number}")
    known = memory._part._by_caller
    known.update({caller: Counted(digests) for caller, digests in known.items()})
    memory.answered("another", "signature")
    assert sizes < 10
