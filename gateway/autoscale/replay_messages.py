"""Messages between a gateway and the child that replays its traffic: JSON, one per line.

A question is a `ReplicasJob` and as many `DemandRow`s as it says; the answer is a `ReplicasAnswer`. No row holds text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from policies.latency.learned_state import LearnedEndpoint
from policies.types import Pool

LONGEST_LINE = 16 << 20  # bytes
MAX_CPU = 30.0  # s of a question: the replays of a usual one take 3 s at most


class DemandRow(msgspec.Struct, array_like=True, frozen=True):
    """A request that came, answered or not. `prefix`: landmarks of the prompt."""

    at: float  # arrival, s of the gateway's monotonic clock
    route: str
    tenant: str
    session: int  # 0: the caller names none
    prompt_tokens: int
    output_tokens: int  # 0: not known
    prefix: bytes
    is_answered: bool


@dataclass(frozen=True, slots=True)
class ReplicasJob:
    """`routes`: dumped, those of the pool; `pools`: all pools of these; `rows`: lines that follow; `now`,
    `since`: s of the gateway's monotonic clock; rows are complete from `since` on."""

    pool: str
    current: int
    least: int
    most: int
    start_time: float
    now: float
    since: float
    rows: int
    cost: int
    pools: tuple[Pool, ...]
    routes: dict[str, dict[str, Any]]
    seen: float = 1.0
    first_token: float = 60.0
    profiles: dict[str, str] = field(default_factory=dict)  # by pool, where configured
    learned: dict[str, list[LearnedEndpoint]] = field(default_factory=dict)  # by pool
    kv_tokens: dict[str, int] = field(default_factory=dict)  # by pool


@dataclass(frozen=True, slots=True)
class ReplicasAnswer:
    """`curve`: the share of the budget that is furthest from its target, by number of engines; `cpu`: s; `requests`:
    replayed; `error`: nothing else is known."""

    needed: int = 0
    reason: str = ""
    curve: dict[int, float] = field(default_factory=dict)
    cpu: float = 0.0
    requests: int = 0
    error: str = ""


encode = msgspec.json.encode
decode_job = msgspec.json.Decoder(ReplicasJob).decode
decode_row = msgspec.json.Decoder(DemandRow).decode
decode_answer = msgspec.json.Decoder(ReplicasAnswer).decode
