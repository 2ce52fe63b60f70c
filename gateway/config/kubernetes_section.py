"""The `kubernetes` section, and endpoints that are the pods of a service or of an InferencePool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from gateway.config import field_types as fields
from gateway.config.field_types import Section

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
