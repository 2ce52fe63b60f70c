"""Endpoints from Kubernetes: the ready pods of services and of InferencePools.

Rules:
- A service is followed by its EndpointSlices; an InferencePool by itself, and by the pods that its selector selects.
- An empty answer counts, since the API server knows: a service scaled to zero has no endpoint. An API server that is
  away changes nothing.
- Events in quick succession are one change.
- Addresses that no pod can have are dropped, as in answers of the DNS (`backends.http.allowed_addresses`), and so are
  those that make no URL: each alone, and named in the log.
- Of more than MAX_PODS endpoints the known ones stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from backends.http.allowed_addresses import is_allowed
from backends.kubernetes.objects import (
    MAX_PODS,
    EndpointSlice,
    InferencePool,
    Pod,
    PodAddress,
    pods_of_pool,
    pods_of_slices,
)
from gateway.config.endpoint_section import KubernetesSection, PodSource
from gateway.config.field_types import is_ip
from gateway.kubernetes.api_server import ApiServer, ApiServerError
from gateway.kubernetes.reflector import Reflector

log = logging.getLogger("firsttoken")

FIRST_ANSWER = 2.0  # s to wait for the first answer about a new source
SETTLE = 0.1  # s after an event in which others join it: a roll-out is hundreds, and each change a reload
MAX_PORT = 65_535
_SHOWN = 80  # characters of an endpoint that cannot be used, in the log
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
PODS = "/api/v1/namespaces/{}/pods"

Pods = tuple[PodAddress, ...]


class Follower(Protocol):
    @property
    def pods(self) -> Pods | None:
        """None: not known yet."""

    def close(self) -> None: ...


class ServiceFollower:
    """The ready pods of a service."""

    def __init__(self, server: ApiServer, source: PodSource, on_change: Callable[[], None]) -> None:
        selector = {"labelSelector": f"kubernetes.io/service-name={source.name}"}
        self._slices = Reflector(server, SLICES.format(source.namespace), EndpointSlice, selector, on_change)
        self._port = source.port
        self._task = asyncio.create_task(self._slices.run())

    @property
    def pods(self) -> Pods | None:
        return pods_of_slices(self._slices.objects.values(), self._port) if self._slices.listed else None

    def close(self) -> None:
        self._task.cancel()


class InferencePoolFollower:
    """The ready pods of an InferencePool."""

    def __init__(self, server: ApiServer, source: PodSource, on_change: Callable[[], None]) -> None:
        self._server, self._source = server, source
        self._on_change = on_change
        selector = {"fieldSelector": f"metadata.name={source.name}"}
        self._pools = Reflector(server, POOLS.format(source.namespace), InferencePool, selector, self._on_pool)
        self._pods: Reflector[Pod] | None = None
        self._selected = ""
        self._pods_task: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._pools.run())

    @property
    def pods(self) -> Pods | None:
        if not self._pools.listed:
            return None
        pool = self._pools.objects.get(self._source.name)
        if pool is None:
            return ()
        return pods_of_pool(pool, self._pods.objects.values()) if self._pods is not None and self._pods.listed else None

    def _on_pool(self) -> None:
        """Follow the pods of another selector."""
        pool = self._pools.objects.get(self._source.name)
        selected = "" if pool is None else pool.spec.selector.query
        if selected != self._selected:
            self._selected = selected
            self._follow_pods(selected)
        self._on_change()

    def _follow_pods(self, selected: str) -> None:
        if self._pods_task is not None:
            self._pods_task.cancel()
        self._pods = self._pods_task = None
        if selected:  # an empty selector would select every pod
            path, selector = PODS.format(self._source.namespace), {"labelSelector": selected}
            self._pods = Reflector(self._server, path, Pod, selector, self._on_change)
            self._pods_task = asyncio.create_task(self._pods.run())

    def close(self) -> None:
        for task in (self._task, self._pods_task):
            if task is not None:
                task.cancel()


class PodDiscovery:
    """`pods`: addresses of every source that was answered once. `on_change` is called after each change."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.pods: Mapping[PodSource, Pods] = {}
        self.left_out: dict[PodSource, int] = {}  # endpoints beyond MAX_PODS
        self._dropped: dict[PodSource, Pods] = {}  # of the latest answer, those that cannot be endpoints
        self._on_change = on_change
        self._settings: KubernetesSection | None = None
        self._server: ApiServer | None = None
        self._followers: dict[PodSource, Follower] = {}
        self._answered = asyncio.Event()  # every source
        self._due: asyncio.TimerHandle | None = None

    async def follow(self, settings: KubernetesSection, sources: Collection[PodSource]) -> None:
        """Follow these from now on, and wait FIRST_ANSWER for first answers."""
        if settings != self._settings:
            await self.close()
            self._settings = settings
        for gone in [*self._followers.keys() - {*sources}]:
            self._followers.pop(gone).close()
            self.left_out.pop(gone, None)
            self._dropped.pop(gone, None)
        self.pods = {source: pods for source, pods in self.pods.items() if source in sources}
        if not sources or (server := self._connected(settings)) is None:
            return
        for source in sources:
            if source not in self._followers:
                follower = InferencePoolFollower if source.is_inference_pool else ServiceFollower
                self._followers[source] = follower(server, source, self._on_event)
        self._answered.clear()
        self._look()
        try:
            await asyncio.wait_for(self._answered.wait(), FIRST_ANSWER)
        except TimeoutError:
            log.warning("Kubernetes: no answer within %g s; endpoints join as soon as it comes", FIRST_ANSWER)

    def _connected(self, settings: KubernetesSection) -> ApiServer | None:
        if self._server is None:
            try:
                self._server = ApiServer(settings)
            except ApiServerError as error:
                log.error("Kubernetes: %s", error)
        return self._server

    def _on_event(self) -> None:
        if not self._answered.is_set():
            self._look()
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(SETTLE, self._look)

    def _look(self) -> None:
        """Compare the pods of every source with those known."""
        self._settled()
        answers = {source: follower.pods for source, follower in self._followers.items()}
        found = {
            source: self._bounded(source, self._usable(source, pods))
            for source, pods in answers.items()
            if pods is not None
        }
        changed = {source: pods for source, pods in found.items() if pods != self.pods.get(source)}
        for source, pods in changed.items():
            log.info("%s has %d endpoints: %s", source, len(pods), _difference(self.pods.get(source, ()), pods))
        if len(found) == len(answers):
            self._answered.set()
        if changed:
            self.pods = {**self.pods, **changed}
            self._on_change()

    def _usable(self, source: PodSource, pods: Pods) -> Pods:
        host = "" if self._server is None else self._server.host
        usable = tuple(pod for pod in pods if _is_usable(host, pod))
        dropped = tuple(sorted({*pods} - {*usable}))
        if dropped != self._dropped.get(source, ()):
            self._dropped[source] = dropped
            if dropped:
                first = f"{dropped[0].ip}:{dropped[0].port}"[:_SHOWN]
                log.warning("%d endpoints of %s cannot be used, such as %r", len(dropped), source, first)
        return usable

    def _bounded(self, source: PodSource, pods: Pods) -> Pods:
        """MAX_PODS at most, those known first: a new pod takes no place of one that serves."""
        more = len(pods) - MAX_PODS
        if more > 0 and source not in self.left_out:
            log.error("%s has %d endpoints; %d beyond %d are left out", source, len(pods), more, MAX_PODS)
        self.left_out.pop(source, None)
        if more <= 0:
            return pods
        self.left_out[source] = more
        known = {*self.pods.get(source, ())}
        return tuple(sorted(sorted(pods, key=lambda pod: (pod not in known, pod))[:MAX_PODS]))

    def _settled(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = None

    async def close(self) -> None:
        self._settled()
        for follower in self._followers.values():
            follower.close()
        self._followers = {}
        if self._server is not None:
            await self._server.close()
        self._server = None


def _is_usable(host: str, pod: PodAddress) -> bool:
    """A URL can name the endpoint, and a pod can have it. `host`: of the API server."""
    named = is_ip(pod.ip) and "%" not in pod.ip and 0 < pod.port <= MAX_PORT
    return named and is_allowed(host, pod.ip) and (pod.uid.replace("-", "").isalnum() or not pod.uid)


def _difference(known: Pods, found: Pods) -> str:
    came, gone = sorted({*found} - {*known}), sorted({*known} - {*found})
    return ", ".join([*(f"+{pod.ip}:{pod.port}" for pod in came), *(f"-{pod.ip}:{pod.port}" for pod in gone)])
