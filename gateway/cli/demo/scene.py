"""The demo's scene: which engines, which policy, which callers. Numbers to play with live here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Simulated servers of a pool."""

    pool: str
    profile: str
    model: str
    count: int
    input: float  # USD per million tokens
    output: float


@dataclass(frozen=True, slots=True)
class TrafficSpec:
    """Traffic of a route. Conversations arrive at `rate` per second and take `turns` turns.

    Token counts are approximate: one word each. `pause`: seconds of a caller's think time between turns.
    Every `burst_every` seconds the rate is multiplied by `burst` for `burst_for` seconds.
    """

    route: str
    rate: float
    turns: int
    system_words: int
    new_words: int
    max_tokens: int
    pause: float
    opening_words: int = 0  # of the first turn, beside `new_words`: a document, a repository
    burst: float = 1.0
    burst_every: float = 30.0
    burst_for: float = 6.0


CAST = (
    EngineSpec("small", "8b-h100", "qwen3-8b", 2, 0.05, 0.2),
    EngineSpec("large", "70b-4xh100", "llama-3.3-70b", 1, 0.6, 0.8),
    EngineSpec("api", "api", "gpt-4.1-mini", 1, 0.4, 1.6),
)

CALLERS = (
    TrafficSpec("chat", 1.5, 4, 400, 120, 100, 2.0, burst=3.0),
    TrafficSpec("agent", 0.3, 5, 600, 500, 40, 0.5, opening_words=9000, burst=4.0, burst_every=20.0),
    TrafficSpec("code", 4.0, 1, 200, 900, 24, 0.0),
)

ROUTES: dict[str, Any] = {
    "chat": {
        "workload": "chat",
        "ttft": {"budget": "300ms", "target": 0.9},
        "tpot": {"budget": "60ms"},
        "tiers": ["large", "small", "api"],
        "on_miss": "best_effort",
    },
    "agent": {
        "workload": "agent",
        "ttft": {"budget": "2s", "target": 0.9},
        "tiers": ["large", "small"],
        "on_miss": "best_effort",
    },
    "code": {
        "workload": "autocomplete",
        "ttft": {"budget": "250ms", "target": 0.9},
        "tiers": ["small", "large"],
        "on_miss": "shed",
    },
}


def document(urls: Mapping[str, list[str]], port: int, admin_port: int) -> dict[str, Any]:
    """The demo's configuration as plain data. `urls`: by pool."""
    pools: dict[str, Any] = {}
    for cast in CAST:
        pools[cast.pool] = {
            "backend": "simulated",
            "model": cast.model,
            "endpoints": urls[cast.pool],
            "price": {"input": cast.input, "output": cast.output},
        }
    pools["api"] |= {"backend": "compatible", "api_key": "demo"}
    return {
        "server": {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{admin_port}"},
        "pools": pools,
        "routes": ROUTES,
        "telemetry": {"access_log": "off"},
    }
