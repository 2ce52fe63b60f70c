"""KV caches that overflow in a replay."""

from __future__ import annotations

from dataclasses import replace

from backends.server_profiles import PROFILES, EngineProfile
from lab.replay.player import Player
from tests.support.replay_builders import arrivals, scenario

PROFILE = PROFILES["8b-h100"]
assert isinstance(PROFILE, EngineProfile)
SMALL = replace(PROFILE, kv_tokens=24_000)


def overloaded() -> Player:
    """Answers need more blocks than the two engines have for about 40 s; the last prompt comes a minute later."""
    chosen = scenario()
    burst = arrivals(160, rate=4.0, prompt=2_000, output=1_000)
    last = replace(burst[-1], at=burst[-1].at + 60.0)
    profiles = dict.fromkeys(chosen.profiles, SMALL)
    return Player(replace(chosen, profiles=profiles), [*burst, last], 1)


def test_a_wait_for_blocks_is_not_learned_as_prefill() -> None:
    """Once the KV caches have room again, the forecast is that of before, and so is the choice of engines."""
    player = overloaded()
    player.play()
    fleet, now = player.gateways[0].fleet, player.clock.now
    loads = fleet.snapshot(now).loads
    medians = [fleet.view.forecast(e, loads[e.id], 2_000, 0, now).p50 for e in player.scenario.pools[0].endpoints]
    assert max(medians) < 0.2
