"""One key's requests get every kind of reply of servers, proxies and networks, and another key is answered meanwhile.

Each reply is tried against pools of one and of two endpoints, of the kind of server that says so, of an API and of a
local engine; in half of the runs key b has traffic before, in the other half key a's request is the first of all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.app import Gateway
from policies.types import Health
from tests.backends.replies.reply import openai_error, replies
from tests.support.builders import calling, get
from tests.support.gateways import running
from tests.support.simulated import eventually
from tests.support.two_callers import (
    GATEWAY,
    JSON,
    KEYS,
    PROVEN,
    PROVOCATIONS,
    A,
    B,
    Provocation,
    UpstreamByCaller,
    chosen,
    complaint,
    documented,
    provoke,
    request,
)
from tests.support.upstream import HANG, Script, reply

pytestmark = pytest.mark.virtual_time

BEFORE = 25  # requests of key b, more than a rate is learned from
WAVES = (1, 9, 10)  # requests of key a at once
BESIDE, AFTER = 4, 6  # requests of key b during the last wave, and after it

by_name = {kind.name: kind for kind in PROVOCATIONS}


@dataclass(frozen=True)
class Layout:
    """Pool under test. `backend` empty: the kind of server that replies so."""

    name: str
    backend: str = ""
    endpoints: int = 1


LAYOUTS = (Layout("its own kind"), Layout("two endpoints", "", 2), Layout("API", "openai"), Layout("local", "vllm"))


@asynccontextmanager
async def before(
    kind: Provocation, layout: Layout = LAYOUTS[0], by_caller: Mapping[str, Script] | None = None, **defaults: Any
) -> AsyncIterator[tuple[Gateway, list[UpstreamByCaller]]]:
    """A gateway for keys a and b over servers that answer key a, or whom `by_caller` names, with a script."""
    async with AsyncExitStack() as stack:
        scripts = by_caller or {A: kind.script}
        servers = [UpstreamByCaller(scripts) for _ in range(layout.endpoints)]
        for server in servers:
            await stack.enter_async_context(server)
        section = {**kind.pool, "endpoints": [server.url for server in servers]}
        section["backend"] = layout.backend or kind.backend
        given = running({"only": section}, keys=KEYS, defaults={**kind.defaults, **defaults})
        yield await stack.enter_async_context(given), servers


class Other:
    """Key b: `ask` sends requests one by one. `complaints`: faults of the answers."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.complaints: list[str] = []
        self.asked = 0

    async def ask(self, times: int) -> None:
        async with calling(self.gateway.url) as caller:
            for _ in range(times):
                self.asked += 1
                self.complaints += filter(None, [await complaint(caller, self.asked)])
        status, _, body = await get(self.gateway.url, "/ready")
        self.complaints += [] if status == 200 else [f"/ready: {status} {body.decode()}"]


def healths(gateway: Gateway) -> dict[str, Health]:
    """As all callers see it, by endpoint."""
    return {name: load.health for name, load in gateway.monitor.loads().items()}


async def provoke_at_once(gateway: Gateway, kind: Provocation, times: int) -> None:
    await asyncio.gather(*(provoke(gateway.url, kind, number) for number in range(times)))


async def played(
    kind: Provocation, layout: Layout, idle: bool, by_caller: Mapping[str, Script] | None = None
) -> list[str]:
    """Returns the first complaint of key b with the number of them, or nothing."""
    async with before(kind, layout, by_caller) as (gateway, servers):
        other = Other(gateway)
        await other.ask(0 if idle else BEFORE)
        for size in WAVES[:-1]:
            await provoke_at_once(gateway, kind, size)
        if "first_token" in kind.defaults:  # the longest wait in the queue too, behind what key a has sent
            await provoke_at_once(gateway, kind, WAVES[-1])
            await other.ask(BESIDE)
        else:
            await asyncio.gather(provoke_at_once(gateway, kind, WAVES[-1]), other.ask(BESIDE))
        await other.ask(AFTER)
        assert sum(server.asked[A] for server in servers) > 0, "nothing of key a has reached the server"
        found = other.complaints + [
            f"{name} is {health.value}" for name, health in healths(gateway).items() if health is not Health.UP
        ]
        where = f"{layout.name}, {'idle' if idle else 'busy'}"
        return [f"{where}: {len(other.complaints)} of {other.asked} with a complaint: {found[0]}"] if found else []


@pytest.mark.parametrize("name", by_name)
async def test_what_one_key_brings_back_costs_the_other_nothing(name: str) -> None:
    """Every request of key b is answered, at the first attempt, and the gateway stays ready."""
    turn = list(by_name).index(name)
    runs = [played(by_name[name], layout, (turn + place) % 2 == 0) for place, layout in enumerate(LAYOUTS)]
    assert [line for lines in await asyncio.gather(*runs) for line in lines] == []


@pytest.mark.parametrize("requests", [0, BEFORE])
@pytest.mark.parametrize("name", sorted(PROVEN))
async def test_a_single_reply_to_one_key_costs_the_other_nothing(name: str, requests: int) -> None:
    """Neither the first reply of all, such as a 404 for a caller's id, nor a 429 after traffic: it does not tell how
    many requests a minute the API takes."""
    kind = by_name[name]
    async with before(kind) as (gateway, _):
        other = Other(gateway)
        await other.ask(requests)
        await provoke(gateway.url, kind, 0)
        await other.ask(40)
        assert other.complaints == []


@pytest.mark.parametrize("name", ["llamacpp: loading", "mistral: capacity"])
async def test_requests_that_wait_for_a_limit_of_their_own_key_hold_up_no_other(name: str) -> None:
    """Key b is answered while requests of key a are still held in the queue of a local engine."""
    kind = by_name[name]
    async with before(kind, LAYOUTS[-1]) as (gateway, _):
        other = Other(gateway)
        await other.ask(BEFORE)
        await provoke(gateway.url, kind, 0)
        held = [asyncio.create_task(provoke(gateway.url, kind, number, patience=10.0)) for number in range(4)]
        await eventually(lambda: gateway.recorder.live == len(held))
        await other.ask(1)
        assert other.complaints == []
        assert not any(task.done() for task in held)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


def test_every_kind_of_failure_and_every_provider_is_tried() -> None:
    """Of the table of documented replies, beside the raw acts."""
    assert {said.kind for said in chosen()} == {said.kind for said in replies()}
    assert {said.provider for said in chosen()} == {said.provider for said in replies()}
    assert len(by_name) == len(PROVOCATIONS) >= 60
    assert set(by_name) >= PROVEN


async def test_without_any_provocation_the_other_key_has_no_complaint() -> None:
    """The control: key a is answered well too."""
    for layout in LAYOUTS:
        assert await played(by_name["a page"], layout, idle=True, by_caller={GATEWAY: [HANG]}) == []


# --------------------------------------------------------------------------- evidence that counts for all

ILL = Provocation("ill", [reply(json.dumps(openai_error("It broke", "server_error")).encode(), "500 Broken", JSON)])
DENYING = Provocation("denying", [reply(json.dumps(openai_error("No key", "t")).encode(), "401 Unauthorized", JSON)])


async def ask_in_turn(gateway: Gateway, kind: Provocation, keys: Sequence[str]) -> list[set[Health]]:
    """The healths of all endpoints after each request."""
    seen = []
    for number, key in enumerate(keys):
        await provoke(gateway.url, kind, number, key)
        seen.append(set(healths(gateway).values()))
    return seen


UP, DOWN = {Health.UP}, {Health.DOWN}


async def test_five_errors_in_a_row_to_two_keys_eject_the_endpoint() -> None:
    """The gateway's own request is not answered: it is no witness here."""
    scripts: dict[str, Script] = {A: ILL.script, B: ILL.script, GATEWAY: [HANG]}
    async with before(ILL, by_caller=scripts, max_attempts=1) as (gateway, _):
        assert await ask_in_turn(gateway, ILL, [A, B, A, B, A]) == [UP, UP, UP, UP, DOWN]


async def test_a_denial_to_two_keys_ejects_an_endpoint_that_has_answered_nobody_yet() -> None:
    scripts: dict[str, Script] = {A: DENYING.script, B: DENYING.script, GATEWAY: [HANG]}
    async with before(DENYING, by_caller=scripts, max_attempts=1) as (gateway, _):
        assert await ask_in_turn(gateway, DENYING, [A, B]) == [UP, DOWN]


async def test_a_denial_to_one_key_and_to_the_gateway_itself_ejects_the_endpoint() -> None:
    scripts: dict[str, Script] = {A: DENYING.script, GATEWAY: DENYING.script}
    async with before(DENYING, by_caller=scripts, max_attempts=1) as (gateway, _):
        await provoke(gateway.url, DENYING, 0)
        await eventually(lambda: set(healths(gateway).values()) == DOWN)


async def test_a_refused_connection_needs_no_second_witness() -> None:
    """Two refusals to one key: nobody listens there, whatever is sent."""
    async with before(ILL, max_attempts=1) as (gateway, [server]):
        await server.__aexit__(None, None, None)
        assert await ask_in_turn(gateway, ILL, [A, A]) == [UP, DOWN]
        async with calling(gateway.url) as caller:
            assert (await caller.ask(request(B, 0)))[0] == 503


async def test_a_providers_own_figures_count_for_all() -> None:
    """A 429 that reports no requests left is about the account, whichever key it was sent to."""
    [said] = [said for said in replies() if (said.provider, said.name) == ("openai", "by the headers: requests")]
    kind = documented(said)
    async with before(kind) as (gateway, _), calling(gateway.url) as caller:
        await provoke(gateway.url, kind, 0)
        status, headers = await caller.ask(request(B, 0))
        assert (status, "retry-after" in headers) == (429, True)
