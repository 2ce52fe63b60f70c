"""Real vLLM servers, and a gateway process in front.

Servers are started by scripts/vllm_servers.py and found through FIRSTTOKEN_VLLM_FLEET; engine figures are read from
/metrics of vLLM, predictions from the Records of the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
START_WITHIN = 120.0  # s, on a machine that works for others too
RECORDED_WITHIN = 30.0  # s after the client has its last byte
POLL = 0.02  # s between two polls: each costs the engine's core 6 ms
_SERVING = re.compile(r"serving (http://\S+)/v1, admin (http://\S+)")


@dataclass(frozen=True, slots=True)
class Server:
    """One vLLM server."""

    name: str
    model: str
    url: str
    kv_events: str
    kv_replay: str
    tokenizer: str
    pid: int

    def busy(self) -> int:
        """Requests running or queued in the engine."""
        return int(sum(series(self.url, "vllm:num_requests_running", "vllm:num_requests_waiting")))

    def waiting(self) -> int:
        return int(series(self.url, "vllm:num_requests_waiting")[0])

    def ttft(self) -> tuple[int, float]:
        """vLLM's histogram of TTFT so far: count, sum in seconds."""
        count, total = series(
            self.url, "vllm:time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_sum"
        )
        return int(count), total


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway."""

    url: str
    admin: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def records(self, last: int = 2000) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(get(f"{self.admin}/requests?last={last}"))
        return found

    async def records_of(self, ids: list[str]) -> list[dict[str, Any]]:
        """Records of these requests, in this order; waits until the last is written."""
        deadline = time.monotonic() + RECORDED_WITHIN
        while True:
            known = {record["request_id"]: record for record in self.records()}
            missing = [i for i in ids if i not in known]
            if not missing:
                return [known[i] for i in ids]
            assert time.monotonic() < deadline, f"no Record of {missing}"
            await asyncio.sleep(POLL)

    def endpoints(self) -> list[dict[str, Any]]:
        """Learned state of each endpoint."""
        found: list[dict[str, Any]] = json.loads(get(f"{self.admin}/fleet"))
        return found

    def in_flight(self) -> int:
        """Attempts in flight by the gateway's count."""
        return int(series(self.admin, "firsttoken_endpoint_in_flight")[0])


def series(url: str, *names: str) -> list[float]:
    """The value of each series in `url`/metrics, summed over its labels."""
    lines = get(f"{url}/metrics").decode().splitlines()
    return [sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")) for name in names]


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as reply:
        body: bytes = reply.read()
        return body


def servers() -> list[Server]:
    """Running servers; empty if none were started."""
    return [Server(**entry) for entry in json.loads(os.environ.get("FIRSTTOKEN_VLLM_FLEET", "[]"))]


@contextmanager
def serving(config: dict[str, Any]) -> Iterator[Gateway]:
    """`firsttoken serve` with this config, on free ports, until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "gateway.yaml", Path(folder) / "stderr.txt"
        path.write_text(json.dumps(config))  # JSON is YAML
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "gateway.cli", "serve", "--config", str(path)], cwd=ROOT, stderr=stderr
            )
        try:
            yield _announced(process, log)
        finally:
            process.terminate()
            process.wait(40)


def _announced(process: subprocess.Popen[bytes], log: Path) -> Gateway:
    deadline = time.monotonic() + START_WITHIN
    while (match := _SERVING.search(log.read_text())) is None:
        late = process.poll() is not None or time.monotonic() > deadline
        assert not late, f"the gateway did not start:\n{log.read_text()}"
        time.sleep(0.05)
    return Gateway(match[1], match[2])


def pool(members: list[Server], events: bool) -> dict[str, Any]:
    """A pool of these servers, with or without KV events."""
    return {
        "backend": "vllm",
        "model": members[0].model,
        "endpoints": [endpoint(server) if events else server.url for server in members],
        "tokenizer": members[0].tokenizer,
        "context_window": 16384,
    }


def endpoint(server: Server) -> dict[str, str]:
    return {"url": server.url, "kv_events": server.kv_events, "kv_replay": server.kv_replay}


def config(pools: dict[str, list[Server]], routes: dict[str, Any], events: bool = False) -> dict[str, Any]:
    return {
        "server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "pools": {name: pool(members, events) for name, members in pools.items()},
        "routes": routes,
        "telemetry": {"access_log": "off"},
    }
