"""Peers of the comparison: our gateway, the least proxy in Python, nginx (Debian: nginx-light), four routers of PyPI.

Those from PyPI are installed on demand, each into an environment of its own under `.cache/peers`; an unavailable peer
is left out, with a message. All proxies run on one core, in front of the same engines.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from urllib.request import Request, urlopen

from benchmarks.client import KEY
from benchmarks.processes import READY, ROOT, child, free_port, gateway

log = logging.getLogger("benchmarks")

CORE = 0  # of the proxy; engines and load use the other core
HOME = ROOT / ".cache/peers"
INSTALLING = 600.0  # s
QUESTION = b'{"model":"bench","messages":[{"role":"user","content":"hello"}]}'
OURS, NGINX, DIRECT = "ours", "nginx", "direct"
SGLANG, SMG, VLLM, LITELLM = "sglang", "smg", "vllm", "litellm"
FLOOR, BARE_FLOOR = "floor", "floor-asyncio"  # the least proxy in Python, with aiohttp's server and without
EARLIER, EARLIER_CHECKOUT = "earlier", "FIRSTTOKEN_EARLIER"  # a peer, and the variable that names its checkout
PACKAGES = {
    SGLANG: "sglang-router==0.3.2",
    SMG: "smg==1.13.0",
    VLLM: "vllm-router==0.1.17",
    LITELLM: "litellm[proxy]==1.106.0",
}
SLOWNESS = {LITELLM: 16}  # some 20 ms for a request, 1 ms for a chunk: it gets a 16th of the requests
PATIENCE = {LITELLM: 120.0}  # s until a peer that starts slowly must listen
CONFIG = """
daemon off; master_process off; worker_processes 1; worker_rlimit_nofile 20000; error_log stderr crit; pid {home}/pid;
events {{ worker_connections 16384; multi_accept on; }}
http {{
  access_log off; tcp_nodelay on; client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 1000000;
  keepalive_timeout 300s; client_body_temp_path {home}/body; proxy_temp_path {home}/proxy;
  fastcgi_temp_path {home}/f; uwsgi_temp_path {home}/u; scgi_temp_path {home}/s;
  upstream engines {{ {servers} keepalive 1024; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy. `pid` 0: none, the load goes to the engine directly."""

    name: str
    port: int
    pid: int

    @property
    def slowness(self) -> int:
        """The share of a load's requests that it gets: one of so many."""
        return SLOWNESS.get(self.name, 1)


@contextmanager
def running(name: str, engines: Sequence[int]) -> Iterator[Proxy]:
    """Raises OSError or SubprocessError if the peer is unavailable."""
    if name == DIRECT:
        yield Proxy(name, engines[0], 0)
        return
    port, urls = free_port(), [f"http://127.0.0.1:{engine}" for engine in engines]
    with tempfile.TemporaryDirectory() as home:
        command = _COMMANDS[name](port, urls, Path(home))
        with child(command, port, CORE, quiet=name != OURS, patience=PATIENCE.get(name, READY)) as pid:
            _wait_until_it_answers(port)
            yield Proxy(name, port, pid)


def _wait_until_it_answers(port: int) -> None:
    """A router listens before its engines are ready."""
    ends = monotonic() + READY
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    asked = Request(f"http://127.0.0.1:{port}/v1/chat/completions", QUESTION, headers)
    while True:
        try:
            with urlopen(asked, timeout=READY):
                return
        except OSError:
            if monotonic() > ends:
                raise
        sleep(0.2)


def allow_connections() -> None:
    """As many files as the machine allows a process; inherited by children."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# -- commands ------------------------------------------------------------------------------


def _ours(port: int, urls: Sequence[str], _home: Path) -> list[str]:
    return gateway(port, *urls)


def _earlier(port: int, urls: Sequence[str], _home: Path) -> list[str]:
    """Starts an earlier version of the gateway, from the checkout that FIRSTTOKEN_EARLIER names."""
    checkout = os.environ.get(EARLIER_CHECKOUT)
    if checkout is None:
        raise FileNotFoundError(f"{EARLIER_CHECKOUT} names no checkout")
    return ["env", "-C", checkout, f"PYTHONPATH={checkout}", *gateway(port, *urls)]


def _floor(server: str, port: int, urls: Sequence[str], _home: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.floor", server, str(port), *urls]


def _nginx(port: int, urls: Sequence[str], home: Path) -> list[str]:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise FileNotFoundError("it is not installed")
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in urls)
    config = home / "nginx.conf"
    config.write_text(CONFIG.format(home=home, port=port, servers=servers))
    return [program, "-c", str(config), "-p", str(home), "-e", "stderr"]


def _sglang(port: int, urls: Sequence[str], _home: Path) -> list[str]:
    program = [str(_installed(SGLANG) / "python"), "-m", "sglang_router.launch_router", "--log-level", "warn"]
    return [*program, *_router(port, urls)]


def _smg(port: int, urls: Sequence[str], _home: Path) -> list[str]:
    program = [str(_installed(SMG) / "smg"), "launch", "--disable-tokenizer-autoload", "--log-level", "warn"]
    return [*program, *_router(port, urls)]


def _vllm(port: int, urls: Sequence[str], _home: Path) -> list[str]:
    return [str(_installed(VLLM) / "vllm-router"), "--log-level", "error", *_router(port, urls)]


def _litellm(port: int, urls: Sequence[str], home: Path) -> list[str]:
    """With the key of the load, which LiteLLM demands; without a database and cost map from the network."""
    served = [
        {"model_name": name, "litellm_params": {"model": "openai/bench", "api_base": f"{url}/v1", "api_key": "none"}}
        for name in ("bench", "unhurried")
        for url in urls
    ]
    config = home / "litellm.json"
    config.write_text(json.dumps({"model_list": served, "litellm_settings": {"telemetry": False}}))
    settings = [
        f"LITELLM_MASTER_KEY={KEY}",
        "LITELLM_MODE=PRODUCTION",
        "LITELLM_LOG=ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP=True",
    ]
    program = str(_installed(LITELLM) / "litellm")
    options = ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    return ["env", *settings, program, "--config", str(config), *options]


def _router(port: int, urls: Sequence[str]) -> list[str]:
    """With the cache-aware policy, the counterpart of ours."""
    return [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-port",
        str(free_port()),
        "--policy",
        "cache_aware",
        "--worker-urls",
        *urls,
    ]


def _installed(name: str) -> Path:
    """Folder of its programs."""
    home, package = HOME / name, PACKAGES[name]
    stamp = home / package
    if not stamp.exists():
        log.warning("installing %s", package)
        python = str(home / "bin/python")
        for command in ([sys.executable, "-m", "venv", str(home)], [python, "-m", "pip", "install", "-q", package]):
            subprocess.run(
                command, check=True, timeout=INSTALLING, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        stamp.touch()
    return home / "bin"


_COMMANDS: dict[str, Callable[[int, Sequence[str], Path], list[str]]] = {
    OURS: _ours,
    EARLIER: _earlier,
    FLOOR: partial(_floor, "aiohttp"),
    BARE_FLOOR: partial(_floor, "asyncio"),
    NGINX: _nginx,
    SGLANG: _sglang,
    SMG: _smg,
    VLLM: _vllm,
    LITELLM: _litellm,
}
KNOWN = tuple(_COMMANDS)
UNASKED = {BARE_FLOOR} if EARLIER_CHECKOUT in os.environ else {BARE_FLOOR, EARLIER}
PEERS = tuple(name for name in KNOWN if name not in UNASKED)
