"""Objects of the Kubernetes API that lead to endpoints: EndpointSlice, Pod, InferencePool.

Only fields that are read are declared. Rules, from the API's reference:
- An absent condition `ready` of an endpoint means ready; an endpoint that terminates is not ready, but goes on serving
  what it has.
- A slice may hold a part of a service's endpoints: slices of one service are united.
- An address can be used again by another pod, so a pod is known by its UID.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct, field

MAX_PODS = 512  # endpoints of one service or pool


class PodAddress(NamedTuple):
    """A port of a pod. `uid`: empty where an endpoint is no pod; `rank`: place of the port among the `ports` of the
    pod, as its data-parallel ranks have it."""

    ip: str
    port: int
    uid: str = ""
    rank: int = 0
    ports: int = 1


class Metadata(Struct, rename="camel", frozen=True):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    continue_: str | None = field(default=None, name="continue")  # of a list with more pages
    deletion_timestamp: str | None = None


class KubernetesObject(Struct, rename="camel", frozen=True):
    """Any object: a bookmark has no more."""

    metadata: Metadata


# -- EndpointSlice: discovery.k8s.io/v1 --------------------------------------------------------


class SliceConditions(Struct, frozen=True):
    ready: bool | None = None


class TargetRef(Struct, frozen=True):
    uid: str = ""


class SliceEndpoint(Struct, rename="camel", frozen=True):
    addresses: list[str] = []
    conditions: SliceConditions = SliceConditions()
    target_ref: TargetRef | None = None

    @property
    def is_ready(self) -> bool:
        return self.conditions.ready is not False


class SlicePort(Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class EndpointSlice(KubernetesObject, frozen=True):
    address_type: str = "IPv4"
    endpoints: list[SliceEndpoint] | None = None
    ports: list[SlicePort] | None = None


def pods_of_slices(slices: Iterable[EndpointSlice], port: str | int) -> tuple[PodAddress, ...]:
    """Ready endpoints of a service. `port`: name of the service's port, or number of the pods'."""
    found: dict[tuple[str, int], PodAddress] = {}
    families = {"IPv4": 0, "IPv6": 1}  # of a pod with both, the first is used
    for one in sorted(slices, key=lambda each: families.get(each.address_type, 2)):
        for number in _numbers(one, port) if one.address_type in families else ():
            for endpoint in one.endpoints or ():
                if endpoint.is_ready and endpoint.addresses:
                    uid = "" if endpoint.target_ref is None else endpoint.target_ref.uid
                    pod = PodAddress(endpoint.addresses[0], number, uid)
                    found.setdefault((uid or pod.ip, number), pod)
    return tuple(sorted(found.values()))


def _numbers(one: EndpointSlice, port: str | int) -> Sequence[int]:
    ports = one.ports or ()
    return [known.port for known in ports if known.port is not None and port in (known.name, known.port)]


# -- Pod: v1; InferencePool: inference.networking.k8s.io/v1 -------------------------------------


class PodCondition(Struct, frozen=True):
    type: str = ""
    status: str = ""


class PodStatus(Struct, rename="camel", frozen=True):
    pod_ip: str | None = field(default=None, name="podIP")
    conditions: list[PodCondition] | None = None


class Pod(KubernetesObject, frozen=True):
    status: PodStatus = PodStatus()

    @property
    def is_ready(self) -> bool:
        ready = any(each.type == "Ready" and each.status == "True" for each in self.status.conditions or ())
        return ready and self.metadata.deletion_timestamp is None and bool(self.status.pod_ip)


class LabelSelector(Struct, rename="camel", frozen=True):
    match_labels: Mapping[str, str] = {}

    @property
    def query(self) -> str:
        """As the API takes it: `app=vllm,role=decode`."""
        return ",".join(f"{name}={value}" for name, value in sorted(self.match_labels.items()))


class TargetPort(Struct, frozen=True):
    number: int


class InferencePoolSpec(Struct, rename="camel", frozen=True):
    selector: LabelSelector
    target_ports: list[TargetPort]


class InferencePool(KubernetesObject, frozen=True):
    spec: InferencePoolSpec


def pods_of_pool(pool: InferencePool, pods: Iterable[Pod]) -> tuple[PodAddress, ...]:
    """Ready pods of an InferencePool; each target port is an endpoint, such as a data-parallel rank."""
    ports = pool.spec.target_ports
    return tuple(
        sorted(
            PodAddress(str(pod.status.pod_ip), port.number, pod.metadata.uid, rank, len(ports))
            for pod in pods
            if pod.is_ready
            for rank, port in enumerate(ports)
        )
    )
