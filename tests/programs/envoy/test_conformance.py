"""Conformance tests of the Gateway API Inference Extension that concern a data plane, before the real Envoy.

https://github.com/kubernetes-sigs/gateway-api-inference-extension, conformance/tests. They need a cluster, and a picker
with a plugin that obeys the header `test-epp-endpoint-selection`. Here the header becomes the subset that the protocol
knows (`envoy.lb.subset_hint`), and the picker is ours. Each test has the name of its original.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest

from benchmarks.processes import free_port
from gateway.app import Gateway
from gateway.parts.picker.part import PickerPart
from gateway.parts.picker.picker import DESTINATION
from lab.servers.simulated_server import SimulatedServer
from tests.programs.envoy.test_envoy import EVERY_VERSION, ROUTES, chat
from tests.support.envoy import address, configuration, deployed, running_envoy
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines, eventually

SELECTION = "test-epp-endpoint-selection"
REQUESTS, AT_ONCE = 100, 10  # as the originals
SUBSETS: dict[str, Any] = {
    "name": "envoy.filters.http.header_to_metadata",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
        "request_rules": [
            {
                "header": SELECTION,
                "on_header_present": {
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "key": f"{DESTINATION}-subset",
                    "type": "STRING",
                },
                "remove": True,
            }
        ],
    },
}
PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
H2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}


def manager(config: dict[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager of the only listener."""
    found: dict[str, Any] = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def selecting(pickers: list[str], urls: list[str], *, duplex: bool = False) -> dict[str, Any]:
    """The deployed configuration, with subsets by header."""
    config = configuration(deployed(), pickers, urls, duplex=duplex)
    manager(config)["http_filters"].insert(0, SUBSETS)
    return config


@asynccontextmanager
async def picked(
    folder: Path, version: str, servers: Sequence[SimulatedServer], **more: Any
) -> AsyncIterator[tuple[str, aiohttp.ClientSession, Gateway]]:
    """Envoy over these engines, with a picker in this process."""
    async with (
        running({"only": engine_pool(*servers)}, ROUTES, pick={"listen": "127.0.0.1:0"}) as gateway,
        aiohttp.ClientSession() as session,
    ):
        config = selecting([gateway.part(PickerPart).url], [server.url for server in servers], **more)
        async with running_envoy(folder, version, config) as url:
            yield url, session, gateway


async def send(session: aiohttp.ClientSession, url: str, selection: str = "", count: int = REQUESTS) -> None:
    """Requests that must all be answered."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        headers = {SELECTION: selection} if selection else {}
        async with (
            limit,
            session.post(f"{url}/v1/chat/completions", json=chat(f"{number} {selection}"), headers=headers) as reply,
        ):
            assert (reply.status, (await reply.read()).endswith(b"data: [DONE]\n\n")) == (200, True)

    await asyncio.gather(*map(one, range(count)))


def place(server: SimulatedServer) -> str:
    return server.url.removeprefix("http://")


def served(servers: Sequence[SimulatedServer]) -> Counter[str]:
    """Requests since the last look, by address."""
    found = Counter({place(server): len(server.requests) for server in servers if server.requests})
    for server in servers:
        server.requests.clear()
    return found


@EVERY_VERSION
@pytest.mark.parametrize("duplex", [False, True], ids=["buffered", "duplex"])
async def test_gateway_following_epp_routing(tmp_path: Path, version: str, duplex: bool) -> None:
    """GatewayFollowingEPPRouting: a single designated pod, two, and all available pods."""
    async with engines(3) as servers, picked(tmp_path, version, servers, duplex=duplex) as (url, session, _):
        for chosen in (servers[2:], servers[:2], servers):
            await send(session, url, ",".join(map(place, chosen)))
            found = served(servers)
            assert (set(found) <= set(map(place, chosen)), found.total()) == (True, REQUESTS)


@EVERY_VERSION
async def test_gateway_following_epp_routing_with_data_parallelism(tmp_path: Path, version: str) -> None:
    """GatewayFollowingEPPRoutingWithDataParallelism: an address without a port stands for each rank of the pod."""
    async with AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(engines(3, host=f"127.0.0.{pod}")) for pod in (1, 2, 3)]
        everything = [rank for pod in pods for rank in pod]
        first, second, third = ({place(rank) for rank in pod} for pod in pods)
        fixed, two = pods[2][0], [place(pods[1][0]), place(pods[1][2])]
        cases = (
            ("127.0.0.2", second),
            (f"127.0.0.1,{place(fixed)}", {*first, place(fixed)}),
            (f"127.0.0.1,{','.join(two)},127.0.0.3", {*first, *third, *two}),
        )
        async with picked(tmp_path, version, everything) as (url, session, _):
            for selection, allowed in cases:
                await send(session, url, selection)
                found = served(everything)
                assert (set(found) <= allowed, found.total()) == (True, REQUESTS)
                assert len(found) > 1


@EVERY_VERSION
async def test_gateway_destination_endpoint_served(tmp_path: Path, version: str) -> None:
    """GatewayDestinationEndpointServed: the data plane reports the endpoint that served, and the picker counts it there
    before the caller has the head of the answer."""
    async with engines(3) as servers, picked(tmp_path, version, servers) as (url, session, gateway):
        for server in servers:
            body, headers = {**chat("hello"), "max_tokens": 500}, {SELECTION: place(server)}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
                assert reply.status == 200
                busy = [id for id, load in gateway.monitor.loads().items() if load.in_flight]
                assert busy == [f"only/{place(server)}"]
                assert set(served(servers)) == {place(server)}
            await eventually(lambda: not any(load.in_flight for load in gateway.monitor.loads().values()))


@EVERY_VERSION
async def test_epp_unavailable_fail_open(tmp_path: Path, version: str) -> None:
    """EppUnAvailableFailOpen: the designated pod with a picker, then any pod without one."""
    async with engines(3) as servers, picked(tmp_path, version, servers) as (url, session, gateway):
        await send(session, url, place(servers[0]))
        assert set(served(servers)) == {place(servers[0])}
        await gateway.part(PickerPart).server.stop(0.1)
        await send(session, url, place(servers[0]))
        assert set(served(servers)) == set(map(place, servers))


@EVERY_VERSION
async def test_gateway_weighted_across_two_inference_pools(tmp_path: Path, version: str) -> None:
    """GatewayWeightedAcrossTwoInferencePools: 70 to 30, each pool with a picker, each request within its pool."""
    async with (
        engines(3) as primary,
        engines(3) as secondary,
        running({"only": engine_pool(*primary)}, ROUTES, pick={"listen": "127.0.0.1:0"}) as first,
        running({"only": engine_pool(*secondary)}, ROUTES, pick={"listen": "127.0.0.1:0"}) as second,
        aiohttp.ClientSession() as session,
    ):
        config = weighted((first, primary, 70), (second, secondary, 30))
        async with running_envoy(tmp_path, version, config) as url:
            await send(session, url, count=200)
        hits = [served(pool).total() for pool in (primary, secondary)]
        assert sum(hits) == 200
        assert abs(hits[0] / 200 - 0.7) <= 0.1
        for gateway, pool, count in ((first, primary, hits[0]), (second, secondary, hits[1])):
            await eventually(lambda gateway=gateway, count=count: len(gateway.recorder.recent) == count)
            places = {f"only/{place(server)}" for server in pool}
            assert {record.endpoint.id for record in gateway.recorder.recent} <= places


def weighted(*pools: tuple[Gateway, list[SimulatedServer], int]) -> dict[str, Any]:
    """A route with weights: for each pool a cluster of engines, and one of its picker."""
    clusters, choices = list[dict[str, Any]](), []
    for number, (gateway, servers, weight) in enumerate(pools):
        picker, urls = gateway.part(PickerPart).url, [server.url for server in servers]
        config = configuration(deployed(), [picker], urls, duplex=False)
        for cluster in config["static_resources"]["clusters"]:
            clusters.append({**cluster, "name": f"{cluster['name']}{number}"})
        overrides = {"grpc_service": {"envoy_grpc": {"cluster_name": f"picker{number}"}}}
        filters = {"envoy.filters.http.ext_proc": {"@type": PER_ROUTE, "overrides": overrides}}
        choices.append({"name": f"engines{number}", "weight": weight, "typed_per_filter_config": filters})
    config["static_resources"]["clusters"] = clusters
    http = manager(config)
    http["http_filters"][0]["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = "picker0"
    route = http["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    del route["cluster"]
    route["weighted_clusters"] = {"clusters": choices}
    return config


@EVERY_VERSION
@pytest.mark.parametrize("protocol", ["HTTP/2", "HTTP/1.1"])
async def test_inference_pool_app_protocol(tmp_path: Path, version: str, protocol: str) -> None:
    """InferencePoolAppProtocol: each engine is behind a port of Envoy that takes both, and tells it of the protocol."""
    async with engines(2) as servers:
        ports = {free_port(): server for server in servers}
        places = [f"127.0.0.1:{port}" for port in ports]
        only = {**engine_pool(*servers), "endpoints": [f"http://{one}" for one in places]}
        async with (
            running({"only": only}, ROUTES, pick={"listen": "127.0.0.1:0"}) as gateway,
            aiohttp.ClientSession() as session,
        ):
            config = selecting([gateway.part(PickerPart).url], [f"http://{one}" for one in places])
            if protocol == "HTTP/2":
                config["static_resources"]["clusters"][1]["typed_extension_protocol_options"] = H2
            for port, server in ports.items():
                add_front(config, port, server)
            async with running_envoy(tmp_path, version, config) as url:
                await eventually(lambda: gateway.decider.any_usable(monotonic()))
                for one, server in zip(places, servers, strict=True):
                    await send(session, url, one, count=5)
                    found = [each for each in server.requests if each.path == "/v1/chat/completions"]
                    assert [each.headers["x-protocol"] for each in found] == [protocol] * 5
                    assert not any(each.requests for each in servers if each is not server)
                    server.requests.clear()


def add_front(config: dict[str, Any], port: int, server: SimulatedServer) -> None:
    """A listener before an engine."""
    static = config["static_resources"]
    name = f"engine {port}"
    engine = {"endpoint": {"address": address(server.host, server.port)}}
    static["clusters"].append(
        {"name": name, "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [engine]}]}}
    )
    host = {"name": name, "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": name}}]}
    host["request_headers_to_add"] = [{"header": {"key": "x-protocol", "value": "%PROTOCOL%"}}]
    http = {**manager(config), "stat_prefix": name, "route_config": {"virtual_hosts": [host]}}
    http["http_filters"] = http["http_filters"][-1:]
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": http}]
    static["listeners"].append(
        {"name": name, "address": address("127.0.0.1", port), "filter_chains": [{"filters": filters}]}
    )
