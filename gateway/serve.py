"""`firsttoken serve`: a gateway until a signal says stop; several behind one port where the configuration says so."""

from __future__ import annotations

import asyncio
import signal
import sys

from gateway.app import Gateway, tune_gc
from gateway.config.models import Config
from gateway.observe.logs import to_stderr, unhandled

DRAIN = 30.0  # s that running requests get after SIGTERM
SWITCH = 0.0005  # s that a thread may keep the interpreter while the loop waits: of Python's own 5 ms tokens are late


def serve(config: Config) -> int:
    """Runs until SIGINT or SIGTERM. Exit code: 0, or 2 where a port cannot be had."""
    to_stderr()
    sys.setswitchinterval(SWITCH)
    if config.server.workers > 1:
        from gateway.workers.supervisor import supervise

        return supervise(config)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(config))


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop where it can be had."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


async def _serve(config: Config) -> int:
    asyncio.get_running_loop().set_exception_handler(unhandled)
    gateway, stop = Gateway(config), asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, _signalled, stop, gateway)
    try:
        await gateway.start(tune_gc)
    except OSError as error:
        await gateway.stop()
        print(f"firsttoken: cannot listen: {error.strerror or error}", file=sys.stderr)
        return 2
    print(f"firsttoken: serving {gateway.url}/v1, admin {gateway.admin_url}", file=sys.stderr, flush=True)
    await stop.wait()
    print(f"firsttoken: draining, {DRAIN:g} s at most; a second signal ends it", file=sys.stderr, flush=True)
    await gateway.stop(DRAIN)
    return 0


def _signalled(stop: asyncio.Event, gateway: Gateway) -> None:
    """The first signal drains; the second does not wait."""
    gateway.hurried = stop.is_set()
    stop.set()
