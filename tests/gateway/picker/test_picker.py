"""The endpoint picker as a data plane sees it: external processing, message by message, before simulated engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from backends.ext_proc.messages import PIECE, BodyMode
from backends.ext_proc.protobuf import sized
from gateway.app import Gateway
from gateway.observe.record import RequestOutcome
from gateway.parts.picker.part import PickerPart
from gateway.parts.picker.picker import DESTINATION, WITHIN
from gateway.parts.picker.picker_service import HEALTH
from lab.servers.simulated_server import SimulatedServer
from policies.types import AttemptOutcome, Health
from tests.support.ext_proc import (
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from tests.support.gateways import running
from tests.support.grpc_client import GrpcClient, framed, grpc_client
from tests.support.simulated import engine_pool, engines, eventually

pytestmark = pytest.mark.virtual_time

ROUTES = {"served": {"tiers": ["only"], "ttft": {"budget": "1s"}, "gap": {"budget": "1s"}}}
CHAT: dict[str, Any] = {"model": "served", "stream": True, "messages": [{"role": "user", "content": "hello " * 500}]}
POST = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
FIRST, SECOND = (
    b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {"content": "Hello"}}]}\n\n',
)
LAST = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
WHOLE = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
}


def talk(about: str) -> dict[str, Any]:
    """A prompt of seconds of prefill."""
    return {**CHAT, "messages": [{"role": "user", "content": f"{about} " * 20_000}]}


def headers(values: Mapping[str, str], end: bool = False) -> HttpHeaders:
    pairs = [HeaderValue(key=name, raw_value=value.encode()) for name, value in values.items()]
    return HttpHeaders(headers=HeaderMap(headers=pairs), end_of_stream=end)


class Envoy:
    """One request on its way: sends what Envoy would, and reads what it is told."""

    def __init__(self, client: GrpcClient, request: BodyMode, response: BodyMode = BodyMode.STREAMED) -> None:
        self.client = client
        self.call = client.begin()
        self.modes = ProtocolConfiguration(request_body_mode=int(request), response_body_mode=int(response))  # type: ignore[arg-type]

    async def tell(self, end: bool = False, **message: Any) -> None:
        sent = ProcessingRequest(**message, protocol_config=self.modes)
        await self.client.send(self.call, framed(sent.SerializeToString()), end)

    async def told(self) -> ProcessingResponse:
        found = ProcessingResponse()
        found.ParseFromString(await self.client.message(self.call))
        return found

    async def ask(self, **message: Any) -> ProcessingResponse:
        await self.tell(**message)
        return await self.told()

    async def pick(self, body: Any = CHAT, metadata: Mapping[str, Mapping[str, str]] | None = None, **more: str) -> Any:
        """Headers and body of a BUFFERED request; the answer to the body."""
        first = ProcessingRequest(request_headers=headers({**POST, **more}), protocol_config=self.modes)
        for space, values in (metadata or {}).items():
            first.metadata_context.filter_metadata[space].update(values)
        await self.client.send(self.call, framed(first.SerializeToString()))
        assert (await self.told()).WhichOneof("response") == "request_headers"
        return await self.ask(request_body=HttpBody(body=json.dumps(body).encode(), end_of_stream=True))


def destination(told: ProcessingResponse) -> str:
    """The address named in header and metadata, which are equal."""
    part = getattr(told, told.WhichOneof("response") or "")
    found = {each.header.key: each.header.raw_value.decode() for each in part.response.header_mutation.set_headers}
    assert told.dynamic_metadata["envoy.lb"][DESTINATION] == found[DESTINATION]
    return found[DESTINATION]


@asynccontextmanager
async def picking(
    count: int = 2, pool: Mapping[str, Any] | None = None, **pick: Any
) -> AsyncIterator[tuple[Gateway, GrpcClient, list[SimulatedServer]]]:
    settings = {"listen": "127.0.0.1:0", **pick}
    async with (
        engines(count) as servers,
        running({"only": engine_pool(*servers, **pool or {})}, ROUTES, pick=settings) as gateway,
        grpc_client(gateway.part(PickerPart).url) as client,
    ):
        yield gateway, client, servers


def addresses(servers: list[SimulatedServer]) -> set[str]:
    return {server.url.removeprefix("http://") for server in servers}


async def answered(envoy: Envoy, served: str, *chunks: bytes, last: bytes = LAST) -> None:
    """The rest of a request that `served` answers, by default as a stream."""
    part = ProcessingRequest(response_headers=headers({":status": "200"}), protocol_config=envoy.modes)
    part.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": served})
    await envoy.client.send(envoy.call, framed(part.SerializeToString()))
    await envoy.told()
    for chunk in chunks or (FIRST, SECOND):
        await asyncio.sleep(0.02)
        assert (await envoy.ask(response_body=HttpBody(body=chunk))).WhichOneof("response") == "response_body"
    await envoy.tell(response_body=HttpBody(body=last, end_of_stream=True), end=True)
    await envoy.told()
    assert await envoy.client.status(envoy.call) == "0"


async def test_a_prompt_goes_back_to_the_engine_that_holds_its_prefix() -> None:
    """Learned from the answer as it passes: first token, end, and what served."""
    async with picking() as (gateway, client, servers):
        chosen = []
        for _ in range(4):
            envoy = Envoy(client, BodyMode.BUFFERED)
            chosen.append(destination(await envoy.pick()))
            await answered(envoy, chosen[-1])
        assert len({*chosen}) == 1
        assert {*chosen} <= addresses(servers)
        first, *rest = gateway.recorder.recent
        assert first.placed.cached_tokens == 0
        assert all((each.placed.cached_tokens or 0) > 300 for each in rest)
        assert [(each.end, each.status, each.operation) for each in rest] == [
            (RequestOutcome.COMPLETED, 200, "pick")
        ] * 3
        assert first.ttft is not None
        assert 0.03 < first.ttft < 0.2  # the second chunk: headers and the chunk of the role are no first token


async def test_a_record_tells_of_an_answer_what_that_of_a_served_one_does() -> None:
    """Model, attempt, tokens and their pace, of which the length of answers is learned."""
    async with picking() as (gateway, client, _):
        envoy = Envoy(client, BodyMode.BUFFERED)
        served = destination(await envoy.pick())
        await answered(envoy, served, SECOND, SECOND)
        (record,) = gateway.recorder.recent
        assert (record.answer.model, record.answer.output_tokens, len(record.attempts)) == ("served", 2, 1)
        assert record.endpoint.id.endswith(served)
        assert record.attempts[0].ending is AttemptOutcome.COMPLETED
        assert 0.015 < (record.answer.tpot or 0) < 0.1  # a chunk each 20 ms
        assert 0.015 < (record.answer.gaps.longest or 0) < 0.1
        assert record.gap_met


async def test_a_whole_answer_misses_no_first_token() -> None:
    async with picking() as (gateway, client, _):
        envoy = Envoy(client, BodyMode.BUFFERED)
        served = destination(await envoy.pick({**CHAT, "stream": False}))
        whole = json.dumps(WHOLE).encode()
        await answered(envoy, served, whole[:40], last=whole[40:])
        (record,) = gateway.recorder.recent
        assert (record.end, record.answer.output_tokens, record.ttft_met) == (RequestOutcome.COMPLETED, 3, None)
        assert record.ttft is not None


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_not_shown_is_judged_by_its_status_alone(stream: bool) -> None:
    """Body mode NONE: the call ends with the request."""
    async with picking() as (gateway, client, _):
        envoy = Envoy(client, BodyMode.BUFFERED, BodyMode.NONE)
        await envoy.pick({**CHAT, "stream": stream})
        await envoy.ask(response_headers=headers({":status": "200"}))
        await envoy.client.send(envoy.call, b"", end=True)
        assert await envoy.client.status(envoy.call) == "0"
        (record,) = gateway.recorder.recent
        assert (record.end, record.ttft_met) == (RequestOutcome.COMPLETED, None)
        assert record.attempts[0].ending is AttemptOutcome.COMPLETED


async def test_an_answer_that_is_shown_at_its_end_has_no_first_token() -> None:
    """Body mode BUFFERED: its tokens are counted, and the time of the whole is not taken for that of the first."""
    async with picking() as (gateway, client, _):
        envoy = Envoy(client, BodyMode.BUFFERED, BodyMode.BUFFERED)
        await envoy.pick()
        await envoy.ask(response_headers=headers({":status": "200"}))
        await asyncio.sleep(2.0)
        await envoy.tell(response_body=HttpBody(body=FIRST + SECOND + SECOND + LAST, end_of_stream=True), end=True)
        await envoy.told()
        assert await envoy.client.status(envoy.call) == "0"
        (record,) = gateway.recorder.recent
        assert (record.end, record.answer.output_tokens) == (RequestOutcome.COMPLETED, 2)
        assert (record.ttft, record.ttft_met, record.gap_met) == (None, None, None)
        assert record.attempts[0].ending is AttemptOutcome.COMPLETED


async def test_what_served_is_learned_and_not_what_was_picked() -> None:
    """A data plane takes another address of the list, or one of its own."""
    async with picking(fallbacks=1) as (_, client, servers):
        envoy = Envoy(client, BodyMode.BUFFERED)
        picked, other = destination(await envoy.pick()).split(",")
        assert {picked, other} == addresses(servers)
        await answered(envoy, other)
        again = Envoy(client, BodyMode.BUFFERED)
        assert destination(await again.pick()).split(",")[0] == other


@pytest.mark.parametrize("trailers", [False, True])
async def test_a_duplex_body_comes_back_whole_behind_the_choice(trailers: bool) -> None:
    """Nothing is answered before its end, and no piece is longer than data planes take."""
    async with picking() as (_, client, servers):
        envoy, body = (
            Envoy(client, BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX),
            json.dumps(CHAT).encode() + b" " * 200_000,
        )
        await envoy.tell(request_headers=headers(POST))
        for at in range(0, len(body), 50_000):
            await envoy.tell(request_body=HttpBody(body=body[at : at + 50_000]))
        if trailers:
            await envoy.tell(request_trailers=HttpTrailers())
        else:
            await envoy.tell(request_body=HttpBody(end_of_stream=True))
        assert destination(await envoy.told()) in addresses(servers)
        back = b""
        while len(back) < len(body):
            piece = (await envoy.told()).request_body.response.body_mutation.streamed_response
            assert len(piece.body) <= PIECE
            back += piece.body
        assert back == body
        assert (await envoy.told()).WhichOneof("response") == "request_trailers" if trailers else piece.end_of_stream


async def test_a_request_without_a_body_goes_to_the_least_loaded_engine() -> None:
    async with picking() as (_, client, servers):
        envoy = Envoy(client, BodyMode.BUFFERED)
        await envoy.pick()
        get = Envoy(client, BodyMode.BUFFERED)
        told = await get.ask(request_headers=headers({":method": "GET", ":path": "/v1/models"}, end=True))
        assert destination(told) in addresses(servers)


@pytest.mark.parametrize("body", [{"model": "unknown", "messages": []}, [1], {"model": "served", "messages": 7}])
async def test_a_request_that_is_not_understood_goes_to_an_engine_which_says_so(body: Any) -> None:
    async with picking() as (_, client, servers):
        assert destination(await Envoy(client, BodyMode.BUFFERED).pick(body)) in addresses(servers)


async def test_a_subset_is_kept_to() -> None:
    """With and without ports; where none of it is known, the request is refused."""
    async with picking() as (_, client, servers):
        for server in servers:
            wanted = server.url.removeprefix("http://")
            hint = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": f"10.9.9.9:1, {wanted}"}}
            assert destination(await Envoy(client, BodyMode.BUFFERED).pick(metadata=hint)) == wanted
        hint = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": "127.0.0.1"}}
        assert destination(await Envoy(client, BodyMode.BUFFERED).pick(metadata=hint)) in addresses(servers)
        hint = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": "10.9.9.9"}}
        refused = (await Envoy(client, BodyMode.BUFFERED).pick(metadata=hint)).immediate_response
        assert refused.status.code == 503
        assert json.loads(refused.body)["error"]["code"] == "unavailable"
        told = {each.header.key: each.header.raw_value for each in refused.headers.set_headers}
        assert told["x-llm-d-request-dropped-reason"] == b"rejected-no-endpoints"
        assert destination(await Envoy(client, BodyMode.BUFFERED).pick()) in addresses(servers)  # nothing is held up


async def test_control_headers_of_a_caller_steer_nothing_and_reach_no_engine() -> None:
    async with picking() as (_, client, servers):
        sent = {DESTINATION: "169.254.169.254:80", "x-llm-d-slo-ttft-ms": "900", f"{DESTINATION}-subset": "10.0.0.1"}
        told = await Envoy(client, BodyMode.BUFFERED).pick(**sent)
        assert destination(told) in addresses(servers)
        removed = {*told.request_body.response.header_mutation.remove_headers}
        assert removed == {"x-llm-d-slo-ttft-ms", f"{DESTINATION}-subset"}


async def test_a_body_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engines(1) as servers:
        more = {"pick": {"listen": "127.0.0.1:0"}, "defaults": {"max_body": "1kB"}}
        async with (
            running({"only": engine_pool(*servers)}, ROUTES, **more) as gateway,
            grpc_client(gateway.part(PickerPart).url) as client,
        ):
            told = await Envoy(client, BodyMode.BUFFERED).pick()
            assert told.immediate_response.status.code == 413


async def test_an_answer_comes_in_time_whatever_the_queue_does() -> None:
    """One engine, one request at a time: the second would wait for seconds."""
    async with engines(1) as servers:
        only = engine_pool(*servers, concurrent_requests=1)
        async with (
            running({"only": only}, ROUTES, pick={"listen": "127.0.0.1:0"}) as gateway,
            grpc_client(gateway.part(PickerPart).url) as client,
        ):
            await Envoy(client, BodyMode.BUFFERED).pick()
            began = asyncio.get_running_loop().time()
            assert destination(await Envoy(client, BodyMode.BUFFERED).pick()) in addresses(servers)
            assert asyncio.get_running_loop().time() - began < 0.3
            assert not gateway.queue.depth()


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.FULL_DUPLEX])
async def test_a_request_is_held_for_longer_where_the_data_plane_is_to_wait(mode: BodyMode) -> None:
    """Where Envoy has a clock, it is asked for the hold and a margin, once and in time. The engine's only place is
    taken; it is free after 1 s."""
    async with engines(1) as servers:
        only = engine_pool(*servers, concurrent_requests=1)
        async with (
            running({"only": only}, ROUTES, pick={"listen": "127.0.0.1:0", "hold": "10s"}) as gateway,
            grpc_client(gateway.part(PickerPart).url) as client,
        ):
            first, second = Envoy(client, BodyMode.BUFFERED), Envoy(client, mode)
            chosen = destination(await first.pick())
            now = asyncio.get_running_loop().time
            began = now()
            await second.tell(request_headers=headers(POST))
            if mode is BodyMode.BUFFERED:
                await second.told()
            await second.tell(request_body=HttpBody(body=json.dumps(CHAT).encode(), end_of_stream=True))
            if mode is BodyMode.BUFFERED:
                assert (await second.told()).override_message_timeout.ToMilliseconds() == 10_250
                assert now() - began < 0.2
            await asyncio.sleep(1.0)
            assert gateway.queue.depth() == {"served": 1}
            await answered(first, chosen)
            assert destination(await second.told()) == chosen
            assert 1.0 < now() - began < 2.0


async def test_a_hold_ends_before_the_data_plane_gives_up() -> None:
    async with engines(1) as servers:
        only = engine_pool(*servers, concurrent_requests=1)
        async with (
            running({"only": only}, ROUTES, pick={"listen": "127.0.0.1:0", "hold": "3s"}) as gateway,
            grpc_client(gateway.part(PickerPart).url) as client,
        ):
            await Envoy(client, BodyMode.BUFFERED).pick()
            began = asyncio.get_running_loop().time()
            second = Envoy(client, BodyMode.BUFFERED)
            assert (await second.pick()).override_message_timeout.ToMilliseconds() == 3_250
            assert destination(await second.told()) in addresses(servers)
            assert 2.9 < asyncio.get_running_loop().time() - began < 3.25


async def test_a_request_that_would_wait_for_longer_is_decided_and_counted_all_the_same() -> None:
    """The engines prefill for seconds: a request named one by load alone would be lost to the next decision."""
    async with picking() as (gateway, client, _):
        await asyncio.gather(*(Envoy(client, BodyMode.BUFFERED).pick(talk(about)) for about in "abcdef"))
        loads = gateway.fleet.snapshot(monotonic()).loads.values()
        assert sorted(load.in_flight for load in loads) == [3, 3]
        assert all(life.record.decision is not None for life in gateway.recorder.lives)


async def test_tokens_of_an_answer_in_progress_are_counted() -> None:
    async with picking() as (gateway, client, _):
        envoy = Envoy(client, BodyMode.BUFFERED)
        await envoy.pick()
        await envoy.ask(response_headers=headers({":status": "200"}))
        for _ in range(3):
            await envoy.ask(response_body=HttpBody(body=SECOND))
        await asyncio.sleep(1)  # the monitor reads them
        assert [each.output_tokens for each in gateway.monitor.fleet.view.answering()] == [3]  # type: ignore[attr-defined]


async def test_a_caller_who_leaves_frees_the_engine() -> None:
    async with picking(1) as (gateway, client, _):
        envoy = Envoy(client, BodyMode.BUFFERED)
        await envoy.pick()
        (id,) = gateway.monitor.loads()
        assert gateway.monitor.loads()[id].in_flight == 1
        client.h2.reset_stream(envoy.call)
        client.flush()
        await eventually(lambda: gateway.monitor.loads()[id].in_flight == 0)
        assert gateway.recorder.recent[-1].end is RequestOutcome.CLIENT_GONE


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x12\x7f\x00", b"\x0a\x00\x0a\x00"])
async def test_a_malformed_message_ends_its_call_alone(raw: bytes) -> None:
    async with picking() as (_, client, servers):
        bad = client.begin()
        await client.send(bad, framed(raw), end=True)
        assert await client.status(bad) in ("0", "3")
        assert destination(await Envoy(client, BodyMode.BUFFERED).pick()) in addresses(servers)


async def test_health_follows_the_engines() -> None:
    """1 is SERVING, 2 is not; of any service that is asked for, but `liveness`: another process would help nobody."""
    async with picking(1) as (gateway, client, servers):

        async def health(service: bytes) -> bytes:
            call = client.begin(HEALTH)
            await client.send(call, framed(sized(1, service) if service else b""), end=True)
            return await client.message(call)

        assert await health(b"readiness") == b"\x08\x01"
        await servers[0].stop()
        await eventually(lambda: not gateway.decider.any_usable(asyncio.get_running_loop().time()))
        assert await health(b"") == await health(b"readiness") == b"\x08\x02"
        assert await health(b"liveness") == b"\x08\x01"


async def test_another_service_is_unimplemented() -> None:
    async with picking(1) as (_, client, _):
        call = client.begin("/other.Service/Method")
        await client.send(call, framed(b""), end=True)
        assert await client.status(call) == "12"


async def test_a_name_of_a_caller_is_kept_to_a_bounded_length() -> None:
    """Data planes pass on headers of 60 KB, and what is known of a thousand callers is kept by their names."""
    async with picking() as (gateway, client, _):
        await Envoy(client, BodyMode.BUFFERED).pick(**{"x-llm-d-inference-fairness-id": "team-" + "a" * 30_000})
        known = [each.caller for each in gateway.decider.fleet._attempts.values()]
    assert [len(name) for name in known] == [128]


async def test_failures_of_callers_without_a_name_close_no_engine_for_others() -> None:
    """They may be of one request that is sent again and again: the gateway asks the engine itself."""
    async with picking() as (gateway, client, _):
        for _ in range(20):
            envoy = Envoy(client, BodyMode.BUFFERED)
            await envoy.pick()
            await envoy.ask(response_headers=headers({":status": "500"}))
            await envoy.ask(response_body=HttpBody(body=b"{}", end_of_stream=True))
        loads = gateway.decider.fleet.snapshot_for("another", monotonic()).loads
        assert [load.health for load in loads.values()] == [Health.UP, Health.UP]


async def test_a_pick_whose_time_is_over_asks_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stall of the event loop both timers are due in the same turn."""
    monkeypatch.setattr("gateway.parts.picker.picker.ASK_AFTER", WITHIN)
    failed = list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    async with picking(1, {"concurrent_requests": 1}, hold="2s") as (_, client, servers):
        await Envoy(client, BodyMode.BUFFERED).pick()
        assert destination(await Envoy(client, BodyMode.BUFFERED).pick()) in addresses(servers)
    assert not failed
