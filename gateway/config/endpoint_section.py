"""Endpoints of a pool as written, and the addresses that each stands for; the `kubernetes` section, and endpoints that
are the pods of a service or of an InferencePool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from backends.http.connection_pool import BackendAddress
from backends.kubernetes.objects import PodAddress
from backends.kv_events import PublisherRank
from gateway.config import field_types as fields
from gateway.config.field_types import Positive, Section, authority, is_ip

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"  # RFC 1123, as Kubernetes takes it
_NAME = rf"{_LABEL}(\.{_LABEL})*"
Reference = Annotated[str, StringConstraints(pattern=rf"^{_LABEL}/{_NAME}$", max_length=317)]
MAX_PORT = 65_535
PortNumber = Annotated[int, Field(ge=1, le=MAX_PORT)]
Ports = Annotated[tuple[PortNumber, ...], Field(min_length=1, max_length=1024)]
PortName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,63}$")]


class KubernetesSection(Section):
    """The API server. In a pod, nothing needs to be set."""

    api: fields.HttpUrl | None = None
    """URL of the API server, such as http://localhost:8001 of `kubectl proxy`; absent: the pod's own cluster."""
    token_file: Path | None = None
    """File of a bearer token; absent, in a pod: the service account's."""
    ca: Path | None = None
    """Certificates that the API server's is verified against, PEM; absent, in a pod: the service account's."""


@dataclass(frozen=True, slots=True, order=True)
class PodSource:
    """Pods behind an object of the cluster. `port`: of a service."""

    namespace: str
    name: str
    port: str | int = ""
    is_inference_pool: bool = False

    def __str__(self) -> str:
        kind = "inferencepool" if self.is_inference_pool else "service"
        return f"{kind} {self.namespace}/{self.name}"


class PodsSection(Section):
    """Ready pods of a service, or of an InferencePool."""

    service: Reference | None = None
    """NAMESPACE/NAME of a service."""
    port: PortNumber | PortName | None = None
    """Of the service's pods: a number, or the name that the service gives it."""
    inference_pool: Reference | None = None
    """NAMESPACE/NAME of an InferencePool (inference.networking.k8s.io/v1), which states the ports."""
    scheme: Literal["http", "https"] = "http"
    kv_events: PortNumber | Ports | None = None
    """Port at which every pod publishes KV cache events (ZMQ); with several target ports that of the first, and the
    n-th rank publishes n ports above; or a list of ports, one for each target port."""
    kv_replay: PortNumber | Ports | None = None
    """Port at which every pod replays missed events; several as of kv_events."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.service is None) == (self.inference_pool is None):
            raise ValueError("name a service or an inference_pool: service: NAMESPACE/NAME, port: http")
        if (self.service is None) != (self.port is None):
            needed = "service needs port, a number or a name" if self.service else "an InferencePool states its ports"
            raise ValueError(f"{needed}; {'add' if self.service else 'remove'} port")
        if self.kv_replay and not self.kv_events:
            raise ValueError("kv_replay requires kv_events: add kv_events, or remove kv_replay")
        return self

    def events_port(self, ports: int | Sequence[int] | None, rank: int) -> int | None:
        """Port of a rank, counted from 0. `ports`: as written. None: it has none."""
        if ports is None or isinstance(ports, int):
            port = None if ports is None else ports + rank
            return port if port is not None and port <= MAX_PORT else None
        return ports[rank] if rank < len(ports) else None

    @property
    def source(self) -> PodSource:
        namespace, _, name = (self.service or self.inference_pool or "").partition("/")
        return PodSource(namespace, name, self.port or "", self.service is None)

    @property
    def url(self) -> str:
        """Stands for all pods, while none is known."""
        source = self.source
        port = f":{self.port}" if isinstance(self.port, int) else ""
        return f"{self.scheme}://{source.name}.{source.namespace}.svc{port}"


UID = 8  # characters of a pod's UID in the id of an endpoint


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """Destination of requests. `ip`: one address of the URL's host name; "": the host is resolved per connection."""

    url: str
    ip: str = ""
    region: str = ""
    kv_events: str | None = None
    kv_replay: str | None = None
    kv_rank: PublisherRank | None = None  # publisher of the events; None: a server without ranks
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
