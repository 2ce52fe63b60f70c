"""Batch work by a deadline beside requests with budgets, in virtual time: done in time, and at no cost."""

from __future__ import annotations

from dataclasses import replace

from lab.replay.player import play
from lab.replay.results import Results
from lab.traffic.traces import Arrival
from tests.support.replay_builders import arrivals, route, scenario

SECONDS = 60.0
RATE = 6.0  # requests/s of two engines, which can answer 7 in time
JOB = 60  # requests of batch work, all at once: another 1.5/s until they are due
DUE = 40.0  # s
NIGHTLY = route("nightly", workload="batch", ttft="off", tpot="off", total="off", prefer="cost", by=f"{DUE:g}s")


def played(job: int) -> Results:
    usual = [replace(arrival, tenant="web") for arrival in arrivals(int(RATE * SECONDS), RATE, seed=1)]
    others = arrivals(job, 1000.0, seed=2)
    batch = [
        Arrival(5.0, each.prompt_tokens, each.output_tokens, [block + (1 << 56) for block in each.hashes], "nightly")
        for each in others
    ]
    batch = [replace(each, tenant="jobs") for each in batch]
    found = scenario(2, first_token=60.0)
    found = replace(found, routes={**found.routes, "nightly": NIGHTLY})
    return play(found, sorted([*usual, *batch], key=lambda arrival: arrival.at), 1)


def test_batch_work_is_done_by_its_deadline_and_costs_others_nothing() -> None:
    """Near the capacity of the fleet, for another key than theirs."""
    alone, beside = ({row.name: row for row in played(job).rows()} for job in (0, JOB))
    assert beside["nightly"].total >= 0.99
    assert beside["agent"].good >= alone["agent"].good - 0.005
