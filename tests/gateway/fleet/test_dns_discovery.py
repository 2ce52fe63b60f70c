"""DNS discovery: names are resolved periodically, changes are announced, and failures remove no endpoint."""

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
from gateway.fleet.dns_discovery import MAX_ADDRESSES, MOST_MISSED, AddressHistory, DnsDiscovery, system
from tests.support.simulated import eventually

pytestmark = pytest.mark.virtual_time

NAME = "engines.svc"
OFTEN = {NAME: 0.005}


class Resolver:
    """Answers as the test sets. `asked` counts the queries."""

    def __init__(self, *addresses: str) -> None:
        self.answer: Sequence[str] | Exception = addresses
        self.asked = 0
        self.answering = asyncio.Event()
        self.answering.set()

    async def __call__(self, name: str) -> Sequence[str]:
        assert name == NAME
        self.asked += 1
        await self.answering.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@asynccontextmanager
async def following(resolver: Resolver) -> AsyncIterator[DnsDiscovery]:
    names = DnsDiscovery(resolver)
    await names.follow(OFTEN)
    yield names
    await names.close()


async def test_follow_resolves_a_name_to_sorted_unique_addresses() -> None:
    """Another order of the answer is no change."""
    resolver = Resolver("10.0.0.2", "10.0.0.1", "10.0.0.2")
    async with following(resolver) as names:
        assert names.addresses == {NAME: ("10.0.0.1", "10.0.0.2")}
        resolver.answer, asked = ["10.0.0.1", "10.0.0.2"], resolver.asked
        await eventually(lambda: resolver.asked > asked + 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(names.changed(), 0.01)


async def test_changed_addresses_are_announced_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A line for the one that joins, with the first answer, and a line for the one that leaves, answers later."""
    caplog.set_level(logging.INFO, "firsttoken")
    resolver = Resolver("10.0.0.1", "10.0.0.2")
    async with following(resolver) as names:
        resolver.answer = ["10.0.0.2", "10.0.0.3"]
        await asyncio.wait_for(names.changed(), 5)
        assert names.addresses[NAME] == ("10.0.0.1", "10.0.0.2", "10.0.0.3")
        await asyncio.wait_for(names.changed(), 5)
        assert names.addresses[NAME] == ("10.0.0.2", "10.0.0.3")
    assert caplog.messages[-2:] == [f"{NAME} has 3 addresses: +10.0.0.3", f"{NAME} has 2 addresses: -10.0.0.1"]


def test_an_answer_that_lacks_an_address_once_or_twice_changes_nothing() -> None:
    """Caches and servers of the DNS differ. A third in a row without it, and it leaves."""
    history, both = AddressHistory(), ("10.0.0.1", "10.0.0.2")
    for answer in (both, both[:1], both, both[1:], both, both[:1], both[:1]):
        history.on_answer(answer)
        assert history.addresses == both
    gone = AddressHistory()
    for count, answer in enumerate((both, both[:1], both[:1], both[:1])):
        gone.on_answer(answer)
        assert gone.addresses == (both if count < 3 else both[:1])


@pytest.mark.parametrize("size", [2, 3, 8, 12])
def test_answers_that_rotate_come_to_rest_with_all_addresses(size: int) -> None:
    """One address of `size` in each answer: after some turns no answer changes the addresses any more."""
    history, addresses = AddressHistory(), [f"10.0.0.{number}" for number in range(size)]
    for turn in range(20 * size):
        before = history.addresses
        history.on_answer([addresses[turn % size]])
        assert turn < 3 * size or history.addresses == before
    assert history.addresses == tuple(sorted(addresses))
    for _ in range(MOST_MISSED):
        history.on_answer(addresses[:1])
    assert history.addresses == ("10.0.0.0",)


def test_a_resolver_that_invents_addresses_fills_no_memory() -> None:
    """An answer of ever new ones: those in the latest answer are used first, and few are remembered."""
    history = AddressHistory()
    for turn in range(1000):
        answer = {f"10.{turn % 200}.{turn // 200}.{number}" for number in range(100)}
        history.on_answer(answer)
        assert answer <= {*history.addresses}
        assert len(history.addresses) <= MAX_ADDRESSES
    assert len(history._missed) <= 100 * (MOST_MISSED + 1)


@pytest.mark.parametrize("bad", ["", "10.0.0.1:80", "fd12::1%eth0", "elsewhere", "10.0.0.01"])
async def test_an_address_that_makes_no_url_is_left_out_alone(bad: str, caplog: pytest.LogCaptureFixture) -> None:
    async with following(Resolver("10.0.0.1", bad)) as names:
        assert names.addresses == {NAME: ("10.0.0.1",)}
    assert f"1 addresses of {NAME} are not used, such as {bad}" in caplog.messages


@pytest.mark.parametrize("failure", [OSError("Name or service not known"), ()], ids=["an error", "none"])
async def test_a_failing_resolver_removes_no_endpoint(
    failure: Exception | Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Logged once at the first failure, and once at recovery."""
    caplog.set_level(logging.INFO, "firsttoken")
    resolver = Resolver("10.0.0.1")
    async with following(resolver) as names:
        caplog.clear()
        resolver.answer, asked = failure, resolver.asked
        await eventually(lambda: resolver.asked > asked + 3)
        assert names.addresses == {NAME: ("10.0.0.1",)}
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith(f"the addresses of {NAME} cannot be had (")
        resolver.answer = ["10.0.0.1"]
        await eventually(lambda: len(caplog.messages) > 1)
        assert caplog.messages[1:] == [f"the addresses of {NAME} can be had again"]


FORBIDDEN = (
    *("127.0.0.1", "::1", "169.254.169.254", "fe80::1%lo", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "fd00:ec2::254", "100.100.100.200"),
)


@pytest.mark.parametrize("forbidden", FORBIDDEN)
async def test_loopback_and_link_local_answers_are_ignored(forbidden: str, caplog: pytest.LogCaptureFixture) -> None:
    """Other addresses of the answer count. Without any, the known addresses stay. Each state is one line in the log."""
    resolver = Resolver("10.0.0.1")
    async with following(resolver) as names:
        for answer in ([forbidden, "10.0.0.1"], [forbidden]):
            resolver.answer, asked = answer, resolver.asked
            await eventually(lambda asked=asked: resolver.asked > asked + 3)
            assert names.addresses == {NAME: ("10.0.0.1",)}
        assert caplog.messages == [
            f"1 addresses of {NAME} are not used, such as {forbidden}",
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


PUBLIC, METADATA = "8efa:b50e", "a9fe:a9fe"  # 142.250.181.14 and 169.254.169.254


@pytest.mark.parametrize(
    "prefix", ["64:ff9b::", "64:ff9b:1::", "64:ff9b:1:7:8:9:", "2a00:1450::5efe:", "fd00::200:5efe:"]
)
def test_an_address_behind_a_translator_is_judged_by_the_ipv4_address_inside(prefix: str) -> None:
    """NAT64 with any prefix that tells it, and ISATAP."""
    assert is_allowed("api.example.com", prefix + PUBLIC)
    assert is_allowed("engines.svc", prefix + "a01:203")
    for forbidden in (METADATA, "7f00:1", "a83f:8110", "6464:64c8", "c000:c0", "e000:1", "ffff:ffff", "0:1"):
        assert not is_allowed("api.example.com", prefix + forbidden), forbidden


@pytest.mark.parametrize(
    ("form", "public", "forbidden"),
    [
        ("2002:{}::1", "8efa:b50e", "7f00:1"),
        ("2002:{}:5:6:7:8:9", "8efa:b50e", "a9fe:a9fe"),
        ("2001:0:4136:e378:8000:63bf:{}", "7105:4af1", "5601:5601"),  # Teredo writes the bits of the address inverted
        ("64:ff9b:1:{}::", "8efa:b5:e00", "a9fe:a9:fe00"),  # RFC 6052, 2.2: a prefix of 48 bits
        ("64:ff9b:1:8{}::", "8e:fa:b50e", "a9:fe:a9fe"),  # 56 bits
        ("64:ff9b:1:800:{}::", "8e:fab5:e00", "a9:fea9:fe00"),  # 64 bits
    ],
)
def test_every_form_that_holds_an_ipv4_address_is_judged_by_it(form: str, public: str, forbidden: str) -> None:
    assert is_allowed("api.example.com", form.format(public))
    assert not is_allowed("api.example.com", form.format(forbidden))


@pytest.mark.parametrize(
    "address",
    [
        "168.63.129.16",
        "::ffff:168.63.129.16",
        "192.0.0.192",
        "192.0.0.1",
        "100.100.100.200",
        "169.254.170.2",
        "0.1.2.3",
        "255.255.255.255",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd00:ec2::254%1",
        "fd20:ce::254",
        "fd00:c1::a9fe:a9fe",
        "fd00:42::42",
        "fd00:a9fe:a9fe::1",
        "fe80::a9fe:a9fe",
        "fe80::5efe:8efa:b50e",  # link-local, whatever it holds
        "::ffff:0:8efa:b50e",  # translated addresses of a node itself (RFC 2765)
        "::8efa:b50e",
    ],
)
@pytest.mark.parametrize("name", ["localhost", "api.example.com"])
def test_services_of_a_cloud_for_its_machines_are_no_backend(name: str, address: str) -> None:
    assert not is_allowed(name, address)


async def test_an_answer_with_hundreds_of_addresses_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Known addresses stay endpoints: an answer in another order moves no endpoint."""
    many = [f"10.0.{i // 250}.{i % 250}" for i in range(900)]
    resolver = Resolver("10.0.3.7", "10.0.3.8")
    async with following(resolver) as names:
        resolver.answer = many
        await asyncio.wait_for(names.changed(), 5)
        assert len(names.addresses[NAME]) == MAX_ADDRESSES
        assert {"10.0.3.7", "10.0.3.8"} < {*names.addresses[NAME]}
        before, asked = names.addresses[NAME], resolver.asked
        resolver.answer = many[::-1]
        await eventually(lambda: resolver.asked > asked + 3)
        assert names.addresses[NAME] == before
    assert caplog.messages == [f"772 addresses of {NAME} are not used, such as 10.0.0.211"]


async def test_a_slow_resolver_gets_one_query_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`follow` returns after FIRST_ANSWER seconds; a later answer still counts."""
    monkeypatch.setattr(module, "FIRST_ANSWER", 0.01)
    monkeypatch.setattr(module, "SLOW_ANSWER", 0.02)
    resolver = Resolver("10.0.0.1")
    resolver.answering.clear()
    async with following(resolver) as names:
        assert (dict(names.addresses), resolver.asked) == ({}, 1)
        await eventually(lambda: caplog.messages)
        assert "(no answer)" in caplog.text
        assert resolver.asked == 1
        resolver.answering.set()
        await asyncio.wait_for(names.changed(), 5)
        assert names.addresses == {NAME: ("10.0.0.1",)}


async def test_a_dropped_name_is_not_resolved_any_more() -> None:
    """The addresses are forgotten."""
    resolver = Resolver("10.0.0.1")
    async with following(resolver) as names:
        await names.follow({})
        asked, began = resolver.asked, monotonic()
        await asyncio.sleep(0.03)
        assert (dict(names.addresses), resolver.asked) == ({}, asked), monotonic() - began


async def test_the_system_resolver_prefers_ipv4() -> None:
    """For a name with addresses of both kinds."""
    assert list(await system("localhost")) == ["127.0.0.1"]
    with pytest.raises(OSError):
        await system("no-such-name.invalid")
