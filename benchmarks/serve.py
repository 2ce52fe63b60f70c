"""A gateway to be measured: `serve.py PORT URL...` routes every model name, unchanged, over these servers.

Routing is on in full: estimate, prefix index, prediction, Records and metrics. The access log is off,
as it is in the peers.
"""

from __future__ import annotations

import sys

from gateway.config.models import Config
from gateway.serve import serve


def main(port: int, urls: list[str]) -> int:
    return serve(
        Config.model_validate(
            {
                "server": {"listen": f"127.0.0.1:{port}", "admin": "127.0.0.1:0"},
                "pools": {"engines": {"backend": "vllm", "model": "any", "endpoints": urls}},
                "passthrough": "engines",
                "telemetry": {"access_log": "off"},
            }
        )
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
