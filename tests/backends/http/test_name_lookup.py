"""Host names that hang, fail or change: in threads, with resolvers of the test."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from backends import failures
from backends.failures import NameTimeoutError, TransportError
from backends.http import name_lookup as address_race
from backends.http.connection_pool import ConnectionPool
from backends.http.name_lookup import Answer, DaemonThreads, NameLookup, connected_socket
from backends.interface import FailureKind, HttpCall
from policies.blame.blame import BLAME
from tests.support.simulated import eventually
from tests.support.upstream import Upstream

GOOD = "127.0.0.1"


def address(ip: str = GOOD) -> Answer:
    return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (ip, 0))]


class Resolver:
    """Blocks on names with `dark` until it is released. `answers`: by name; an error is raised."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer | OSError] = {}
        self.hangs = {"dark"}
        self.asked: list[str] = []
        self.released = threading.Event()

    def __call__(self, name: str) -> Answer:
        self.asked.append(name)
        if any(word in name for word in self.hangs):
            self.released.wait(60)
        answer = self.answers.get(name, address())
        if isinstance(answer, OSError):
            raise answer
        return answer


@contextmanager
def resolving(threads: int = 64) -> Iterator[tuple[NameLookup, Resolver]]:
    resolver = Resolver()
    try:
        yield NameLookup(threads, resolver), resolver
    finally:
        resolver.released.set()


async def test_names_that_hang_delay_no_other_name() -> None:
    """Forty of them, asked for by ten callers each: one thread a name."""
    with resolving() as (names, resolver):
        hanging = [asyncio.create_task(names.usable(f"{n}.dark", 60)) for n in range(40) for _ in range(10)]
        await eventually(lambda: len(resolver.asked) == 40)
        assert await names.usable("api", 30) == address()
        assert len(resolver.asked) == 41
        resolver.released.set()
        assert await asyncio.gather(*hanging) == [address()] * 400


async def test_a_name_that_hangs_is_told_in_time_and_then_at_once() -> None:
    with resolving() as (names, _):
        for _ in range(2):
            with pytest.raises(NameTimeoutError):
                await names.usable("a.dark", 0.2)
        async with asyncio.timeout(10):  # of 200 s, if each waited
            for _ in range(1_000):
                with pytest.raises(NameTimeoutError):
                    await names.usable("a.dark", 0.2)


@pytest.mark.parametrize("error", [None, socket.gaierror(socket.EAI_AGAIN, "Temporary failure")])
async def test_the_last_answer_stands_in_for_the_next(error: OSError | None) -> None:
    """While the name hangs, or the resolver does not answer; a new answer counts from then on."""
    with resolving() as (names, resolver):
        assert await names.usable("api", 30) == address()
        if error is None:
            resolver.hangs = {"api"}
        else:
            resolver.answers["api"] = error
        assert await names.usable("api", 30) == address()
        resolver.answers["api"] = address("127.0.0.9")
        resolver.released.set()
        await names.fresh("api")
        assert await names.usable("api", 30) == address("127.0.0.9")


async def test_a_name_that_is_gone_has_no_last_answer() -> None:
    with resolving() as (names, resolver):
        assert await names.usable("api", 30) == address()
        resolver.answers["api"] = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        for _ in range(2):
            with pytest.raises(socket.gaierror):
                await names.usable("api", 30)


async def test_names_beyond_the_threads_wait_without_blame_of_their_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the time is over: an own cause, which opens no breaker."""
    with resolving(threads=2) as (names, _):
        monkeypatch.setattr(address_race, "CONNECT_NAMES", names)
        waiting = [asyncio.create_task(names.usable(f"{n}.dark", 60)) for n in range(2)]
        await asyncio.sleep(0)
        pool = ConnectionPool("http://api.example.com:8000", connect_timeout=0.4)
        with pytest.raises(TransportError) as raised:
            await pool.fetch(HttpCall("GET", "/", {}), 30)
        assert raised.value.failure.kind is FailureKind.UNRESOLVED
        assert raised.value.failure.cause == "name not resolved within 0.2 s"
        assert not BLAME["unresolved"].evidence.is_failure
        for task in waiting:
            task.cancel()


def test_a_resolver_that_does_not_answer_is_an_own_cause() -> None:
    failure = failures.of_connect(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))
    assert (failure.kind, failure.cause) == (FailureKind.UNRESOLVED, "name not resolved: the DNS does not answer")
    assert failures.of_connect(socket.gaierror(socket.EAI_NONAME, "unknown")).kind is FailureKind.CONNECT


async def test_a_connection_is_made_by_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with resolving() as (names, resolver):
        monkeypatch.setattr(address_race, "CONNECT_NAMES", names)
        async with Upstream([]) as upstream:
            port = int(upstream.url.rpartition(":")[2])
            for _ in range(2):
                sock = await connected_socket("api", port, 30)
                assert sock.getpeername() == (GOOD, port)
                sock.close()
                resolver.hangs = {"api"}


def test_threads_are_begun_as_needed_and_no_more() -> None:
    threads, release, before = DaemonThreads(4), threading.Event(), threading.active_count()
    futures = [threads.submit(release.wait, 60) for _ in range(10)]
    assert threading.active_count() - before == 4
    release.set()
    assert all(future.result(60) for future in futures)
    for _ in range(20):
        threads.submit(int).result(60)
    assert threading.active_count() - before == 4


async def test_an_answer_for_a_loop_that_has_ended_is_asked_for_anew() -> None:
    with resolving() as (names, resolver):

        async def wait_in_vain() -> None:
            with pytest.raises(NameTimeoutError):
                await names.usable("a.dark", 0.01)

        await asyncio.to_thread(asyncio.run, wait_in_vain())
        resolver.hangs.clear()
        assert await names.usable("a.dark", 30) == address()
