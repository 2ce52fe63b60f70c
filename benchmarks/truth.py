"""Compares the gateway's TTFT with the caller's: `truth.py [REQUESTS]` prints the difference on loopback.

The caller is the openai SDK in this process; the gateway and a simulated engine run in processes of
their own. The SDK's TTFT ends with the first chunk with content; the gateway's is its header.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from time import perf_counter

import openai

from benchmarks.processes import child, free_port

CONFIG = """
server: {{listen: 127.0.0.1:{port}, admin: 127.0.0.1:{admin}}}
pools: {{engine: {{backend: simulated, model: served, endpoints: ["http://127.0.0.1:{engine}"]}}}}
routes: {{chat: {{tiers: [engine], ttft: {{budget: 10s}}}}}}
telemetry: {{access_log: "off"}}
"""


class Caller:
    """An SDK which notes the time of handing a request to its HTTP client: no gateway sees the time before."""

    def __init__(self, port: int) -> None:
        self.sent = 0.0
        http = openai.DefaultHttpxClient(event_hooks={"request": [self._note]})
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", http_client=http)

    def _note(self, _request: object) -> None:
        self.sent = perf_counter()

    def ask(self, i: int) -> tuple[float, float]:
        """Milliseconds by which the caller's TTFT exceeds the gateway's: from the send, and from the call."""
        called = perf_counter()
        reply = self.client.chat.completions.with_raw_response.create(
            model="chat", stream=True, max_tokens=3, messages=[{"role": "user", "content": f"{i} hello there"}]
        )
        said = float(reply.headers["x-firsttoken-ttft-ms"])
        seen = 0.0
        for chunk in reply.parse():
            if not seen and chunk.choices and chunk.choices[0].delta.content:
                seen = perf_counter()
        return (seen - self.sent) * 1e3 - said, (seen - called) * 1e3 - said


def main(count: int) -> None:
    port, admin, engine = free_port(), free_port(), free_port()
    command = [sys.executable, "-m", "lab"]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config, ExitStack() as stack:
        config.write(CONFIG.format(port=port, admin=admin, engine=engine))
        config.flush()
        simulate = [*command, "simulate", "--profile", "8b-h100", "--port", str(engine), "--model", "served"]
        stack.enter_context(child(simulate, engine))
        stack.enter_context(child([*command, "serve", "--config", config.name], port))
        caller = Caller(port)
        caller.ask(-1)
        found = [caller.ask(i) for i in range(count)]
    for name, values in zip(("from the send", "from the call"), zip(*found, strict=True), strict=True):
        print(f"SDK minus gateway TTFT, {name}, {count} requests: median {statistics.median(values):.2f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
