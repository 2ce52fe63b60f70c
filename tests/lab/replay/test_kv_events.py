"""A replay with engines that keep blocks in the CPU's memory, and the KV events that a gateway hears."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backends.server_profiles import EngineProfile
from lab.replay.player import Player
from lab.replay.sim_fleet import Scenario
from lab.traffic.traces import Arrival
from tests.support.replay_builders import scenario

TURNS, CONVERSATIONS, BLOCKS = 8, 12, 40  # tokens: 512 a block


def offloading(host_tokens: int, **more: Any) -> Scenario:
    """Two engines, each with room for two conversations in the GPU."""
    made = scenario(2, **more)
    profiles = {
        name: replace(each, kv_tokens=50_000, host_tokens=host_tokens)
        for name, each in made.profiles.items()
        if isinstance(each, EngineProfile)
    }
    return replace(made, profiles=profiles)


def blocks_of(conversation: int) -> range:
    return range(conversation << 20, (conversation << 20) + BLOCKS)


def conversations() -> list[Arrival]:
    """Each conversation comes back with the same prompt when the others have had a turn."""
    return [
        Arrival(2.0 * (turn * CONVERSATIONS + number), 512 * BLOCKS + 9, 4, blocks_of(number), "agent")
        for turn in range(TURNS)
        for number in range(1, CONVERSATIONS + 1)
    ]


def played(host_tokens: int, *media: str) -> Player:
    player = Player(offloading(host_tokens, kv_events=media), conversations(), seed=1)
    player.play()
    return player


def cached(player: Player) -> float:
    """Share of prompt tokens that engines had cached."""
    engines = [server.engine for server in player.servers.servers.values()]  # type: ignore[union-attr]
    return sum(each.prefix_hits for each in engines) / sum(each.prefix_queries for each in engines)


def test_prompts_stay_with_the_engine_that_has_them_in_the_cpus_memory() -> None:
    """To a gateway that hears of the GPU alone they are lost, and it spreads them."""
    without, gpu, both = played(0, "gpu"), played(400_000, "gpu"), played(400_000, "gpu", "cpu")
    assert cached(without) < 0.2
    assert cached(both) > 0.8
    assert cached(both) > cached(gpu) + 0.05


def test_the_time_of_a_load_is_forecast() -> None:
    """Half of the first tokens come within 10% of their forecast once loads are known."""
    later = played(400_000, "gpu", "cpu").results.requests[CONVERSATIONS * 2 :]
    errors = sorted(abs(each.ttft / each.p50 - 1) for each in later if each.ttft and each.p50)
    assert errors[len(errors) // 2] < 0.1


@pytest.mark.parametrize("media", [(), ("gpu",)])
def test_engines_without_offloaded_blocks_are_played_as_before(media: tuple[str, ...]) -> None:
    assert played(0, *media).results.overall().good > 0.9
