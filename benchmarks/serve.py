"""A gateway to be measured: `serve.py PORT URL...` routes the models `bench` and `unhurried` over these servers.

Routing is fully on: estimate, prefix index, prediction, Records and metrics. The access log is off, as in the peers.
"""

from __future__ import annotations

import sys
from typing import Any

from gateway.config.models import Config
from gateway.serve import serve


def gateway_config(port: int, urls: list[str]) -> dict[str, Any]:
    """The configuration. The engines answer at once, and write a token every 50 ms: well within the targets. Without
    targets, no prompt is delayed for the sake of answers under way."""
    return {
        "server": {"listen": f"127.0.0.1:{port}", "admin": "127.0.0.1:0"},
        "pools": {"engines": {"backend": "vllm", "model": "bench", "endpoints": urls}},
        "routes": {
            "bench": {"tiers": ["engines"], "ttft": {"budget": "10s"}, "tpot": {"budget": "200ms"}},
            "unhurried": {"tiers": ["engines"], "workload": "batch"},
        },
        "telemetry": {"access_log": "off"},
    }


def main(port: int, urls: list[str]) -> int:
    return serve(Config.model_validate(gateway_config(port, urls)))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
