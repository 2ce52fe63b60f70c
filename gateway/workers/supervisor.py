"""Keeps N workers serving one port, and a desk that speaks for all of them.

Rules:
- It serves nothing itself: without threads and without a loop it can fork at any time. So a worker is replaced in
  milliseconds, needs nothing from disk, and shares the memory of all that was loaded before.
- Every worker has a listening socket of its own on the shared port; the kernel spreads connections over them. The
  supervisor holds each too: connections that a dead worker had not accepted wait for its successor.
- Callers are let in when all workers are prepared, not before.
- A worker that dies is replaced at once; one that dies young again and again later each time, and meanwhile its socket
  is closed, so that the others get its connections.
- The first signal drains, the second does not wait. What is left when the time for it is over is killed.
- Another configuration is read and checked here, once; workers are told of it when it is good.
- Each of these is one line on stderr.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from gateway.admission.local_quotas import Shared
from gateway.app import tune_gc
from gateway.cluster.pending_updates import new_group
from gateway.config.addresses import ListenAddress
from gateway.config.models import Config
from gateway.reload import ConfigSource, Reloads
from gateway.serve import draining
from gateway.tokenize.tokenizers import encoder
from gateway.workers.admin_aggregator import AdminAggregator, serve_aggregator
from gateway.workers.child_process import ASKED, DRAIN, FORCE_STOP, GO, PREPARED, RELOADED, SERVING, fork, told
from gateway.workers.coordinated_reload import POSTED, CoordinatedReload
from gateway.workers.listen_sockets import BACKLOG, bound, private, reserved, url
from gateway.workers.retired_counters import RetiredCounters
from gateway.workers.shared_memory import Memory
from gateway.workers.signal_selector import heard
from gateway.workers.worker import serve_worker
from gateway.workers.worker_context import WorkerContext
from gateway.workers.worker_register import Entry, WorkerRegister, WorkerState
from gateway.workers.worker_slot import WorkerSlot

log = logging.getLogger("firsttoken")

SPARE = 64  # endpoints that workers can share beyond twice those that they began with: all may be exchanged at once
LATE = 5.0  # s beyond its grace that a process has to end


class Phase(Enum):
    STARTING = "starting"
    OPEN = "open"
    ENDING = "ending"


def supervise(config: Config, source: ConfigSource) -> int:
    """Until a signal says stop. Exit code: 0; 2 where a port cannot be had; 1 where a worker cannot start."""
    for tokenizer in {pool.tokenizer for pool in config.pools.values()}:
        encoder(tokenizer)  # here, so that all share its memory
    tune_gc()  # a collection in a worker would write to the memory that it shares
    with ExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory(prefix="firsttoken-")))
        try:
            held, admin = reserved(config.server.listen), bound(config.server.admin)
            admin.listen(BACKLOG)
        except OSError as error:
            print(f"firsttoken: cannot listen: {error.strerror or error}", file=sys.stderr)
            return 2
        return Supervisor(config, source, held, admin, home).run()


class Supervisor:
    """`held` has the shared port and never listens, `admin` is the admin port's, `home` a directory of our own."""

    def __init__(
        self, config: Config, source: ConfigSource, held: socket.socket, admin: socket.socket, home: Path
    ) -> None:
        count = config.server.workers
        self.config, self.held, self.admin = config, held, admin
        self.listening: list[socket.socket | None] = [None] * count
        self.asked = [private(home / f"{number}.sock") for number in range(count)]
        self.lock, self.group = home / "lines.lock", new_group()
        self.memory = Memory(config.urls(), count, len(config.urls()) + SPARE)
        self.quotas = Shared((key.name for key in config.keys), count)
        self.register, self.retired = WorkerRegister(count), RetiredCounters()
        self.change = CoordinatedReload(config, source, Reloads(self.register.reloads))
        self.workers = [WorkerSlot(f"worker {number + 1}", self._work_of(number)) for number in range(count)]
        self.desk = WorkerSlot("the admin port", self._run_desk)
        self.places = (*self.workers, self.desk)
        self.phase, self.announced, self.code = Phase.STARTING, False, 0
        self.kill_at: float | None = None
        self.selector = selectors.DefaultSelector()

    def run(self) -> int:
        with heard() as wake:
            self.selector.register(wake, selectors.EVENT_READ, lambda: self._signalled(wake.recv(64)))
            for place in self.places:
                self._start(place)
            while any(place.child or place.due for place in self.places):
                self._turn()
        return self.code

    def _turn(self) -> None:
        """What happened, and what is due."""
        due = [at for at in (self.kill_at, self.change.due, *(p.due for p in self.places)) if at is not None]
        for key, _ in self.selector.select(max(min(due) - monotonic(), 0.0) if due else None):
            key.data()
        now = monotonic()
        for place in self.places:
            if place.due is not None and place.due <= now:
                self._start(place)
        if self.kill_at is not None and self.kill_at <= now:
            self._kill()
        if self.phase is not Phase.ENDING and self.change.look(now):
            self._reload("a file changed")

    def _reload(self, why: str) -> None:
        if self.phase is not Phase.ENDING:
            self.change.begin(why, self.workers, self.desk)
            self.config = self.change.config

    # -- beginning ------------------------------------------------------------------------

    def _start(self, place: WorkerSlot) -> None:
        if place in self.workers:
            number = self.workers.index(place)
            self.listening[number] = self.listening[number] or self._listening()
            self.register.set(number, Entry(WorkerState.STARTING, place.starts + 1))
        child = fork(place.work)
        place.began(child)
        self.selector.register(child.line, selectors.EVENT_READ, lambda: self._reported(place))

    def _listening(self) -> socket.socket:
        """On the shared port, bound at least."""
        made = bound(ListenAddress(self.config.server.listen.host, self.held.getsockname()[1]), shared=True)
        if self.phase is Phase.OPEN:
            made.listen(BACKLOG)
        return made

    def _work_of(self, number: int) -> Callable[[socket.socket], int]:
        def work(line: socket.socket) -> int:
            data = self.listening[number]
            assert data is not None
            self._leave(data, self.asked[number])
            siblings, quotas = self.memory.member(number), self.quotas.member(number)
            seat = WorkerContext(number, data, self.asked[number], siblings, self.group, self.lock, quotas)
            return serve_worker(self.config, seat, self.change.configs, line)

        return work

    def _run_desk(self, line: socket.socket) -> int:
        paths = [one.getsockname() for one in self.asked]
        self._leave(self.admin)
        change = self.change
        desk = AdminAggregator(self.config, paths, self.register, self.retired, change.configs, change.answers)
        return serve_aggregator(desk, self.admin, line)

    def _leave(self, *kept: socket.socket) -> None:
        """In a child: a socket listens, and a line is open, as long as any process has it."""
        self.selector.close()
        lines = (place.child.line for place in self.places if place.child is not None)
        for each in (self.held, self.admin, *lines, *self.asked, *self.listening):
            if each is not None and each not in kept:
                each.close()

    # -- what children say ----------------------------------------------------------------

    def _reported(self, place: WorkerSlot) -> None:
        child = place.child
        if child is None:
            return  # it ended in this very turn
        said = child.line.recv(64)
        if not said:
            self.selector.unregister(child.line)  # it has ended, and SIGCHLD says how
        if PREPARED in said:
            place.prepared = True
            self._let_in(place)
        if SERVING in said:
            place.serving = True
            self._serves(place)
        if ASKED in said and place is self.desk:
            self._reload(POSTED)
        if RELOADED in said:
            self.change.taken(place, self.desk)
            self._go_on()

    def _go_on(self) -> None:
        """With a reload that was asked for while another was not over."""
        if (why := self.change.next()) is not None:
            self._reload(why)

    def _let_in(self, place: WorkerSlot) -> None:
        if self.phase is Phase.STARTING and all(worker.prepared for worker in self.workers):
            self.phase = Phase.OPEN
            for listening in filter(None, self.listening):
                listening.listen(BACKLOG)
            for worker in self.workers:
                worker.tell(GO)
        elif self.phase is Phase.OPEN:
            place.tell(GO)

    def _serves(self, place: WorkerSlot) -> None:
        self.register.set(self.workers.index(place), Entry(WorkerState.SERVING, place.starts))
        if self.announced:
            log.info("%s serves again", place.name)
        elif all(worker.serving for worker in self.workers):
            self.announced, server = True, self.config.server
            where, admin = url(self.held, server.listen.host), url(self.admin, server.admin.host)
            print(f"firsttoken: serving {where}/v1, admin {admin}, {len(self.workers)} workers", file=sys.stderr)

    # -- ending ---------------------------------------------------------------------------

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                self._reap()
            elif number == signal.SIGHUP:
                self._reload("SIGHUP")
            elif self.phase is not Phase.ENDING:
                drain = self.config.server.drain
                print(draining(drain), file=sys.stderr, flush=True)
                self._end(DRAIN, drain.wait + drain.grace + LATE)
            else:
                self._end(FORCE_STOP, LATE)

    def _end(self, order: bytes, within: float) -> None:
        self.phase, self.kill_at, self.change.due = Phase.ENDING, monotonic() + within, None
        for place in self.places:
            place.due = None
        for listening in (self.held, *self.listening):
            if listening is not None:
                listening.close()
        for number, worker in enumerate(self.workers):
            self.register.set(number, Entry(WorkerState.DRAINING if worker.child else WorkerState.ENDED, worker.starts))
            worker.tell(order)
        self._close_desk()

    def _close_desk(self) -> None:
        """It is asked until there is nothing to be asked."""
        if not any(worker.child for worker in self.workers):
            self.desk.tell(FORCE_STOP)

    def _reap(self) -> None:
        for place in self.places:
            if place.child is not None:
                pid, status = os.waitpid(place.child.pid, os.WNOHANG)
                if pid:
                    self._ended(place, status)

    def _ended(self, place: WorkerSlot, status: int) -> None:
        assert place.child is not None
        pid = place.child.pid
        if place.child.line in self.selector.get_map():
            self.selector.unregister(place.child.line)
        wait = place.ended(monotonic())
        self.change.taken(place, self.desk)
        self._go_on()
        if place in self.workers:
            number = self.workers.index(place)
            self.register.set(number, Entry(WorkerState.ENDED, place.starts))
            self.memory.wipe(number)
        if self.phase is Phase.ENDING:
            self._close_desk()
        elif self.phase is Phase.STARTING:
            log.error("%s (pid %d) %s before it served", place.name, pid, told(status))
            self.code = 1
            self._end(FORCE_STOP, LATE)
        else:
            self._replace(place, wait, f"{place.name} (pid {pid}) {told(status)}")

    def _replace(self, place: WorkerSlot, wait: float, what: str) -> None:
        place.due = monotonic() + wait
        if not wait:
            log.error("%s; another takes its place", what)
            return
        if place in self.workers:
            number = self.workers.index(place)
            if (listening := self.listening[number]) is not None:
                listening.close()
            self.listening[number] = None
        log.error("%s, again and again; another takes its place in %g s", what, wait)

    def _kill(self) -> None:
        self.kill_at = None
        for place in self.places:
            if place.child is not None:
                log.error("%s (pid %d) does not end; it is killed", place.name, place.child.pid)
                os.kill(place.child.pid, signal.SIGKILL)
