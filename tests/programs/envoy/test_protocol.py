"""Rules of external processing that data planes and pickers rely on, before the real Envoy: `make envoy`."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest

from gateway.observe.record import RequestOutcome
from gateway.parts.picker.part import PickerPart
from gateway.parts.picker.picker import DESTINATION
from lab.servers.simulated_server import SimulatedServer
from scripts.envoy_setup import VERSIONS
from tests.programs.envoy.test_conformance import manager, picked, place, selecting, send, served
from tests.programs.envoy.test_envoy import BOTH_MODES, EVERY_VERSION, ROUTES, ask, chat
from tests.support.envoy import running_envoy
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines, eventually

PICK = {"listen": "127.0.0.1:0"}
VERSIONS_WITH_SELECTED_HOST = [version for version in VERSIONS if version != "1.36.4"]  # which refuses the field


@EVERY_VERSION
@BOTH_MODES
async def test_a_request_without_a_body_is_sent_on(tmp_path: Path, version: str, duplex: bool) -> None:
    """Its headers end the stream: no body is waited for."""
    async with (
        engines(3) as servers,
        picked(tmp_path, version, servers, duplex=duplex) as (url, session, _),
        session.get(f"{url}/v1/models") as reply,
    ):
        assert (reply.status, [each["id"] for each in (await reply.json())["data"]]) == (200, ["served"])


@EVERY_VERSION
async def test_an_address_that_envoy_does_not_know_is_replaced_and_counts_nowhere(tmp_path: Path, version: str) -> None:
    """Envoy says nothing of it: load is counted where the answer comes from."""
    async with engines(3) as servers, running({"only": engine_pool(*servers)}, ROUTES, pick=PICK) as gateway:
        known = [server.url for server in servers[1:]]
        async with (
            aiohttp.ClientSession() as session,
            running_envoy(tmp_path, version, selecting([gateway.part(PickerPart).url], known)) as url,
        ):
            headers, body = {"test-epp-endpoint-selection": place(servers[0])}, {**chat("hello"), "max_tokens": 500}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
                assert reply.status == 200
                (place_of_answer,) = served(servers)
                busy = [id for id, load in gateway.monitor.loads().items() if load.in_flight]
                assert busy == [f"only/{place_of_answer}"]
                assert place_of_answer != place(servers[0])


@EVERY_VERSION
@BOTH_MODES
async def test_a_request_waits_in_the_queue_for_as_long_as_the_picker_asks(
    tmp_path: Path, version: str, duplex: bool
) -> None:
    """The engine takes one request at a time, for 0.7 s: far beyond `message_timeout`."""
    async with engines(1) as servers:
        only, pick = engine_pool(*servers, concurrent_requests=1), {**PICK, "hold": "20s"}
        async with running({"only": only}, ROUTES, pick=pick) as gateway, aiohttp.ClientSession() as session:
            config = selecting([gateway.part(PickerPart).url], [servers[0].url], duplex=duplex)
            async with running_envoy(tmp_path, version, config) as url:
                body = {**chat("hello"), "max_tokens": 100}
                answers = await asyncio.gather(*(ask(session, url, body) for _ in range(3)))
                assert [status for status, _ in answers] == [200] * 3
                await eventually(lambda: gateway.recorder.live == 0)
            ends = sorted(record.arrival + record.total for record in gateway.recorder.recent)
            assert [each.end for each in gateway.recorder.recent] == [RequestOutcome.COMPLETED] * 3
            assert min(later - before for before, later in pairwise(ends)) > 0.5


@EVERY_VERSION
async def test_a_caller_who_leaves_frees_the_engine(tmp_path: Path, version: str) -> None:
    async with engines(1) as servers, picked(tmp_path, version, servers) as (url, session, gateway):
        body = {**chat("hello"), "max_tokens": 5_000}
        async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
            await reply.content.readany()
            (load,) = gateway.monitor.loads().values()
            assert load.in_flight == 1
            reply.close()
        await eventually(lambda: not any(each.in_flight for each in gateway.monitor.loads().values()))
        await eventually(lambda: [each.end for each in gateway.recorder.recent] == [RequestOutcome.CLIENT_GONE])


@EVERY_VERSION
async def test_a_body_above_the_buffer_of_envoy_is_refused_by_it(tmp_path: Path, version: str) -> None:
    """BUFFERED has 1 MB unless the listener says otherwise, as the deployed one does."""
    async with engines(1) as servers, running({"only": engine_pool(*servers)}, ROUTES, pick=PICK) as gateway:
        config = selecting([gateway.part(PickerPart).url], [server.url for server in servers])
        del config["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"]
        async with aiohttp.ClientSession() as session, running_envoy(tmp_path, version, config) as url:
            body = {**chat("hello"), "metadata": {"note": "x" * 2_000_000}}
            async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
                assert reply.status == 413
            await send(session, url, count=1)


@EVERY_VERSION
@BOTH_MODES
async def test_one_address_is_followed_by_an_original_dst_cluster(tmp_path: Path, version: str, duplex: bool) -> None:
    """It reads the header alone, as Envoy AI Gateway does. A caller's own header steers nothing."""
    async with engines(3) as servers, running({"only": engine_pool(*servers)}, ROUTES, pick=PICK) as gateway:
        config = selecting([gateway.part(PickerPart).url], [server.url for server in servers], duplex=duplex)
        clusters = config["static_resources"]["clusters"]
        by_header = {"use_http_header": True, "http_header_name": DESTINATION}
        clusters[1] = {
            "name": "engines",
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": by_header,
        }
        async with aiohttp.ClientSession() as session, running_envoy(tmp_path, version, config) as url:
            for server in servers:
                assert await answers_at(session, url, server, servers) == {place(server): 1}


@EVERY_VERSION
@BOTH_MODES
async def test_a_request_that_is_shed_is_told_when_to_come_back(tmp_path: Path, version: str, duplex: bool) -> None:
    """An immediate response of the picker, with all of its headers. The engine takes one request at a time, for 0.7 s:
    the last of eight cannot have its first token within 1 s. What is shed reaches no engine."""
    async with engines(1) as servers:
        only, limits = engine_pool(*servers, concurrent_requests=1), {"defaults": {"first_token": "1s"}}
        async with (
            running({"only": only}, ROUTES, pick={**PICK, "hold": "20s"}, **limits) as gateway,
            aiohttp.ClientSession() as session,
        ):
            config = selecting([gateway.part(PickerPart).url], [servers[0].url], duplex=duplex)
            async with running_envoy(tmp_path, version, config) as url:
                answers = await asyncio.gather(*(answer_to(session, url) for _ in range(8)))
    shed = [headers for status, headers in answers if status == 503]
    assert {status for status, _ in answers} == {200, 503}
    assert [int(headers["retry-after"]) >= 1 for headers in shed] == [True] * len(shed)
    assert {headers["x-llm-d-request-dropped-reason"] for headers in shed} == {"rejected-no-endpoints"}
    assert len(servers[0].requests) == len(answers) - len(shed)


async def answer_to(session: aiohttp.ClientSession, url: str) -> tuple[int, dict[str, str]]:
    """Status and headers."""
    body = {**chat("hello"), "max_tokens": 100}
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        await reply.read()
        return reply.status, {name.lower(): value for name, value in reply.headers.items()}


@pytest.mark.parametrize("version", VERSIONS_WITH_SELECTED_HOST)
async def test_the_selected_host_of_envoy_s_metadata_is_what_served(tmp_path: Path, version: str) -> None:
    """`selected_host_key`, by gateways that send no attributes. Of two addresses the first does not answer."""
    async with engines(3) as servers, running({"only": engine_pool(*servers)}, ROUTES, pick=PICK) as gateway:
        config = selecting([gateway.part(PickerPart).url], [server.url for server in servers[1:]])
        filters = manager(config)["http_filters"]
        (processor,) = [each["typed_config"] for each in filters if each["name"] == "envoy.filters.http.ext_proc"]
        del processor["response_attributes"]
        policy = config["static_resources"]["clusters"][1]["load_balancing_policy"]["policies"][0]
        told = {"key": "envoy.lb", "path": [{"key": f"{DESTINATION}-served"}]}
        policy["typed_extension_config"]["typed_config"]["selected_host_key"] = told
        async with aiohttp.ClientSession() as session, running_envoy(tmp_path, version, config) as url:
            for picked_server in (servers[0], servers[1]):
                headers = {"test-epp-endpoint-selection": place(picked_server)}
                body = {**chat("hello"), "max_tokens": 500}
                async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
                    assert reply.status == 200
                    (place_of_answer,) = served(servers)
                    busy = [id for id, load in gateway.monitor.loads().items() if load.in_flight]
                    assert busy == [f"only/{place_of_answer}"]
                await eventually(lambda: gateway.recorder.live == 0)


async def answers_at(
    session: aiohttp.ClientSession, url: str, server: SimulatedServer, servers: list[SimulatedServer]
) -> dict[str, int]:
    """Requests by address, of one that is meant for `server` and names another itself."""
    other = next(each for each in servers if each is not server)
    headers = {"test-epp-endpoint-selection": place(server), DESTINATION: place(other)}
    async with session.post(f"{url}/v1/chat/completions", json=chat("hello"), headers=headers) as reply:
        assert reply.status == 200
        await reply.read()
    return dict(served(servers))
