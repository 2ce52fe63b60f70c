"""Workload presets: defaults of a route's keys.

Presets have the form of the YAML and are merged beneath it before validation, so the operator's keys win one by
one: `ttft: {target: 0.99}` keeps the preset's budget, `ttft: off` drops it.

| workload     | who waits                                    | first budget          |
|--------------|----------------------------------------------|-----------------------|
| autocomplete | a typist, who types on after half a second   | total 500 ms          |
| chat         | a reader, for the first words                | TTFT 1 s              |
| task         | a user, for one whole answer                 | total 5 s             |
| agent        | a program, with progress shown               | total 30 s, TTFT 3 s  |
| batch        | nobody                                       | none                  |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.routes.route import Workload

PRESETS: Mapping[Workload, Mapping[str, Any]] = {
    # The editor discards a late suggestion: refuse it, and take the fastest tier.
    # Prompts are short, so a second copy is cheap. After the first token the total budget suffices: no TPOT.
    "autocomplete": {
        "ttft": {"budget": "300ms", "target": 0.9},
        "total": {"budget": "500ms"},
        "hedge": {"max_extra": "5%"},
        "on_miss": "shed",
        "prefer": "latency",
    },
    # 50 ms a token is about 15 words a second, three times what people read.
    "chat": {
        "ttft": {"budget": "1s", "target": 0.9},
        "tpot": {"budget": "50ms"},
        "hedge": {"max_extra": "3%"},
        "on_miss": "queue",
        "prefer": "quality",
    },
    # The whole answer counts: 2 s to its start leave 3 s, 120 tokens at 25 ms.
    "task": {
        "ttft": {"budget": "2s", "target": 0.9},
        "tpot": {"budget": "25ms"},
        "total": {"budget": "5s"},
        "hedge": {"max_extra": "2%"},
        "on_miss": "queue",
        "prefer": "quality",
    },
    # A second copy of a long prompt costs a long prefill: few are allowed.
    "agent": {
        "ttft": {"budget": "3s", "target": 0.9},
        "tpot": {"budget": "50ms"},
        "total": {"budget": "30s"},
        "hedge": {"max_extra": "1%"},
        "on_miss": "queue",
        "prefer": "quality",
    },
    # Throughput and cost: without a budget every tier qualifies, and the cheapest is taken.
    "batch": {
        "hedge": "off",
        "on_miss": "best_effort",
        "prefer": "cost",
    },
}


def apply(workload: Workload, raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw`, the route as the operator wrote it, over the preset of its workload."""
    return {"workload": workload} | _over(PRESETS[workload], raw)


def _over(beneath: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(beneath)
    for key, value in raw.items():
        under = beneath.get(key)
        merged[key] = _over(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged
