"""CPU per request and per streamed chunk: ours beside nginx, in turns (`request_cost.py [ROUNDS]`).

Proxies run on core 0, the engine and the load on core 1. A chunk's cost is the difference between
streams of 200 and of 10 tokens. nginx is the measure of the machine: quote ratios. Without nginx
(Debian: nginx-light) ours is printed alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import child, cpu_seconds, free_port, gateway

PROMPT = "Tell me a short story about a gateway that routes requests. "
NGINX = """
daemon off; master_process off; worker_processes 1; error_log stderr crit; pid {home}/pid;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; client_max_body_size 64m;
  client_body_buffer_size 256k; fastcgi_temp_path {home}/f; uwsgi_temp_path {home}/u; scgi_temp_path {home}/s;
  upstream engines {{ server 127.0.0.1:{engine}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True)
class Load:
    """`count` requests for `model`, `at_once` of them at a time."""

    name: str
    model: str
    count: int
    at_once: int
    prompt: str = PROMPT


LOADS = (
    Load("request, 200 B", "whole", 3000, 32),
    Load("request, 100 KB", "whole", 500, 16, PROMPT * 1700),
    Load("stream of 10", "stream-10-5", 192, 64),
    Load("stream of 200", "stream-200-5", 64, 64),
)


async def ask(port: int, load: Load, turns: Iterator[int]) -> None:
    """One connection's share of a load."""
    body = json.dumps(
        {"model": load.model, "stream": "stream" in load.model, "messages": [{"role": "user", "content": load.prompt}]}
    ).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)  # fmt: skip # noqa: E501
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in turns:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(head.decode())
        if b"content-length:" in head:
            await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        else:
            await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()


async def apply(port: int, load: Load) -> None:
    turns = iter(range(load.count))
    await asyncio.gather(*(ask(port, load, turns) for _ in range(load.at_once)))


def measure(port: int, pid: int, load: Load) -> float:
    """Microseconds of the proxy's CPU for one request."""
    before = cpu_seconds(pid)
    asyncio.run(apply(port, load))
    return (cpu_seconds(pid) - before) * 1e6 / load.count


@contextmanager
def proxies(engine: int) -> Iterator[dict[str, tuple[int, int]]]:
    """Name -> port and process id."""
    with ExitStack() as stack:
        found = {}
        port = free_port()
        found["ours"] = (port, stack.enter_context(child(gateway(port, f"http://127.0.0.1:{engine}"), port, 0)))
        nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
        if nginx:
            home, port = stack.enter_context(tempfile.TemporaryDirectory()), free_port()
            config = Path(home) / "nginx.conf"
            config.write_text(NGINX.format(home=home, port=port, engine=engine))
            found["nginx"] = (port, stack.enter_context(child([nginx, "-c", str(config), "-p", home], port, 0)))
        yield found


def main(rounds: int) -> None:
    os.sched_setaffinity(0, {1 % (os.cpu_count() or 1)})
    engine, cost = free_port(), defaultdict[tuple[str, str], list[float]](list)
    with child([sys.executable, "-m", "benchmarks.engine", str(engine)], engine, 1), proxies(engine) as running:
        for port, _ in running.values():
            asyncio.run(apply(port, LOADS[0]))
        for _ in range(rounds):
            for load in LOADS:
                for name, (port, pid) in running.items():
                    cost[name, load.name].append(measure(port, pid, load))
    for name in running:
        chunks = [
            (long - short) / 190
            for long, short in zip(cost[name, LOADS[3].name], cost[name, LOADS[2].name], strict=True)
        ]
        cost[name, "streamed chunk"] = chunks
    report(cost, list(running))


def report(cost: dict[tuple[str, str], list[float]], names: list[str]) -> None:
    print("| us of CPU, medians | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for what in [load.name for load in LOADS] + ["streamed chunk"]:
        medians = [statistics.median(cost[name, what]) for name in names]
        ratio = f" ({medians[0] / medians[1]:.1f}x)" if len(medians) > 1 else ""
        print(f"| {what} | {medians[0]:.1f}{ratio} | " + " | ".join(f"{m:.1f}" for m in medians[1:]) + " |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
