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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic

from aiohttp import web

from gateway.admin.admin_replies import json_response
from gateway.app import Gateway
from gateway.config.kept_facts import use_kept
from gateway.config.models import Config
from gateway.observe.logs import to_stderr
from gateway.observe.metrics.merged_metrics import encode_counts
from gateway.process import tune_gc
from gateway.strict_json import encode
from gateway.worker_context import WorkerContext
from gateway.workers.shared_state import SharedState

log = logging.getLogger("firsttoken")

MIN_UPTIME = 10.0  # s: after two earlier exits in a row, the restart waits
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # s between restarts

SERVING = b"s"  # report of a worker to the supervisor
COUNTS, APPLY, DRAIN, KNOWN_KEYS = "/counts", "/apply", "/drain", "/known-keys"  # paths on a worker's private port

Work = Callable[[socket.socket], int]  # given the child's end of the channel; returns the exit code


class Order(Enum):
    """Bytes from the supervisor; SUPERVISOR_GONE: the end of the channel."""

    SUPERVISOR_GONE, DRAIN, FORCE_STOP, HANGUP = range(4)


# -- the parent's side ---------------------------------------------------------------------


@dataclass(slots=True)
class Child:
    """A forked process."""

    pid: int
    channel: socket.socket
    started_at: float = field(default_factory=monotonic)


def fork(work: Work) -> Child:
    """Runs `work` in a new process. Signals that a child must not take are to be blocked."""
    sys.stdout.flush()
    sys.stderr.flush()  # or the child would write the same bytes
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        ours.close()
        _run_child(work, theirs)
    theirs.close()
    ours.setblocking(False)
    return Child(pid, ours)


def _run_child(work: Work, channel: socket.socket) -> None:
    """Never returns: the frames below on the stack are the parent's."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        code = work(channel)
    except BaseException:
        log.exception("internal error")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def exit_reason(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exited with code {code}"


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """A process to keep running, and the time of the next start."""

    name: str
    work: Work
    child: Child | None = None
    serving: bool = False
    starts: int = 0  # processes so far
    restart_at: float | None = None
    early_exits: int = 0  # in a row

    def start(self) -> None:
        self.restart_at = None
        self.starts += 1
        self.child = fork(self.work)

    def read_report(self) -> bool:
        """Read a report from the child without blocking. True: the child has just reported that it serves."""
        if self.child is not None and not self.serving:
            with suppress(OSError):  # no report yet, or exited
                self.serving = self.child.channel.recv(1) == SERVING
                return self.serving
        return False

    def send(self, order: Order) -> None:
        if self.child is not None:
            with suppress(OSError):  # exited; SIGCHLD reports the exit
                self.child.channel.send(bytes([order.value]))

    def on_exit(self, now: float) -> float:
        """Seconds until the next process should start."""
        assert self.child is not None
        self.early_exits = self.early_exits + 1 if now - self.child.started_at < MIN_UPTIME else 0
        self.child.channel.close()
        self.child = None
        self.serving = False
        return 0.0 if self.early_exits < 2 else min(FIRST_WAIT * 2.0 ** (self.early_exits - 2), LONGEST_WAIT)


# -- the child's side ----------------------------------------------------------------------


def follow_orders(channel: socket.socket, handlers: Mapping[Order, Callable[[], object]]) -> None:
    """Calls the handler of each order from now on."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        orders = channel.recv(64)
        if not orders:
            loop.remove_reader(channel)
        for order in orders or [Order.SUPERVISOR_GONE.value]:
            handlers[Order(order)]()

    channel.setblocking(False)
    loop.add_reader(channel, read)


async def serve_worker(
    config: Config, context: WorkerContext, starts: int, shared: SharedState, channel: socket.socket
) -> None:
    """Run a worker process. `starts`: number of processes started in the slot, this process included."""
    to_stderr(f"worker {context.number + 1}: ")
    beating = asyncio.create_task(shared.beats.beat_forever(context.number))
    use_kept(config.state.dir)  # since the fork of the supervisor there may be newer ones
    gateway, ended = Gateway(config, context), asyncio.Event()

    def force_stop() -> None:
        gateway.force_stop = True
        ended.set()

    async def counts(http: web.Request) -> web.Response:
        metrics = list(gateway.registry.collect())  # on the counting loop; encoded in a thread
        return web.Response(body=await asyncio.to_thread(encode_counts, starts, metrics))

    async def apply(http: web.Request) -> web.Response:
        """Bring into force the configuration that the aggregator has read and checked."""
        wanted = shared.config.get()
        await asyncio.to_thread(use_kept, wanted.state.dir)  # tables of facts are of a process
        await gateway.apply_config(wanted)
        return web.Response(status=204)

    async def drain_endpoints(http: web.Request) -> web.Response:
        """Take out the endpoints that the aggregator has written."""
        await gateway.admin.drain(shared.drained.get() or frozenset())
        return web.Response(status=204)

    handlers = {Order.SUPERVISOR_GONE: ended.set, Order.DRAIN: ended.set, Order.FORCE_STOP: force_stop}
    follow_orders(channel, {**handlers, Order.HANGUP: gateway.reopen_logs})

    async def known_keys(_: web.Request) -> web.Response:
        keys = await gateway.admin.known_keys()
        return json_response(200, encode([key.model_dump(exclude_defaults=True) for key in keys]))

    gateway.admin_app.add_routes([web.get(COUNTS, counts), web.get(KNOWN_KEYS, known_keys)])
    gateway.admin_app.add_routes([web.post(APPLY, apply), web.post(DRAIN, drain_endpoints)])
    await gateway.prepare(context.admin)
    if (latest := shared.config.get() or config) != config:  # reloaded since the fork, before this process was asked
        await gateway.apply_config(latest)
    gateway.fleet.drain(shared.drained.get() or frozenset())
    tune_gc()
    if not ended.is_set():
        await gateway.open(context.data)
        channel.send(SERVING)
        await ended.wait()
    drain = gateway.config.server.drain
    await gateway.stop(drain.grace, drain.wait)
    beating.cancel()
