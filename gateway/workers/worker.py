"""A worker: a gateway in a forked process with a control channel, restarted in a slot.

Rules:
- The parent has no threads and no event loop when forking: no half-done state is copied.
- A child takes orders from the channel alone and ignores SIGINT, SIGTERM and SIGHUP. Terminals, containers and systemd
  send those to all processes of a service, and a second one means "do not wait": the supervisor alone counts.
- The end of the channel is an order too: without a supervisor a process drains and exits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client.core import Metric

from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.logs import to_stderr, unhandled
from gateway.process import loop_factory, tune_gc
from gateway.worker_context import WorkerContext
from gateway.workers.shared_state import SharedValue

log = logging.getLogger("firsttoken")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
MIN_UPTIME = 10.0  # s: after two earlier exits in a row, the restart waits
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # s between restarts

COUNTS = "/counts"  # path on a worker's private port: all metrics

Work = Callable[[socket.socket], int]  # given the child's end of the channel; returns the exit code


class Order(Enum):
    """Bytes from the supervisor. REPLY: the answer to ASK_RELOAD is ready for the aggregator; REOPEN: log files."""

    GO, DRAIN, FORCE_STOP, RELOAD, REPLY, REOPEN = b"g", b"d", b"h", b"r", b"t", b"o"


class Report(Enum):
    """Bytes from a child. ASK_RELOAD: the aggregator has got a POST /reload."""

    PREPARED, SERVING, RELOADED, ASK_RELOAD = b"p", b"s", b"r", b"a"


# -- the parent's side ---------------------------------------------------------------------


@dataclass(slots=True)
class Child:
    """A forked process."""

    pid: int
    channel: socket.socket
    started_at: float = field(default_factory=monotonic)


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
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exited with code {code}"


@contextmanager
def signal_socket() -> Iterator[socket.socket]:
    """A socket with one byte, the number, per signal: handlers do nothing and interrupt nothing, the selector does."""
    read, write = socket.socketpair()
    with read, write:
        read.setblocking(False)
        write.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        fd = signal.set_wakeup_fd(write.fileno())
        try:
            yield read
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """A process to keep running, and the time of the next start. `listening`: a worker's socket on the shared port."""

    name: str
    work: Work
    child: Child | None = None
    listening: socket.socket | None = None
    prepared: bool = False
    serving: bool = False
    starts: int = 0  # processes so far
    restart_at: float | None = None
    early_exits: int = 0  # in a row

    def on_started(self, child: Child) -> None:
        self.child = child
        self.restart_at = None
        self.starts += 1

    def send(self, order: Order) -> None:
        if self.child is not None:
            with suppress(OSError):  # exited; SIGCHLD reports the exit
                self.child.channel.send(order.value)

    def on_exit(self, now: float) -> float:
        """Seconds until the next process should start."""
        assert self.child is not None
        self.early_exits = self.early_exits + 1 if now - self.child.started_at < MIN_UPTIME else 0
        self.child.channel.close()
        self.child = None
        self.prepared = self.serving = False
        return 0.0 if self.early_exits < 2 else min(FIRST_WAIT * 2.0 ** (self.early_exits - 2), LONGEST_WAIT)

    def close_listening(self) -> None:
        if self.listening is not None:
            self.listening.close()
        self.listening = None


# -- the child's side ----------------------------------------------------------------------


class ControlChannel(asyncio.Protocol):
    """One event per order of the supervisor."""

    def __init__(self) -> None:
        self.orders = {order: asyncio.Event() for order in Order}
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(cls, channel: socket.socket) -> ControlChannel:
        transport, protocol = await asyncio.get_running_loop().create_connection(cls, sock=channel)
        protocol._transport = transport
        return protocol

    async def next(self, order: Order) -> None:
        """Waits for the order, and forgets the order."""
        await self.orders[order].wait()
        self.orders[order].clear()

    async def first_of(self, *orders: Order) -> None:
        """Returns when any of the orders has come."""
        waiting = [asyncio.create_task(self.orders[order].wait()) for order in orders]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    def report(self, report: Report) -> None:
        assert self._transport is not None
        self._transport.write(report.value)

    def data_received(self, data: bytes) -> None:
        for order, event in self.orders.items():
            if order.value in data:
                event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.orders[Order.DRAIN].set()


def run_loop(work: Coroutine[Any, Any, None]) -> int:
    """Returns the exit code."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.get_loop().set_exception_handler(unhandled)
        runner.run(work)
    return 0


async def serve_worker(config: Config, context: WorkerContext, configs: SharedValue, channel: socket.socket) -> None:
    """`configs`: where the supervisor puts a reloaded configuration."""
    to_stderr(f"worker {context.number + 1}: ")
    control = await ControlChannel.open(channel)
    gateway = Gateway(config, context)
    gateway.admin_app.router.add_get(COUNTS, _counts_handler(gateway))
    await gateway.prepare(context.admin)
    tune_gc()
    control.report(Report.PREPARED)
    following = [
        asyncio.create_task(_reload_forever(gateway, control, configs)),
        asyncio.create_task(_reopen_forever(gateway, control)),
    ]
    stopping = asyncio.create_task(_follow_force_stop(gateway, control))
    await control.first_of(Order.GO, Order.DRAIN, Order.FORCE_STOP)
    if control.orders[Order.GO].is_set():
        await gateway.open(context.data)
        control.report(Report.SERVING)
        await control.first_of(Order.DRAIN, Order.FORCE_STOP)
    for task in following:
        task.cancel()
    drain = gateway.config.server.drain
    await gateway.stop(drain.grace, drain.wait)
    stopping.cancel()


async def _reload_forever(gateway: Gateway, control: ControlChannel, configs: SharedValue) -> None:
    """Applies configurations checked by the supervisor.

    After a failure the worker drains, and the successor starts with the new configuration: after a reload no two
    workers run different configurations.
    """
    while True:
        await control.next(Order.RELOAD)
        try:
            await gateway.apply_config(configs.get())
        except Exception:
            log.exception("could not apply the reloaded configuration; restarting this worker")
            control.orders[Order.DRAIN].set()
        control.report(Report.RELOADED)


async def _reopen_forever(gateway: Gateway, control: ControlChannel) -> None:
    while True:
        await control.next(Order.REOPEN)
        gateway.reopen_logs()


async def _follow_force_stop(gateway: Gateway, control: ControlChannel) -> None:
    await control.first_of(Order.FORCE_STOP)
    gateway.force_stop = True


def encode_counts(process: bytes, metrics: Iterable[Metric]) -> bytes:
    """Body of the answer to COUNTS. `process`: an id, because the successor of a process counts from 0."""
    fields = [(metric.name, metric.documentation, metric.type, metric.samples) for metric in metrics]
    return msgspec.msgpack.encode((process, fields))


def _counts_handler(gateway: Gateway) -> Callable[[web.Request], Awaitable[web.Response]]:
    process = os.urandom(8)

    async def answer(http: web.Request) -> web.Response:
        metrics = list(gateway.registry.collect())  # on the counting loop; encoded in a thread
        return web.Response(body=await asyncio.to_thread(encode_counts, process, metrics))

    return answer
