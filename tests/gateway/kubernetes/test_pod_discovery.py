"""Pods of services and of InferencePools are followed through every fault of an API server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backends.kubernetes.objects import PodAddress
from gateway.config.endpoint_section import KubernetesSection, PodSource
from gateway.kubernetes import api_server as api
from gateway.kubernetes.pod_discovery import PodDiscovery
from tests.support.kubernetes_api import (
    PODS,
    SLICES,
    FakeApiServer,
    api_server,
    endpoint,
    put_pod,
    put_pool,
    put_slice,
)
from tests.support.simulated import eventually

pytestmark = pytest.mark.virtual_time

SERVICE = PodSource("default", "vllm", "http")
POOL = PodSource("default", "vllm", is_inference_pool=True)
DEFAULT = SLICES.format("default")


@asynccontextmanager
async def following(server: FakeApiServer, *sources: PodSource, **settings: Path) -> AsyncIterator[PodDiscovery]:
    found = PodDiscovery(lambda: None)
    await found.follow(KubernetesSection(api=server.url, **settings), sources or (SERVICE,))
    try:
        yield found
    finally:
        await found.close()


def ips(found: PodDiscovery, source: PodSource = SERVICE) -> list[str]:
    return [pod.ip for pod in found.pods.get(source, ())]


async def test_pods_are_known_when_follow_returns() -> None:
    """In pages, where there are many."""
    async with api_server(page=2) as server:
        for number in range(5):
            put_slice(server, f"s{number}", endpoint(f"10.0.0.{number}", str(number)))
        async with following(server) as found:
            assert ips(found) == [f"10.0.0.{number}" for number in range(5)]
        assert [each.query.get("continue") for each in server.asked[:3]] == [None, "2", "4"]


async def test_a_change_arrives_by_the_watch() -> None:
    async with api_server() as server:
        put_slice(server, "one", endpoint("10.0.0.1", "a"))
        async with following(server) as found:
            lists = len(server.asked)
            put_slice(server, "one", endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b"))
            await eventually(lambda: ips(found) == ["10.0.0.1", "10.0.0.2"])
            put_slice(server, "two", endpoint("10.0.0.3", "c"))
            server.delete(DEFAULT, "one")
            await eventually(lambda: ips(found) == ["10.0.0.3"])
            assert len(server.asked) <= lists + 1  # the watch itself


async def test_an_object_that_cannot_be_read_holds_up_none_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    """It stays as it was known; in a list too, and without a list for each event."""
    async with api_server() as server:
        put_slice(server, "one", endpoint("10.0.0.1", "a"))
        async with following(server) as found:
            lists = sum("watch" not in each.query for each in server.asked)
            server.put(DEFAULT, "one", {"kubernetes.io/service-name": "vllm"}, endpoints="none")
            put_slice(server, "two", endpoint("10.0.0.2", "b"))
            await eventually(lambda: ips(found) == ["10.0.0.1", "10.0.0.2"])
            assert sum("watch" not in each.query for each in server.asked) == lists
        async with following(server) as found:
            assert ips(found) == ["10.0.0.2"]
    assert sum("one of " in message and "left as it was" in message for message in caplog.messages) == 2


async def test_endpoints_beyond_the_bound_are_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log, and as a number for the metrics until they fit again."""
    monkeypatch.setattr("gateway.kubernetes.pod_discovery.MAX_PODS", 2)
    async with api_server() as server:
        for number in range(3):
            put_slice(server, f"s{number}", endpoint(f"10.0.0.{number}", str(number)))
        async with following(server) as found:
            assert (len(ips(found)), found.left_out) == (2, {SERVICE: 1})
            put_slice(server, "s3", endpoint("10.0.0.0", "new"))
            await eventually(lambda: found.left_out == {SERVICE: 2})
            server.delete(DEFAULT, "s0")
            server.delete(DEFAULT, "s1")
            await eventually(lambda: not found.left_out)
    assert sum("are left out" in message for message in caplog.messages) == 1


async def test_a_service_scaled_to_zero_has_no_endpoint() -> None:
    """The API server knows: an empty answer of the DNS would change nothing."""
    async with api_server() as server:
        put_slice(server, "one", endpoint("10.0.0.1", "a"))
        async with following(server) as found:
            put_slice(server, "one")
            await eventually(lambda: found.pods == {SERVICE: ()})


async def test_another_pod_with_the_same_address_is_another_endpoint() -> None:
    async with api_server() as server:
        put_slice(server, "one", endpoint("10.0.0.1", "a"))
        async with following(server) as found:
            put_slice(server, "one", endpoint("10.0.0.1", "b"))
            await eventually(lambda: found.pods[SERVICE] == (PodAddress("10.0.0.1", 8000, "b"),))


@pytest.mark.parametrize("status", [403, 429, 500, 503])
async def test_an_api_server_that_is_away_for_an_hour_changes_nothing(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Tries are made with pauses that grow; the log has one line at the failure and one at the recovery."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with api_server() as server:
        put_slice(server, "one", endpoint("10.0.0.1", "a"))
        async with following(server) as found:
            await eventually(lambda: server.watches == 1)
            server.status, tried = status, len(server.asked)
            server.cut()
            await asyncio.sleep(3600.0)
            assert ips(found) == ["10.0.0.1"]
            assert 100 < len(server.asked) - tried < 300
            server.status = 200
            put_slice(server, "one", endpoint("10.0.0.2", "b"))
            await eventually(lambda: ips(found) == ["10.0.0.2"], within=60)
    told = [message for message in caplog.messages if "Kubernetes" in message]
    assert ["cannot be read" in told[0], "can be read again" in told[-1], len(told)] == [True, True, 2]
    assert ("needs the verbs list and watch" in told[0]) == (status == 403)


@pytest.mark.parametrize("in_stream", [True, False])
async def test_a_version_too_old_leads_to_a_new_list(in_stream: bool) -> None:
    """410 Gone, as an event or as a status; what was deleted meanwhile is gone."""
    async with api_server(in_stream=in_stream) as server:
        put_slice(server, "one", endpoint("10.0.0.1", "a"))
        put_slice(server, "two", endpoint("10.0.0.2", "b"))
        async with following(server) as found:
            await eventually(lambda: server.watches == 1)
            server.status = 503
            server.cut()
            await eventually(lambda: server.watches == 0)
            server.delete(DEFAULT, "one")
            server.compact()
            server.status = 200
            await eventually(lambda: ips(found) == ["10.0.0.2"], within=60)


async def test_a_watch_goes_on_from_the_last_bookmark() -> None:
    async with api_server() as server:
        put_slice(server, "one", endpoint("10.0.0.1", "a"))
        async with following(server) as found:
            await eventually(lambda: server.watches == 1)
            server.bookmark()
            await asyncio.sleep(2.0)
            server.compact()  # the version of the list is too old now, that of the bookmark is not
            lists = sum("watch" not in each.query for each in server.asked)
            server.cut()
            put_slice(server, "two", endpoint("10.0.0.2", "b"))
            await eventually(lambda: len(ips(found)) == 2, within=60)
            assert sum("watch" not in each.query for each in server.asked) == lists


async def test_a_watch_that_ends_at_once_is_not_opened_again_at_once() -> None:
    """Of a proxy that buffers or cuts: tries a minute are few."""
    async with api_server() as server:
        server.status = 200
        async with following(server):
            await eventually(lambda: server.watches == 1)
            tried = len(server.asked)
            for _ in range(600):
                server.cut()
                await asyncio.sleep(0.1)
            assert len(server.asked) - tried < 30


async def test_addresses_that_no_pod_can_have_are_dropped() -> None:
    """Whoever may write a slice leads no prompt into a metadata service."""
    async with api_server() as server:
        bad = ["169.254.169.254", "0.0.0.0", "224.0.0.1", "fd00:ec2::254", "elsewhere", "10.0.0.1\r\nx"]
        put_slice(server, "one", *map(endpoint, bad), endpoint("10.0.0.1", "a"))
        async with following(server) as found:
            assert ips(found) == ["10.0.0.1"]


BAD_PORTS = (0, -1, 65_536, 99_999, 2**70)


@pytest.mark.parametrize("port", BAD_PORTS)
async def test_an_endpoint_that_makes_no_url_is_left_out_alone(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """It is named in the log, once; what joins later joins."""
    async with api_server() as server:
        put_slice(server, "bad", endpoint("10.0.0.9", "x"), port=port)
        put_slice(server, "good", endpoint("10.0.0.1", "a"))
        async with following(server) as found:
            assert ips(found) == ["10.0.0.1"]
            put_slice(server, "good", endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b"))
            await eventually(lambda: ips(found) == ["10.0.0.1", "10.0.0.2"])
    told = [message for message in caplog.messages if "cannot be used" in message]
    assert told == [f"1 endpoints of service default/vllm cannot be used, such as '10.0.0.9:{port}'"]


@pytest.mark.parametrize("port", BAD_PORTS)
async def test_an_inference_pool_with_a_port_that_makes_no_url_has_its_other_ports(port: int) -> None:
    async with api_server() as server:
        put_pool(server, port, 8000)
        put_pod(server, "one", "10.0.0.1")
        async with following(server, POOL) as found:
            assert [(pod.ip, pod.port) for pod in found.pods[POOL]] == [("10.0.0.1", 8000)]


async def test_of_too_many_endpoints_those_that_serve_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new pod with a lower address pushes none out, and takes the place of one that leaves."""
    monkeypatch.setattr("gateway.kubernetes.pod_discovery.MAX_PODS", 2)
    async with api_server() as server:
        put_slice(server, "one", endpoint("10.0.0.5", "a"), endpoint("10.0.0.6", "b"))
        async with following(server) as found:
            put_slice(server, "two", endpoint("10.0.0.1", "c"))
            await eventually(lambda: found.left_out == {SERVICE: 1})
            assert ips(found) == ["10.0.0.5", "10.0.0.6"]
            put_slice(server, "one", endpoint("10.0.0.6", "b"))
            await eventually(lambda: ips(found) == ["10.0.0.1", "10.0.0.6"])


@pytest.mark.parametrize("endless", ["same", "new"])
async def test_a_list_without_end_is_a_failure_with_pauses(endless: str, caplog: pytest.LogCaptureFixture) -> None:
    """Some requests a try, and tries as of any failure; what was known stays."""
    async with api_server() as server:
        put_slice(server, "one", endpoint("10.0.0.1", "a"))
        async with following(server) as found:
            await eventually(lambda: server.watches == 1)
            server.endless, tried = endless, len(server.asked)
            server.watch_status = 410
            server.cut()
            await asyncio.sleep(60.0)
            assert ips(found) == ["10.0.0.1"]
            assert 5 < len(server.asked) - tried < 200
            assert sum("a list goes on without another object" in message for message in caplog.messages) == 1
            server.endless, server.watch_status = "", 200
            put_slice(server, "two", endpoint("10.0.0.2", "b"))
            await eventually(lambda: len(ips(found)) == 2, within=60)


@pytest.mark.parametrize("gone", ["list_status", "watch_status"])
async def test_a_version_that_is_always_too_old_is_told_and_asked_for_with_pauses(
    gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    """410 for ever, of the list, or of each watch after a list that succeeds. Once is usual, and has no line."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with api_server() as server:
        put_slice(server, "one", endpoint("10.0.0.1", "a"))
        async with following(server) as found:
            await eventually(lambda: server.watches == 1)
            setattr(server, gone, 410)
            tried = len(server.asked)
            server.cut()
            put_slice(server, "one", endpoint("10.0.0.1", "a"))
            server.compact()
            await asyncio.sleep(600.0)
            assert ips(found) == ["10.0.0.1"]
            assert 10 < len(server.asked) - tried < 130
            setattr(server, gone, 200)
            put_slice(server, "two", endpoint("10.0.0.2", "b"))
            await eventually(lambda: len(ips(found)) == 2, within=60)
            await eventually(lambda: "can be read again" in caplog.text, within=120)
    told = [message for message in caplog.messages if "Kubernetes" in message]
    assert ["cannot be read (410" in told[0], "can be read again" in told[-1], len(told)] == [True, True, 2]


async def test_a_watch_whose_connection_is_half_open_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """What has changed meanwhile is found by a list, within the time of a watch, also where each next watch is deaf."""
    async with api_server() as server:
        put_slice(server, "one", endpoint("10.0.0.1", "a"))
        server.deaf = True
        async with following(server) as found:
            for number in (2, 3, 4):
                put_slice(server, f"{number}", endpoint(f"10.0.0.{number}", f"uid{number}"))
                await eventually(lambda number=number: len(ips(found)) == number, within=70)
            assert "cannot be read (the watch is silent beyond its time)" in caplog.text
            assert sum("Kubernetes" in message for message in caplog.messages) <= 3


async def test_an_inference_pool_is_followed_with_the_pods_that_it_selects() -> None:
    """A port of each pod is an endpoint; another selector selects other pods."""
    async with api_server() as server:
        put_pool(server, 8000, 8001)
        put_pod(server, "one", "10.0.0.1")
        put_pod(server, "two", "10.0.0.2", ready=False)
        put_pod(server, "other", "10.0.0.9", app="other")
        async with following(server, POOL) as found:
            assert [(pod.ip, pod.port) for pod in found.pods[POOL]] == [("10.0.0.1", 8000), ("10.0.0.1", 8001)]
            put_pod(server, "two", "10.0.0.2")
            await eventually(lambda: ips(found, POOL) == ["10.0.0.1"] * 2 + ["10.0.0.2"] * 2)
            put_pod(server, "one", "10.0.0.1", deletionTimestamp="2026-11-23T10:00:00Z")
            await eventually(lambda: ips(found, POOL) == ["10.0.0.2"] * 2)
            put_pool(server, 8000, app="other")
            await eventually(lambda: ips(found, POOL) == ["10.0.0.9"])
            server.delete(PODS.format("default"), "other")
            await eventually(lambda: ips(found, POOL) == [])


async def test_a_rotated_token_is_used_at_once(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    async with api_server(token="first") as server:
        put_slice(server, "one", endpoint("10.0.0.1", "a"))
        async with following(server, token_file=token) as found:
            await eventually(lambda: server.watches == 1)
            server.token = "second"
            server.cut()
            token.write_text("second\n")
            put_slice(server, "one", endpoint("10.0.0.2", "b"))
            await eventually(lambda: ips(found) == ["10.0.0.2"], within=60)


async def test_outside_of_a_cluster_the_mend_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    found = PodDiscovery(lambda: None)
    await found.follow(KubernetesSection(), (SERVICE,))
    await found.close()
    assert "set kubernetes.api, such as http://localhost:8001 of `kubectl proxy`" in caplog.text


async def test_an_event_of_unbounded_length_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api, "MAX_OBJECT", 2000)
    async with api_server() as server:
        put_slice(server, "one", endpoint("10.0.0.1", "a"))
        async with following(server) as found:
            await eventually(lambda: server.watches == 1)
            put_slice(server, "long", *(endpoint("10.0.1.1", "x" * 100) for _ in range(9999)))
            await eventually(lambda: "an event is longer than 2000 bytes" in caplog.text)
            assert ips(found) == ["10.0.0.1"]


async def test_a_roll_out_is_few_changes() -> None:
    """Each is a reload; 300 events, each compared with all pods, would stall every stream for half a second."""
    async with api_server() as server:
        put_pool(server, 8000)
        for number in range(300):
            put_pod(server, f"p{number}", f"10.0.{number // 200}.{number % 200 + 1}", ready=False)
        changes: list[int] = []
        found = PodDiscovery(lambda: changes.append(len(ips(found, POOL))))
        await found.follow(KubernetesSection(api=server.url), (POOL,))
        await eventually(lambda: server.watches == 2)
        for number in range(300):
            put_pod(server, f"p{number}", f"10.0.{number // 200}.{number % 200 + 1}")
        await eventually(lambda: len(ips(found, POOL)) == 300)
        assert len(changes) < 10
        await found.close()


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"two\nlines"])
async def test_a_token_that_no_header_can_hold_is_told_and_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: bytes
) -> None:
    """A source goes on being followed after any failure; the token itself is in no log."""
    token = tmp_path / "token"
    token.write_bytes(bad)
    async with api_server(token="right") as server:
        put_slice(server, "one", endpoint("10.0.0.1", "a"))
        async with following(server, token_file=token) as found:
            await eventually(lambda: "cannot be read" in caplog.text)
            token.write_text("right")
            await eventually(lambda: ips(found) == ["10.0.0.1"], within=60)
    assert "two" not in caplog.text


async def test_the_pods_of_another_api_server_are_known_when_follow_returns() -> None:
    """Names are the same in both clusters: known pods are no answer of the other one."""
    async with api_server() as one, api_server() as other:
        put_slice(one, "slice", endpoint("10.0.0.1", "a"))
        put_slice(other, "slice", endpoint("10.1.0.1", "b"))
        async with following(one) as found:
            await found.follow(KubernetesSection(api=other.url), (SERVICE,))
            assert ips(found) == ["10.1.0.1"]
            await found.follow(KubernetesSection(api="http://localhost:1"), (SERVICE,))
            assert ips(found) == ["10.1.0.1"]  # it is away: these stay
