"""`firsttoken serve`: a gateway until a signal says stop; several behind one port where the configuration says so."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from contextlib import suppress

from gateway.app import Gateway, tune_gc
from gateway.config.models import Config, Drain
from gateway.observe.log_format import to_stderr, unhandled
from gateway.reload import ConfigSource, Reloader

SWITCH = 0.0005  # s that a thread may keep the interpreter while the loop waits: of Python's own 5 ms tokens are late
FILES = 1 << 20  # that may be open, where the system allows as many


def serve(config: Config, source: ConfigSource | None = None) -> int:
    """Runs until SIGINT or SIGTERM. Exit code: 0, or 2 where a port cannot be had. `source`: where another
    configuration would come from."""
    source = source or ConfigSource(lambda: config)
    raise_limit()
    to_stderr()
    sys.setswitchinterval(SWITCH)
    if config.server.workers > 1:
        from gateway.workers.supervisor import supervise

        return supervise(config, source)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(config, source))


def raise_limit() -> None:
    """A stream is two open files, and what a shell allows by default is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop where it can be had."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


async def _serve(config: Config, source: ConfigSource) -> int:
    gateway, stop, loop = Gateway(config), asyncio.Event(), asyncio.get_running_loop()
    loop.set_exception_handler(unhandled)
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, _signalled, stop, gateway)
    reloader = Reloader(config, source, gateway.apply_config)
    gateway.admin.registry.register(reloader.reloads)
    gateway.admin.reloading = reloader.posted
    loop.add_signal_handler(signal.SIGHUP, reloader.soon, "SIGHUP")
    try:
        await gateway.start(tune_gc)
    except OSError as error:
        await gateway.stop()
        print(f"firsttoken: cannot listen: {error.strerror or error}", file=sys.stderr)
        return 2
    reloader.start()
    print(f"firsttoken: serving {gateway.url}/v1, admin {gateway.admin_url}", file=sys.stderr, flush=True)
    await stop.wait()
    await reloader.close()
    drain = config.server.drain
    print(draining(drain), file=sys.stderr, flush=True)
    await gateway.stop(drain.grace, drain.wait)
    return 0


def draining(drain: Drain) -> str:
    waiting = f"in {drain.wait:g} s, " if drain.wait else ""
    return f"firsttoken: draining, {waiting}{drain.grace:g} s at most; a second signal ends it"


def _signalled(stop: asyncio.Event, gateway: Gateway) -> None:
    """The first signal drains; the second does not wait."""
    gateway.force_stop = stop.is_set()
    stop.set()
