"""The `pools:` section. A pool, one API or forty engines, is a set of endpoints that serve one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, WithJsonSchema, field_validator, model_validator

from backends.dialects import KINDS, BackendKind
from backends.http.connection_pool import BackendAddress
from gateway.config.config_errors import did_you_mean
from gateway.config.field_types import (
    HeaderName,
    HeaderValue,
    HttpUrl,
    Positive,
    ProfileName,
    Section,
    TcpUrl,
    authority,
    is_ip,
    tcp_host,
    tcp_with_host,
)
from policies import types as facts

PRIORITY = ("vllm", "simulated")  # backends with priority scheduling, smallest number first
Addresses = Mapping[str, Sequence[str]]  # IP addresses by host name
# The encodings of gateway.tokenize.tokenizers, which is slow to import.
ENCODINGS = ("o200k_base", "cl100k_base", "o200k_harmony")


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """Destination of requests. `ip`: one address of the URL's host name; "": the host is resolved per connection."""

    url: str
    ip: str = ""
    region: str = ""
    kv_events: str | None = None
    kv_replay: str | None = None

    @property
    def authority(self) -> str:
        return authority(self.url, self.ip)


class EndpointSection(Section):
    """One server of a pool: its URL, or a mapping."""

    url: HttpUrl
    region: str = ""
    """Label, for affinity and metrics."""
    kv_events: TcpUrl | None = None
    """ZMQ address of the engine's KV cache events."""
    kv_replay: TcpUrl | None = None
    """ZMQ address for the replay of missed events."""
    profile: ProfileName = None
    """Simulation profile for `replay`, where it differs from the pool's."""
    resolve: Positive | None = None
    """Every address of the host name becomes an endpoint; the value is the resolution interval, such as 10s."""

    @model_validator(mode="before")
    @classmethod
    def _bare_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _replay_needs_events(self) -> Self:
        if self.kv_replay and not self.kv_events:
            raise ValueError("kv_replay requires kv_events: add kv_events, or remove kv_replay")
        return self

    @model_validator(mode="after")
    def _resolve_needs_host_name(self) -> Self:
        if self.resolve is None:
            return self
        if is_ip(self.host):
            raise ValueError(f"{self.host} is an IP address, not a host name; remove resolve")
        for key, url in (("kv_events", self.kv_events), ("kv_replay", self.kv_replay)):
            if url is not None and tcp_host(url) != self.host:
                raise ValueError(f"{key} must have the host {self.host} too: resolve replaces it by each address")
        return self

    @property
    def host(self) -> str:
        return BackendAddress.parse(self.url).host

    def addresses(self, resolved: Addresses | None) -> tuple[EndpointAddress, ...]:
        """One, or with `resolve` one per address in `resolved` (None: not resolved yet)."""
        if self.resolve is None or resolved is None:
            return (EndpointAddress(self.url, "", self.region, self.kv_events, self.kv_replay),)
        return tuple(self._with_ip(ip) for ip in resolved.get(self.host, ()))

    def _with_ip(self, ip: str) -> EndpointAddress:
        events, replay = (url and tcp_with_host(url, ip) for url in (self.kv_events, self.kv_replay))
        return EndpointAddress(self.url, ip, self.region, events, replay)


class PriceSection(Section):
    """USD per million tokens."""

    input: float = Field(default=0.0, ge=0)
    output: float = Field(default=0.0, ge=0)


class KeepWarm(Section):
    idle: Positive
    """Send a one-token request after this time without requests."""


class PoolSection(Section):
    """Interchangeable endpoints that serve one model."""

    backend: Annotated[str, WithJsonSchema({"type": "string", "enum": sorted(KINDS)})]
    """Kind of server."""
    model: str = ""
    """Model name that the servers know."""
    endpoints: tuple[EndpointSection, ...] = ()
    """Servers: URLs, or {url, region, kv_events, kv_replay, profile, resolve}."""
    base_url: HttpUrl | None = None
    """For an API, in place of endpoints; each API backend has a default."""
    api_key: SecretStr = SecretStr("")
    """Sent to the servers; write "${NAME}" and keep the key in the environment."""
    headers: Mapping[HeaderName, HeaderValue] = {}
    """Sent to the servers with every request."""
    tokenizer: str = "o200k_base"
    """o200k_base, cl100k_base, o200k_harmony, or the path of a tokenizer.json."""
    context_window: int | None = Field(default=None, gt=0)
    """Tokens of prompt and output together."""
    capabilities: frozenset[Literal["tools", "images", "json_schema"]] | None = None
    """Capabilities of the model; absent: unknown, no request is excluded."""
    price: PriceSection = PriceSection()
    block_size: int = Field(default=16, gt=0, le=4096)
    """Tokens of a prefix cache block, until learned from the server."""
    keep_warm: KeepWarm | None = None
    priority_scheduling: bool = False
    """The servers schedule by `priority`, smallest first: requests are sent with a priority from their deadline."""
    profile: ProfileName = None
    """Simulation profile for `replay`: 8b-h100, 8b-a100, 8b-l4, 32b-2xh100, 70b-4xh100 or api."""

    @field_validator("backend")
    @classmethod
    def _known_backend(cls, value: str) -> str:
        if value not in KINDS:
            raise ValueError(f"no backend '{value}'{did_you_mean(value, KINDS)}")
        return value

    @field_validator("tokenizer")
    @classmethod
    def _known_tokenizer(cls, value: str) -> str:
        if value not in ENCODINGS and not Path(value).exists():
            raise ValueError(f"'{value}' is neither an encoding nor a file{did_you_mean(value, ENCODINGS)}")
        return value

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.endpoints and self.base_url:
            raise ValueError("endpoints and base_url exclude each other; keep one")
        if not self.urls:
            raise ValueError(f"a {self.backend} pool needs endpoints, the URLs of its servers")
        return self

    @model_validator(mode="after")
    def _authorized(self) -> Self:
        if self.kind.needs_key and not self.api_key.get_secret_value() and "authorization" not in self.headers:
            hint = f'write api_key: "${{{self.backend.upper()}_API_KEY}}" (a server without keys: backend: compatible)'
            raise ValueError(f"{self.backend} needs a key; {hint}")
        return self

    @model_validator(mode="after")
    def _warmable(self) -> Self:
        if self.keep_warm and not self.model:
            raise ValueError("keep_warm requires model: add model, or remove keep_warm")
        return self

    @model_validator(mode="after")
    def _schedules_by_priority(self) -> Self:
        if self.priority_scheduling and self.backend not in PRIORITY:
            raise ValueError(f"{self.backend} servers have no priority scheduling; remove priority_scheduling")
        return self

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        seen: dict[str, int] = {}
        for i, url in enumerate(self.urls):
            first = seen.setdefault(authority(url), i)
            if first != i:
                raise ValueError(f"endpoints[{i}] and endpoints[{first}] are both {authority(url)}; keep one")
        return self

    @property
    def kind(self) -> BackendKind:
        return KINDS[self.backend]

    @cached_property
    def urls(self) -> tuple[str, ...]:
        if self.endpoints:
            return tuple(endpoint.url for endpoint in self.endpoints)
        base = self.base_url or self.kind.base_url
        return (base,) if base else ()

    def addresses(self, name: str, resolved: Addresses | None = None) -> Mapping[str, EndpointAddress]:
        """By endpoint id. `resolved`: the addresses of host names with `resolve`; None: not resolved yet."""
        if self.endpoints:
            found = [address for endpoint in self.endpoints for address in endpoint.addresses(resolved)]
        else:
            found = [EndpointAddress(url) for url in self.urls]
        return {f"{name}/{address.authority}": address for address in found}

    def to_pool(self, name: str, resolved: Addresses | None = None) -> facts.Pool:
        """The pool as a value of the policies."""
        addresses = self.addresses(name, resolved)
        return facts.Pool(
            name=name,
            model=self.model,
            endpoints=tuple(facts.Endpoint(id, name, address.region) for id, address in addresses.items()),
            local=self.kind.local,
            context_window=self.context_window,
            capabilities=self.capabilities,
            price=facts.Price(self.price.input, self.price.output),
            block_size=self.block_size,
        )


def endpoint_id(pool: str, url: str) -> str:
    """`small/10.0.0.11:8000`: unique in the fleet, stable across reloads."""
    return f"{pool}/{authority(url)}"
