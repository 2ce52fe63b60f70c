"""Names are asked for their addresses, and who follows hears of others; a resolver that is ill empties nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from socket import gethostname
from time import monotonic

import pytest

from backends.http.allowed_addresses import is_allowed
from gateway.fleet import dns_discovery as module
from gateway.fleet.dns_discovery import MAX_ADDRESSES, DnsDiscovery, system
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


LIES = (
    *("127.0.0.1", "::1", "169.254.169.254", "fe80::1%lo", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "fd00:ec2::254", "100.100.100.200"),
)


@pytest.mark.parametrize("lie", LIES)
async def test_an_answer_that_leads_into_this_machine_or_its_link_is_no_endpoint(
    lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Other addresses of the answer count; without any, what was known stays. Each state is one line."""
    resolver = Resolver("10.0.0.1")
    async with following(resolver) as names:
        for answer in ([lie, "10.0.0.1"], [lie]):
            resolver.says, asked = answer, resolver.asked
            await eventually(lambda asked=asked: resolver.asked > asked + 3)
            assert names.addresses == {NAME: ("10.0.0.1",)}
        assert caplog.messages == [
            f"1 addresses of {NAME} are not used, such as {lie}",
            f"the addresses of {NAME} cannot be had (none of its addresses can be a backend's); the 1 known ones stay",
        ]


@pytest.mark.parametrize(
    ("name", "address", "allowed"),
    [
        ("localhost", "127.0.0.1", True),
        ("engines.localhost", "127.0.0.2", True),
        (gethostname(), "127.0.1.1", True),
        ("localhost.example.com", "127.0.0.1", False),
        ("localhost", "169.254.169.254", False),
        ("engines.svc", "10.1.2.3", True),
        ("engines.svc", "100.64.0.7", True),
        ("engines.svc", "fd12::1", True),
        ("api.example.com", "93.184.216.34", True),
    ],
)
def test_loopback_addresses_belong_to_local_names(name: str, address: str, allowed: bool) -> None:
    assert is_allowed(name, address) is allowed


async def test_an_answer_with_hundreds_of_addresses_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Known addresses stay endpoints: an answer in another order moves nobody."""
    many = [f"10.0.{i // 250}.{i % 250}" for i in range(900)]
    resolver = Resolver("10.0.3.7", "10.0.3.8")
    async with following(resolver) as names:
        resolver.says = many
        await asyncio.wait_for(names.changed(), 5)
        assert len(names.addresses[NAME]) == MAX_ADDRESSES
        assert {"10.0.3.7", "10.0.3.8"} < {*names.addresses[NAME]}
        before, asked = names.addresses[NAME], resolver.asked
        resolver.says = many[::-1]
        await eventually(lambda: resolver.asked > asked + 3)
        assert names.addresses[NAME] == before
    assert caplog.messages == [f"772 addresses of {NAME} are not used, such as 10.0.0.211"]


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
