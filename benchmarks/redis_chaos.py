"""Effect of a Redis outage on callers: `redis_chaos.py [SECONDS [RATE]]` prints a table, a row per fault.

A gateway with a quota stored in a real Redis, RATE requests a second (50), SECONDS per fault (90): see
benchmarks/chaos.py for the faults.

Printed: failed requests; p50 and p99, ms, with and without Redis, the first second without apart (`first`: its longest
request); MB of the gateway before and after; its CPU, us a request; lines on its stderr; s until Redis was reconnected.
The last column says `ok` or the missed part of the promise: none failed, p99 at most 10 ms more, memory at most 1.1
times, CPU at most 1.2 times, at most 5 s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.chaos import Gateway, Load, Seen, main
from tests.support.redis import RedisServer

KEY = "sk-bench-0123456789abcdef"  # sent by the load


class Quotas:
    """The quota of one key: more than the load uses."""

    room = fullest = 0.0

    def __init__(self, home: Path) -> None:
        self.server = RedisServer(home)

    def sections(self, address: str) -> str:
        return (
            f"telemetry: {{access_log: off}}\nstate: {{redis: 'redis://{address}/0'}}\n"
            f"keys: [{{name: bench, sha256: {hashlib.sha256(KEY.encode()).hexdigest()}, requests_per_minute: 1000000,"
            " tokens_per_minute: 1000000000, concurrent_requests: 10000, monthly_cost_usd: 1000}]\n"
        )

    async def warmed(self, gateway: Gateway, warm: Callable[[], Awaitable[Seen]]) -> None:
        await warm()

    async def ending(self, gateway: Gateway, load: Load) -> None:
        """Nothing is counted."""

    async def back(self, gateway: Gateway) -> float:
        return await gateway.until(lambda figures: figures["firsttoken_redis_up"] == 1)

    async def told(self, gateway: Gateway, load: Load) -> tuple[str, list[str]]:
        return "", []


if __name__ == "__main__":
    main(Quotas, "Redis")
