"""Endpoints of a pool as written, and the addresses that each stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from backends.http.connection_pool import BackendAddress
from backends.kubernetes.objects import PodAddress
from backends.kv_events import PublisherRank
from gateway.config import field_types as fields
from gateway.config.field_types import Positive, Section, authority, is_ip
from gateway.config.kubernetes_section import PodSource, PodsSection

UID = 8  # characters of a pod's UID in the id of an endpoint


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """Destination of requests. `ip`: one address of the URL's host name; "": the host is resolved per connection."""

    url: str
    ip: str = ""
    region: str = ""
    kv_events: str | None = None
    kv_replay: str | None = None
    kv_rank: PublisherRank | None = None  # whose events these are; None: of a server without ranks
    dp_rank: int | None = None
    key_number: int | None = None  # from 1, where the pool has several
    pod: str = ""  # UID of the pod: another pod with the same address is another endpoint

    def id(self, pool: str) -> str:
        """Stable across reloads."""
        rank = "" if self.dp_rank is None else f"/dp{self.dp_rank}"
        key = f"/key{self.key_number}" if self.key_number else ""
        uid = f"/{self.pod[:UID]}" if self.pod else ""
        return f"{pool}/{authority(self.url, self.ip)}{uid}{rank}{key}"

    @property
    def host(self) -> str:
        """The same for all ranks and keys of a server."""
        return f"{authority(self.url, self.ip)}/{self.pod}"

    def shared_server(self, pool: str) -> str:
        """The same for all keys; empty with one."""
        return replace(self, key_number=None).id(pool) if self.key_number else ""

    @property
    def server(self) -> str:
        """Of all ranks."""
        return authority(self.url, self.ip)


@dataclass(frozen=True, slots=True)
class Discovered:
    """Addresses that were found: by host name with `resolve`, and pods by their source."""

    hosts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pods: Mapping[PodSource, Sequence[PodAddress]] = field(default_factory=dict)


class EndpointSection(Section):
    """One server of a pool: a URL, or a mapping. Several servers, with `resolve` or `kubernetes`."""

    url: fields.HttpUrl
    region: str = ""
    """Where the server is, by any name: for `region` of routes, and for metrics."""
    kv_events: fields.TcpUrl | None = None
    """ZMQ address of the engine's KV cache events."""
    kv_replay: fields.TcpUrl | None = None
    """ZMQ address for the replay of missed events."""
    profile: fields.ProfileName | None = None
    """Simulation profile for `replay`, where it differs from the pool's."""
    resolve: Positive | None = None
    """Every address of the host name becomes an endpoint; the value is the resolution interval, such as 10s."""
    dp_rank: int | None = Field(default=None, ge=0, le=1023)
    """A data-parallel rank of the server, as an endpoint of its own; requests name the rank in a header."""
    kubernetes: PodsSection | None = None
    """In place of url: the ready pods of a service or of an InferencePool."""

    @model_validator(mode="before")
    @classmethod
    def _bare_url(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("kubernetes") is not None and "url" not in value:
            return {"url": _url_of_pods(value["kubernetes"]), **value}
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kubernetes is not None:
            self._check_pods(self.kubernetes)
        if self.kv_replay and not self.kv_events:
            raise ValueError("kv_replay requires kv_events: add kv_events, or remove kv_replay")
        if self.resolve is None:
            return self
        if is_ip(self.host):
            raise ValueError(f"{self.host} is an IP address, not a host name; remove resolve")
        for key, url in (("kv_events", self.kv_events), ("kv_replay", self.kv_replay)):
            if url is not None and url.removeprefix("tcp://").rpartition(":")[0] != self.host:
                raise ValueError(f"{key} must have the host {self.host} too: resolve replaces it by each address")
        return self

    def _check_pods(self, pods: PodsSection) -> None:
        """The pods have no other URL, and ports in place of other URLs."""
        if self.url != pods.url:
            raise ValueError("url and kubernetes exclude each other; keep one")
        for key in ("kv_events", "kv_replay", "resolve", "dp_rank"):
            if getattr(self, key) is not None:
                where = f"; write the port: kubernetes: {{{key}: 5557}}" if key.startswith("kv_") else ""
                raise ValueError(f"{key} and kubernetes exclude each other{where}")

    @property
    def is_dynamic(self) -> bool:
        """Stands for servers that are found while the gateway runs."""
        return self.resolve is not None or self.kubernetes is not None

    @property
    def host(self) -> str:
        return BackendAddress.parse(self.url).host

    def addresses(self, found: Discovered | None) -> list[EndpointAddress]:
        """A single address, or every address in `found` (None: discovery has not begun)."""
        if found is not None and self.kubernetes is not None:
            return [self._of_pod(pod, self.kubernetes) for pod in found.pods.get(self.kubernetes.source, ())]
        if self.resolve is None or found is None:
            return [self._address("", self.kv_events, self.kv_replay)]
        return [self._of_ip(ip) for ip in found.hosts.get(self.host, ())]

    def _of_ip(self, ip: str) -> EndpointAddress:
        events, replay = (
            url and f"tcp://{fields.ListenAddress(ip, int(url.rpartition(':')[2]))}"
            for url in (self.kv_events, self.kv_replay)
        )
        return self._address(ip, events, replay)

    def _address(self, ip: str, events: str | None, replay: str | None) -> EndpointAddress:
        rank = None if self.dp_rank is None else PublisherRank(self.dp_rank)
        return EndpointAddress(self.url, ip, self.region, events, replay, rank, self.dp_rank)

    def _of_pod(self, pod: PodAddress, section: PodsSection) -> EndpointAddress:
        url = f"{section.scheme}://{fields.ListenAddress(pod.ip, pod.port)}"
        ports = (section.events_port(each, pod.rank) for each in (section.kv_events, section.kv_replay))
        events, replay = (port and f"tcp://{fields.ListenAddress(pod.ip, port)}" for port in ports)
        rank = PublisherRank(pod.rank, pod.ports) if pod.ports > 1 else None
        return EndpointAddress(url, "", self.region, events or None, replay or None, rank, pod=pod.uid)


def _url_of_pods(written: Any) -> str:
    """Mistakes are told where the section itself is read."""
    try:
        return PodsSection.model_validate(written).url
    except ValidationError:
        return "http://pods"
