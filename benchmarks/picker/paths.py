"""Data paths to be compared: a plain Envoy, one that asks a picker, and our own proxy; all before the same engines."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.processes import child, free_port, gateway
from scripts.envoy_setup import VERSIONS, binary
from tests.support.envoy import address, configuration, deployed

VERSION = VERSIONS[-1]
PLAIN, BUFFERED, DUPLEX, SERVE = "plain Envoy", "Envoy + picker", "Envoy + picker, duplex", "serve"
NAMES = (PLAIN, BUFFERED, DUPLEX, SERVE)


@dataclass(frozen=True, slots=True)
class DataPath:
    """`port`: of callers. `brain`: process id of the picker, or of our own proxy; 0: none."""

    name: str
    port: int
    envoy: int = 0
    brain: int = 0


@contextmanager
def running(name: str, engines: Sequence[int], core: int | None) -> Iterator[DataPath]:
    """`core`: of its processes; None: any."""
    urls, port = [f"http://127.0.0.1:{engine}" for engine in engines], free_port()
    with ExitStack() as stack:
        if name == SERVE:
            yield DataPath(name, port, brain=stack.enter_context(child(gateway(port, *urls), port, core)))
            return
        picker, pid = free_port(), 0
        if name != PLAIN:
            command = [sys.executable, "-m", "benchmarks.picker.serve", str(picker), *urls]
            pid = stack.enter_context(child(command, picker, core))
        config = configuration(deployed(), [f"http://127.0.0.1:{picker}"], urls, duplex=name == DUPLEX)
        yield DataPath(name, port, stack.enter_context(_envoy(config, port, core, is_plain=name == PLAIN)), pid)


@contextmanager
def _envoy(config: dict[str, Any], port: int, core: int | None, *, is_plain: bool) -> Iterator[int]:
    """One worker thread. `is_plain`: round robin, without a picker. Raises FileNotFoundError."""
    if (program := binary(VERSION)) is None:
        raise FileNotFoundError(f"Envoy {VERSION} is not installed: python scripts/envoy_setup.py")
    resources = config["static_resources"]
    (listener,) = resources["listeners"]
    listener["address"] = address("127.0.0.1", port)
    if is_plain:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        del manager["http_filters"][0], manager["access_log"]
        resources["clusters"] = [each for each in resources["clusters"] if each["name"] == "engines"]
        resources["clusters"][0].pop("load_balancing_policy")
    with tempfile.TemporaryDirectory() as home:
        written = Path(home) / "envoy.yaml"
        written.write_text(yaml.safe_dump(config))
        options = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
        with child([str(program), "-c", str(written), *options], port, core) as pid:
            yield pid
