"""Resolves host names with the system's resolver, off the event loop, and connects to them.

The system's resolver blocks a thread for each name that hangs, some 10 s each time. Rules:
- Each use of names has threads of its own (`NameLookup`), apart from those of the event loop, where four are shared by
  Redis, the collector and the Kubernetes API.
- A name is asked for once at a time, and so takes one thread, however many wait for it.
- The last answer of a name stands in for a next one that is late, or that the resolver could not get: connections to a
  known server do not wait for the DNS.
- A name that is not answered in time is no fault of its server (NameTimeoutError). Who asks again meanwhile is told at
  once.
- Threads end with the process: no exit waits for a resolver.

The addresses of a host race (RFC 8305), and the first connection wins. Attempts start ATTEMPT_DELAY apart, IPv6 and
IPv4 in turn, or at once after a failed one: an address that nobody answers costs a quarter of a second, not the whole
connect timeout. The other attempts end and their sockets are closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeAlias

from aiohappyeyeballs import start_connection

from backends.failures import ForbiddenAddressError, NameTimeoutError

THREADS = 64
LATE = 0.25  # s until the last answer stands in for the next one

AddressInfo: TypeAlias = tuple[int, int, int, str, tuple[Any, ...]]  # as of socket.getaddrinfo, with port 0
Answer: TypeAlias = Sequence[AddressInfo]


def system_answer(name: str) -> Answer:
    """Ask the system's resolver. Raises OSError, or UnicodeError for a malformed name."""
    return socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)


class DaemonThreads(Executor):
    """At most `most` threads, begun as they are needed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._forget_threads()
        os.register_at_fork(after_in_child=self._forget_threads)

    def _forget_threads(self) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._free = threading.Semaphore(0)  # threads that wait for work
        self._count = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((future, partial(fn, *args, **kwargs)))
        if not self._free.acquire(blocking=False) and self._count < self._most:
            self._count += 1
            threading.Thread(target=self._run, name=f"names-{self._count}", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            future, work = self._work.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)
            del future, work
            self._free.release()


@dataclass(frozen=True, slots=True)
class NameQuery:
    began: float
    answer: asyncio.Future[Answer]


class NameLookup:
    """Answers by name. `ask`: of the resolver, in a thread."""

    def __init__(self, threads: int = THREADS, ask: Callable[[str], Answer] = system_answer) -> None:
        self._threads = DaemonThreads(threads)
        self._ask = ask
        self._queries: dict[str, NameQuery] = {}
        self._known: dict[str, Answer] = {}

    async def fresh(self, name: str) -> Answer:
        """The answer of the resolver, whenever it comes. Raises OSError, or UnicodeError."""
        return await asyncio.shield(self._query(name).answer)

    async def usable(self, name: str, within: float) -> Answer:
        """The answer, or the last one. Raises NameTimeoutError after `within` seconds; OSError, UnicodeError."""
        query, known = self._query(name), self._known.get(name)
        patience = query.began + (within if known is None else min(LATE, within)) - monotonic()
        await asyncio.wait([query.answer], timeout=max(patience, 0.0))
        if not query.answer.done():
            if known is None:
                raise NameTimeoutError(within)
            return known
        if known is not None and _is_temporary(query.answer.exception()):
            return known
        return query.answer.result()

    def _query(self, name: str) -> NameQuery:
        loop = asyncio.get_running_loop()
        query = self._queries.get(name)
        if query is None or query.answer.get_loop() is not loop:
            answer = loop.run_in_executor(self._threads, self._ask, name)
            query = self._queries[name] = NameQuery(monotonic(), answer)
            answer.add_done_callback(partial(self._on_answer, name))
        return query

    def _on_answer(self, name: str, answer: asyncio.Future[Answer]) -> None:
        if (query := self._queries.get(name)) is not None and query.answer is answer:
            del self._queries[name]
        if answer.cancelled():
            return
        error = answer.exception()
        if error is None:
            self._known[name] = answer.result()
        elif not _is_temporary(error):
            self._known.pop(name, None)


def _is_temporary(error: BaseException | None) -> bool:
    """The resolver could not say."""
    return isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN


ATTEMPT_DELAY = 0.25  # s; RFC 8305, section 5
NAME_SHARE = 0.5  # of the time to connect: the rest is for the server, which is not to blame for the DNS
CONNECT_NAMES = NameLookup()


async def connected_socket(
    host: str, port: int, within: float, allowed: Callable[[str], bool] = lambda address: True
) -> socket.socket:
    """A socket connected to an allowed address of the host. `within`: s that the caller waits for it. Raises OSError,
    or UnicodeError for a malformed name."""
    answers = await CONNECT_NAMES.usable(host, within * NAME_SHARE)
    usable = [_with_port(answer, port) for answer in answers if allowed(str(answer[4][0]))]
    if not usable:
        raise ForbiddenAddressError
    try:
        return await start_connection(usable, happy_eyeballs_delay=ATTEMPT_DELAY)
    except RuntimeError as error:  # uvloop, in place of an OSError
        raise OSError(str(error)) from error


def _with_port(answer: AddressInfo, port: int) -> AddressInfo:
    family, kind, protocol, name, (address, _, *rest) = answer
    return family, kind, protocol, name, (address, port, *rest)
