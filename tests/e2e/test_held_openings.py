"""Openings of streams that are held back and judged, over real sockets, in the dialects of chats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from backends.stream.answer_opening import LONGEST_HOLD
from gateway.app import Gateway
from gateway.observe.record import JUDGE, RequestOutcome
from policies.types import AttemptOutcome
from tests.support.builders import Caller, calling, get, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import GATE, HANG, LAST_CHUNK, RESET, STREAM_HEAD, Pause, Script, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

DONE = b"data: [DONE]\n\n"
REFUSED = ("I'm sorry,", " but I can't", " help with that.")
ANSWERED = ("The sky", " is blue", " by day.")
OF_REFUSED, OF_ANSWERED = 8, 6  # tokens, by length, with the last word and not before
FAILED = reply(b'{"error":{"message":"broken"}}', "500 Internal Server Error")
PRICE = {"input": 1.0, "output": 1.0}


# --------------------------------------------------------------------------- dialects


def event(kind: str, **members: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **members})}\n\n".encode()


def chat_chunk(finish: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"id": "x", "choices": [choice], "model": "served"}).encode()


def chat(words: tuple[str, ...]) -> list[bytes]:
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    last_event = b"data: %b\n\n" % json.dumps({"id": "x", "choices": [], "usage": usage}).encode()
    texts = [chat_chunk(content=word) for word in words]
    return [chat_chunk(role="assistant", content=""), *texts, chat_chunk("stop"), last_event, DONE]


def messages(words: tuple[str, ...]) -> list[bytes]:
    message = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "served"}
    return [
        event("message_start", message={**message, "usage": {"input_tokens": 10, "output_tokens": 1}}),
        event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        *(event("content_block_delta", index=0, delta={"type": "text_delta", "text": word}) for word in words),
        event("content_block_stop", index=0),
        event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 5}),
        event("message_stop"),
    ]


def responses(words: tuple[str, ...]) -> list[bytes]:
    item = {"id": "i", "type": "message", "role": "assistant", "content": []}
    response = {"id": "resp_1", "object": "response", "status": "in_progress", "output": []}
    said = [{**item, "content": [{"type": "output_text", "text": "".join(words), "annotations": []}]}]
    usage = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": response}),
        ("response.output_item.added", {"output_index": 0, "item": item}),
        *(("response.output_text.delta", {"item_id": "i", "content_index": 0, "delta": word}) for word in words),
        ("response.completed", {"response": {**response, "status": "completed", "output": said, "usage": usage}}),
    ]
    return [event(kind, sequence_number=number, **members) for number, (kind, members) in enumerate(events)]


ASK = "Why is the sky blue by day, and not at night?"
CHAT: Mapping[str, Any] = {"model": "chat", "stream": True, "messages": [{"role": "user", "content": ASK}]}


@dataclass(frozen=True)
class Spoken:
    """A caller's dialect, and the pool's, in which `events` are written."""

    path: str
    body: Mapping[str, Any]
    backend: str
    events: Any

    def request(self, **members: Any) -> bytes:
        return post({**self.body, **members}, path=self.path)

    def script(self, words: tuple[str, ...], *cuts: int) -> Script:
        return cut(self.events(words), *cuts)


def cut(events: list[bytes], *cuts: int) -> Script:
    """A stream, each event a read of its own; or else torn at `cuts`."""
    data = b"".join(events)
    parts = [data[start:end] for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True)] if cuts else events
    return [STREAM_HEAD, *map(chunk, parts), LAST_CHUNK]


TO_MESSAGES = {"model": "chat", "stream": True, "max_tokens": 99, "messages": CHAT["messages"]}
TO_RESPONSES = {"model": "chat", "stream": True, "input": ASK, "store": False}
DIALECTS = {
    "chat": Spoken("/v1/chat/completions", CHAT, "compatible", chat),
    "messages": Spoken("/v1/messages", TO_MESSAGES, "anthropic", messages),
    "responses": Spoken("/v1/responses", TO_RESPONSES, "openai", responses),
    "messages over chat": Spoken("/v1/messages", TO_MESSAGES, "compatible", chat),
    "responses over chat": Spoken("/v1/responses", TO_RESPONSES, "compatible", chat),
    "chat over messages": Spoken("/v1/chat/completions", CHAT, "anthropic", messages),
}


def told(body: bytes) -> str:
    """Text of a streamed answer, in whatever dialect."""
    found = ""
    for line in body.splitlines():
        if not line.startswith(b"data: {"):
            continue
        data = json.loads(line[6:])
        for choice in data.get("choices", ()):
            found += choice["delta"].get("content") or ""
        if data.get("type") == "content_block_delta":
            found += data["delta"].get("text", "")
        elif data.get("type") == "response.output_text.delta":
            found += data["delta"]
    return found


@asynccontextmanager
async def tiers(
    spoken: Spoken, first: list[Script], second: list[Script], hold: int | None = 40, **route: Any
) -> AsyncIterator[tuple[Gateway, Caller, Upstream, Upstream]]:
    when = ["refusal", "refusal_text", "language", "invalid_json"]
    async with Upstream(*first) as small, Upstream(*second) as large:
        pools = {
            name: pool(server.url, backend=spoken.backend, price=PRICE)
            for name, server in (("small", small), ("large", large))
        }
        escalate: Any = when if hold is None else {"when": when, "hold": hold}
        routes = {"chat": {"tiers": ["small", "large"], "ttft": "off", "hedge": "off", "escalate": escalate, **route}}
        async with running(pools, routes) as gateway, calling(gateway.url) as caller:
            yield gateway, caller, small, large


async def answer(caller: Caller, raw: bytes) -> bytes:
    status, _ = await caller.ask(raw)
    assert status == 200
    return b"".join(await caller.chunks())


# --------------------------------------------------------------------------- the next tier


@pytest.mark.parametrize("spoken", DIALECTS.values(), ids=DIALECTS)
async def test_a_refusal_is_dropped_and_the_next_tier_answers(spoken: Spoken) -> None:
    """The caller reads the second answer alone; both are counted and priced."""
    async with tiers(spoken, [spoken.script(REFUSED)], [spoken.script(ANSWERED)]) as (gateway, caller, small, large):
        status, headers = await caller.ask(spoken.request())
        body = b"".join(await caller.chunks())
        assert (status, told(body), b"sorry" in body) == (200, "".join(ANSWERED), False)
        assert (headers["x-firsttoken-pool"], headers["x-firsttoken-attempts"]) == ("large", "2")
        record = last(gateway)
        assert (record.end, record.escalated) == (RequestOutcome.COMPLETED, "refusal_text")
        assert [(each.pool, each.ending) for each in record.attempts] == [
            ("small", AttemptOutcome.COMPLETED),
            ("large", AttemptOutcome.COMPLETED),
        ]
        assert all(each.cost_usd > 0 for each in record.attempts)
        assert record.cost_usd == sum(each.cost_usd for each in record.attempts)
        assert len(small.requests) == len(large.requests) == 1
        page = (await get(gateway.admin_url, "/metrics"))[2].decode()
        assert 'firsttoken_escalations_total{reason="refusal_text",route="chat"} 1.0' in page


@pytest.mark.parametrize(
    ("reason", "words", "members"),
    [
        ("invalid_json", ("Sure! Here", " is"), {"response_format": {"type": "json_object"}}),
        ("invalid_json", ("```", "json\n{"), {"response_format": {"type": "json_object"}}),
        ("language", ("天空是蓝色的，", "因为空气散射了阳光中的蓝光。"), {}),
    ],
)
async def test_each_reason_of_an_opening_asks_the_next_tier(
    reason: str, words: tuple[str, ...], members: dict[str, Any]
) -> None:
    spoken = DIALECTS["chat"]
    async with tiers(spoken, [spoken.script(words)], [spoken.script(('{"n"', ": 1}"))]) as (gateway, caller, _, _):
        assert told(await answer(caller, spoken.request(**members))) == '{"n": 1}'
        assert last(gateway).escalated == reason


async def test_a_refusal_of_the_dialects_own_form_asks_the_next_tier() -> None:
    spoken = DIALECTS["chat"]
    refused = cut([chat_chunk(refusal="I can't."), chat_chunk("stop"), DONE])
    async with tiers(spoken, [refused], [spoken.script(ANSWERED)]) as (gateway, caller, _, _):
        assert told(await answer(caller, spoken.request())) == "".join(ANSWERED)
        assert last(gateway).escalated == "refusal"


async def test_an_opening_is_judged_with_its_last_token_before_the_answer_ends() -> None:
    """The rest is not awaited: its engine is stopped."""
    spoken = DIALECTS["chat"]
    first = [STREAM_HEAD, *map(chunk, spoken.events(REFUSED)[:4]), HANG]
    async with tiers(spoken, [first], [spoken.script(ANSWERED)], hold=OF_REFUSED) as (gateway, caller, small, _):
        assert told(await answer(caller, spoken.request())) == "".join(ANSWERED)
        await small.until(lambda seen: seen.hangups == 1)
        assert last(gateway).escalated == "refusal_text"


# --------------------------------------------------------------------------- the answer as it came


@pytest.mark.parametrize("words", [ANSWERED, REFUSED])
@pytest.mark.parametrize("spoken", DIALECTS.values(), ids=DIALECTS)
async def test_no_byte_of_an_answer_is_altered(spoken: Spoken, words: tuple[str, ...]) -> None:
    """Of a good one, nor of a refusal that is the caller's because no other tier answers: torn anywhere, it is read as
    on a route that holds nothing."""
    size = len(b"".join(spoken.events(words)))
    cuts = range(1, size, 9)
    async with tiers(spoken, [spoken.script(words, at) for at in cuts], [[FAILED]]) as (_, caller, _, _):
        held = [await answer(caller, spoken.request()) for _ in cuts]
    async with tiers(spoken, [spoken.script(words, at) for at in cuts], [[FAILED]], hold=None) as (_, caller, _, _):
        plain = [await answer(caller, spoken.request()) for _ in cuts]
    assert list(map(told, held)) == ["".join(words)] * len(cuts)
    if spoken is DIALECTS["chat"]:  # in the others, ids are of each answer alone
        assert held == plain


async def test_a_kept_stream_goes_on_where_it_was_stopped() -> None:
    """The next tier fails while the first answer is still being written."""
    spoken = DIALECTS["chat"]
    events = spoken.events((*REFUSED, " But", " try this."))
    first = [STREAM_HEAD, *map(chunk, events[:4]), GATE, *map(chunk, events[4:]), LAST_CHUNK]
    async with tiers(spoken, [first], [[FAILED]], hold=OF_REFUSED) as (gateway, caller, small, _):
        await caller.ask(spoken.request())
        small.proceed()
        assert told(b"".join(await caller.chunks())) == "".join((*REFUSED, " But", " try this."))
        record = last(gateway)
        assert (record.end, record.escalated, record.pool) == (RequestOutcome.COMPLETED, "refusal_text", "small")
        assert [each.pool for each in record.attempts].count("small") == 1
        assert record.ttft == pytest.approx(sum(spent or 0.0 for spent in record.spent[:-1]), abs=1e-6)


async def test_a_kept_stream_that_has_broken_meanwhile_ends_with_an_error() -> None:
    """What came of it is the caller's; no part is told to be the whole."""
    spoken = DIALECTS["chat"]
    first = [STREAM_HEAD, *map(chunk, spoken.events(REFUSED)[:4]), RESET]
    async with tiers(spoken, [first], [[GATE, FAILED], [FAILED]], hold=OF_REFUSED) as (gateway, caller, _, large):
        caller.writer.write(spoken.request())
        await large.until(lambda seen: len(seen.requests) == 1)
        large.proceed()
        await caller.head()
        body = b"".join(await caller.chunks())
        assert told(body) == "".join(REFUSED)
        assert b'"error"' in body
        assert last(gateway).end is RequestOutcome.UPSTREAM_BROKE


# --------------------------------------------------------------------------- what is held, and for how long


async def test_nothing_is_written_before_the_opening_is_complete() -> None:
    """From then on, every token as it comes."""
    spoken = DIALECTS["chat"]
    events = spoken.events(ANSWERED)
    first = [STREAM_HEAD, *map(chunk, events[:3]), GATE, chunk(events[3]), GATE, *map(chunk, events[4:]), LAST_CHUNK]
    async with tiers(spoken, [first], [[FAILED]], hold=OF_ANSWERED) as (gateway, caller, small, _):
        head = asyncio.ensure_future(caller.ask(spoken.request()))
        await small.until(lambda seen: len(seen.requests) == 1)
        await asyncio.sleep(1.0)
        assert not head.done()
        small.proceed()
        await head
        size = int(await caller.reader.readline(), 16)
        assert told(await caller.reader.readexactly(size)) == "".join(ANSWERED)
        small.proceed()
        await caller.reader.readexactly(2)
        await caller.chunks()
    record = last(gateway)
    assert record.spent[JUDGE] is not None
    assert record.spent[JUDGE] >= 0.9
    assert record.ttft == pytest.approx(sum(spent or 0.0 for spent in record.spent[:-1]), abs=1e-6)


@pytest.mark.parametrize("drip", [chat_chunk(content="a "), b": busy\n\n"], ids=["words", "comments"])
async def test_an_opening_that_drips_is_judged_as_it_is_and_sent(drip: bytes) -> None:
    """A caller is not kept waiting for minutes by what it could read."""
    spoken = DIALECTS["chat"]
    dripped = [step for _ in range(60) for step in (chunk(drip), Pause(6.0))]
    first = [
        STREAM_HEAD,
        *map(chunk, spoken.events(ANSWERED)[:2]),
        *dripped,
        chunk(chat_chunk("stop") + DONE),
        LAST_CHUNK,
    ]
    async with tiers(spoken, [first], [[FAILED]]) as (gateway, caller, _, _):
        assert (await caller.ask(spoken.request()))[0] == 200
        caller.writer.transport.abort()
        await eventually(lambda: gateway.recorder.recent)
        assert LONGEST_HOLD < (last(gateway).ttft or 0.0) < LONGEST_HOLD + 7.0


@pytest.mark.parametrize(
    "delta",
    [{"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]}, {"reasoning": "hm"}],
)
async def test_a_stream_that_begins_with_something_else_than_text_is_not_held(delta: dict[str, Any]) -> None:
    spoken = DIALECTS["chat"]
    first = [STREAM_HEAD, chunk(chat_chunk(**delta)), GATE, chunk(chat_chunk("stop") + DONE), LAST_CHUNK]
    async with tiers(spoken, [first], [[FAILED]]) as (_, caller, small, _):
        assert (await caller.ask(spoken.request()))[0] == 200
        small.proceed()
        await caller.chunks()


@pytest.mark.parametrize("members", [{"n": 2}, {}])
async def test_where_no_single_other_answer_is_possible_nothing_is_held(members: dict[str, Any]) -> None:
    """Several choices, and a route with one pool."""
    spoken = DIALECTS["chat"]
    first = [STREAM_HEAD, *map(chunk, spoken.events(REFUSED)[:3]), GATE, LAST_CHUNK]
    route = {} if members else {"tiers": ["small"]}
    async with tiers(spoken, [first], [[FAILED]], **route) as (_, caller, _, _):
        assert (await caller.ask(spoken.request(**members)))[0] == 200


async def test_a_stream_that_breaks_in_its_opening_is_hidden() -> None:
    """As before the first token: another tier answers, and nothing was escalated."""
    spoken = DIALECTS["chat"]
    first = [STREAM_HEAD, *map(chunk, spoken.events(ANSWERED)[:2]), RESET]
    async with tiers(spoken, [first], [spoken.script(ANSWERED)]) as (gateway, caller, _, _):
        assert told(await answer(caller, spoken.request())) == "".join(ANSWERED)
        record = last(gateway)
        assert (record.pool, record.escalated, record.end) == ("large", "", RequestOutcome.COMPLETED)


async def test_a_caller_that_leaves_stops_the_engine_of_a_held_stream() -> None:
    spoken = DIALECTS["chat"]
    first = [STREAM_HEAD, *map(chunk, spoken.events(ANSWERED)[:2]), HANG]
    async with tiers(spoken, [first], [[FAILED]]) as (gateway, caller, small, _):
        caller.writer.write(spoken.request())
        await small.until(lambda seen: len(seen.requests) == 1)
        await asyncio.sleep(0.1)
        caller.writer.transport.abort()
        await small.until(lambda seen: seen.hangups == 1)
    assert last(gateway).end is RequestOutcome.CLIENT_GONE


async def test_the_connection_of_a_complete_refusal_is_kept() -> None:
    """Most refusals are shorter than an opening."""
    spoken = DIALECTS["chat"]
    async with tiers(spoken, [spoken.script(REFUSED)], [spoken.script(ANSWERED)]) as (_, caller, small, _):
        for _ in range(3):
            await answer(caller, spoken.request())
        assert (len(small.requests), small.connections) == (3, 1)


async def test_whole_answers_are_judged_for_the_same_reasons() -> None:
    """A refusal in words has its own name: a route that lists `refusal` alone means the dialect's own form."""
    spoken = DIALECTS["chat"]
    poor, good = ({"choices": [{"message": {"content": "".join(words)}}]} for words in (REFUSED, ANSWERED))
    first, second = ([reply(json.dumps(each).encode())] for each in (poor, good))
    async with tiers(spoken, [first], [second], hold=None) as (gateway, caller, _, _):
        await caller.whole(spoken.request(stream=False))
        assert last(gateway).escalated == "refusal_text"
    async with tiers(spoken, [first], [second], escalate=["refusal"]) as (gateway, caller, _, _):
        await caller.whole(spoken.request(stream=False))
        assert last(gateway).escalated == ""


# --------------------------------------------------------------------------- the forecast


async def test_a_tier_whose_opening_would_come_too_late_is_left_for_the_next() -> None:
    """Both make the budget of 1 s with their first tokens; the rest of an opening takes the slow one 2.6 s more. The
    predicted TTFT is that of the first token written to the caller."""
    routes: dict[str, Any] = {
        name: {"tiers": ["slow", "fast"], "ttft": {"budget": "1s"}, "hedge": "off", **more}
        for name, more in (("plain", {}), ("held", {"escalate": {"when": ["refusal_text"], "hold": 40}}))
    }
    routes |= {name: {"tiers": [name]} for name in ("slow", "fast")}
    body = {"stream": True, "max_tokens": 60, "messages": [{"role": "user", "content": ASK}]}
    async with engines(1, "8b-l4") as slow, engines(1, "8b-h100") as fast:
        pools = {"slow": engine_pool(*slow), "fast": engine_pool(*fast)}
        async with running(pools, routes) as gateway, calling(gateway.url) as caller:
            for _ in range(12):  # answers teach the pace of both
                for model in ("slow", "fast"):
                    await answer(caller, post({**body, "model": model}))
            await answer(caller, post({**body, "model": "plain"}))
            _, headers = await caller.ask(post({**body, "model": "held"}))
            await caller.chunks()
            plain, held = list(gateway.recorder.recent)[-2:]
    assert (plain.pool, held.pool) == ("slow", "fast")
    assert held.ttft is not None
    assert held.ttft_predicted_p50 == pytest.approx(held.ttft, rel=0.3)
    assert float(headers["x-firsttoken-ttft-predicted-ms"]) == pytest.approx(held.ttft_predicted_p50 * 1e3, abs=0.1)
