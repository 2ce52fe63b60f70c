"""DNS names with several addresses: each address is an endpoint, added and removed while requests run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.record import RequestOutcome
from gateway.parts.discovery.part import DiscoveryPart
from tests.support.builders import DONE, FINISH, STREAMED, TOKEN, calling, get, last, stream_status
from tests.support.gateways import document, pool, started
from tests.support.leaving_host import STREAM, finished, two_hosts
from tests.support.served import serving, write_config
from tests.support.simulated import eventually
from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

pytestmark = pytest.mark.virtual_time


class Dns:
    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses

    async def __call__(self, name: str) -> Sequence[str]:
        if name != "engines.localhost" or not self.addresses:
            raise OSError("Name or service not known")
        return self.addresses


@asynccontextmanager
async def gateway_by_name(dns: Dns, port: str, **more: Any) -> AsyncIterator[Gateway]:
    """Gateway with the endpoints of the name `engines.localhost`."""
    endpoint = {"url": f"http://engines.localhost:{port}", "resolve": "10ms"}
    routes = {"chat": {"tiers": ["only"], "scorer": "round_robin"}}
    gateway = Gateway(Config.model_validate(document({"only": {**pool(), "endpoints": [endpoint]}}, routes, **more)))
    gateway.part(DiscoveryPart).found.dns.resolve = dns
    async with started(gateway):
        yield gateway


async def test_every_address_of_a_name_is_an_endpoint() -> None:
    """Requests connect to the address and send the name as Host."""
    async with Upstream([STREAMED]) as one:
        port = one.url.rpartition(":")[2]
        async with (
            Upstream([STREAMED], host="127.0.0.2", port=int(port)) as two,
            gateway_by_name(Dns("127.0.0.1", "127.0.0.2"), port) as gateway,
        ):
            assert gateway.monitor.loads().keys() == {f"only/127.0.0.1:{port}", f"only/127.0.0.2:{port}"}
            for _ in range(4):
                assert await stream_status(gateway) == 200
            assert one.requests
            assert two.requests
            assert {request.headers["host"] for request in one.requests + two.requests} == {f"engines.localhost:{port}"}
            shown = json.loads((await get(gateway.admin_url, "/config"))[2])["pools"]["only"]["endpoints"]
            assert [endpoint["url"] for endpoint in shown] == [f"http://engines.localhost:{port}"]


async def test_a_removed_address_finishes_its_stream_and_gets_no_new_request() -> None:
    """New requests go to the remaining addresses."""
    async with two_hosts() as (leaves, comes, port):
        dns = Dns("127.0.0.1")
        async with gateway_by_name(dns, str(port)) as gateway, calling(gateway.url) as caller:
            assert (await caller.ask(STREAM))[0] == 200
            dns.addresses = ["127.0.0.2"]
            await eventually(lambda: gateway.monitor.loads().keys() == {f"only/127.0.0.2:{port}"})
            assert await stream_status(gateway) == 200
            assert len(comes.requests) == 1
            assert await finished(leaves, caller) == TOKEN + FINISH + DONE
            assert last(gateway).end is RequestOutcome.COMPLETED


async def test_a_pool_without_addresses_has_no_endpoint_until_the_name_resolves() -> None:
    """The gateway starts and is not ready, and other tiers serve; endpoints appear with the first addresses."""
    async with Upstream([STREAMED]) as engine, Upstream([STREAMED]) as api:
        dns, port = Dns(), engine.url.rpartition(":")[2]
        async with gateway_by_name(dns, port) as gateway:
            assert (await get(gateway.url, "/ready"))[0] == 503
            assert await stream_status(gateway) == 503
            assert last(gateway).end is RequestOutcome.UNAVAILABLE
            dns.addresses = ["127.0.0.1"]
            await eventually(gateway.monitor.loads)
            assert (await get(gateway.url, "/ready"))[0] == 200
            assert await stream_status(gateway) == 200
        two = {
            "only": {**pool(), "endpoints": [{"url": "http://gone.svc:1", "resolve": "1s"}]},
            "api": pool(api.url),
        }
        async with gateway_by_name(Dns(), port) as gateway:
            await gateway.apply_config(Config.model_validate(document(two)))
            assert await stream_status(gateway) == 200
            assert last(gateway).endpoint.pool == "api"


async def test_a_reload_keeps_resolved_addresses() -> None:
    """A reload resolves new names only."""
    async with Upstream([STREAMED]) as engine:
        dns, port = Dns("127.0.0.1"), engine.url.rpartition(":")[2]
        async with gateway_by_name(dns, port) as gateway:
            dns.addresses = []
            endpoint = {"url": f"http://engines.localhost:{port}", "resolve": "10ms", "region": "here"}
            await gateway.apply_config(Config.model_validate(document({"only": {**pool(), "endpoints": [endpoint]}})))
            assert await stream_status(gateway) == 200
            assert last(gateway).endpoint.locality == "here"
            await asyncio.sleep(0.03)
            assert await stream_status(gateway) == 200


@pytest.mark.real_time
async def test_workers_resolve_names_independently_and_share_load_by_address(tmp_path: Path) -> None:
    """Workers resolve `localhost` in real processes; requests in flight at its address are visible to all workers."""
    slow: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]
    async with Upstream(slow) as engine:
        port = engine.url.rpartition(":")[2]
        config = write_config(tmp_path / "f.yaml", f"{{url: http://localhost:{port}, resolve: 1s}}")
        async with serving(config, "--workers", "2") as served, AsyncExitStack() as stack:
            for _ in range(8):
                caller = await stack.enter_async_context(calling(served.url))
                assert (await caller.ask(STREAM))[0] == 200
            async with asyncio.timeout(60):
                while True:
                    [shown] = json.loads((await get(served.admin, "/fleet"))[2])
                    if shown["load"]["in_flight"] == 8:
                        break
                    await asyncio.sleep(0.05)
            assert shown["endpoint"]["id"] == f"only/127.0.0.1:{port}"
