"""Which adapters an engine is believed to hold, and what it costs to ask for another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.adapters.adapter_slots import AdapterFacts, AdapterSlots
from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import NEVER, AttemptOutcome, Health, PoolEstimate
from policies.variants import UNKNOWN
from tests.support.learned_fleet import ONE, SMALL, TWO, answer, prompt, send

FACTS = AdapterFacts(frozenset("abcd"), slots=2, load_s=0.3)
ADAPTED = replace(SMALL, variants=FACTS)


def asking(adapter: str, tokens: int = 1000) -> PoolEstimate:
    return replace(prompt(tokens), variant=adapter)


def forecasts(fleet: Fleet, adapter: str, now: float) -> list[float]:
    """Point estimates at both endpoints, s."""
    loads = fleet.snapshot(now).loads
    found = fleet.view.candidates({one.id: loads[one.id] for one in (ONE, TWO)}, asking(adapter), 0, 0.0, now, 10.0)
    return [candidate.forecast.point_estimate for candidate in found]


def waits(slots: AdapterSlots, now: float = 100.0) -> dict[str, float]:
    return {name: slots.wait(name, now).seconds for name in sorted(FACTS.names)}


def test_the_least_recently_used_adapter_makes_room() -> None:
    slots = AdapterSlots(FACTS)
    for now, name in enumerate("abac"):
        slots.on_sent(name, float(now))
        slots.on_ended(name, 0.0)
    assert slots.loaded == ("a", "c")
    assert waits(slots) == {"a": 0.0, "b": 0.3, "c": 0.0, "d": 0.3}


def test_requests_sent_during_a_load_wait_for_its_rest() -> None:
    slots = AdapterSlots(FACTS)
    assert slots.on_sent("a", 1.0).seconds == 0.3
    assert slots.on_sent("a", 1.1).seconds == pytest.approx(0.2)
    slots.on_answer("a")
    assert slots.on_sent("a", 1.15).seconds == 0.0


def test_an_engine_loads_one_adapter_after_another_and_computes_nothing_meanwhile() -> None:
    """So a request waits for the loads before it, whatever adapter it needs, until the last of these answers."""
    slots = AdapterSlots(replace(FACTS, slots=3))
    slots.on_sent("a", 1.0)
    assert slots.on_sent("b", 1.0).seconds == pytest.approx(0.6)
    assert waits(slots, 1.1) == pytest.approx({"a": 0.5, "b": 0.5, "c": 0.8, "d": 0.8})
    slots.on_answer("a")
    assert slots.wait("a", 1.3).seconds == pytest.approx(0.3)
    slots.on_answer("b")
    assert slots.wait("a", 1.3).seconds == 0.0


def test_a_request_waits_for_a_slot_while_all_are_in_use() -> None:
    """The wait is the mean answer's, over the slots."""
    slots = AdapterSlots(FACTS)
    for _ in range(100):
        slots.on_sent("a", 0.0)
        slots.on_ended("a", 4.0)
    slots.on_sent("a", 9.0)
    assert slots.wait("c", 10.0).seconds == pytest.approx(0.3)
    slots.on_sent("b", 9.0)
    assert slots.wait("c", 10.0).seconds == pytest.approx(2.3, rel=0.01)
    slots.on_ended("b", 4.0)
    assert slots.wait("c", 10.0).seconds == pytest.approx(0.3)


def test_the_engine_tells_what_it_runs_and_how_many_it_holds() -> None:
    slots = AdapterSlots(FACTS)
    slots.on_scrape(("a", "b", "c", "unheard of"), 3)
    assert slots.loaded == ("a", "b", "c")
    slots.on_scrape((), None)
    assert slots.loaded == ("a", "b", "c")


def test_an_endpoint_without_the_adapter_is_predicted_later_by_a_load() -> None:
    fleet = Fleet([ADAPTED])
    before = forecasts(fleet, "", 0.0)
    answer(fleet, asking("a"), ONE, now=0.0, ttft=0.3 + before[0])
    held, other = forecasts(fleet, "a", 10.0)
    assert other - held == pytest.approx(0.3, rel=0.1)
    assert forecasts(fleet, "", 10.0)[1] < other - 0.2  # the model itself needs no load


def test_a_load_teaches_its_own_time_and_not_the_speed_of_the_engine() -> None:
    """Each request asks for an adapter that two others have driven out; a load takes 2 s, and not 0.3."""
    fleet = Fleet([ADAPTED])
    for now in range(20):
        answer(fleet, prompt(1000), ONE, now=10.0 * now, ttft=0.1)
    speed = forecasts(fleet, "", 300.0)[0]
    for number in range(60):
        answer(fleet, asking("abcd"[number % 4]), ONE, now=300.0 + 10.0 * number, ttft=2.1)
    assert forecasts(fleet, "", 1000.0)[0] == pytest.approx(speed, rel=0.1)
    assert forecasts(fleet, "a", 1000.0)[0] == pytest.approx(2.1, rel=0.1)


def test_an_engine_that_does_not_know_an_adapter_serves_its_other_models() -> None:
    fleet = Fleet([ADAPTED])
    key = send(fleet, asking("a"), ONE)
    fleet.on_ended(key, AttemptOutcome.MISCONFIGURED, 0.1, AttemptReport(unknown_model=True))
    load = fleet.snapshot(0.2).loads[ONE.id]
    assert (load.health, load.unknown_variants) == (Health.UP, {"a": 0.1 + UNKNOWN})
    answer(fleet, asking("a"), ONE, now=20.0, ttft=0.1)
    assert fleet.snapshot(30.0).loads[ONE.id].unknown_variants == {}


def test_a_refused_key_is_a_fault_of_the_engine_for_all_its_models() -> None:
    fleet = Fleet([ADAPTED])
    key = send(fleet, asking("a"), ONE)
    fleet.on_ended(key, AttemptOutcome.MISCONFIGURED, 0.1, AttemptReport())
    assert fleet.snapshot(0.2).loads[ONE.id].health is Health.DOWN


def test_a_reload_keeps_what_is_held_and_forgets_it_with_other_slots() -> None:
    fleet = Fleet([ADAPTED])
    answer(fleet, asking("a"), ONE, now=0.0, ttft=0.4)
    fleet.reload([replace(ADAPTED, context_window=9000)])
    held, other = forecasts(fleet, "a", 10.0)
    assert held < other - 0.2
    fleet.reload([replace(ADAPTED, variants=replace(FACTS, slots=3))])
    held, other = forecasts(fleet, "a", 10.0)
    assert held == pytest.approx(other, rel=0.1)
    fleet.reload([SMALL])
    assert forecasts(fleet, "a", 10.0)[0] < 0.3
    assert fleet.snapshot(20.0).loads[ONE.id].unknown_variants is None
    assert fleet.view.last_used_at(TWO.id) == NEVER
