"""The Redis client: bounded calls, a circuit breaker and reconnection, with a real Redis that is killed, frozen and
slowed."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from redis.asyncio import Redis

from backends.http.loop_aware_timer import LoopAwareTimer
from gateway.cluster import redis_client
from gateway.cluster.redis_client import TIMEOUT, RedisClient, ScriptPipeline, Unavailable, UnusableKey
from tests.support.redis import RedisServer, TcpProxy, cluster_port, redis_server
from tests.support.simulated import eventually

BACK = 60.0  # s, on a busy machine


@asynccontextmanager
async def linked(url: str, up: bool = True) -> AsyncIterator[RedisClient]:
    """A client that waits for as long as a busy machine needs. Tests of time-outs set the time of the product."""
    link = RedisClient(url, BACK)
    link.start()
    try:
        if up:
            await eventually(lambda: link.up)
        yield link
    finally:
        await link.close()


async def ping(client: Redis) -> Any:
    return await client.ping()


async def refused(link: RedisClient) -> None:
    with pytest.raises(Unavailable):
        await link.call(ping)


def refused_at_once(link: RedisClient) -> bool:
    """The call has failed before it waits for anything."""
    call = link.call(ping)
    try:
        call.send(None)
    except Unavailable:
        return True
    finally:
        call.close()
    return False


async def failures_until_open(link: RedisClient) -> int:
    """The number of failed calls until the breaker opens, without those in which a busy machine stalled this loop."""
    failed = 0
    while link.up:
        before = link._failures
        await refused(link)
        failed += link._failures > before
    return failed


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "firsttoken"]


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "firsttoken")


async def test_a_call_returns_the_reply() -> None:
    async with redis_server() as server, linked(server.url) as link:
        await link.call(lambda redis: redis.set("k", "v"))
        assert await link.call(lambda redis: redis.get("k")) == b"v"
        assert link.errors == 0


async def test_a_killed_redis_opens_the_breaker_and_is_reconnected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One log line each, at any number of failed calls."""
    async with redis_server() as server, linked(server.url) as link:
        ups: list[bool] = []
        link.on_up(lambda: ups.append(link.up))
        server.kill()
        assert await failures_until_open(link) <= 3
        before = link.errors
        for _ in range(100):
            await refused(link)
        assert link.errors - before <= 1  # the client's own probe, at most
        await server.start()
        await eventually(lambda: link.up, BACK)
        assert await link.call(ping)
    assert ups == [True, True]
    assert [line.split(": ", 1)[1].split(":")[0] for line in lines(caplog)] == [
        "connected",
        "unavailable",
        "reconnected",
    ]


async def test_a_frozen_redis_costs_a_few_timeouts() -> None:
    """The kernel still accepts connections, so only timeouts show the freeze."""
    async with redis_server() as server, linked(server.url) as link:
        link.timeout = TIMEOUT
        server.freeze()
        assert await failures_until_open(link) <= 3
        assert refused_at_once(link)  # the breaker is open
        server.thaw()
        await eventually(lambda: link.up, BACK)
        assert await link.call(ping)


async def pinged_in_a_stall(redis: Redis) -> Any:
    """Our own loop stalls when the request is on its way."""
    asyncio.get_running_loop().call_soon(sleep, 0.5)  # Redis answers meanwhile, on a busy machine too
    return await redis.ping()


async def test_a_reply_that_came_in_during_a_stall_of_our_own_loop_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read before the time-out, although the time has long passed."""
    monkeypatch.setattr(redis_client, "PROBE_INTERVAL", BACK)  # a probe has no stall to wait for
    monkeypatch.setattr(redis_client, "LoopAwareTimer", partial(LoopAwareTimer, read_first=BACK))
    async with redis_server() as server, linked(server.url) as link:
        link.timeout = 0.02
        assert [await link.call(pinged_in_a_stall) for _ in range(3)] == [True] * 3
        assert link.errors == 0


async def test_time_outs_after_stalls_of_our_own_loop_open_no_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    """How Redis is cannot be told from them."""
    monkeypatch.setattr(redis_client, "PROBE_INTERVAL", BACK)  # a probe has no stall to wait for
    async with redis_server() as server, linked(server.url) as link:
        link.timeout = 0.02
        server.freeze()
        for _ in range(5):
            with pytest.raises(Unavailable):
                await link.call(pinged_in_a_stall)
        assert link.up
        assert await failures_until_open(link) <= 3
        server.thaw()


async def test_a_late_reply_is_never_read_by_another_call() -> None:
    """A connection with an outstanding reply is not reused."""
    async with redis_server() as server, linked(server.url) as link:
        await link.call(lambda redis: redis.set("mine", "1"))
        await link.call(lambda redis: redis.set("yours", "2"))
        link.timeout = TIMEOUT
        server.freeze()
        with pytest.raises(Unavailable):
            await link.call(lambda redis: redis.get("mine"))
        server.thaw()
        link.timeout = BACK
        await eventually(lambda: link.up, BACK)
        assert await link.call(lambda redis: redis.get("yours")) == b"2"


async def test_a_slow_redis_opens_the_breaker() -> None:
    """A Redis that answers every ping later than the timeout."""
    async with redis_server() as server, linked(server.url) as link, server.client() as client:
        link.timeout = 0.02
        for _ in range(200):
            await asyncio.gather(client.execute_command("DEBUG", "SLEEP", "0.06"), *(call_soon(link) for _ in range(3)))
            if not link.up:
                break
        assert not link.up


async def call_soon(link: RedisClient) -> None:
    await asyncio.sleep(0.005)
    with suppress(Unavailable):  # a busy machine may ask after the sleep
        await link.call(ping)


async def test_a_redis_that_is_absent_at_the_start_is_connected_later(caplog: pytest.LogCaptureFixture) -> None:
    async with redis_server(start=False) as server, linked(server.url, up=False) as link:
        await eventually(lambda: lines(caplog))
        assert refused_at_once(link)
        await server.start()
        await eventually(lambda: link.up, BACK)
    assert len(lines(caplog)) == 2


@pytest.mark.parametrize(
    "url",
    [
        "redis://:CANARY@nowhere.invalid:6379",
        "redis+cluster://:CANARY@127.0.0.1:{port}",
        "redis+sentinel://:CANARY@127.0.0.1:{port}/main?sentinel_password=CANARY",
    ],
)
async def test_an_unreachable_redis_is_one_log_line_without_the_password(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(url.format(port=cluster_port()), up=False) as link:
        await eventually(lambda: link.errors >= 2, BACK)
        await refused(link)
    assert len(lines(caplog)) == 1
    assert "CANARY" not in caplog.text
    assert not any(record.exc_info for record in caplog.records)


async def test_a_read_only_redis_is_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    """Full, or a former master: a Redis that answers reads only is of no use."""
    async with redis_server("--requirepass", "CANARY", "--maxmemory", "1") as server:
        url = server.url.replace("://", "://:CANARY@")
        async with linked(url, up=False) as link:
            await eventually(lambda: link.errors >= 2, BACK)
            assert not link.up
    assert "CANARY" not in caplog.text


async def test_a_user_without_scripts_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """Quotas and keys are scripts: such a Redis is unavailable, and the log names the missing right."""
    users = "--user web on >pw ~firsttoken:* +@all -@scripting --user default off".split()
    async with redis_server(*users) as server, linked(server.url.replace("//", "//web:pw@"), up=False) as link:
        await eventually(lambda: "unavailable" in caplog.text, BACK)
        assert (link.up, gauge_of(link)) == (False, 0.0)
    assert "NoPermissionError" in caplog.text
    assert "eval" in caplog.text


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "noeviction"])
async def test_a_policy_that_drops_keys_is_named_once(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also after Redis was away."""
    async with redis_server("--maxmemory-policy", policy) as server, linked(server.url) as link:
        server.kill()
        await eventually(lambda: not link.up, BACK)
        await server.start()
        await eventually(lambda: link.up, BACK)
        await link.call(ping)
        await eventually(lambda: caplog.text.count("maxmemory-policy is") == (policy != "noeviction"), BACK)
    assert caplog.text.count("set noeviction") == (policy != "noeviction")


async def test_a_value_of_another_type_is_the_fault_of_its_call(caplog: pytest.LogCaptureFixture) -> None:
    """A script or a plain command; the breaker stays closed, calls of one round trip have their answers, and the log
    names the keys once."""
    get, odd = "return redis.call('HGET', KEYS[1], 'f')", "return redis.call('GET', KEYS[1]) + {}"
    async with redis_server() as server, linked(server.url) as link, server.client() as client:
        await client.set("firsttoken:broken", "text")
        await client.hset("firsttoken:good", "f", "v")
        pipeline = ScriptPipeline(link)
        for _ in range(6):
            names = ["firsttoken:broken", "firsttoken:good", "firsttoken:broken", "firsttoken:good"]
            calls = [pipeline.call(get, [name], []) for name in names] + [pipeline.call(odd, ["firsttoken:broken"], [])]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(each) for each in answers] == [UnusableKey, bytes, UnusableKey, bytes, UnusableKey]
            with pytest.raises(UnusableKey, match="WRONGTYPE"):
                await link.call(lambda redis: redis.hget("firsttoken:broken", "f"))
            assert link.up
    assert caplog.text.count("firsttoken:broken: not as the gateway writes it") == 1
    assert caplog.text.count("a value: not as the gateway writes it: ResponseError: WRONGTYPE") == 1
    assert "unavailable" not in caplog.text


def gauge_of(link: RedisClient) -> float:
    return next(sample.value for metric in link.collect() for sample in metric.samples if "redis_up" in sample.name)


async def test_metrics_show_the_state_of_redis() -> None:
    async with redis_server() as server, linked(server.url) as link:
        assert samples(link) == {"firsttoken_redis_up": 1.0, "firsttoken_redis_errors_total": 0.0}
        server.kill()
        await failures_until_open(link)
        assert samples(link)["firsttoken_redis_up"] == 0.0
        assert samples(link)["firsttoken_redis_errors_total"] >= 3.0


def samples(link: RedisClient) -> dict[str, float]:
    return {sample.name: sample.value for family in link.collect() for sample in family.samples}


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost, with its key."""
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
            "-keyout",
            path,
            "-out",
            f"{path}.crt",
        ],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


async def test_tls_certificates_and_passwords_are_checked(certificate: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The certificate against the configured authority and the host name. Log lines contain no password."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(path := certificate)
    users = "--user web on >CANARY ~firsttoken:* +@all --user default off".split()
    async with redis_server(*users) as server, TcpProxy(server.port, tls) as way:
        where = f"localhost:{way.url.rpartition(':')[2]}?ssl_ca_certs={path}"
        async with linked(f"rediss://web:CANARY@{where}") as link:
            await link.call(lambda redis: redis.set("firsttoken:k", "v"))
        wrong = (
            f"rediss://web:CANARY-no@{where}",
            f"rediss://web:CANARY@{where.partition('?')[0]}",
            f"rediss://web:CANARY@{where.replace('localhost', '127.0.0.1', 1)}",
        )
        for url in wrong:
            async with linked(url, up=False) as link:
                await eventually(lambda link=link: link.errors)  # type: ignore[misc]
                assert not link.up
    assert "CANARY" not in caplog.text
    assert "invalid username-password" in caplog.text
    assert caplog.text.count("CERTIFICATE_VERIFY_FAILED") == 2


async def test_sentinels_lead_to_the_master() -> None:
    async with redis_server() as server, redis_server(start=False) as sentinel:
        conf = sentinel.home / "sentinel.conf"
        conf.write_text(f"port {sentinel.port}\nsentinel monitor main 127.0.0.1 {server.port} 1\n")
        guard = RedisServer(sentinel.home, port=sentinel.port)
        guard.command = [guard.command[0], str(conf), "--sentinel"]
        await guard.start()
        try:
            async with linked(f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0") as link:
                await link.call(lambda redis: redis.set("k", "v"))
            async with server.client() as client:
                assert await client.get("k") == "v"
        finally:
            guard.kill()


async def test_a_cluster_is_found_from_a_single_node() -> None:
    async with redis_server("--cluster-enabled", "yes") as server, server.client() as client:
        await client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        while "cluster_state:ok" not in str(await client.execute_command("CLUSTER", "INFO")):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        async with linked(f"redis+cluster://127.0.0.1:{server.port}") as link:
            await link.call(lambda redis: redis.set("k", "v"))
            assert await link.call(lambda redis: redis.get("k")) == b"v"
