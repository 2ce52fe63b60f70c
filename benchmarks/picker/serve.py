"""A gateway with a picker, to be measured: `serve.py PICKER_PORT URL...`, configured as `benchmarks.serve` is."""

from __future__ import annotations

import sys

from benchmarks.processes import free_port
from benchmarks.serve import gateway_config
from gateway.config.models import Config
from gateway.serve import serve


def main(port: int, urls: list[str]) -> int:
    config = gateway_config(free_port(), urls) | {"pick": {"listen": f"127.0.0.1:{port}"}}
    return serve(Config.model_validate(config))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
