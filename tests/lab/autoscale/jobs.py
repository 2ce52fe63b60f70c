"""Questions to the process that replays traffic."""

from __future__ import annotations

from typing import Any

from lab.autoscale.replay_process import ReplicasJob
from tests.support import replay_builders as build


def job(**more: Any) -> ReplicasJob:
    """Of two engines and a route `chat`."""
    route = build.route("chat", ttft={"budget": "800ms", "per_1k_tokens": "20ms", "target": 0.9})
    given: dict[str, Any] = {
        "pool": "main",
        "current": 2,
        "least": 1,
        "most": 6,
        "start_time": 100.0,
        "since": 0.0,
        "cost": 1_200,
        "pools": (build.pool(),),
        "routes": {"chat": route},
        "rows": (),
        **more,
    }
    return ReplicasJob(**given)
