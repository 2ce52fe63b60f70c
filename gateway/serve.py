"""`firsttoken serve`: one process, or a supervisor with several workers, until a signal."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable

from gateway.app import Gateway
from gateway.config.models import Config
from gateway.handover import LINGER, hand_over, report_serving
from gateway.observe.logs import to_stderr
from gateway.parts.picker.part import PickerPart
from gateway.process import SWITCH_INTERVAL, drain_message, raise_file_limit, run_loop, serving_line, tune_gc
from gateway.reload import ConfigSource, Reloader
from gateway.workers.supervisor import supervise

Greeting = Callable[[str, str], str]  # of the URLs of both ports


def serve(config: Config, source: ConfigSource | None = None, greeting: Greeting | None = None) -> int:
    """Exit code: 0 after SIGINT or SIGTERM, 2 if a port is taken. `source`: where reloads read the configuration.
    `greeting`: printed when the only process listens."""
    source = source or ConfigSource(lambda: config)
    raise_file_limit()
    to_stderr()
    sys.setswitchinterval(SWITCH_INTERVAL)
    if config.server.workers > 1:
        return supervise(config, source)
    return run_loop(_serve_in_one_process(config, source, greeting))


async def _serve_in_one_process(config: Config, source: ConfigSource, greeting: Greeting | None) -> int:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # nothing to hand over yet
    gateway = Gateway(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_stop_signal() -> None:
        gateway.force_stop = stop.is_set()  # the first signal drains; the second ends the draining
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_stop_signal)
    reloader = Reloader(config, source, gateway.apply_config)
    gateway.admin.registry.register(reloader.counts)
    gateway.admin.reload = reloader.on_post

    def on_hangup() -> None:
        gateway.reopen_logs()  # `logrotate` has renamed the files
        reloader.reload_soon("SIGHUP")

    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        await gateway.start(tune_gc)
    except OSError as error:
        await gateway.stop()
        print(f"firsttoken: cannot listen {error.strerror or error}", file=sys.stderr)
        return 2
    reloader.start()
    picker = gateway.part(PickerPart).url.partition("//")[2]
    handover = _Handover(gateway, stop)
    loop.add_signal_handler(signal.SIGUSR2, handover.start)
    text = greeting or (lambda url, admin_url: serving_line(url, admin_url, picker))
    print(text(gateway.url, gateway.admin_url), file=sys.stderr, flush=True)
    report_serving()
    await stop.wait()
    await reloader.close()
    drain = config.server.drain
    wait = max(drain.wait, LINGER) if handover.is_done else drain.wait
    print(drain_message(drain.model_copy(update={"wait": wait})), file=sys.stderr, flush=True)
    await gateway.stop(drain.grace, wait, handed_over=handover.is_done)
    return 0


class _Handover:
    """The handover of a process, once at a time; `stop` is set when the new process serves."""

    def __init__(self, gateway: Gateway, stop: asyncio.Event) -> None:
        self.is_done = False
        self._gateway, self._stop = gateway, stop
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """A signal handler. Ignored while one runs, and while the process drains."""
        if self._stop.is_set() or (self._task is not None and not self._task.done()):
            return
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        if await hand_over(self._gateway.sockets):
            self.is_done = True
            self._stop.set()
