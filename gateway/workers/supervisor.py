"""Keeps N workers serving one port, and an admin aggregator to answer for all.

Rules:
- The supervisor serves nothing: without threads and without an event loop a fork is possible at any time. So a worker
  is replaced in milliseconds, reads nothing from disk, and shares the memory of everything loaded before.
- Every worker has a listening socket on the shared port; the kernel spreads connections over all. The supervisor holds
  each socket too: connections not accepted by a dead worker wait for the successor.
- Callers are let in when all workers are prepared, not before.
- After an exit a worker is restarted at once; after two early exits in a row with growing delays. Meanwhile the socket
  is closed, so the other workers get the connections.
- The first signal drains, the second ends the draining. Processes still running after the grace are killed.
- A configuration is read and checked here, once, and passed to workers only if valid. An exited worker counts as done
  with a reload: the successor starts with the new configuration. The reply comes after the last worker's report.
- Each of these events is one log line.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from gateway.admission.local_quotas import SharedQuotaMemory
from gateway.cluster.gossip import new_group
from gateway.config.config_errors import ConfigError
from gateway.config.field_types import ListenAddress
from gateway.config.file_watch import CHECK_INTERVAL
from gateway.config.models import Config
from gateway.process import BACKLOG, bind, drain_message, listen_unix, reserve_port, tune_gc, url_of
from gateway.reload import ConfigSource, ReloadCounts, reload_result
from gateway.server_certificate import ServerCertificate
from gateway.tokenize.tokenizers import encoder
from gateway.worker_context import WorkerContext
from gateway.workers.admin_aggregator import serve_aggregator
from gateway.workers.shared_state import SharedState, WorkerState, WorkerStatus
from gateway.workers.worker import Order, Report, WorkerSlot, exit_reason, fork, run_loop, serve_worker, signal_socket
from gateway.workers.worker_peers import WorkerPeers

log = logging.getLogger("firsttoken")

KILL_AFTER = 5.0  # s beyond its grace for a process to exit
POSTED = "POST /reload"


class Phase(Enum):
    STARTING = "starting"
    OPEN = "open"
    ENDING = "ending"


def supervise(config: Config, source: ConfigSource) -> int:
    """Runs until a signal. Exit code: 0; 2 if a port is taken; 1 if a worker cannot start."""
    for tokenizer in {pool.tokenizer for pool in config.pools.values()}:
        encoder(tokenizer)  # before the fork: all processes share the memory
    tune_gc()  # a collection in a worker would write to shared pages
    with ExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory(prefix="firsttoken-")))
        try:
            reserved, admin = reserve_port(config.server.listen), bind(config.server.admin)
            admin.listen(BACKLOG)
        except OSError as error:
            print(f"firsttoken: cannot listen: {error.strerror or error}", file=sys.stderr)
            return 2
        return Supervisor(config, source, reserved, admin, home).run()


class Supervisor:
    """`reserved` is bound to the shared port and never listens; `home` is a directory for private files."""

    def __init__(
        self, config: Config, source: ConfigSource, reserved: socket.socket, admin: socket.socket, home: Path
    ) -> None:
        count = config.server.workers
        self.reserved, self.admin = reserved, admin
        self.private = [listen_unix(home / f"{number}.sock") for number in range(count)]
        self.log_lock, self.group = home / "lines.lock", new_group()
        self.peer_paths = [home / f"{number}.peers.sock" for number in range(count)]
        self.peer_sockets = [listen_unix(path) for path in self.peer_paths]
        tls = config.server.tls
        self.certificate = None if tls is None else ServerCertificate(tls)
        self.quotas = SharedQuotaMemory((key.name for key in config.keys), count)
        self.shared = SharedState(count)
        self.workers = [WorkerSlot(f"worker {n + 1}", partial(self._run_worker, n)) for n in range(count)]
        self.aggregator = WorkerSlot("the admin port", self._run_aggregator)
        self.slots = (*self.workers, self.aggregator)
        self.reload = CoordinatedReload(
            config=config,
            source=source,
            shared=self.shared,
            workers=self.workers,
            aggregator=self.aggregator,
            counts=ReloadCounts(self.shared.reloads),
            check_at=monotonic() + CHECK_INTERVAL if source.watch.files else None,
        )
        self.phase = Phase.STARTING
        self.announced = False
        self.exit_code = 0
        self.kill_at: float | None = None
        self.selector = selectors.DefaultSelector()

    def run(self) -> int:
        with signal_socket() as signals:
            self.selector.register(signals, selectors.EVENT_READ, lambda: self._on_signals(signals.recv(64)))
            for slot in self.slots:
                self._start(slot)
            while any(slot.child or slot.restart_at for slot in self.slots):
                self._turn()
        return self.exit_code

    def _turn(self) -> None:
        """Handles events and due timers."""
        timers = [self.kill_at, self.reload.check_at, *(slot.restart_at for slot in self.slots)]
        due = [at for at in timers if at is not None]
        for key, _ in self.selector.select(max(min(due) - monotonic(), 0.0) if due else None):
            key.data()
        now = monotonic()
        for slot in self.slots:
            if slot.restart_at is not None and slot.restart_at <= now:
                self._start(slot)
        if self.kill_at is not None and self.kill_at <= now:
            self._kill()
        if self.reload.files_changed(now):
            self._reload("a file changed")

    def _reload(self, reason: str) -> None:
        if self.phase is not Phase.ENDING:
            self.reload.request(reason)

    def _set_state(self, slot: WorkerSlot, state: WorkerState) -> None:
        if slot is not self.aggregator:
            self.shared.set_worker(self.workers.index(slot), WorkerStatus(state, slot.starts))

    # -- start ------------------------------------------------------------------------------

    def _start(self, slot: WorkerSlot) -> None:
        if slot is not self.aggregator and slot.listening is None:
            slot.listening = self._bind_shared()
        child = fork(slot.work)
        slot.on_started(child)
        self._set_state(slot, WorkerState.STARTING)
        self.selector.register(child.channel, selectors.EVENT_READ, lambda: self._on_report(slot))

    def _bind_shared(self) -> socket.socket:
        """A socket on the shared port, which listens once callers are let in."""
        server = self.reload.config.server
        made = bind(ListenAddress(server.listen.host, self.reserved.getsockname()[1]), shared=True)
        if self.phase is Phase.OPEN:
            made.listen(BACKLOG)
        return made

    def _run_worker(self, number: int, channel: socket.socket) -> int:
        data = self.workers[number].listening
        assert data is not None
        self._close_inherited(data, self.private[number], self.peer_sockets[number])
        context = WorkerContext(
            number=number,
            data=data,
            admin=self.private[number],
            peers=WorkerPeers(number, self.peer_paths, self.peer_sockets[number], self.shared.is_running),
            group=self.group,
            log_lock=self.log_lock,
            quotas=self.quotas.member(number),
            certificate=self.certificate,
        )
        return run_loop(serve_worker(self.reload.config, context, self.shared.config, channel))

    def _run_aggregator(self, channel: socket.socket) -> int:
        paths = [sock.getsockname() for sock in self.private]
        self._close_inherited(self.admin)
        return run_loop(serve_aggregator(self.reload.config, paths, self.shared, self.admin, channel))

    def _close_inherited(self, *kept: socket.socket) -> None:
        """In a child: a socket listens, and a channel is open, as long as any process holds it."""
        self.selector.close()
        channels = (slot.child.channel for slot in self.slots if slot.child is not None)
        listening = (worker.listening for worker in self.workers)
        for each in (self.reserved, self.admin, *channels, *self.private, *self.peer_sockets, *listening):
            if each is not None and each not in kept:
                each.close()

    # -- reports of children ----------------------------------------------------------------

    def _on_report(self, slot: WorkerSlot) -> None:
        child = slot.child
        if child is None:
            return  # exited in this very turn
        report = child.channel.recv(64)
        if not report:
            self.selector.unregister(child.channel)  # exited; SIGCHLD reports how
        if Report.PREPARED.value in report:
            slot.prepared = True
            self._open(slot)
        if Report.SERVING.value in report:
            slot.serving = True
            self._on_serving(slot)
        if Report.ASK_RELOAD.value in report and slot is self.aggregator:
            self._reload(POSTED)
        if Report.RELOADED.value in report:
            self.reload.on_applied(slot)

    def _open(self, slot: WorkerSlot) -> None:
        if self.phase is Phase.STARTING and all(worker.prepared for worker in self.workers):
            self.phase = Phase.OPEN
            for worker in self.workers:
                if worker.listening is not None:
                    worker.listening.listen(BACKLOG)
            for worker in self.workers:
                worker.send(Order.GO)
        elif self.phase is Phase.OPEN:
            slot.send(Order.GO)

    def _on_serving(self, slot: WorkerSlot) -> None:
        self._set_state(slot, WorkerState.SERVING)
        if self.announced:
            log.info("%s is serving again", slot.name)
        elif all(worker.serving for worker in self.workers):
            self.announced = True
            server = self.reload.config.server
            data = url_of(self.reserved, server.listen.host, tls=self.certificate is not None)
            admin = url_of(self.admin, server.admin.host)
            print(f"firsttoken: serving {data}/v1, admin {admin}, {len(self.workers)} workers", file=sys.stderr)

    # -- signals and exits ------------------------------------------------------------------

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                self._reap()
            elif number == signal.SIGHUP:
                for slot in self.workers:
                    slot.send(Order.REOPEN)
                self._reload("SIGHUP")
            elif self.phase is not Phase.ENDING:
                drain = self.reload.config.server.drain
                print(drain_message(drain), file=sys.stderr, flush=True)
                self._end(Order.DRAIN, drain.wait + drain.grace + KILL_AFTER)
            else:
                self._end(Order.FORCE_STOP, KILL_AFTER)

    def _end(self, order: Order, within: float) -> None:
        """`within`: s after which processes are killed."""
        self.phase = Phase.ENDING
        self.kill_at = monotonic() + within
        self.reload.begin_no_more()
        self.reserved.close()
        for slot in self.slots:
            slot.restart_at = None
            slot.close_listening()
        for worker in self.workers:
            self._set_state(worker, WorkerState.DRAINING if worker.child else WorkerState.ENDED)
            worker.send(order)
        self._stop_aggregator()

    def _stop_aggregator(self) -> None:
        """Only after the exit of the last worker: until then the aggregator answers for the others."""
        if not any(worker.child for worker in self.workers):
            self.aggregator.send(Order.FORCE_STOP)

    def _reap(self) -> None:
        for slot in self.slots:
            if slot.child is not None:
                pid, status = os.waitpid(slot.child.pid, os.WNOHANG)
                if pid:
                    self._on_exit(slot, pid, exit_reason(status))

    def _on_exit(self, slot: WorkerSlot, pid: int, reason: str) -> None:
        assert slot.child is not None
        if slot.child.channel in self.selector.get_map():
            self.selector.unregister(slot.child.channel)
        wait = slot.on_exit(monotonic())
        self.reload.on_applied(slot)
        if slot is not self.aggregator:
            self._set_state(slot, WorkerState.ENDED)
        if self.phase is Phase.ENDING:
            self._stop_aggregator()
        elif self.phase is Phase.STARTING:
            log.error("%s (pid %d) %s before it was serving", slot.name, pid, reason)
            self.exit_code = 1
            self._end(Order.FORCE_STOP, KILL_AFTER)
        else:
            slot.restart_at = monotonic() + wait
            if wait:
                slot.close_listening()
            restarting = f", repeatedly; restarting it in {wait:g} s" if wait else "; restarting it"
            log.error("%s (pid %d) %s%s", slot.name, pid, reason, restarting)

    def _kill(self) -> None:
        self.kill_at = None
        for slot in self.slots:
            if slot.child is not None:
                log.error("%s (pid %d) did not exit in time; killing it", slot.name, slot.child.pid)
                os.kill(slot.child.pid, signal.SIGKILL)


@dataclass(slots=True, kw_only=True)
class CoordinatedReload:
    """All-or-nothing reload of the workers, one at a time; `config` is in force. Blocks on nothing."""

    config: Config
    source: ConfigSource
    shared: SharedState
    workers: list[WorkerSlot]
    aggregator: WorkerSlot
    counts: ReloadCounts
    check_at: float | None  # monotonic time of the next look at the files
    applying: set[WorkerSlot] = field(default_factory=set)  # workers without a report yet
    answer: object = None  # to POST /reload, after the last report
    requested: dict[str, None] = field(default_factory=dict)  # reasons, in order

    def files_changed(self, now: float) -> bool:
        if self.check_at is None or now < self.check_at:
            return False
        self.check_at = now + CHECK_INTERVAL
        return self.source.watch.changed()

    def request(self, reason: str) -> None:
        self.requested[reason] = None
        self._advance()

    def on_applied(self, slot: WorkerSlot) -> None:
        """This worker has applied the configuration, or has exited."""
        if slot in self.applying:
            self.applying.discard(slot)
            self._advance()

    def begin_no_more(self) -> None:
        self.check_at = None
        self.requested.clear()

    def _advance(self) -> None:
        """Answers the finished reload, then begins the next."""
        while not self.applying:
            if self.answer is not None:
                self.shared.answer.put(self.answer)
                self.aggregator.send(Order.REPLY)
            self.answer = None
            if not self.requested:
                return
            reason = next(iter(self.requested))
            del self.requested[reason]
            answer = self._begin(reason)
            self.answer = answer if reason == POSTED else None

    def _begin(self, reason: str) -> object:
        """The answer to POST /reload: a result, or the errors as text."""
        try:
            change = self.source.next(self.config)
        except ConfigError as error:
            self.counts.refused(error, reason)
            return str(error)
        self.counts.applied(change, reason)
        self.config = change.config
        if change.changed:
            self.shared.config.put(self.config)
            self.applying = {worker for worker in self.workers if worker.child is not None}
            for slot in (*self.applying, self.aggregator):
                slot.send(Order.RELOAD)
        return reload_result(change)
