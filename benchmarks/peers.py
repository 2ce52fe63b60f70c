"""Peers of the comparison: our gateway, nginx (Debian: nginx-light) and two routers in Rust from PyPI.

The routers are installed on demand, each into an environment of its own under `.cache/peers`; an unavailable peer is
left out, with a message. All proxies run on one core, in front of the same engines.
"""

from __future__ import annotations

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
from pathlib import Path
from time import monotonic, sleep
from urllib.request import Request, urlopen

from benchmarks.processes import READY, ROOT, child, free_port, gateway

log = logging.getLogger("benchmarks")

CORE = 0  # of the proxy; engines and load use the other core
HOME = ROOT / ".cache/peers"
INSTALLING = 300.0  # s
QUESTION = b'{"model":"bench","messages":[{"role":"user","content":"hello"}]}'
OURS, NGINX, DIRECT = "ours", "nginx", "direct"
EARLIER, EARLIER_CHECKOUT = "earlier", "FIRSTTOKEN_EARLIER"  # a peer, and the variable that names its checkout
PACKAGES = {"sglang": "sglang-router==0.3.2", "vllm": "vllm-router==0.1.17"}
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


@contextmanager
def running(name: str, engines: Sequence[int]) -> Iterator[Proxy]:
    """Raises OSError or SubprocessError if the peer is unavailable."""
    if name == DIRECT:
        yield Proxy(name, engines[0], 0)
        return
    port, urls = free_port(), [f"http://127.0.0.1:{engine}" for engine in engines]
    with tempfile.TemporaryDirectory() as home:
        command = _COMMANDS[name](port, urls, Path(home))
        with child(command, port, CORE, quiet=name != OURS) as pid:
            _wait_until_it_answers(port)
            yield Proxy(name, port, pid)


def available(names: Sequence[str], engines: Sequence[int]) -> list[str]:
    """The peers which start; prints the others."""
    found = []
    for name in names:
        try:
            with running(name, engines):
                found.append(name)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("%s is left out: %s", name, error)
    return found


def _wait_until_it_answers(port: int) -> None:
    """A router listens before its engines are ready."""
    ends = monotonic() + READY
    asked = Request(f"http://127.0.0.1:{port}/v1/chat/completions", QUESTION, {"content-type": "application/json"})
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


def _nginx(port: int, urls: Sequence[str], home: Path) -> list[str]:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise FileNotFoundError("it is not installed")
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in urls)
    config = home / "nginx.conf"
    config.write_text(CONFIG.format(home=home, port=port, servers=servers))
    return [program, "-c", str(config), "-p", str(home), "-e", "stderr"]


def _sglang(port: int, urls: Sequence[str], _home: Path) -> list[str]:
    program = [str(_installed("sglang") / "python"), "-m", "sglang_router.launch_router", "--log-level", "warn"]
    return [*program, *_router(port, urls)]


def _vllm(port: int, urls: Sequence[str], _home: Path) -> list[str]:
    return [str(_installed("vllm") / "vllm-router"), "--log-level", "error", *_router(port, urls)]


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
    NGINX: _nginx,
    "sglang": _sglang,
    "vllm": _vllm,
}
PEERS = tuple(name for name in _COMMANDS if name != EARLIER or EARLIER_CHECKOUT in os.environ)
