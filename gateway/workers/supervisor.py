"""Keeps N workers serving one port, and a process for the admin port.

Rules:
- The supervisor serves nothing: without threads and without an event loop a fork is possible at any time. So a worker
  is replaced in milliseconds, reads nothing from disk, and shares the memory of everything loaded before.
- Every worker listens on a socket of its own on the shared port; the kernel spreads connections over those of the
  workers that run.
- After an exit a worker is restarted at once; after two early exits in a row with growing delays.
- The first signal drains, the second ends the draining. Processes still running after the grace are killed. SIGHUP is
  passed on: workers reopen their logs, and the admin process reads the configuration again.
- A process whose event loop stands still is told after 5 s, and killed and replaced after 30 s (`heartbeats`).
- Each of these events is one log line.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from contextlib import ExitStack
from enum import Enum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

from gateway.admission.auth import account
from gateway.admission.local_quotas import SharedQuotaMemory
from gateway.cluster.gossip import new_group
from gateway.config.field_types import ListenAddress
from gateway.config.models import Config
from gateway.handover import notify_systemd
from gateway.process import (
    ADMIN_KEY,
    BACKLOG,
    LISTEN_KEY,
    PICK_KEY,
    bind,
    drain_message,
    listen_unix,
    naming,
    reserve_port,
    run_loop,
    serving_line,
    tune_gc,
    url_of,
)
from gateway.reload import ConfigSource
from gateway.server_certificate import ServerCertificate
from gateway.tokenize.tokenizers import encoder
from gateway.worker_context import WorkerContext
from gateway.workers.admin_aggregator import serve_aggregator
from gateway.workers.shared_state import KILLED, STALLED, TICK, SharedState, StallWatch
from gateway.workers.worker import Order, WorkerSlot, exit_reason, serve_worker
from gateway.workers.worker_peers import WorkerPeers

log = logging.getLogger("firsttoken")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD, signal.SIGALRM)
KILL_AFTER = 5.0  # s beyond its grace for a process to exit
LOOK_INTERVAL = 0.01  # s between two looks for the report of a worker that starts, or for its time


class Phase(Enum):
    STARTING = "starting"
    SERVING = "serving"
    ENDING = "ending"


def supervise(config: Config, source: ConfigSource) -> int:
    """Runs until a signal. Exit code: 0; 2 if a port is taken; 1 if a worker cannot start."""
    for tokenizer in {pool.tokenizer for pool in config.pools.values()}:
        encoder(tokenizer)  # before the fork: all processes share the memory
    tune_gc()  # a collection in a worker would write to shared pages
    with ExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory(prefix="firsttoken-")))
        try:
            reserved, admin = _reserved(config, stack), _admin(config)
        except OSError as error:
            print(f"firsttoken: cannot listen {error.strerror or error}", file=sys.stderr)
            return 2
        return Supervisor(config, source, reserved, admin, home).run()


def _reserved(config: Config, stack: ExitStack) -> socket.socket | None:
    """Holds the shared ports, that of the picker until the end of `stack`. Returns the data port's, if it is opened.
    Raises OSError."""
    if config.pick is not None:
        with naming(config.pick.listen, PICK_KEY):
            stack.enter_context(reserve_port(config.pick.listen))
    if not config.opens_data_port:
        return None
    with naming(config.server.listen, LISTEN_KEY):
        return reserve_port(config.server.listen)


def _admin(config: Config) -> socket.socket:
    with naming(config.server.admin, ADMIN_KEY):
        admin = bind(config.server.admin)
        admin.listen(BACKLOG)
    return admin


class Supervisor:
    """`reserved` is bound to the shared port and never listens; `home` is a directory for private files."""

    def __init__(
        self, config: Config, source: ConfigSource, reserved: socket.socket | None, admin: socket.socket, home: Path
    ) -> None:
        count, tls = config.server.workers, config.server.tls
        self.config, self.source = config, source
        self.reserved, self.admin = reserved, admin
        self.private_paths = [home / f"{number}.sock" for number in range(count)]
        self.peer_paths = [home / f"{number}.peers.sock" for number in range(count)]
        self.log_lock, self.group = home / "lines.lock", new_group()
        self.certificate = None if tls is None else ServerCertificate(tls)
        self.quotas = SharedQuotaMemory((account(key.name, key.sha256) for key in config.keys), count)
        self.shared = SharedState(count)
        self.workers = [WorkerSlot(f"worker {n + 1}", partial(self._run_worker, n)) for n in range(count)]
        self.aggregator = WorkerSlot("the admin port", self._run_aggregator)
        self.slots = (*self.workers, self.aggregator)
        self.stalls = [StallWatch() for _ in self.slots]
        self.kill_at: float | None = None
        self.phase = Phase.STARTING
        self.exit_code = 0

    def run(self) -> int:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            for slot in self.slots:
                slot.start()
            signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
            while any(slot.child or slot.restart_at for slot in self.slots):
                self._turn()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self.exit_code

    def _turn(self) -> None:
        """Waits for a signal, a report or the time of a start, and handles each."""
        if (found := self._next_signal()) is not None:
            self._on_signal(found.si_signo)
        for worker in self.workers:
            if worker.read_report():
                self._on_serving(worker)
        for slot in self.slots:
            if slot.restart_at and slot.restart_at <= monotonic():
                slot.start()

    def _next_signal(self) -> signal.struct_siginfo | None:
        """Waits for a signal; while a worker starts or will be started, LOOK_INTERVAL at most. `sigtimedwait` waits for
        no time here: CPython's returns a signal that never came if SIGSTOP and SIGCONT outlast the time."""
        if any(slot.restart_at for slot in self.slots) or any(each.child and not each.serving for each in self.workers):
            sleep(LOOK_INTERVAL)
            return signal.sigtimedwait(SIGNALS, 0)
        return signal.sigwaitinfo(SIGNALS)

    # -- start ------------------------------------------------------------------------------

    def _run_worker(self, number: int, channel: socket.socket) -> int:
        data = None
        if self.reserved is not None:
            port = self.reserved.getsockname()[1]
            data = bind(ListenAddress(self.config.server.listen.host, port), shared=True)
        self._close_inherited(self.admin, self.reserved)
        context = WorkerContext(
            number=number,
            data=data,
            admin=listen_unix(self.private_paths[number]),
            peers=WorkerPeers(number, self.peer_paths),
            group=self.group,
            log_lock=self.log_lock,
            quotas=self.quotas.member(number),
            certificate=self.certificate,
        )
        config = self.shared.config.get() or self.config
        return run_loop(serve_worker(config, context, self.workers[number].starts, self.shared, channel))

    def _run_aggregator(self, channel: socket.socket) -> int:
        self._close_inherited(self.reserved)
        config = self.shared.config.get() or self.config
        return run_loop(serve_aggregator(config, self.source, self.private_paths, self.shared, self.admin, channel))

    def _close_inherited(self, *unused: socket.socket | None) -> None:
        """In a child: a socket listens, and a channel is open, as long as any process holds it."""
        for each in (*unused, *(slot.child.channel for slot in self.slots if slot.child is not None)):
            if each is not None:
                each.close()

    def _on_serving(self, worker: WorkerSlot) -> None:
        if self.phase is Phase.SERVING:
            log.info("%s is serving again", worker.name)
        elif self.phase is Phase.STARTING and all(each.serving for each in self.workers):
            self.phase = Phase.SERVING
            print(f"{self._serving_line()}, {len(self.workers)} workers", file=sys.stderr)
            notify_systemd("READY=1")

    def _serving_line(self) -> str:
        server, pick, data = self.config.server, self.config.pick, ""
        if self.reserved is not None:
            data = url_of(self.reserved, server.listen.host, tls=self.certificate is not None)
        return serving_line(data, url_of(self.admin, server.admin.host), "" if pick is None else str(pick.listen))

    # -- signals and exits ------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif number == signal.SIGHUP:
            for slot in self.slots:
                slot.send(Order.HANGUP)
        elif number == signal.SIGALRM:
            self._tick()
        elif number == signal.SIGUSR2:
            log.error("several workers hand no sockets over (SIGUSR2): restart the service")
        elif self.phase is not Phase.ENDING:
            drain = self.config.server.drain
            print(drain_message(drain), file=sys.stderr, flush=True)
            self._end(Order.DRAIN, drain.wait + drain.grace + KILL_AFTER)
        else:
            self._end(Order.FORCE_STOP, KILL_AFTER)

    def _end(self, order: Order, within: float) -> None:
        """`within`: s after which processes are killed."""
        self.phase = Phase.ENDING
        self.kill_at = monotonic() + within
        if self.reserved is not None:
            self.reserved.close()
        for slot in self.slots:
            slot.restart_at = None
        for worker in self.workers:
            worker.send(order)
        self._stop_aggregator()

    def _stop_aggregator(self) -> None:
        """Only after the exit of the last worker: until then the aggregator answers for the others."""
        if not any(worker.child for worker in self.workers):
            self.aggregator.send(Order.DRAIN)

    def _reap(self) -> None:
        for slot in self.slots:
            if slot.child is not None:
                pid, status = os.waitpid(slot.child.pid, os.WNOHANG)
                if pid:
                    self._on_exit(slot, pid, exit_reason(status))

    def _on_exit(self, slot: WorkerSlot, pid: int, reason: str) -> None:
        wait = slot.on_exit(monotonic())
        self.shared.beats.clear(self.slots.index(slot))
        if self.phase is Phase.ENDING:
            self._stop_aggregator()
        elif self.phase is Phase.STARTING:
            log.error("%s (pid %d) %s before it was serving", slot.name, pid, reason)
            self.exit_code = 1
            self._end(Order.FORCE_STOP, KILL_AFTER)
        else:
            slot.restart_at = monotonic() + wait
            restarting = f", repeatedly; restarting it in {wait:g} s" if wait else "; restarting it"
            log.error("%s (pid %d) %s%s", slot.name, pid, reason, restarting)

    def _tick(self) -> None:
        if self.phase is Phase.SERVING:
            for number, slot in enumerate(self.slots):
                if slot.child is not None:
                    self._look_at(slot, slot.child.pid, self.stalls[number], self.shared.beats.last(number))
        elif self.kill_at is not None and monotonic() >= self.kill_at:
            self._kill()

    def _look_at(self, slot: WorkerSlot, pid: int, stall: StallWatch, last: float) -> None:
        stood_still = stall.tick(last)
        if stood_still:
            log.warning("%s (pid %d) goes on after it stood still for %d s", slot.name, pid, stood_still)
        elif stall.ticks == STALLED:
            text = "%s (pid %d) has stood still for %d s: what it serves waits; it is killed after %d s"
            log.error(text, slot.name, pid, STALLED, KILLED)
        elif stall.ticks == KILLED:
            log.error("%s (pid %d) has stood still for %d s; killing it", slot.name, pid, KILLED)
            os.kill(pid, signal.SIGKILL)

    def _kill(self) -> None:
        for slot in self.slots:
            if slot.child is not None:
                log.error("%s (pid %d) did not exit in time; killing it", slot.name, slot.child.pid)
                os.kill(slot.child.pid, signal.SIGKILL)
