"""A broken stream is continued by a peer: the caller reads one whole answer, or an explicit error."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from random import Random
from time import monotonic
from typing import Any

import openai
import pytest

from gateway.app import Gateway
from gateway.observe.part_notes import RESCUE as NOTED
from gateway.observe.record import Record, RequestOutcome
from lab.servers.drivers import Faults
from lab.servers.simulated_server import SimulatedServer
from policies.fleet.fleet_reader import FleetReader
from policies.rescue.successors import MOST_FORECAST, RESCUE_ATTEMPT
from policies.types import AttemptOutcome
from tests.support.builders import calling, post
from tests.support.gateways import running
from tests.support.rescued_answers import (
    END,
    FINISH,
    RESCUE,
    REST,
    TEXT,
    Scripted,
    holder,
    last,
    read,
    same,
    scripted,
    scripted_pool,
    whole,
)
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import (
    CLOSE,
    HANG,
    LAST_CHUNK,
    RESET,
    STREAM_HEAD,
    Pause,
    Received,
    Script,
    ScriptedEngine,
    chunk,
    reply,
)

pytestmark = pytest.mark.virtual_time

RESCUES = int(os.environ.get("RESCUES", "24"))


@asynccontextmanager
async def gateway_before(*servers: SimulatedServer, **more: Any) -> AsyncIterator[tuple[Gateway, openai.AsyncOpenAI]]:
    async with (
        running({"p": engine_pool(*servers)}, RESCUE, **more) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield gateway, client


def rescues(gateway: Gateway) -> list[Record]:
    return [record for record in gateway.recorder.recent if NOTED.of(record) == "rescued"]


async def test_an_answer_cut_anywhere_is_whole() -> None:
    """No token is lost or there twice, usage is that of the whole; the gap is the peer's TTFT and little more."""
    random, gaps = Random(11), []
    async with engines(2, speed=10.0) as servers, gateway_before(*servers) as (gateway, client):
        for number in range(10 * RESCUES):  # a peer may take the request instead: then nothing is cut
            if len(gaps) == RESCUES:
                break
            prompt, length = f"tell me {number}", random.randint(2, 60)
            uncut = await whole(client, prompt, max_tokens=length)
            server = holder(gateway, servers)
            server.faults.cut_after_tokens = random.randrange(1, max(len(uncut.texts), 2))
            answer = await whole(client, prompt, max_tokens=length)
            server.faults.cut_after_tokens = None
            assert same(answer, uncut), (answer, uncut)
            record = last(gateway)
            if NOTED.of(record):
                gaps.append(answer.longest_gap - (uncut.ttft or 0.0))
                assert (NOTED.of(record), record.end) == ("rescued", RequestOutcome.COMPLETED)
                assert record.answer.output_tokens == uncut.usage.completion_tokens
                assert record.answer.prompt_tokens == uncut.usage.prompt_tokens
                lost, won = record.attempts[-2:]
                assert (lost.ending, won.kind, won.ending) == (
                    AttemptOutcome.BROKEN,
                    RESCUE_ATTEMPT,
                    AttemptOutcome.COMPLETED,
                )
        print(f"{len(gaps)} rescued; gap beyond the peer's TTFT p99 {sorted(gaps)[-1 - len(gaps) // 100]}")
        assert len(gaps) == RESCUES
        assert sorted(gaps)[-1 - len(gaps) // 100] <= 1.0  # 0.1 s at rest; the test machine may be busy


FAULTS: Mapping[str, Mapping[str, Any]] = {
    "cut": {"cut_after_tokens": 7},
    "an error event": {"error_after_tokens": 7},
    "broken JSON": {"garbage_after_tokens": 7},
    "a stall": {"stall_share": 1.0, "stall_after_tokens": 7},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", ["chat", "with tools on offer"])
async def test_every_kind_of_break_is_rescued(fault: str, operation: str) -> None:
    """A stalled stream is left after 2 s, long before `stream_idle`; with tools on offer at `stream_idle`."""
    more = {"tools": [TOOL]} if operation != "chat" else {}
    idle = {"defaults": {"stream_idle": "3s" if more else "30s"}}
    async with engines(2, speed=10.0) as servers, gateway_before(*servers, **idle) as (gateway, client):
        for number in range(20):  # until the faulty server is asked
            uncut = await whole(client, f"hello {number}", **more)
            faults = holder(gateway, servers).faults
            for name, value in FAULTS[fault].items():
                setattr(faults, name, value)
            answer = await whole(client, f"hello {number}", **more)
            assert same(answer, uncut)
            for name in FAULTS[fault]:
                setattr(faults, name, getattr(Faults(), name))
            if NOTED.of(last(gateway)):
                break
        assert NOTED.of(last(gateway)) == "rescued"
        if fault == "a stall":
            assert 2.0 <= answer.longest_gap <= 3.5


async def test_an_answer_that_breaks_twice_is_whole() -> None:
    """Three endpoints write a part each; usage and cost are those of all."""
    price = {"price": {"input": 1.0, "output": 1.0}}
    async with (
        engines(3, speed=10.0) as servers,
        running({"p": engine_pool(*servers, **price)}, RESCUE) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        uncut = await whole(client, "hello", max_tokens=40)
        for server in servers:
            server.faults.error_after_tokens = 15
        answer = await whole(client, "hello", max_tokens=40)
        assert same(answer, uncut)
        record = last(gateway)
        assert [attempt.kind.value for attempt in record.attempts] == ["primary", "rescue", "rescue"]
        prompt, output = uncut.usage.prompt_tokens, uncut.usage.completion_tokens
        assert record.answer.output_tokens == output
        assert record.cost_usd * 1e6 == pytest.approx(3 * prompt + 15 + 30 + output, abs=3)


async def test_fifty_streams_survive_the_death_of_an_endpoint() -> None:
    """One of two engines is killed: 50 whole answers."""
    async with engines(2) as servers, gateway_before(*servers) as (gateway, client):
        uncut = await asyncio.gather(*(whole(client, f"tell me {i}", max_tokens=80) for i in range(50)))
        calls = [asyncio.create_task(whole(client, f"tell me {i}", max_tokens=80)) for i in range(50)]
        await eventually(lambda: sum(server.engine.running for server in servers) >= 45)
        await asyncio.sleep(0.2)
        await max(servers, key=lambda server: server.engine.running).kill()
        answers = await asyncio.gather(*calls)
        pairs = list(zip(answers, uncut, strict=True))
        assert all(same(answer, before) for answer, before in pairs), [pair for pair in pairs if not same(*pair)][:1]
        assert len(rescues(gateway)) >= 10
        assert gateway.recorder.live == 0


# --------------------------------------------------------------------------- what is not rescued

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
}
REFUSED: Mapping[str, Mapping[str, Any]] = {
    "a tool call": {"tools": [TOOL], "tool_choice": "required"},
    "a JSON schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
    "a JSON object": {"response_format": {"type": "json_object"}},
    "a grammar": {"extra_body": {"guided_regex": "a+"}},
    "structured outputs": {"extra_body": {"structured_outputs": {"regex": "a+"}}},
    "log probabilities": {"logprobs": True},
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_continued_ends_by_an_error_event_at_once(case: str) -> None:
    """Never by a false end."""
    async with engines(2, speed=10.0) as servers, gateway_before(*servers) as (gateway, client):
        for server in servers:
            server.faults.cut_after_tokens = 3
        answer = await read(client, "hello", **REFUSED[case])
        assert "closed the connection" in answer.error
        assert (answer.finish_reasons, answer.usage) == ([], None)
        record = last(gateway)
        assert (NOTED.of(record), record.end, len(record.attempts)) == (
            "refused",
            RequestOutcome.UPSTREAM_BROKE,
            1,
        )
        assert record.arrival + record.attempts[0].ended + 0.1 > record.arrival + record.total


BREAKS: Mapping[str, Script] = {
    "closed": [STREAM_HEAD + chunk(TEXT), CLOSE],
    "reset": [STREAM_HEAD + chunk(TEXT), RESET],
    "within an event": [STREAM_HEAD + chunk(TEXT + scripted({"content": " three"})[:-20]), RESET],
    "an end without an end": [STREAM_HEAD + chunk(TEXT) + LAST_CHUNK],
    "silent": [STREAM_HEAD + chunk(TEXT), HANG],
    "junk": [STREAM_HEAD + chunk(TEXT), chunk(b"data: junk\n\n"), HANG],
    "an error in the same read": [STREAM_HEAD + chunk(TEXT + b'data: {"error": {"message": "x"}}\n\n'), HANG],
}


@pytest.mark.parametrize("case", BREAKS)
async def test_the_peer_gets_the_text_so_far_and_its_stream_is_joined(case: str) -> None:
    """One id, one role, one end; usage with the count of the prompt by the peer."""
    async with scripted_pool(BREAKS[case], [STREAM_HEAD, Pause(0.05), chunk(REST), *END]) as pool:
        answer = await read(pool.client, "hello", max_tokens=60)
        assert (answer.text, answer.finish_reasons, answer.error) == ("one two three", ["stop"], "")
        assert (answer.ids, answer.roles) == ({"1"}, 1)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (9, 4, 13)
        body = pool.continuation
        assert body["messages"][-1] == {"role": "assistant", "content": "one two"}
        assert (body["continue_final_message"], body["add_generation_prompt"], body["max_tokens"]) == (True, False, 58)
        record = last(pool.gateway)
        assert (NOTED.of(record), record.answer.prompt_tokens, record.answer.output_tokens) == (
            "rescued",
            9,
            4,
        )


async def test_a_peer_that_ends_at_once_ends_the_answer() -> None:
    """Nothing was left to say."""
    async with scripted_pool(BREAKS["reset"], [STREAM_HEAD, chunk(FINISH + b"data: [DONE]\n\n"), LAST_CHUNK]) as pool:
        answer = await read(pool.client, "hello")
        assert (answer.text, answer.finish_reasons, answer.error) == ("one two", ["stop"], "")
        assert last(pool.gateway).end is RequestOutcome.COMPLETED


PEERS: Mapping[str, Script] = {
    "refuses": [reply(b'{"error": {"message": "no"}}', "400 Bad Request")],
    "dies": [RESET],
    "is silent": [HANG],
    "breaks too": [STREAM_HEAD + chunk(REST), RESET],
    "sends an error event": [STREAM_HEAD + chunk(REST), chunk(b'data: {"error": {"message": "x"}}\n\n'), LAST_CHUNK],
}


@pytest.mark.parametrize("case", PEERS)
async def test_a_peer_that_fails_too_is_an_explicit_error(case: str) -> None:
    async with scripted_pool(BREAKS["reset"], PEERS[case]) as pool:
        answer = await read(pool.client, "hello")
        assert answer.text.startswith("one two")
        assert answer.error
        assert (answer.finish_reasons, answer.usage) == ([], None)
        record = last(pool.gateway)
        assert (NOTED.of(record), record.end) == ("failed", RequestOutcome.UPSTREAM_BROKE)
        assert pool.gateway.proxy.dispatcher.retries.retrying == 0


REFUSAL: Script = [reply(b'{"error": {"message": "The last message is no user message."}}', "400 Bad Request")]
WHOLE = scripted({"role": "assistant", "content": ""}, {"content": "one t"}, {"content": "wo"}, {"content": " three"})
USAGE_OF_WHOLE = (
    b'data: {"id":"2","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13}}\n\n'
)


async def test_a_peer_that_refuses_to_continue_writes_the_whole_answer_again() -> None:
    """The text so far is skipped, however the second answer is cut into tokens; usage is that of the whole."""
    again = [STREAM_HEAD, chunk(WHOLE), chunk(FINISH + USAGE_OF_WHOLE + b"data: [DONE]\n\n"), LAST_CHUNK]
    async with scripted_pool(BREAKS["reset"], REFUSAL, again) as pool:
        answer = await read(pool.client, "hello", max_tokens=60)
        assert (answer.text, answer.finish_reasons, answer.error) == ("one two three", ["stop"], "")
        assert (answer.ids, answer.roles) == ({"1"}, 1)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 4)
        body = json.loads(pool.answered[2].body)
        assert (body["messages"], body["max_tokens"]) == ([{"role": "user", "content": "hello"}], 60)
        assert "continue_final_message" not in body
        record = last(pool.gateway)
        assert (NOTED.of(record), record.answer.prompt_tokens, record.answer.output_tokens) == (
            "rescued",
            9,
            4,
        )
        assert sorted(attempt.kind.value for attempt in record.attempts) == ["primary", "rescue", "rescue"]


OTHER_WORDS: Mapping[str, bytes] = {
    "at once": scripted({"content": "uno"}),
    "within a token": scripted({"content": "one twin"}),
    "an end too early": scripted({"content": "one"}) + FINISH,
    "reasoning": scripted({"content": "one"}, {"reasoning_content": "hm"}),
}


@pytest.mark.parametrize("case", OTHER_WORDS)
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_second_answer_in_other_words_is_an_explicit_error(case: str, at_once: bool) -> None:
    """No word of it is relayed, nor an end."""
    rest = FINISH + b"data: [DONE]\n\n"
    events = OTHER_WORDS[case]
    again = (
        [chunk(events + rest)]
        if at_once
        else [part for each in events.split(b"\n\n")[:-1] for part in (chunk(each + b"\n\n"), Pause(0.01))]
    )
    async with scripted_pool(BREAKS["reset"], REFUSAL, [STREAM_HEAD, *again, HANG]) as pool:
        answer = await read(pool.client, "hello")
        assert (answer.text, answer.finish_reasons, answer.usage) == ("one two", [], None)
        assert "other words" in answer.error
        assert (NOTED.of(last(pool.gateway)), last(pool.gateway).end) == (
            "failed",
            RequestOutcome.UPSTREAM_BROKE,
        )


@asynccontextmanager
async def two_tiers(first: Script, second: Script, kind: str = "vllm") -> AsyncIterator[Scripted]:
    """Two pools of different models; the second is of the given kind."""
    answered: list[Received] = []
    async with (
        ScriptedEngine(first, answered=answered) as one,
        ScriptedEngine(second, answered=answered) as two,
        running(
            {
                "small": {"backend": "vllm", "model": "little", "endpoints": [one.url]},
                "large": {"backend": kind, "model": "big", "endpoints": [two.url]},
            },
            {"chat": {**RESCUE["chat"], "tiers": ["small", "large"]}},
        ) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Scripted(gateway, client, (one, two), answered)


async def test_without_a_peer_in_the_pool_the_next_tier_continues() -> None:
    """By its own model; the stream keeps its identity."""
    async with two_tiers(BREAKS["reset"], [STREAM_HEAD, Pause(0.05), chunk(REST), *END]) as pool:
        answer = await read(pool.client, "hello", max_tokens=60)
        assert (answer.text, answer.finish_reasons, answer.ids, answer.error) == ("one two three", ["stop"], {"1"}, "")
        assert (pool.continuation["model"], pool.continuation["max_tokens"]) == ("big", 58)
        record = last(pool.gateway)
        assert NOTED.of(record) == "rescued"
        assert [attempt.pool for attempt in record.attempts] == ["small", "large"]


async def test_a_next_tier_that_cannot_continue_is_not_asked() -> None:
    async with two_tiers(BREAKS["reset"], [STREAM_HEAD, chunk(REST), *END], "llamacpp") as pool:
        answer = await read(pool.client, "hello")
        assert (answer.text, bool(answer.error), len(pool.answered)) == ("one two", True, 1)
        assert NOTED.of(last(pool.gateway)) == "refused"


async def test_reasoning_is_not_continued() -> None:
    """No engine resumes a thought that it is given as words."""
    thought = scripted({"role": "assistant", "content": ""}, {"reasoning_content": "hm"})
    async with scripted_pool([STREAM_HEAD + chunk(thought), RESET], [STREAM_HEAD, chunk(REST), *END]) as pool:
        began = monotonic()
        answer = await read(pool.client, "hello")
        assert "closed the connection" in answer.error
        assert (NOTED.of(last(pool.gateway)), len(pool.answered)) == ("refused", 1)
        assert monotonic() - began < 5


async def test_without_rescue_a_broken_stream_ends_by_an_error_event() -> None:
    async with scripted_pool(BREAKS["reset"], [STREAM_HEAD, chunk(REST), *END], rescue="off") as pool:
        answer = await read(pool.client, "hello")
        assert (answer.text, bool(answer.error), len(pool.answered)) == ("one two", True, 1)
        assert NOTED.of(last(pool.gateway)) == ""


async def test_a_caller_that_leaves_during_a_rescue_cancels_it() -> None:
    async with scripted_pool(BREAKS["reset"], [STREAM_HEAD, HANG]) as pool:
        task = asyncio.create_task(read(pool.client, "hello"))
        await eventually(lambda: len(pool.answered) == 2)
        task.cancel()
        await eventually(lambda: pool.gateway.recorder.recent)
        assert last(pool.gateway).end is RequestOutcome.CLIENT_GONE
        await eventually(lambda: any(engine.hangups for engine in pool.engines))


async def test_a_completion_is_continued_by_its_prompt() -> None:
    """Completions have no template: white space stays."""

    def text(*texts: str) -> bytes:
        events = ({"id": "1", "choices": [{"index": 0, "text": each, "finish_reason": None}]} for each in texts)
        return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)

    finish = b'data: {"id":"2","choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    second = [STREAM_HEAD, chunk(text(" two") + finish), LAST_CHUNK]
    async with scripted_pool([STREAM_HEAD + chunk(text("one", " ")), RESET], second) as pool:
        stream = await pool.client.completions.create(model="chat", prompt="count:", max_tokens=9, stream=True)
        texts = [choice.text async for event in stream for choice in event.choices]
        assert "".join(texts) == "one  two"
        assert (pool.continuation["prompt"], pool.continuation["max_tokens"]) == ("count:one ", 7)


ODD = b'data: {"id":"1","choices":[{"index":0,"delta":{},"finish_reason":{"a":1}}]}\n\n'


@asynccontextmanager
async def read_as_messages(*scripts: Script) -> AsyncIterator[tuple[bytes, Gateway, list[Received]]]:
    """An answer in Anthropic's dialect, of three engines in turn."""
    answered: list[Received] = []
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine(*scripts, answered=answered)) for _ in range(3)]
        pool = {"backend": "sglang", "model": "served", "endpoints": [engine.url for engine in engines]}
        gateway = await stack.enter_async_context(running({"p": pool}, RESCUE))
        caller = await stack.enter_async_context(calling(gateway.url))
        prompt = {"model": "chat", "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": "x"}]}
        await caller.ask(post(prompt, path="/v1/messages"))
        events = b"".join(await caller.chunks())
        await eventually(lambda: gateway.recorder.recent)
        yield events, gateway, answered


async def test_a_peer_continues_what_the_caller_has_read_and_nothing_else() -> None:
    """The text of an attempt that failed before the caller saw a word of it is no part of the answer."""
    unseen: Script = [STREAM_HEAD + chunk(scripted({"content": "Once upon a time"}) + ODD) + LAST_CHUNK]
    rest: Script = [STREAM_HEAD, chunk(REST), *END]
    async with read_as_messages(unseen, BREAKS["reset"], rest) as (events, _, answered):
        assert json.loads(answered[2].body)["messages"][-1] == {"role": "assistant", "content": "one two"}
        assert b" three" in events
        assert b"message_stop" in events


async def test_a_peer_whose_first_events_cannot_be_told_to_the_caller_is_followed_by_the_next() -> None:
    """The stream breaks again at the commit of the peer: each attempt is in the Record once."""
    untold = [STREAM_HEAD, chunk(ODD + b"data: [DONE]\n\n"), LAST_CHUNK]
    scripts = [BREAKS["reset"], untold, [STREAM_HEAD, chunk(REST), *END]]
    async with read_as_messages(*scripts) as (events, gateway, answered):
        assert json.loads(answered[2].body)["messages"][-1] == {"role": "assistant", "content": "one two"}
        assert [events.count(text) for text in (b'"one"', b'" two"', b'" three"', b"event: message_stop")] == [1] * 4
        record = last(gateway)
        assert (NOTED.of(record), record.end) == ("rescued", RequestOutcome.COMPLETED)
        assert [(each.number, each.ending.value) for each in record.attempts] == [
            *((1, "broken"), (2, "completed"), (3, "completed"))
        ]
        assert gateway.proxy.dispatcher.retries.retrying == 0


UNTOLD: Mapping[str, list[Script]] = {
    "by the peer": [BREAKS["reset"], [STREAM_HEAD, chunk(REST + ODD), HANG]],
    "in mid-stream": [[STREAM_HEAD + chunk(TEXT), Pause(0.05), chunk(REST + ODD), HANG]],
}


@pytest.mark.parametrize("case", UNTOLD)
async def test_no_peer_goes_on_behind_words_that_the_caller_has_not_got(case: str) -> None:
    """Words in one read with an event that cannot be told are not written: a peer that was given them would leave them
    out. The caller has an explicit error."""
    scripts = [*UNTOLD[case], [STREAM_HEAD, chunk(REST), *END]]
    async with read_as_messages(*scripts) as (events, gateway, answered):
        assert (len(answered), events.count(b" three"), b"event: error" in events) == (len(scripts) - 1, 0, True)
        assert last(gateway).end is RequestOutcome.UPSTREAM_BROKE


async def test_silent_streams_are_left_one_by_one() -> None:
    """By the queue that spreads lost connections over turns of the event loop: an engine that hangs leaves a thousand
    streams silent at once."""
    later: list[Callable[[], None]] = []
    async with scripted_pool([STREAM_HEAD + chunk(TEXT), HANG], [STREAM_HEAD, chunk(REST), *END]) as pool:
        losses = pool.gateway.proxy.dispatcher.losses
        losses.do = lambda work, *given: later.append(partial(work, *given))  # type: ignore[method-assign]
        reading = asyncio.create_task(read(pool.client, "hello"))
        await eventually(lambda: later)
        assert (len(later), len(pool.answered)) == (1, 1)
        later.pop()()
        answer = await reading
        assert (answer.text, answer.error, NOTED.of(last(pool.gateway))) == ("one two three", "", "rescued")


async def test_a_break_asks_for_the_forecasts_of_a_few_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: a thousand streams may break at once."""
    asked: list[str] = []

    def counted(view: FleetReader, endpoint: str, *known: Any) -> Any:
        asked.append(endpoint)
        return forecast(view, endpoint, *known)

    forecast = FleetReader.continuation_ttft
    monkeypatch.setattr(FleetReader, "continuation_ttft", counted)
    async with engines(MOST_FORECAST + 3, speed=10.0) as servers, gateway_before(*servers) as (gateway, client):
        for server in servers:
            server.faults.cut_after_tokens = 5
        await read(client, "hello", max_tokens=9)
        record = last(gateway)
        assert (record.attempts[0].ending, len(asked)) == (AttemptOutcome.BROKEN, MOST_FORECAST)
        assert record.attempts[0].endpoint not in asked
