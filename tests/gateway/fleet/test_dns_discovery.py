"""Names are asked for their addresses, and who follows hears of others; a resolver that is ill empties nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import pytest

from gateway.fleet import dns_discovery as module
from gateway.fleet.dns_discovery import DnsDiscovery, system
from tests.support.simulated import eventually

NAME = "engines.svc"
OFTEN = {NAME: 0.005}


class Resolver:
    """Says what the test says. `asked` counts the questions."""

    def __init__(self, *addresses: str) -> None:
        self.says: Sequence[str] | Exception = addresses
        self.asked = 0
        self.speaks = asyncio.Event()
        self.speaks.set()

    async def __call__(self, name: str) -> Sequence[str]:
        assert name == NAME
        self.asked += 1
        await self.speaks.wait()
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


@asynccontextmanager
async def following(resolver: Resolver) -> AsyncIterator[DnsDiscovery]:
    names = DnsDiscovery(resolver)
    await names.follow(OFTEN)
    yield names
    await names.close()


async def test_who_begins_to_follow_a_name_has_its_addresses() -> None:
    """In one order, and each once, however they were said: another order is no news."""
    resolver = Resolver("10.0.0.2", "10.0.0.1", "10.0.0.2")
    async with following(resolver) as names:
        assert names.addresses == {NAME: ("10.0.0.1", "10.0.0.2")}
        resolver.says, asked = ["10.0.0.1", "10.0.0.2"], resolver.asked
        await eventually(lambda: resolver.asked > asked + 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(names.changed(), 0.01)


async def test_other_addresses_are_news(caplog: pytest.LogCaptureFixture) -> None:
    """In one line: which came, and which are gone."""
    caplog.set_level(logging.INFO, "firsttoken")
    resolver = Resolver("10.0.0.1", "10.0.0.2")
    async with following(resolver) as names:
        resolver.says = ["10.0.0.2", "10.0.0.3"]
        await asyncio.wait_for(names.changed(), 5)
        assert names.addresses[NAME] == ("10.0.0.2", "10.0.0.3")
    assert caplog.messages[-1] == f"{NAME} has 2 addresses: +10.0.0.3, -10.0.0.1"


@pytest.mark.parametrize("illness", [OSError("Name or service not known"), ()], ids=["an error", "none"])
async def test_a_resolver_that_is_ill_empties_nothing(
    illness: Exception | Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Said once when it falls ill, and once when it is well."""
    caplog.set_level(logging.INFO, "firsttoken")
    resolver = Resolver("10.0.0.1")
    async with following(resolver) as names:
        caplog.clear()
        resolver.says, asked = illness, resolver.asked
        await eventually(lambda: resolver.asked > asked + 3)
        assert names.addresses == {NAME: ("10.0.0.1",)}
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith(f"the addresses of {NAME} cannot be had (")
        resolver.says = ["10.0.0.1"]
        await eventually(lambda: len(caplog.messages) > 1)
        assert caplog.messages[1:] == [f"the addresses of {NAME} can be had again"]


async def test_a_resolver_that_is_slow_is_asked_once_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who follows does not wait for it beyond its patience; its answer counts when it comes."""
    monkeypatch.setattr(module, "FIRST_ANSWER", 0.01)
    monkeypatch.setattr(module, "SLOW_ANSWER", 0.02)
    resolver = Resolver("10.0.0.1")
    resolver.speaks.clear()
    async with following(resolver) as names:
        assert (dict(names.addresses), resolver.asked) == ({}, 1)
        await eventually(lambda: caplog.messages)
        assert "(no answer)" in caplog.text
        assert resolver.asked == 1
        resolver.speaks.set()
        await asyncio.wait_for(names.changed(), 5)
        assert names.addresses == {NAME: ("10.0.0.1",)}


async def test_a_name_that_is_followed_no_longer_is_not_asked_for() -> None:
    """And what was known of it is forgotten."""
    resolver = Resolver("10.0.0.1")
    async with following(resolver) as names:
        await names.follow({})
        asked, began = resolver.asked, monotonic()
        await asyncio.sleep(0.03)
        assert (dict(names.addresses), resolver.asked) == ({}, asked), monotonic() - began


async def test_the_system_resolves_names_to_addresses() -> None:
    """Of a name with both kinds the IPv4 ones."""
    assert list(await system("localhost")) == ["127.0.0.1"]
    with pytest.raises(OSError):
        await system("no-such-name.invalid")
