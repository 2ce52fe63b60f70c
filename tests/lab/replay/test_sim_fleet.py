"""The simulated servers of a replay."""

from __future__ import annotations

import pytest

from backends.server_profiles import PROFILES, ApiProfile
from lab.engines.engine_events import EngineRequest, Event, Refused
from lab.replay.sim_fleet import API_OVERHEAD, ScheduledFault, SimFleet
from tests.support.replay_builders import arrivals

ENGINES = {"main/0": PROFILES["8b-h100"], "main/1": PROFILES["8b-a100"]}


def ask(number: int, prompt: int = 2_000, output: int = 20) -> EngineRequest:
    return EngineRequest(number, prompt, output)


def played(step: float) -> list[Event]:
    """All events, with the servers run in slices of `step` seconds."""
    servers, events, now = SimFleet(ENGINES, seed=3), list[Event](), 0.0
    for number, arrival in enumerate(arrivals(40, rate=10.0)):
        while now + step < arrival.at:
            now += step
            events += servers.run_until(now)
        request = EngineRequest(number, arrival.prompt_tokens, arrival.output_tokens, arrival.hashes)
        servers.submit(f"main/{number % 2}", request, arrival.at)
    return events + list(servers.run_until(200.0))


def test_how_time_is_sliced_changes_nothing() -> None:
    """Events are equal to the bit with slices of a millisecond and without slices."""
    fine, coarse = played(0.001), played(1e9)
    assert len(fine) == 80
    assert fine == coarse


def test_events_come_in_the_order_of_their_times() -> None:
    """Events of all servers are merged in order of time."""
    times = [event.at for event in played(0.01)]
    assert times == sorted(times)


def test_one_seed_is_one_outcome() -> None:
    """Equal seeds give equal events; another seed gives other events."""
    first, again, other = (SimFleet(ENGINES, seed) for seed in (1, 1, 2))
    for servers in (first, again, other):
        servers.submit("main/0", ask(1), 0.0)
    ends = [list(servers.run_until(60.0)) for servers in (first, again, other)]
    assert ends[0] == ends[1]
    assert ends[0] != ends[2]


def test_a_dead_engine_takes_its_requests_along() -> None:
    """A killed engine refuses requests until a restart, and restarts empty."""
    servers = SimFleet(ENGINES)
    servers.submit("main/0", ask(1), 0.0)
    assert servers.apply_fault(ScheduledFault(0.1, "main/0", "kill"), 0.1) == (1,)
    assert servers.load_of("main/0") is None
    with pytest.raises(Refused):
        servers.submit("main/0", ask(2), 0.2)
    servers.apply_fault(ScheduledFault(1.0, "main/0", "restart"), 1.0)
    servers.submit("main/0", ask(3), 1.0)
    assert [event.id for event in servers.run_until(60.0)] == [3, 3]


def test_a_slow_engine_takes_as_many_times_longer() -> None:
    """A factor of 1 restores the speed."""
    took = []
    for factor in (1.0, 5.0):
        servers = SimFleet(ENGINES)
        servers.apply_fault(ScheduledFault(0.0, "main/0", "slow", factor), 0.0)
        servers.submit("main/0", ask(1), 0.0)
        took.append(list(servers.run_until(60.0))[-1].at - 0.015)
    assert took[1] / took[0] == pytest.approx(5.0)


def test_a_hung_request_is_never_answered() -> None:
    """A hung request is no load on the engine, and is lost with the engine."""
    servers = SimFleet(ENGINES, hung=1.0)
    servers.submit("main/0", ask(1), 0.0)
    assert list(servers.run_until(100.0)) == []
    assert servers.apply_fault(ScheduledFault(100.0, "main/1", "kill"), 100.0) == ()
    assert servers.apply_fault(ScheduledFault(100.0, "main/0", "kill"), 100.0) == (1,)


def test_a_hung_request_can_be_left() -> None:
    """An aborted request is not lost with the engine later."""
    servers = SimFleet(ENGINES, hung=1.0)
    servers.submit("main/0", ask(1), 0.0)
    servers.abort("main/0", 1)
    assert servers.apply_fault(ScheduledFault(1.0, "main/0", "kill"), 1.0) == ()


def test_simulated_servers_run_ahead_by_less_than_the_shortest_ttft() -> None:
    """For APIs alone, servers run ahead by less than the shortest TTFT."""
    assert SimFleet(ENGINES).overhead == PROFILES["8b-h100"].overhead  # type: ignore[union-attr]
    assert SimFleet({"api/0": ApiProfile("api", "m")}).overhead == API_OVERHEAD
