"""Small scenarios and traces with defaults for all that a test leaves open."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from backends.server_profiles import PROFILES, Profile
from gateway.config.yaml_source import with_preset
from lab.replay.sim_fleet import Scenario
from lab.traffic.traces import BLOCK, Arrival
from policies.routes.route import Route
from policies.types import Endpoint, Pool, Price

CONFIG = """\
pools:
  main:
    backend: simulated
    model: m
    profile: 8b-h100
    endpoints: ["http://h0:80", "http://h1:80"]
routes:
  agent: {workload: agent, tiers: [main]}
"""


def route(name: str = "agent", *, workload: Any = "agent", tiers: Sequence[Any] = ("main",), **more: Any) -> Route:
    return Route.model_validate(with_preset(workload, {"name": name, "tiers": list(tiers), **more}))


def pool(name: str = "main", *, engines: int = 2, local: bool = True, price: Price = Price()) -> Pool:  # noqa: B008
    endpoints = tuple(Endpoint(f"{name}/{i}", name) for i in range(engines))
    return Pool(name, "m", endpoints, local=local, price=price)


def scenario(engines: int = 2, profile: str = "8b-h100", *routes: Route, **more: Any) -> Scenario:
    """One pool of equal engines."""
    main = pool(engines=engines)
    profiles: dict[str, Profile] = {endpoint.id: PROFILES[profile] for endpoint in main.endpoints}
    return Scenario((main,), {r.name: r for r in routes or (route(),)}, profiles, **more)


def arrivals(
    count: int = 60, rate: float = 4.0, prompt: int = 6_000, output: int = 120, *, route: str = "agent", seed: int = 1
) -> list[Arrival]:
    """Poisson arrivals; lengths vary by half; every second prompt shares one of eight prefixes."""
    random, at, made = Random(seed), 0.0, list[Arrival]()
    for number in range(count):
        at += random.expovariate(rate)
        tokens = int(prompt * random.uniform(0.5, 1.5))
        shared = tokens // BLOCK // 2 if number % 2 else 0
        begun = random.randrange(8) << 20
        own = range(number << 40, (number << 40) + tokens // BLOCK - shared)
        hashes = array("Q", [*(begun + block for block in range(shared)), *own])
        made.append(Arrival(at, tokens, int(output * random.uniform(0.5, 1.5)), hashes, route))
    return made


def mooncake(path: Path, count: int = 40, gap: int = 250) -> Path:
    """A trace of short prompts, one every `gap` ms."""
    line = '{{"timestamp": {}, "input_length": 2000, "output_length": 40, "hash_ids": [1, 2, {}]}}\n'
    path.write_text("".join(line.format(number * gap, 100 + number) for number in range(count)))
    return path


def agent_sessions(path: Path, sessions: int = 3, turns: int = 4) -> Path:
    """Recorded sessions: a turn every 5 s, 2 s of thought, prompts that grow by two blocks; one block is common."""
    rows = []
    for session in range(1, sessions + 1):
        for turn in range(turns):
            blocks = [0, *(session * 1000 + block for block in range(1, 8 + 2 * turn))]
            row = {"session_id": session, "turn": turn, "timestamp": 5000 * turn, "think_time": 2.0 if turn else 0.0}
            rows.append({**row, "input_length": 512 * len(blocks), "output_length": 40, "hash_ids": blocks})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
