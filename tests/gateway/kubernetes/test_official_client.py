"""The official Python client understands the API server of the tests, so that it stays like the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import pytest
from kubernetes import client, watch

from tests.support.kubernetes_api import FakeApiServer, api_server, endpoint, put_slice

SELECTOR = "kubernetes.io/service-name=vllm"


@pytest.fixture
def server() -> Iterator[tuple[FakeApiServer, asyncio.AbstractEventLoop]]:
    """In a thread, since the official client blocks."""
    found: list[Any] = []
    ready, stop = Event(), Event()

    async def serve() -> None:
        async with api_server(page=2) as server:
            found.extend((server, asyncio.get_running_loop()))
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    yield found[0], found[1]
    stop.set()
    thread.join()


def slices(url: str) -> client.DiscoveryV1Api:
    return client.DiscoveryV1Api(client.ApiClient(client.Configuration(host=url)))


def test_it_lists_in_pages(server: tuple[FakeApiServer, asyncio.AbstractEventLoop]) -> None:
    fake, loop = server
    for number in range(3):
        loop.call_soon_threadsafe(put_slice, fake, f"s{number}", endpoint(f"10.0.0.{number}", str(number), ready=True))
    api = slices(fake.url)
    first = api.list_namespaced_endpoint_slice("default", label_selector=SELECTOR, limit=2)
    rest = api.list_namespaced_endpoint_slice(
        "default", label_selector=SELECTOR, limit=2, _continue=first.metadata._continue
    )
    found = [*first.items, *rest.items]
    assert [each.endpoints[0].addresses for each in found] == [[f"10.0.0.{number}"] for number in range(3)]
    assert found[0].endpoints[0].target_ref.uid == "0"
    assert rest.metadata._continue is None


def test_it_watches_changes_and_is_refused_an_old_version(
    server: tuple[FakeApiServer, asyncio.AbstractEventLoop],
) -> None:
    fake, loop = server
    api, seen = slices(fake.url), []
    version = api.list_namespaced_endpoint_slice("default").metadata.resource_version

    def change(*steps: Any) -> None:
        for step in steps:
            loop.call_soon_threadsafe(*step)

    change((put_slice, fake, "one", endpoint("10.0.0.1", "a")), (put_slice, fake, "one"))
    follower = watch.Watch()
    for event in follower.stream(
        api.list_namespaced_endpoint_slice, "default", label_selector=SELECTOR, resource_version=version
    ):
        seen.append((event["type"], event["object"].metadata.name))
        if len(seen) == 2:
            change((fake.delete, "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", "one"))
        if len(seen) == 3:
            follower.stop()
    assert seen == [("ADDED", "one"), ("MODIFIED", "one"), ("DELETED", "one")]
    change((fake.compact,))
    with pytest.raises(client.ApiException) as refused:
        list(watch.Watch().stream(api.list_namespaced_endpoint_slice, "default", resource_version=version))
    assert refused.value.status == 410
