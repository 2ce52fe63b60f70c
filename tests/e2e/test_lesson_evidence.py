"""What counts as evidence of a lesson, and for whom: no caller and no server takes anything from another caller."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import pytest

from policies.lessons.lesson_book import APART, OWN, SHARED
from tests.support.builders import calling
from tests.support.refusing_server import (
    FITTED,
    HELLO,
    JSON,
    TOOL,
    A,
    B,
    C,
    Json,
    Rule,
    Verifying,
    ask,
    lessons,
    never,
    no_temperature,
    openai,
    served,
    tools_elsewhere,
)
from tests.support.upstream import CLOSE, HANG, Received, Script, reply

pytestmark = pytest.mark.virtual_time

# --------------------------------------------------------------------------- who learns from whom


async def test_a_lesson_counts_for_its_caller_for_ten_minutes_from_the_mended_answer() -> None:
    """Answers to bodies that were changed before they were sent prove nothing: the server is asked again after that."""
    async with Verifying(no_temperature) as server, served(("compatible", server)) as (gateway, _):
        for bodies, wait in ((2, OWN - 10), (3, 20), (5, 0)):
            async with calling(gateway.url) as caller:
                assert (await ask(caller, temperature=0))[0] == 200
            assert len(server.bodies) == bodies
            (lesson,) = await lessons(gateway)
            await asyncio.sleep(wait)
        assert lesson["left_s"] == pytest.approx(OWN, abs=5)


async def test_a_second_caller_whom_a_lesson_has_helped_shares_it_with_all() -> None:
    async with Verifying(no_temperature) as server, served(("compatible", server)) as (gateway, caller):
        for key, bodies in ((A, 2), (A, 3), (B, 5), (A, 6), (B, 7)):
            assert (await ask(caller, key, temperature=0))[0] == 200
            assert len(server.bodies) == bodies
        (lesson,) = await lessons(gateway)
        assert (lesson["callers"], lesson["left_s"]) == ("all", pytest.approx(SHARED, abs=5))


async def test_a_lesson_of_one_caller_changes_no_body_of_another() -> None:
    """The server takes a temperature from b; that a was refused it is no reason to leave it out of b's."""
    async with Verifying(no_temperature) as server, served(("compatible", server)) as (_, caller):
        for _ in range(5):
            assert (await ask(caller, A, temperature=0))[0] == 200
        assert len(server.bodies) == 6  # refused once
        server.rule = never
        status, headers, _ = await ask(caller, B, temperature=0)
        assert (status, server.bodies[-1]["temperature"], "x-firsttoken-left-out" in headers) == (200, 0, False)


@pytest.mark.parametrize("kind", ["a member", "a fact", "an operation"])
async def test_what_a_caller_was_answered_is_not_left_out_because_of_two_others(kind: str) -> None:
    """Refusals depend on values, such as an effort: between two callers who are refused, a third is answered."""
    kinds: dict[str, tuple[str, Rule, Json]] = {
        "a member": ("compatible", no_temperature, {"temperature": 0}),
        "a fact": (*FITTED["a schema"][:2], {"tools": [FITTED["a schema"][2]]}),
        "an operation": ("openai", tools_elsewhere, {"tools": [TOOL]}),
    }
    backend, rule, members = kinds[kind]
    async with Verifying(rule) as server, served((backend, server)) as (gateway, caller):
        assert (await ask(caller, A, **members))[0] == 200
        server.rule = never
        assert (await ask(caller, C, **members))[0] == 200
        server.rule = rule
        assert (await ask(caller, B, **members))[0] == 200
        (lesson,) = await lessons(gateway)
        assert lesson["callers"] == 2
        bodies, server.rule = len(server.bodies), never
        assert (await ask(caller, C, **members))[0] == 200
        assert len(server.bodies) == bodies + 1
        assert {**server.bodies[-1], **members} == server.bodies[-1]


async def test_without_keys_a_lesson_takes_a_minute_and_counts_for_all() -> None:
    """An address may be a proxy's: each request is mended for itself until a second witness."""
    async with Verifying(no_temperature) as server, served(("compatible", server), keys=False) as (gateway, caller):
        for bodies, wait in ((2, 1.0), (4, APART), (6, 0.0)):
            assert (await ask(caller, temperature=0))[0] == 200
            assert len(server.bodies) == bodies
            await asyncio.sleep(wait)
        (lesson,) = await lessons(gateway)
        assert lesson["callers"] == "all"
        assert (await ask(caller, temperature=0))[0] == 200
        assert len(server.bodies) == 7


async def test_without_keys_no_caller_teaches_what_another_is_answered() -> None:
    async with Verifying(no_temperature) as server, served(("compatible", server), keys=False) as (gateway, caller):
        for _ in range(10):
            server.rule = no_temperature
            assert (await ask(caller, temperature=0))[0] == 200
            server.rule = never
            assert (await ask(caller, temperature=0))[0] == 200
            assert server.bodies[-1]["temperature"] == 0
            await asyncio.sleep(APART / 2)
        assert await lessons(gateway) == []


# --------------------------------------------------------------------------- what is no evidence


def _echoing(target: str, body: Json) -> bytes | None:
    """A server that repeats the first unknown member's name."""
    known = {"model", "messages", "max_tokens", "temperature", "seed", "stream", "service_tier"}
    found = next((each for each in body if each not in known), None)
    return None if found is None else openai(f"Unknown parameter: '{found}'")


ECHOES = (
    "temperature is deprecated; unknown field: seed",
    "x'. Unsupported parameter: 'temperature",
    "temperature-x",
    "x.temperature",
    "x temperature",
    "temperature, seed",
)


@pytest.mark.parametrize("name", ECHOES)
@pytest.mark.parametrize("more", [{}, {"zz": 1}], ids=["alone", "beside another"])
async def test_a_name_that_a_server_repeats_teaches_nothing_about_other_members(name: str, more: Json) -> None:
    """Callers write names of members. What such words leave out does not end the complaint, and is forgotten."""
    async with Verifying(_echoing) as server, served(("compatible", server), keys=False) as (gateway, caller):
        for key in (A, B, A):
            await ask(caller, key, temperature=0, seed=1, **{name: 1, **more})
            await asyncio.sleep(APART)
        told = [each["lesson"] for each in await lessons(gateway)]
        assert not [each for each in told if "temperature" in each or "seed" in each]
        assert (await ask(caller, C, temperature=0, seed=1))[0] == 200
        assert {"temperature": 0, "seed": 1}.items() <= server.bodies[-1].items()


async def test_a_change_that_did_not_help_is_forgotten_though_a_later_one_did() -> None:
    """The value of one member is the name of another, and the server blames the value's name first."""

    def rule(target: str, body: Json) -> bytes | None:
        if "service_tier" not in body:
            return None
        words = f"'{body['service_tier']}' is not supported."
        return openai(words) if "temperature" in body else openai(f"{words} Unknown parameter: 'service_tier'.")

    async with Verifying(rule) as server, served(("compatible", server)) as (gateway, caller):
        for key in (A, B):
            assert (await ask(caller, key, temperature=0, service_tier="temperature"))[0] == 200
        assert {"temperature", "service_tier"}.isdisjoint(server.bodies[-1])
        assert [each["lesson"] for each in await lessons(gateway)] == ["service_tier is left out"]


FAILING = reply(b'{"error": {"message": "busy"}}', "503 Service Unavailable", JSON)
NO_ANSWER: Mapping[str, Script] = {
    "an error": [FAILING],
    "a closed connection": [CLOSE],
    "silence, and the caller leaves": [HANG],
    "a refusal on its merits": [openai("Invalid 'max_tokens': integer below minimum value.", "max_tokens")],
}


@pytest.mark.parametrize("end", NO_ANSWER)
async def test_a_mended_request_without_an_answer_teaches_nothing(end: str) -> None:
    class Ending(Verifying):
        def script(self, received: Received) -> Script:
            found = super().script(received)
            is_mended = received.method == "POST" and "temperature" not in self.bodies[-1]
            return NO_ANSWER[end] if is_mended else found

    async with Ending(no_temperature) as server, served(("compatible", server), max_attempts=1) as (gateway, caller):
        with suppress(TimeoutError):
            async with asyncio.timeout(30):
                assert (await ask(caller, temperature=0))[0] >= 400
        assert "temperature" not in server.bodies[-1]
        assert await lessons(gateway) == []


async def test_a_server_that_names_every_member_takes_nothing_from_another_caller() -> None:
    """A hostile or broken server refuses each request with another name. What it ends with is its own."""

    def rule(target: str, body: Json) -> bytes | None:
        names = [each for each in body if each != "model"]
        found = names[len(server.bodies) % len(names)]
        return openai(f"Unsupported parameter: '{found}'", found, "unsupported_parameter")

    given = {"temperature": 0, "seed": 1, "user": "u", "metadata": {}, "stream": False, "stop": "x"}
    async with Verifying(rule) as server, served(("compatible", server)) as (gateway, caller):
        for key in (A, B) * 5:
            assert (await ask(caller, key, **given))[0] >= 400
        assert await lessons(gateway) == []
        kept = {"model", "messages", "stream"}
        assert all(kept <= each.keys() and {"max_tokens", "max_completion_tokens"} & {*each} for each in server.bodies)


async def test_names_that_a_caller_made_up_cost_three_further_requests() -> None:
    """A provider's limit of requests is all callers', and such names are never used up."""
    async with Verifying(_echoing) as server, served(("compatible", server)) as (_, caller):
        for number in range(1, 4):
            assert (await ask(caller, **{f"x{number}{each}": 1 for each in range(8)}))[0] == 400
            assert len(server.bodies) == 4 * number


async def test_a_member_that_a_caller_made_up_is_a_lesson_for_that_caller_alone() -> None:
    """Such names are without number, and nobody else has them."""
    async with Verifying(_echoing) as server, served(("compatible", server)) as (gateway, caller):
        for key in (A, B):
            assert (await ask(caller, key, madeup=1))[0] == 200
        (lesson,) = await lessons(gateway)
        assert (lesson["lesson"], lesson["callers"]) == ("madeup is left out", 2)


@pytest.mark.parametrize("member", ["messages", "model", "max_tokens", "temperature", "madeup"])
async def test_a_refusal_that_its_own_mend_does_not_end_is_mended_no_more(member: str) -> None:
    """The same words about a body without the member teach nothing; a lesson that has helped nobody is forgotten."""

    def rule(target: str, body: Json) -> bytes | None:
        return openai(f"Unsupported parameter: '{member}' is not supported.", member, "unsupported_parameter")

    async with Verifying(rule) as server, served(("compatible", server), max_attempts=3) as (gateway, caller):
        for number in range(1, 4):
            status, _, _ = await ask(caller, temperature=0, madeup=[1])
            assert status >= 400
            assert len(server.bodies) <= 2 * number
        assert await lessons(gateway) == []
        assert all("messages" in each and {"max_tokens", "max_completion_tokens"} & {*each} for each in server.bodies)


async def test_a_server_that_refuses_one_member_after_the_other_costs_the_first_request_nothing() -> None:
    """Servers name one member at a time: each is left out, and the next request is sent without all of them."""
    order = ["temperature", "top_p", "seed", "user"]

    def rule(target: str, body: Json) -> bytes | None:
        found = next((each for each in order if each in body), None)
        return None if found is None else openai(f"Unsupported parameter: {found}", found, "unsupported_parameter")

    async with Verifying(rule) as server, served(("compatible", server)) as (_, caller):
        given = {"temperature": 0, "top_p": 1, "seed": 1, "user": "u"}
        first, second = await ask(caller, **given), await ask(caller, **given)
        assert (first[0], second[0], len(server.bodies)) == (200, 200, 6)
        assert {*first[1]["x-firsttoken-left-out"].split(", ")} == {*order}


async def test_a_server_that_refuses_for_ever_is_asked_nine_times_a_request() -> None:
    """It names another member each time. Another pool gets the request as the caller has written it."""
    order = "temperature top_p seed user top_k min_p logprobs metadata service_tier logit_bias".split()

    def rule(target: str, body: Json) -> bytes | None:
        found = next((each for each in order if each in body), "metadata")
        return openai(f"Unsupported parameter: {found}", found, "unsupported_parameter")

    async with (
        Verifying(rule) as first,
        Verifying(never) as second,
        served(("compatible", first), ("compatible", second), max_attempts=2) as (_, caller),
    ):
        status, headers, _ = await ask(caller, **dict.fromkeys(order, 1) | {"user": "u"})
        assert (status, headers["x-firsttoken-pool"], len(first.bodies), len(second.bodies)) == (200, "p1", 9, 1)
        assert {*order} <= second.bodies[0].keys()
        assert all(each["messages"] == [HELLO] for each in first.bodies)
