"""When the gateway asks an endpoint itself."""

from __future__ import annotations

from policies.fleet.witness_schedule import FIRST, FORGOTTEN, LONGEST, WitnessSchedule

DAY = 86_400


def began(schedule: WitnessSchedule, begin: float, seconds: float, well: bool = True) -> list[float]:
    """Times of probes where one is wanted every second, and each is answered at once."""
    times = []
    for now in range(int(begin), int(begin + seconds)):
        if schedule.begin("api/1", now):
            times.append(now)
            schedule.on_ended("api/1", well)
    return [time - begin for time in times]


def test_the_interval_doubles_while_the_endpoint_is_well() -> None:
    """Up to the longest."""
    assert began(WitnessSchedule(), 1000.0, 1000.0) == [0, 10, 30, 70, 150, 310, 610, 910]


def test_a_caller_costs_a_paid_api_less_than_300_probes_a_day() -> None:
    """Whatever it repeats."""
    assert len(began(WitnessSchedule(), 0.0, DAY)) <= 300


def test_after_a_failed_probe_the_interval_is_the_first() -> None:
    """The endpoint changes: its recovery should be seen."""
    assert began(WitnessSchedule(), 1000.0, 35.0, well=False) == [0, FIRST, 2 * FIRST, 3 * FIRST]


def test_one_probe_at_a_time() -> None:
    """Of each endpoint."""
    schedule = WitnessSchedule()
    assert schedule.begin("api/1", 0.0)
    assert not schedule.begin("api/1", LONGEST)
    assert schedule.begin("api/2", LONGEST)
    schedule.on_ended("api/1", well=True)
    assert schedule.begin("api/1", LONGEST + 1)


def test_endpoints_that_are_gone_are_forgotten() -> None:
    """Addresses of a name may change for years."""
    schedule = WitnessSchedule()
    for number in range(100):
        schedule.begin(f"api/{number}", 0.0)
        schedule.on_ended(f"api/{number}", well=True)
    schedule.begin("api/new", FORGOTTEN + 1)
    assert len(schedule) == 1
