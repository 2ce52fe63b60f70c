"""Resolves host names whose addresses are endpoints of their own, such as a Kubernetes headless service.

Rules:
- Names are resolved off the event loop, repeatedly, one query per name at a time: a slow resolver never occupies more
  and more threads.
- A failed or empty answer changes nothing: a broken resolver must not empty a fleet. Failure and recovery are logged
  once each.
- For a name with addresses of both families the IPv4 addresses count: both are usually the same servers.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

log = logging.getLogger("firsttoken")

FIRST = 2.0  # s to wait for the first answer of a new name
SLOW = 5.0  # s without an answer until a warning

Resolve = Callable[[str], Awaitable[Sequence[str]]]


async def system(name: str) -> Sequence[str]:
    """Resolve with the system's resolver. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    four = [where[0] for family, _, _, _, where in found if family == socket.AF_INET]
    return [str(address) for address in four or (where[0] for _, _, _, _, where in found)]


class DnsDiscovery:
    """`addresses`: sorted addresses of every name that was ever resolved."""

    def __init__(self, resolve: Resolve = system) -> None:
        self.resolve = resolve
        self.addresses: Mapping[str, tuple[str, ...]] = {}
        self._followed: dict[str, tuple[float, asyncio.Task[None]]] = {}
        self._asked: dict[str, asyncio.Event] = {}  # once
        self._ill: set[str] = set()
        self._changed = asyncio.Event()

    async def follow(self, names: Mapping[str, float]) -> None:
        """These from now on, each asked for every so many seconds. Waits for the first answers, but not for long."""
        for name, (every, task) in [*self._followed.items()]:
            if names.get(name) != every:
                task.cancel()
                del self._followed[name]
        for name, every in names.items():
            if name not in self._followed:
                self._asked.setdefault(name, asyncio.Event())
                self._followed[name] = every, asyncio.create_task(self._ask_forever(name, every))
        answers = [asyncio.create_task(self._asked[name].wait()) for name in names]
        if answers:
            _, late = await asyncio.wait(answers, timeout=FIRST)
            for answer in late:
                answer.cancel()
        self._changed.clear()  # the caller reads the current addresses next
        self._forget(names)

    async def changed(self) -> None:
        """Until some name has other addresses."""
        await self._changed.wait()
        self._changed.clear()

    async def close(self) -> None:
        tasks = [task for _, task in self._followed.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, names: Mapping[str, float]) -> None:
        self.addresses = {name: known for name, known in self.addresses.items() if name in names}
        self._asked = {name: event for name, event in self._asked.items() if name in names}
        self._ill &= names.keys()

    async def _ask_forever(self, name: str, every: float) -> None:
        while True:
            self._heard(name, await self._ask(name))
            await asyncio.sleep(every)

    async def _ask(self, name: str) -> Sequence[str] | Exception:
        """Resolve once, without a time limit."""
        question = asyncio.ensure_future(self.resolve(name))
        try:
            if not (await asyncio.wait([question], timeout=SLOW))[0]:
                self._say_ill(name, "no answer")
            return await question
        except Exception as error:
            return error
        finally:
            question.cancel()

    def _heard(self, name: str, answer: Sequence[str] | Exception) -> None:
        self._asked[name].set()
        if isinstance(answer, Exception) or not answer:
            self._say_ill(
                name, str(answer) or type(answer).__name__ if isinstance(answer, Exception) else "it has none"
            )
            return
        known, found = self.addresses.get(name, ()), tuple(sorted({*answer}))
        if name in self._ill:
            self._ill.discard(name)
            log.info("the addresses of %s can be had again", name)
        if found != known:
            log.info("%s has %d addresses: %s", name, len(found), _news(known, found))
            self.addresses = {**self.addresses, name: found}
            self._changed.set()

    def _say_ill(self, name: str, why: str) -> None:
        if name not in self._ill:
            self._ill.add(name)
            kept = len(self.addresses.get(name, ()))
            log.warning("the addresses of %s cannot be had (%s); the %d known ones stay", name, why, kept)


def _news(known: Sequence[str], found: Sequence[str]) -> str:
    came, gone = sorted({*found} - {*known}), sorted({*known} - {*found})
    return ", ".join([*(f"+{address}" for address in came), *(f"-{address}" for address in gone)])
