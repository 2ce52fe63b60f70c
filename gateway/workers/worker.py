"""One worker: a gateway in a process of its own, controlled by the supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from aiohttp import web
from prometheus_client.core import Metric

from gateway.admin.admin_server import json_response
from gateway.admin.gateway_admin import GatewayAdmin
from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.logs import to_stderr, unhandled
from gateway.process import loop_factory, tune_gc
from gateway.strict_json import encode
from gateway.wiring import WorkerContext
from gateway.workers.merged_stats import COUNTS, families
from gateway.workers.shared_memory import SharedValue

log = logging.getLogger("firsttoken")


def serve_worker(config: Config, context: WorkerContext, configs: SharedValue, channel: socket.socket) -> int:
    """Returns the exit code. `configs`: where the supervisor puts a reloaded configuration."""
    to_stderr(f"worker {context.number + 1}: ")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(config, context, configs, channel))


async def _serve(config: Config, context: WorkerContext, configs: SharedValue, channel: socket.socket) -> int:
    asyncio.get_running_loop().set_exception_handler(unhandled)
    control = await ControlChannel.open(channel)
    gateway = Gateway(config, context)
    gateway.admin_app.router.add_get(COUNTS, _Counts(gateway.admin).answer)
    await gateway.prepare(context.admin)
    tune_gc()
    control.report(PREPARED)
    reloading = asyncio.create_task(_reload_forever(gateway, control, configs))
    await first_of(control.go, control.drain, control.force_stop)
    if control.go.is_set():
        await gateway.open(context.data)
        control.report(SERVING)
        await first_of(control.drain, control.force_stop)
    reloading.cancel()
    await _stop(gateway, control)
    return 0


async def _reload_forever(gateway: Gateway, control: ControlChannel, configs: SharedValue) -> None:
    """Applies configurations checked by the supervisor. After a failure the worker drains and is replaced by a
    process with
    the new configuration: after a reload no two workers run different configurations."""
    while True:
        await control.reload.wait()
        control.reload.clear()
        try:
            await gateway.apply_config(configs.get())
        except Exception:
            log.exception("could not apply the reloaded configuration; restarting this worker")
            control.drain.set()
        control.report(RELOADED)


async def _stop(gateway: Gateway, control: ControlChannel) -> None:
    async def watch_force_stop() -> None:
        await control.force_stop.wait()
        gateway.force_stop = True

    watching = asyncio.create_task(watch_force_stop())
    drain = gateway.config.server.drain
    await gateway.stop(drain.grace, drain.wait)
    watching.cancel()


class _Counts:
    """GET /counts of the worker's private port. `life` tells a process from its successor, which counts from 0."""

    def __init__(self, admin: GatewayAdmin) -> None:
        self.admin = admin
        self.life = os.urandom(8).hex()

    async def answer(self, http: web.Request) -> web.StreamResponse:
        metrics = list(self.admin.registry.collect())  # on the counting loop; encoded in a thread
        return json_response(200, await asyncio.get_running_loop().run_in_executor(None, self._encode, metrics))

    def _encode(self, metrics: list[Metric]) -> bytes:
        return encode({"life": self.life, "families": families(metrics)})


# A forked process, its control channel, and the slot in which the process is restarted.

log = logging.getLogger("firsttoken")

# Orders of the supervisor. REPLY: the answer to ASK_RELOAD is ready for the aggregator.
GO, DRAIN, FORCE_STOP, RELOAD, REPLY = b"g", b"d", b"h", b"r", b"t"
# Reports of a child. ASK_RELOAD: the aggregator has got a POST /reload.
PREPARED, SERVING, RELOADED, ASK_RELOAD = b"p", b"s", b"r", b"a"

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
MIN_UPTIME = 10.0  # s: after two earlier exits in a row, the restart waits
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # s between restarts

Work = Callable[[socket.socket], int]  # given the child's end of the channel; returns the exit code


@dataclass(slots=True)
class Child:
    """A forked process, for its parent."""

    pid: int
    channel: socket.socket
    started_at: float = field(default_factory=monotonic)

    def send(self, order: bytes) -> None:
        """Drops the order if the process has exited; SIGCHLD reports the exit."""
        try:
            self.channel.send(order)
        except OSError:
            log.debug("process %d has exited", self.pid)


def fork(work: Work) -> Child:
    """Runs `work` in a new process."""
    sys.stdout.flush()
    sys.stderr.flush()  # or the child would write the same bytes
    ours, theirs = socket.socketpair()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = os.fork()
    if pid == 0:
        _run_child(work, ours, theirs)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    theirs.close()
    ours.setblocking(False)
    return Child(pid, ours)


def _run_child(work: Work, ours: socket.socket, theirs: socket.socket) -> None:
    """Never returns: the frames below on the stack are the parent's."""
    code = 1
    try:
        ours.close()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        code = work(theirs)
    except BaseException:
        log.exception("internal error")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def exit_reason(status: int) -> str:
    """`status`: of `os.waitpid`."""
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exited with code {code}"


@contextmanager
def signal_socket() -> Iterator[socket.socket]:
    """A socket with one byte, the number, per signal. Signal handlers do nothing and so interrupt nothing: the
    selector
    handles each signal in turn."""
    read, write = socket.socketpair()
    with read, write:
        for end in (read, write):
            end.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        fd = signal.set_wakeup_fd(write.fileno())
        try:
            yield read
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)


class WorkerSlot:
    """A process to keep running: counts its starts and decides when to restart."""

    def __init__(self, name: str, work: Work) -> None:
        self.name, self.work = name, work
        self.child: Child | None = None
        self.prepared = False
        self.serving = False
        self.starts = 0  # processes so far
        self.restart_at: float | None = None
        self._early_exits = 0  # in a row

    def on_started(self, child: Child) -> None:
        self.child = child
        self.restart_at = None
        self.starts += 1

    def send(self, order: bytes) -> None:
        if self.child is not None:
            self.child.send(order)

    def on_exit(self, now: float) -> float:
        """Seconds until the next process should start."""
        assert self.child is not None
        self._early_exits = self._early_exits + 1 if now - self.child.started_at < MIN_UPTIME else 0
        self.child.channel.close()
        self.child = None
        self.prepared = self.serving = False
        return 0.0 if self._early_exits < 2 else min(FIRST_WAIT * 2.0 ** (self._early_exits - 2), LONGEST_WAIT)


class ControlChannel(asyncio.Protocol):
    """The child's end of the channel: one event per order of the supervisor."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.drain = asyncio.Event()
        self.force_stop = asyncio.Event()
        self.reload = asyncio.Event()
        self.reply = asyncio.Event()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(cls, channel: socket.socket) -> ControlChannel:
        transport, protocol = await asyncio.get_running_loop().create_connection(cls, sock=channel)
        protocol._transport = transport
        return protocol

    def report(self, what: bytes) -> None:
        assert self._transport is not None
        self._transport.write(what)

    def data_received(self, data: bytes) -> None:
        events = {
            GO: self.go,
            DRAIN: self.drain,
            FORCE_STOP: self.force_stop,
            RELOAD: self.reload,
            REPLY: self.reply,
        }
        for order, event in events.items():
            if order in data:
                event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.drain.set()


async def first_of(*events: asyncio.Event) -> None:
    """Returns when any of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
