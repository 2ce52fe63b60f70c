"""Resolves host names whose addresses are endpoints of their own, such as a Kubernetes headless service.

Rules:
- Names are resolved off the event loop, repeatedly, one query per name at a time, in threads of their own: neither a
  slow name nor many of them delay a connection to another (`backends.http.name_lookup`).
- A failed or empty answer changes nothing: a broken resolver must not empty a fleet. Failure and recovery are logged
  once each.
- An address joins with the first answer that has it, and leaves after LEAVES answers in a row without it: one answer is
  no news of a server, as caches and servers of the DNS differ. Where answers rotate, so that an address was missing and
  came back, it leaves after twice as many as that took, and no more than MOST_MISSED.
- Addresses that no backend can have are dropped (`backends.http.allowed_addresses`), and so are those beyond
  MAX_ADDRESSES: an answer that lies leads no request astray and fills no memory.
- For a name with addresses of both families the IPv4 addresses count, where the machine has a route to them: both are
  usually the same servers.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress

from backends.http.allowed_addresses import is_allowed
from backends.http.name_lookup import NameLookup
from gateway.config.field_types import is_ip

log = logging.getLogger("firsttoken")

FIRST_ANSWER = 2.0  # s to wait for the first answer of a new name
SLOW_ANSWER = 5.0  # s without an answer until a warning
MAX_ADDRESSES = 128  # endpoints of a name; known endpoints come first
LEAVES, MOST_MISSED = 3, 30  # answers in a row without an address

Resolve = Callable[[str], Awaitable[Sequence[str]]]


RESOLVED_NAMES = NameLookup()


async def system(name: str) -> Sequence[str]:
    """Resolve with the system's resolver. Raises OSError."""
    found = await RESOLVED_NAMES.fresh(name)
    four = [where[0] for family, _, _, _, where in found if family == socket.AF_INET]
    if not four or not _is_routed(str(four[0])):
        return [str(where[0]) for family, _, _, _, where in found if family == socket.AF_INET6] or four
    return [str(address) for address in four]


def _is_routed(address: str) -> bool:
    """The machine has a way to IPv4 addresses: with NAT64, a name may have addresses of both families, and only IPv6
    leads there."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return True
    return False


class AddressHistory:
    """Addresses of one name over its answers. `addresses`: sorted, those that are in use."""

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()
        self._missed: dict[str, int] = {}  # answers in a row without each, of those lately seen
        self._patience = LEAVES

    def on_answer(self, answer: Collection[str]) -> None:
        """`answer`: usable addresses, one or more. Those beyond MAX_ADDRESSES are not used, and those missing in the
        answer give way first."""
        returned = max((self._missed.get(address, 0) for address in answer), default=0)
        self._patience = min(max(self._patience, 2 * returned), MOST_MISSED)
        missed = {address: 0 if address in answer else count + 1 for address, count in self._missed.items()}
        missed |= dict.fromkeys(answer, 0)
        self._missed = {address: count for address, count in missed.items() if count <= MOST_MISSED}
        known = {*self.addresses}
        kept = [address for address in self.addresses if 0 < self._missed.get(address, LEAVES) < self._patience]
        found = [*sorted(answer, key=lambda one: (one not in known, one)), *kept]
        self.addresses = tuple(sorted(found[:MAX_ADDRESSES]))


class DnsDiscovery:
    """`addresses`: sorted addresses of every name that was ever resolved."""

    def __init__(self, resolve: Resolve = system) -> None:
        self.resolve = resolve
        self.addresses: Mapping[str, tuple[str, ...]] = {}
        self._followed: dict[str, tuple[float, asyncio.Task[None]]] = {}
        self._answered: dict[str, asyncio.Event] = {}  # set by the first answer, also by a failed one
        self._failing: set[str] = set()
        self._dropped: dict[str, Sequence[str]] = {}  # addresses in the last answer
        self._histories: dict[str, AddressHistory] = {}
        self._changed = asyncio.Event()

    async def follow(self, names: Mapping[str, float]) -> None:
        """Resolve these names from now on, each every so many seconds, and wait FIRST_ANSWER for the first answers."""
        for name, (interval, task) in [*self._followed.items()]:
            if names.get(name) != interval:
                task.cancel()
                del self._followed[name]
        for name, interval in names.items():
            if name not in self._followed:
                self._answered.setdefault(name, asyncio.Event())
                self._followed[name] = interval, asyncio.create_task(self._resolve_forever(name, interval))
        answers = [asyncio.create_task(self._answered[name].wait()) for name in names]
        if answers:
            _, late = await asyncio.wait(answers, timeout=FIRST_ANSWER)
            for answer in late:
                answer.cancel()
        self._changed.clear()  # the caller reads the current addresses next
        self.addresses = {name: known for name, known in self.addresses.items() if name in names}
        self._answered = {name: event for name, event in self._answered.items() if name in names}
        self._failing &= names.keys()
        self._histories = {name: history for name, history in self._histories.items() if name in names}
        self._dropped = {name: dropped for name, dropped in self._dropped.items() if name in names}

    async def changed(self) -> None:
        """Wait until some name has other addresses."""
        await self._changed.wait()
        self._changed.clear()

    async def close(self) -> None:
        tasks = [task for _, task in self._followed.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _resolve_forever(self, name: str, interval: float) -> None:
        while True:
            try:
                self._on_addresses(name, await self._resolve_once(name))
            except Exception as error:
                self._log_failure(name, str(error) or type(error).__name__)
            self._answered[name].set()
            await asyncio.sleep(interval)

    async def _resolve_once(self, name: str) -> Sequence[str]:
        """Resolve without a time limit."""
        query = asyncio.ensure_future(self.resolve(name))
        try:
            if not (await asyncio.wait([query], timeout=SLOW_ANSWER))[0]:
                self._log_failure(name, "no answer")
            return await query
        finally:
            query.cancel()

    def _on_addresses(self, name: str, answer: Sequence[str]) -> None:
        known = self.addresses.get(name, ())
        usable = {address for address in answer if _is_usable(name, address)}
        if not usable:
            self._log_dropped(name, {*answer})
            self._log_failure(name, "none of its addresses can be a backend's" if answer else "it has none")
            return
        history = self._histories.setdefault(name, AddressHistory())
        history.on_answer(usable)
        found = history.addresses
        self._log_dropped(name, {*answer} - {*found})
        if name in self._failing:
            self._failing.discard(name)
            log.info("the addresses of %s can be had again", name)
        if found != known:
            log.info("%s has %d addresses: %s", name, len(found), _difference(known, found))
            self.addresses = {**self.addresses, name: found}
            self._changed.set()

    def _log_dropped(self, name: str, addresses: Collection[str]) -> None:
        dropped = sorted(addresses)
        if dropped != self._dropped.get(name, []):
            self._dropped[name] = dropped
            if dropped:
                log.warning("%d addresses of %s are not used, such as %s", len(dropped), name, dropped[0])

    def _log_failure(self, name: str, reason: str) -> None:
        if name not in self._failing:
            self._failing.add(name)
            kept = len(self.addresses.get(name, ()))
            log.warning("the addresses of %s cannot be had (%s); the %d known ones stay", name, reason, kept)


def _is_usable(name: str, address: str) -> bool:
    """A URL can name the address, and a backend can have it."""
    return is_ip(address) and "%" not in address and is_allowed(name, address)


def _difference(known: Sequence[str], found: Sequence[str]) -> str:
    came, gone = sorted({*found} - {*known}), sorted({*known} - {*found})
    return ", ".join([*(f"+{address}" for address in came), *(f"-{address}" for address in gone)])
