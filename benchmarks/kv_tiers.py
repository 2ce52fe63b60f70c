"""Engines with and without KV blocks in the CPU's memory, and what a gateway hears of them, in replays of (agents).

`kv_tiers.py --traces DIR` prints a row for each way: share of good requests, p50 and p99 of the TTFT in seconds, and
the cached share of prompt tokens, means over the seeds. A seed of a way takes some four seconds of CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from backends.server_profiles import EngineProfile
from benchmarks.scenarios import arrivals, setting
from lab.engines.virtual_engine import VirtualEngine
from lab.replay.player import Player

SCENARIO, SECONDS = "agents", 220.0  # of virtual time: the fleet starts cold


@dataclass(frozen=True, slots=True)
class Way:
    """`media`: of the KV events that the gateway hears."""

    title: str
    offloads: bool
    media: tuple[str, ...] = ()


WAYS = (
    Way("no offload, events of the GPU", False, ("gpu",)),
    Way("offload, no events", True),
    Way("offload, events of the GPU", True, ("gpu",)),
    Way("offload, events of both", True, ("gpu", "cpu")),
)


def replayed(way: Way, load: float, seed: int, gpu: int, host: int, traces: Path) -> tuple[float, float, float, float]:
    """Good, p50, p99 and the cached share, of engines with room for `gpu` and `host` tokens."""
    scenario = setting(SCENARIO)
    room = {"kv_tokens": gpu, "host_tokens": host if way.offloads else 0}
    profiles = {
        name: replace(each, **room) if isinstance(each, EngineProfile) else each
        for name, each in scenario.profiles.items()
    }
    offered = [each for each in arrivals(SCENARIO, load, traces, seed) if each.at < SECONDS]
    player = Player(replace(scenario, profiles=profiles, kv_events=way.media), offered, seed)
    row = player.play().overall()
    engines = [each.engine for each in player.servers.servers.values() if isinstance(each, VirtualEngine)]
    cached = sum(each.prefix_hits for each in engines) / max(sum(each.prefix_queries for each in engines), 1)
    return row.good, row.ttft[0], row.ttft[2], cached


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--gpu", type=int, default=200_000, help="tokens in the GPU")
    parser.add_argument("--host", type=int, default=1_300_000, help="tokens in the CPU's memory")
    args = parser.parse_args(argv)
    for way in WAYS:
        rows = [replayed(way, args.load, seed, args.gpu, args.host, args.traces) for seed in range(1, args.seeds + 1)]
        good, p50, p99, cached = map(mean, zip(*rows, strict=True))
        print(f"{way.title:32} good {good:.3f}  p50 {p50:5.2f}  p99 {p99:5.1f}  cached {cached:.3f}", flush=True)


if __name__ == "__main__":
    main()
