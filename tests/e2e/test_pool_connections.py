"""Ways to the servers of a pool: certificates, a proxy, query parameters, and parameters by other names."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.app import Gateway
from gateway.config.loading import change
from gateway.config.models import Config
from gateway.observe.record import RequestOutcome
from tests.support.builders import CHAT, STREAMED, calling, last, post
from tests.support.certificates import Certificates, made
from tests.support.connect_proxy import ConnectProxy
from tests.support.gateways import document, pool, running
from tests.support.upstream import HANG, STREAM_HEAD, Script, Upstream

STREAM = {**CHAT, "stream": True}


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return made(tmp_path_factory.mktemp("tls"))


async def ask(gateway: Gateway, **more: Any) -> tuple[int, bytes]:
    async with calling(gateway.url) as caller:
        status, _ = await caller.ask(post({**STREAM, **more}))
        return status, b"".join(await caller.chunks()) if status == 200 else b""


def tls(certificates: Certificates, **more: str) -> dict[str, str]:
    return {"ca": str(certificates.ca), **more}


async def test_a_private_ca_is_trusted_by_its_pool_alone(certificates: Certificates) -> None:
    async with Upstream([STREAMED], tls=certificates.serving()) as upstream:
        async with running({"only": pool(upstream.url, tls=tls(certificates))}) as gateway:
            assert (await ask(gateway))[0] == 200
        async with running({"only": pool(upstream.url)}) as gateway:
            assert (await ask(gateway))[0] == 502


@pytest.mark.parametrize("apart", [False, True])
async def test_a_client_certificate_is_shown_to_the_servers_of_its_pool(
    certificates: Certificates, apart: bool
) -> None:
    """The key in the file of the certificate, or in its own."""
    shown = {"certificate": str(certificates.client)}
    if apart:
        shown = {"certificate": str(certificates.client_only), "key": str(certificates.client_key)}
    async with Upstream([STREAMED], tls=certificates.serving(mutual=True)) as upstream:
        async with running({"only": pool(upstream.url, tls=tls(certificates, **shown))}) as gateway:
            assert (await ask(gateway))[0] == 200
        async with running({"only": pool(upstream.url, tls=tls(certificates))}) as gateway:
            assert (await ask(gateway))[0] == 502
        assert len(upstream.requests) == 1


async def test_a_certificate_renewed_under_its_name_is_used_after_a_reload(
    certificates: Certificates, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text(certificates.ca.read_text())
    async with Upstream([STREAMED], tls=certificates.serving()) as upstream:
        config = document({"only": pool(upstream.url, tls={"ca": str(ca)})})
        async with running(config["pools"]) as gateway:
            assert (await ask(gateway))[0] == 200
            kept = gateway.runtime.current.connections
            await gateway.apply_config(Config.model_validate(config))
            assert gateway.runtime.current.connections == kept
            before = gateway.config
            assert change(before, Config.model_validate(config)).changed == ()
            ca.write_text(made(tmp_path / "other").ca.read_text())
            renewed = change(before, Config.model_validate(config))
            assert renewed.changed == ("pools.only.tls",)
            await gateway.apply_config(renewed.config)
            assert (await ask(gateway))[0] == 502


async def test_requests_and_keys_go_through_the_pools_proxy(certificates: Certificates) -> None:
    async with ConnectProxy() as proxy, Upstream([STREAMED], tls=certificates.serving()) as upstream:
        reached = pool(upstream.url, tls=tls(certificates), proxy=proxy.url)
        async with running({"only": reached}) as gateway:
            assert (await ask(gateway))[0] == 200
        assert proxy.targets == [upstream.url.removeprefix("https://")]
        assert b"sk-backend" not in proxy.upward
        assert upstream.requests[0].headers["authorization"] == "Bearer sk-backend"


async def test_a_proxy_that_is_gone_moves_callers_to_the_next_tier() -> None:
    async with Upstream([STREAMED]) as upstream:
        pools = {"first": pool(upstream.url, proxy="http://127.0.0.1:9"), "second": pool(upstream.url)}
        async with running(pools) as gateway:
            assert (await ask(gateway))[0] == 200
            assert last(gateway).endpoint.pool == "second"


async def test_query_parameters_are_added_to_the_url() -> None:
    async with Upstream([STREAMED]) as upstream:
        pools = {"only": pool(upstream.url, query={"api-version": "2024-10-21", "tag": "a&b c"})}
        async with running(pools) as gateway:
            assert (await ask(gateway))[0] == 200
        assert upstream.requests[0].target == "/v1/chat/completions?api-version=2024-10-21&tag=a%26b+c"


async def test_parameters_are_renamed_and_dropped() -> None:
    """Of two spellings the servers' own counts; the gateway's cap is renamed like the caller's."""
    renaming = {"rename": {"max_tokens": "max_completion_tokens"}, "drop": ["logit_bias"]}
    async with Upstream([STREAMED]) as upstream:
        routes = {"chat": {"tiers": ["only"], "limits": {"output_tokens": 50}}}
        async with running({"only": pool(upstream.url, **renaming)}, routes) as gateway:
            await ask(gateway, max_tokens=7, logit_bias={"1": 2}, seed=3)
            await ask(gateway, max_tokens=7, max_completion_tokens=9)
            await ask(gateway)
        bodies = [json.loads(request.body) for request in upstream.requests]
        assert [body["max_completion_tokens"] for body in bodies] == [7, 9, 50]
        assert all("max_tokens" not in body and "logit_bias" not in body for body in bodies)
        assert bodies[0]["seed"] == 3


async def test_a_pool_may_take_longer_to_its_first_token_than_the_default() -> None:
    """Hidden reasoning of minutes, beside a default that ends a hung server soon."""
    silent: Script = [STREAM_HEAD, HANG]
    routes = {"chat": {"tiers": ["slow", "fast"], "ttft": "off"}}
    for limit, outcome in (("200ms", RequestOutcome.COMPLETED), (None, None)):
        async with Upstream(silent) as slow, Upstream([STREAMED]) as fast:
            first = pool(slow.url, **({"first_token": limit} if limit else {"first_token": "30s"}))
            pools = {"slow": first, "fast": pool(fast.url)}
            async with running(pools, routes, defaults={"first_token": "30s" if limit else "200ms"}) as gateway:
                asking = asyncio.create_task(ask(gateway))
                done, _ = await asyncio.wait([asking], timeout=60 if limit else 1)
                assert bool(done) is (outcome is not None)
                if done:
                    assert last(gateway).endpoint.pool == "fast"
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"tls": {"ca": "/nowhere/ca.pem"}}, "there is no file"),
        ({"tls": {"key": "/etc/hostname"}}, "key requires certificate"),
        ({"tls": {"ca": "/etc/hostname"}}, "cannot be used"),
        ({"proxy": "socks5://user:hidden@a:1"}, "write it like http://proxy.internal:3128"),
        ({"rename": {"messages": "x"}}, "gateway's own"),
        ({"rename": {"x": "model"}}, "gateway's own"),
        ({"drop": ["cache_salt"]}, "gateway's own"),
        ({"rename": {"a": "b"}, "drop": ["a"]}, "both renamed and dropped"),
    ],
)
def test_settings_that_cannot_work_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config.model_validate(document({"only": pool("https://a.example", **setting)}))


def test_proxy_credentials_and_query_values_are_in_no_dump() -> None:
    secret = {"proxy": "http://user:hidden@a:1", "query": {"key": "hidden"}}
    config = Config.model_validate(document({"only": pool("http://a:1", **secret)}))
    assert "hidden" not in repr(config) + config.model_dump_json()
