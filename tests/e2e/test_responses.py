"""OpenAI's Responses over real sockets, with OpenAI's SDK: translated for engines that speak chat, native, and with
state that stays at the endpoint that holds it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from time import monotonic
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from gateway.app import Gateway
from gateway.observe.record import RequestOutcome
from gateway.parts.responses import stored_responses
from policies.types import Health
from tests.support.builders import Caller, get
from tests.support.gateways import pool, running
from tests.support.responses_server import ENCRYPTED, ResponsesServer
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Received, Script, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

TOOL: Any = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    "strict": True,
}
ITEM: Any = {"role": "user", "content": "hi"}
KEYS = {name: {"name": name, "sha256": sha256(name.encode()).hexdigest()} for name in ("ann", "bob")}


CLIENTS: list[AsyncOpenAI] = []  # of the test in hand


@pytest.fixture(autouse=True)
async def closed_clients() -> AsyncIterator[None]:
    """Closes each client of a test. The garbage collector closes the sockets of a client that was dropped, and then has
    the SDK close their transports: that takes the sockets which got the same numbers meanwhile out of the loop."""
    yield
    for client in CLIENTS:
        await client.close()
    CLIENTS.clear()


def sdk(gateway: Gateway, key: str = "none") -> AsyncOpenAI:
    CLIENTS.append(AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0))
    return CLIENTS[-1]


def native(*servers: ResponsesServer, **more: Any) -> dict[str, Any]:
    return pool(*(server.url for server in servers), backend="vllm", **more)


def unsalted(server: ResponsesServer) -> dict[str, Any]:
    """A provider, in whose cache all keys of the gateway meet."""
    return pool(server.url, backend="openai")


@asynccontextmanager
async def servers(count: int = 1) -> AsyncIterator[list[ResponsesServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ResponsesServer(f"s{number}")) for number in range(count)]  # type: ignore[misc]


# -- over chat ---------------------------------------------------------------------------------


async def test_an_engine_that_speaks_chat_serves_responses() -> None:
    async with engines() as simulated, running({"only": engine_pool(*simulated)}) as gateway:
        client = sdk(gateway)
        whole = await client.responses.create(model="chat", input="hello", instructions="be brief", max_output_tokens=5)
        assert whole.output_text
        assert whole.usage is not None
        assert 0 < whole.usage.output_tokens <= 5
        assert whole.status in ("completed", "incomplete")
        async with client.responses.stream(model="chat", input="hello") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(
            range(len(events))
        )
        assert (
            "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
        )
        assert final.usage is not None


CALL = (
    b'{"id":"chatcmpl-1","created":1,"model":"m","choices":[{"index":0,"finish_reason":"tool_calls","message":{"role":'
    b'"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"look","arguments":"{}"'
    b"}}]}}]}"
)
SAID = (
    b'{"id":"chatcmpl-2","choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":"ok"}}]}'
)


async def test_a_tool_is_called_and_answered_over_chat() -> None:
    async with Upstream([reply(CALL)], [reply(SAID)]) as upstream, running({"only": pool(upstream.url)}) as gateway:
        client = sdk(gateway)
        asked: list[Any] = [{"role": "user", "content": "look"}]
        first = await client.responses.create(model="chat", input=asked, tools=[TOOL], store=False)
        (call,) = first.output
        assert (call.type, call.name, call.arguments) == ("function_call", "look", "{}")
        asked += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
        second = await client.responses.create(model="chat", input=asked, tools=[TOOL], store=False)
        assert second.output_text == "ok"
        sent = upstream.requests[1].body
        assert b'{"role":"tool","tool_call_id":"c1","content":"42"}' in sent
        assert b'"store"' not in sent


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
async def test_what_chat_cannot_express_is_refused_by_name_before_anything_is_sent(
    members: dict[str, Any], param: str
) -> None:
    async with Upstream([reply(SAID)]) as upstream, running({"only": pool(upstream.url)}) as gateway:
        with pytest.raises(openai.BadRequestError, match=param.replace("[", r"\[")):
            await sdk(gateway).responses.create(model="chat", input="hi", **members)
        assert upstream.requests == []


async def test_a_stream_over_chat_that_breaks_ends_by_a_failed_response() -> None:
    begun = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
    script = [STREAM_HEAD + chunk(begun), GATE, LAST_CHUNK]
    async with Upstream(script) as upstream, running({"only": pool(upstream.url)}) as gateway:
        stream = await sdk(gateway).responses.create(model="chat", input="hi", stream=True)
        seen = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                upstream.proceed()
        assert seen[-1].type == "response.failed"
        assert seen[-1].response.error is not None
        assert seen[-1].sequence_number == len(seen) - 1


# -- native ------------------------------------------------------------------------------------


async def test_a_native_answer_reaches_the_caller_as_it_is_but_for_its_ids() -> None:
    async with servers() as (server,), running({"only": native(server)}) as gateway:
        client = sdk(gateway)
        whole = await client.responses.create(model="chat", input="hi", include=["reasoning.encrypted_content"])
        streamed = [event async for event in await client.responses.create(model="chat", input="hi", stream=True)]
        final = streamed[-1].response  # type: ignore[union-attr]
        assert whole.output_text == final.output_text == "turn 1 of s0"
        assert whole.usage is not None
        assert whole.usage.input_tokens_details.cached_tokens == 4
        begun = {event.response.id for event in streamed if hasattr(event, "response")}
        assert len(begun) == 1
        assert begun.isdisjoint(server.stored)
        assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
        (reasoning, _) = final.output
        assert reasoning.type == "reasoning"
        assert (reasoning.encrypted_content or "").endswith(ENCRYPTED + "s0")
        assert reasoning.encrypted_content != ENCRYPTED + "s0"


async def test_encrypted_reasoning_goes_back_to_the_endpoint_that_can_read_it() -> None:
    async with servers(3) as three, running({"only": native(*three)}) as gateway:
        client = sdk(gateway)
        for _ in range(9):
            items: list[Any] = [{"role": "user", "content": "hi"}]
            for _ in range(3):
                answer = await client.responses.create(model="chat", input=items, store=False)
                items += [item.to_dict() for item in answer.output] + [{"role": "user", "content": "more"}]
        assert sum(len(server.asked) for server in three) == 27
        assert sum(bool(server.asked) for server in three) > 1


async def test_a_session_may_change_its_model_at_any_step() -> None:
    """Encrypted reasoning returns to its maker bit for bit, and is left out and told for the other."""
    async with servers(2) as two:
        pools = {name: native(server, model=name) for name, server in zip("ab", two, strict=True)}
        routes = {"first": {"tiers": ["a", "b"]}, "second": {"tiers": ["b", "a"]}}
        async with running(pools, routes) as gateway:
            told = [await _step(gateway, model, items) for items in [[ITEM]] for model in "abbaab"]
        assert told == [None, *["input.reasoning.encrypted_content"] * 5]
        sent = [
            [item["encrypted_content"] for item in asked["input"] if "encrypted_content" in item]
            for asked in two[0].asked
        ]
        assert sent == [[ENCRYPTED + "s0"] * before for before in (0, 1, 2)]


async def _step(gateway: Gateway, name: str, items: list[Any]) -> str | None:
    """Ask the route whose first pool it is, and add the answer to the items. Returns what was left out."""
    model = {"a": "first", "b": "second"}[name]
    raw = await sdk(gateway).responses.with_raw_response.create(model=model, input=items, store=False)
    assert raw.headers["x-firsttoken-pool"] == name
    items += [item.to_dict() for item in raw.parse().output] + [ITEM]
    return raw.headers.get("x-firsttoken-left-out")


@pytest.mark.timeout(240)
@pytest.mark.real_time  # the client keeps connections by the real clock
async def test_a_hundred_chains_over_three_endpoints_and_two_gateways_are_whole() -> None:
    """One gateway is restarted half-way. The endpoints know nothing of each other's responses."""
    async with servers(3) as three, AsyncExitStack() as stack:
        pools = {"only": native(*three)}
        first = await stack.enter_async_context(running(pools))
        second = await stack.enter_async_context(running(pools))
        chains: list[str | None] = [None] * 100
        for turn in range(5):
            if turn == 3:
                await second.stop()
                second = await stack.enter_async_context(running(pools))
            clients = sdk(first), sdk(second)

            async def ask(number: int, turn: int = turn, clients: tuple[AsyncOpenAI, ...] = clients) -> None:
                answer = await clients[(number + turn) % 2].responses.create(
                    model="chat", input=f"turn {turn}", previous_response_id=chains[number]
                )
                assert answer.output_text.startswith(f"turn {turn + 1} of ")
                assert answer.previous_response_id == chains[number]
                chains[number] = answer.id

            for start in range(0, 100, 20):
                await asyncio.gather(*map(ask, range(start, start + 20)))
        assert sum(len(server.stored) for server in three) == 500
        assert sum(bool(server.stored) for server in three) > 1


async def test_the_gateway_does_not_count_the_tokens_of_what_a_backend_keeps() -> None:
    async with servers() as (server,), running({"only": native(server)}) as gateway:
        client = sdk(gateway)
        given = (await client.responses.create(model="chat", input="hi")).id
        with pytest.raises(openai.BadRequestError, match="whole input"):
            await client.responses.input_tokens.count(model="chat", input="more", previous_response_id=given)
        assert (await client.responses.input_tokens.count(model="chat", input="more")).input_tokens > 0


async def test_an_id_that_was_not_given_to_this_caller_is_not_found() -> None:
    """Forged, the backend's own, or another tenant's: nothing reaches a backend."""
    keys = {"keys": list(KEYS.values())}
    async with servers() as (server,), running({"only": native(server)}, **keys) as gateway:
        ann, bob = sdk(gateway, "ann"), sdk(gateway, "bob")
        given = (await ann.responses.create(model="chat", input="hi")).id
        forged = given[:-1] + ("0" if given[-1] != "0" else "1")
        for client, number in ((ann, forged), (ann, next(iter(server.stored))), (bob, given)):
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.responses.create(model="chat", input="hi", previous_response_id=number)
            assert unknown.value.code == "previous_response_not_found"
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(number)
            with pytest.raises(openai.NotFoundError):
                await client.responses.delete(number)
        assert len(server.asked) == 1
        assert (await ann.responses.retrieve(given)).id == given


async def test_a_lost_endpoint_s_state_is_asked_for_nowhere_else() -> None:
    async with servers(2) as (one, two), running({"only": native(one, two)}) as gateway:
        client = sdk(gateway)
        given = [(await client.responses.create(model="chat", input="hi")).id for _ in range(6)]
        lost, kept = (one, two) if one.stored else (two, one)
        await lost.__aexit__(None, None, None)
        before = len(kept.asked)
        failures = []
        for number in given:
            try:
                await client.responses.create(model="chat", input="more", previous_response_id=number)
            except openai.InternalServerError as error:
                failures.append(error)
        assert len(failures) == len(lost.stored)
        assert {error.status_code for error in failures} <= {502, 503}
        assert len(kept.asked) == before + len(given) - len(failures)
        found = [await asyncio.gather(client.responses.retrieve(number), return_exceptions=True) for number in given]
        away = [error for (error,) in found if isinstance(error, openai.InternalServerError)]
        assert [error.status_code for error in away] == [503] * len(failures)


async def test_requests_about_stored_responses_count_in_the_quotas_of_their_key_and_have_records() -> None:
    keys = [{**KEYS["ann"], "requests_per_minute": 3}, KEYS["bob"]]
    async with servers() as (server,), running({"only": native(server)}, keys=keys) as gateway:
        ann = sdk(gateway, "ann")
        given = (await ann.responses.create(model="chat", input="hi")).id
        assert (await ann.responses.retrieve(given)).id == given
        with pytest.raises(openai.NotFoundError):
            await ann.responses.input_items.list("resp_nobody")
        with pytest.raises(openai.RateLimitError) as refused:
            await ann.responses.delete(given)
        assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await sdk(gateway, "bob").models.list()).data
        await eventually(lambda: len(gateway.recorder.recent) == 4)
    records = [*gateway.recorder.recent][1:]
    assert [(each.end, each.status) for each in records] == [
        (RequestOutcome.COMPLETED, 200),
        (RequestOutcome.REFUSED, 404),
        (RequestOutcome.REFUSED, 429),
    ]
    assert {(each.operation, each.route.name, each.tenant, each.ttft) for each in records} == {
        ("responses", "-", "ann", None)
    }


async def test_a_stored_response_above_the_limit_is_refused_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "LIMIT", 1 << 20)
    async with servers() as (server,), running({"only": native(server)}) as gateway:
        client = sdk(gateway)
        given = (await client.responses.create(model="chat", input="hi")).id
        server.kept_text = "x" * (2 << 20)
        with pytest.raises(openai.InternalServerError, match="at most 1 MiB") as refused:
            await client.responses.retrieve(given)
    assert (refused.value.status_code, refused.value.code) == (502, "response_too_large")
    assert refused.value.response.headers["x-should-retry"] == "false"


@pytest.mark.real_time  # the kernel probes a full receiver by its own clock
async def test_a_large_stored_response_keeps_its_place_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one of the same key waits for it; a small one does not."""
    monkeypatch.setattr(stored_responses, "PLACE_WAIT", 0.05)
    async with servers() as (server,), running({"only": native(server)}) as gateway:
        client = sdk(gateway)
        given = (await client.responses.create(model="chat", input="hi")).id
        server.kept_text = "x" * (12 << 20)
        with socket.socket() as small:
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            small.connect(("127.0.0.1", int(gateway.url.rpartition(":")[2])))
            caller = Caller(*await asyncio.open_connection(sock=small))
            status, headers = await caller.ask(
                f"GET /v1/responses/{given} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
            )
            assert status == 200
            with pytest.raises(openai.InternalServerError, match="Other large stored responses") as refused:
                await client.responses.retrieve(given)
            assert refused.value.response.headers["retry-after"] == "1"
            large, server.kept_text = server.kept_text, "small"
            assert (await client.responses.retrieve(given)).output_text == "small"
            assert len(await caller.body(headers)) > len(large)
            await eventually(lambda: not gateway.recorder.lives)
            server.kept_text = large
            assert (await client.responses.retrieve(given)).output_text == large


@pytest.mark.parametrize("large", [stored_responses.LARGE, 0])
async def test_stored_responses_are_retrieved_listed_cancelled_and_deleted(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones are rewritten in a thread."""
    monkeypatch.setattr(stored_responses, "LARGE", large)
    async with servers(3) as three, running({"only": native(*three)}) as gateway:
        client = sdk(gateway)
        given = [(await client.responses.create(model="chat", input=f"hi {number}")).id for number in range(9)]
        for number, response in enumerate(given):
            assert (await client.responses.retrieve(response)).id == response
            (item,) = (await client.responses.input_items.list(response, limit=5)).data
            assert item.content == f"hi {number}"  # type: ignore[union-attr]
            assert (await client.responses.cancel(response)).status == "cancelled"
            await client.responses.delete(response)
            with pytest.raises(openai.NotFoundError) as gone:
                await client.responses.retrieve(response)
            assert response in str(gone.value)
        assert all(server.stored == {} for server in three)
        assert sum(len(server.cancelled) for server in three) == len(given)


@pytest.mark.parametrize(("status", "detail"), [(405, "Method Not Allowed"), (404, "Not Found"), (501, "Unsupported")])
async def test_what_an_engine_cannot_do_with_a_stored_response_is_refused_for_good(status: int, detail: str) -> None:
    """vLLM 0.32 deletes none: a 503 would be tried again."""

    class Undeletable(ResponsesServer):
        def script(self, received: Received) -> Script:
            refusal = reply(
                json.dumps({"detail": detail}).encode(), f"{status} {detail}", "content-type: application/json"
            )
            return [refusal] if received.method == "DELETE" else super().script(received)

    async with Undeletable("s") as server, running({"only": native(server)}) as gateway:
        client = sdk(gateway)
        given = (await client.responses.create(model="chat", input="hi")).id
        with pytest.raises(openai.NotFoundError, match="does not serve this operation") as refused:
            await client.responses.delete(given)
        assert refused.value.code == "unsupported_operation"
        assert (await client.responses.retrieve(given)).id == given


async def test_a_stored_response_is_not_for_strangers() -> None:
    async with servers() as (server,), running({"only": native(server)}, keys=list(KEYS.values())) as gateway:
        given = (await sdk(gateway, "ann").responses.create(model="chat", input="hi")).id
        status, _, _ = await get(gateway.url, f"/v1/responses/{given}")
        assert status == 401
        with pytest.raises(openai.AuthenticationError):
            await sdk(gateway, "eve").responses.retrieve(given)
        assert [each.method for each in server.requests if each.target.startswith("/v1/responses/")] == []


async def test_a_stored_response_tells_no_cached_tokens_where_two_groups_share_a_cache() -> None:
    """As the answer told none."""
    keys = list(KEYS.values())
    async with servers() as (server,), running({"only": unsalted(server)}, keys=keys) as gateway:
        ann = sdk(gateway, "ann")
        given = await ann.responses.create(model="chat", input="hello")
        again = await ann.responses.retrieve(given.id)
        for found in (given, again):
            assert found.usage is not None
            assert (found.usage.input_tokens > 4, found.usage.input_tokens_details.cached_tokens) == (True, 0)


async def test_state_that_its_server_has_forgotten_is_not_found_and_harms_no_endpoint() -> None:
    """vLLM keeps responses in memory. Callers with old ids must not take a healthy endpoint out."""
    async with servers(2) as both, running({"only": native(*both)}) as gateway:
        client = sdk(gateway)
        given = (await client.responses.create(model="chat", input="hi")).id
        for server in both:
            server.stored.clear()
        for _ in range(20):
            with pytest.raises(openai.NotFoundError, match="not found"):
                await client.responses.create(model="chat", input="more", previous_response_id=given)
        answers = [await client.responses.create(model="chat", input="hi") for _ in range(6)]
        assert all(answer.output_text for answer in answers)
        assert all(load.health is Health.UP for load in gateway.fleet.snapshot(monotonic()).loads.values())


async def test_a_long_preamble_is_no_first_token() -> None:
    """Responses repeats the instructions in two events before the answer; they may be long."""
    instructions = "long " * 60_000
    async with servers() as (server,), running({"only": native(server)}) as gateway:
        server.gated = True
        client = sdk(gateway)
        asking = asyncio.create_task(
            client.responses.create(model="chat", input="hi", instructions=instructions, stream=True)
        )
        await server.until(lambda upstream: len(server.asked) == 1)
        await asyncio.sleep(0.1)
        assert not asking.done()
        server.proceed()
        assert [event async for event in await asking][-1].type == "response.completed"


async def test_a_native_answer_of_many_megabytes_is_relayed() -> None:
    """As with images in it: their bytes come in base64."""
    async with servers() as (server,), running({"only": native(server)}) as gateway:
        text = "x" * (6 << 20)
        server.text = text
        client = sdk(gateway)
        whole = await client.responses.create(model="chat", input="hi")
        assert whole.output_text == text
        (*_, last) = [event async for event in await client.responses.create(model="chat", input="hi", stream=True)]
        assert last.type == "response.completed"
        assert last.response.output_text == text


async def test_a_native_stream_that_fails_ends_with_the_backend_s_own_words() -> None:
    async with servers() as (server,), running({"only": native(server)}) as gateway:
        server.failing = True
        seen = [event async for event in await sdk(gateway).responses.create(model="chat", input="hi", stream=True)]
        assert seen[-1].type == "response.failed"
        assert seen[-1].response.error is not None
        assert seen[-1].response.error.message == "out of memory"
        assert seen[-1].response.id == seen[0].response.id  # type: ignore[union-attr]
