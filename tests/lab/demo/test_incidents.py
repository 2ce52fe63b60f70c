"""Incidents: the gateway finds the cause of each by its own knowledge, and none in calm traffic."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from gateway.observe.part_notes import DIAGNOSIS, cause_of
from lab.demo.incident_stage import IncidentFleet, incident_stage
from lab.demo.incidents import CALM, INCIDENTS, Incident
from lab.engines.engine import Engine
from lab.virtual_time import stall
from policies.diagnosis.causes import Cause

pytestmark = pytest.mark.virtual_time

SEEDS = range(int(os.environ.get("INCIDENT_SEEDS", "3")))


async def causes_of_victims(incident: Incident, seed: int) -> tuple[Counter[str], str]:
    """Causes of the victims' Records, and the cause of the first incident that the page shows."""
    async with incident_stage(incident.fleet, seed, stall) as stage:
        await incident.play(stage)
        records = [await stage.record(victim) for victim in stage.victims]
        shown = stage.gateway.recorder.slow.incidents(5)["incidents"]
    first = f"{shown[0]['cause']} of {shown[0]['culprit']}" if shown else "none"
    return Counter("no Record" if record is None else cause_of(record) for record in records), first


@pytest.mark.parametrize("name", INCIDENTS)
async def test_the_cause_of_an_incident_is_found(name: str) -> None:
    """At least 90% of the requests that an incident slows have its cause, and the first row of the page names it."""
    incident, found = INCIDENTS[name], Counter[str]()
    for seed in SEEDS:
        causes, first = await causes_of_victims(incident, seed)
        assert causes, f"the incident slowed no request with seed {seed}"
        found += causes
        assert first.startswith(f"{incident.cause.value} of ")
        assert not first.endswith(" of ")
    assert found[incident.cause.value] >= 0.9 * found.total(), found


async def test_calm_traffic_has_no_cause() -> None:
    """Less than 5% of the requests of a route that is well are slow for any reason."""
    slow, requests = 0, 0
    for seed in SEEDS:
        async with incident_stage(CALM.fleet, seed, stall) as stage:
            await CALM.play(stage)
            recent = stage.gateway.recorder.recent
            slow, requests = slow + sum(bool(cause_of(record)) for record in recent), requests + len(recent)
    assert requests >= 50 * len(SEEDS)
    assert slow < 0.05 * requests


async def test_a_session_whose_engine_has_lost_its_cache_is_cold_and_not_evicted() -> None:
    """Its next turn goes to the same endpoint, and finds nothing there: the gateway knows of the loss."""
    async with incident_stage(IncidentFleet(engines=1), 1, stall) as stage:
        await stage.calm()
        messages = stage.question(5_000)
        record = await stage.record(await stage.ask(messages))
        assert record is not None
        engine = stage.servers[0].engine
        assert isinstance(engine, Engine)
        engine.cache.clear()
        stage.gateway.fleet.on_cache_cleared(record.endpoint.id)
        after = await stage.record(await stage.ask([*messages, {"role": "user", "content": "and then"}]))
    assert after is not None
    assert DIAGNOSIS.of(after) is not None
    assert cause_of(after) == Cause.COLD_CACHE
    assert "restarted or gone since" in DIAGNOSIS.of(after).verdict.evidence


def test_each_common_cause_has_an_incident() -> None:
    """Causes without one need an engine's or a provider's own trouble, or an operator: the lab simulates neither."""
    unplayed = {Cause.SLOW_REGION, Cause.KV_FULL, Cause.DRAINED, Cause.UNKNOWN}
    assert {incident.cause for incident in INCIDENTS.values()} == set(Cause) - unplayed
