"""Run a command beside real vLLM servers on this machine's CPU, and stop the servers afterwards.

    python scripts/vllm_servers.py -- python -m pytest tests/programs/vllm
    python scripts/vllm_servers.py --fleet small,small          # until Ctrl-C

Run scripts/vllm_setup.py and scripts/vllm_models.py first. Every server gets one core (the cores are dealt in turn) and
free ports. The command reads FIRSTTOKEN_VLLM_FLEET, a JSON list of {name, model, url, kv_events, kv_replay, tokenizer,
pid}; logs are in `.cache/vllm-logs`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
VENV = Path(os.environ.get("FIRSTTOKEN_VLLM_VENV") or CACHE / "vllm-venv")
MODELS = Path(os.environ.get("FIRSTTOKEN_VLLM_MODELS") or CACHE / "vllm-models")
LOGS = CACHE / "vllm-logs"
READY_WITHIN = 300.0  # s; three servers on two cores take about 100
STOP_WITHIN = 15.0  # s


@dataclass(frozen=True, slots=True)
class Server:
    """One server, as described to tests."""

    name: str
    model: str
    url: str
    kv_events: str
    kv_replay: str
    tokenizer: str
    pid: int


def ready(models: list[str]) -> None:
    """Raises FileNotFoundError, which names the setup step to run."""
    if not (VENV / "bin" / "python").exists():
        raise FileNotFoundError(f"no vLLM in {VENV}; run python scripts/vllm_setup.py")
    for model in models:
        if not (MODELS / model / "config.json").exists():
            raise FileNotFoundError(f"no model {MODELS / model}; run {VENV}/bin/python scripts/vllm_models.py")


def free_port() -> int:
    """Below the ephemeral ports (Linux: from 32768): clients take those in the minute before a server binds."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def command(model: str, name: str, port: int, events: int, replay: int) -> list[str]:
    # vLLM binds an events endpoint only with a `*`; with an address vLLM would connect, to no listener.
    kv_events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": f"kv@{name}",
    }
    flags = {
        "model": str(MODELS / model),
        "served-model-name": model,
        "host": "127.0.0.1",
        "port": str(port),
        "load-format": "dummy",
        "dtype": "float32",
        "max-model-len": "16384",
        "block-size": "32",  # the smallest accepted by vLLM on a CPU
        "max-num-seqs": "64",
        "max-num-batched-tokens": "256",  # an abort takes effect between steps: keep a prefill's steps near 60 ms
        "tool-call-parser": "hermes",
        "kv-events-config": json.dumps(kv_events),
    }
    switches = (
        "enforce-eager",
        "enable-auto-tool-choice",
        "enable-prompt-tokens-details",
        "enable-per-request-metrics",
        "enable-server-load-tracking",
    )
    module = [str(VENV / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    return [*module, *(f"--{k}={v}" for k, v in flags.items()), *(f"--{s}" for s in switches)]


def start(
    model: str, name: str, core: int, *more: str, settings: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Server]:
    """`more`: flags; `settings`: of the server's environment."""
    port, events, replay = free_port(), free_port(), free_port()
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_NO_USAGE_STATS": "1",
        **(settings or {}),
    }
    with (LOGS / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command(model, name, port, events, replay), *more],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own: its engine process is stopped too
        )
    url, kv_events, kv_replay = f"http://127.0.0.1:{port}", f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
    tokenizer = str(MODELS / model / "tokenizer.json")
    return process, Server(name, model, url, kv_events, kv_replay, tokenizer, process.pid)


def healthy(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until_healthy(process: subprocess.Popen[bytes], server: Server, deadline: float) -> None:
    while not healthy(server):
        log = LOGS / f"{server.name}.log"
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            state = "ended" if process.poll() is not None else f"was not healthy after {READY_WITHIN:.0f} s"
            raise RuntimeError(f"server {server.name} {state}; the end of {log}:\n{tail}")
        time.sleep(0.5)


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_WITHIN
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def running(models: list[str]) -> Iterator[list[Server]]:
    ready(models)
    LOGS.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    started: list[tuple[subprocess.Popen[bytes], Server]] = []
    try:
        for i, model in enumerate(models):
            number = models[:i].count(model)
            started.append(start(model, f"{model}-{number}", cores[i % len(cores)]))
        deadline = time.monotonic() + READY_WITHIN
        for process, server in started:
            wait_until_healthy(process, server, deadline)
        yield [server for _, server in started]
    finally:
        stop([process for process, _ in started])


def wait_for_interrupt() -> int:
    print("Ctrl-C stops them", flush=True)
    while True:
        signal.pause()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command beside real vLLM servers.")
    parser.add_argument("--fleet", default="small,small,large", help="models, comma separated")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ...; absent: until Ctrl-C")
    arguments = parser.parse_args()
    wanted = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `finally` stops the servers
    began = time.monotonic()
    try:
        with running(arguments.fleet.split(",")) as servers:
            for server in servers:
                print(f"{server.name}: {server.url}, pid {server.pid}", flush=True)
            print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
            if not wanted:
                return wait_for_interrupt()
            fleet = json.dumps([asdict(server) for server in servers])
            return subprocess.run(wanted, env=os.environ | {"FIRSTTOKEN_VLLM_FLEET": fleet}, check=False).returncode
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, FileNotFoundError) as error:
        print(f"vllm_servers: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
