"""Operating-system side of one gateway process: event loop, memory, file limit and listening sockets."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from gateway.config.field_types import ListenAddress
from gateway.config.models import Drain
from gateway.observe.logs import unhandled

LISTEN_KEY, ADMIN_KEY, PICK_KEY = "server.listen", "server.admin", "pick.listen"  # of the configuration
BACKLOG = 4096  # connections in the kernel, not accepted yet
FILES = 1 << 20  # open files, where the system allows as many
HANDLER_GRACE = 0.1  # s for a handler to end after an abort of the connection
NEW_OBJECTS = 2_000  # until the young ones are collected
OLDER = 200, 50  # collections of a generation until the next one is collected
SWITCH_INTERVAL = 0.0005  # s a thread may keep the interpreter while the loop waits: Python's 5 ms would delay tokens


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop if installed, else asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


def run_loop(work: Coroutine[Any, Any, int | None]) -> int:
    """Returns the exit code: of `work`, or 0."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.get_loop().set_exception_handler(unhandled)
        return runner.run(work) or 0


def tune_gc() -> None:
    """Exempts long-lived objects from collection; requests leave no cycles behind. A request has 80 objects, and a
    collection of 20,000 new ones would stall all streams for 5 to 30 ms. Memory that the start has used and freed (of
    vocabularies, 9 MB) goes back to the system: glibc alone would keep it."""
    gc.collect()
    gc.freeze()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    gc.set_threshold(NEW_OBJECTS, *OLDER)


def raise_file_limit() -> None:
    """A stream is two open files, and a shell's default limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def drain_message(drain: Drain) -> str:
    waiting = f"in {drain.wait:g} s, " if drain.wait else ""
    return f"firsttoken: draining, {waiting}{drain.grace:g} s at most; a second signal ends it"


@contextmanager
def naming(address: ListenAddress, key: str) -> Iterator[None]:
    """An OSError of the block names the address and its configuration key."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"on {address} ({key}): {error.strerror or error}") from error


def target_of(address: ListenAddress) -> tuple[int, int, Any]:
    """Family, protocol and address of a socket. Of several addresses of a host name, the first IPv4 address is taken,
    as clients do. Raises OSError."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, protocol, _, target = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, protocol, target


def bind(address: ListenAddress, *, shared: bool = False) -> socket.socket:
    """Binds a TCP socket without listening. Raises OSError.

    `shared`: SO_REUSEPORT; the kernel spreads connections over all listening sockets of the port.
    """
    family, protocol, target = target_of(address)
    made = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(target)
    except OSError:
        made.close()
        raise
    return made


def reserve_port(address: ListenAddress) -> socket.socket:
    """Binds a socket without ever listening, to hold the port for workers and get no connection.

    Raises OSError if another process has the port, even for sharing: another gateway.
    """
    with bind(address) as exclusive:
        port = exclusive.getsockname()[1]
    return bind(ListenAddress(address.host, port), shared=True)


def listen_unix(path: Path) -> socket.socket:
    """A listening Unix socket for connections between our own processes, in place of one of an exited process."""
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen(BACKLOG)
    return made


async def serve_app(app: web.Application, bound: socket.socket, *, auto_decompress: bool = True) -> web.AppRunner:
    """Serves an admin port until the cleanup of the runner. `auto_decompress`: bodies of requests are decompressed."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=HANDLER_GRACE, auto_decompress=auto_decompress)
    await runner.setup()
    await web.SockSite(runner, bound, backlog=BACKLOG).start()
    return runner


def serving_line(url: str, admin_url: str, picker: str = "") -> str:
    """`url`: empty without a data port; `picker`: address of its port, empty without one."""
    ports = [f"serving {url}/v1"] if url else []
    ports += [f"picking endpoints for Envoy on {picker}"] if picker else []
    return f"firsttoken: {', '.join(ports)}, admin {admin_url}"


def url_of(listening: socket.socket, host: str, *, tls: bool = False) -> str:
    """`host`: as configured."""
    return f"http{'s' if tls else ''}://{host if ':' not in host else f'[{host}]'}:{listening.getsockname()[1]}"
