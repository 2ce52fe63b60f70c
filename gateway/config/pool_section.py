"""The `pools:` section.

A pool looks the same to callers with one API or forty engines: endpoints that serve one model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, WithJsonSchema, field_validator, model_validator

from backends.catalog import KINDS, BackendKind
from gateway.config.addresses import HttpUrl, TcpUrl, authority, host_of, is_address, tcp_at, tcp_host
from gateway.config.config_errors import did_you_mean
from gateway.config.sections import HeaderName, HeaderValue, Positive, ProfileName, Section
from policies import types as facts

PRIORITY = ("vllm", "simulated")  # backends whose servers can serve the smallest number first
Addresses = Mapping[str, Sequence[str]]  # by name
# Names from gateway.tokenize.tokenizers, which is slow to import.
ENCODINGS = ("o200k_base", "cl100k_base", "o200k_harmony")


@dataclass(frozen=True, slots=True)
class Site:
    """The destination of requests. `at`: one address of the name; empty: the name is resolved per connection."""

    url: str
    at: str = ""
    region: str = ""
    kv_events: str | None = None
    kv_replay: str | None = None

    @property
    def authority(self) -> str:
        return authority(self.url, self.at)


class EndpointSection(Section):
    """One server of a pool; a bare URL is enough."""

    url: HttpUrl
    region: str = ""
    """A label, for affinity and metrics."""
    kv_events: TcpUrl | None = None
    """Address at which the engine publishes its cache events."""
    kv_replay: TcpUrl | None = None
    """Address at which the engine repeats missed cache events."""
    profile: ProfileName = None
    """Profile of this server in `replay`, if different from its pool's."""
    resolve: Positive | None = None
    """Every address of the name is an endpoint of its own; the interval of resolution, such as 10s."""

    @model_validator(mode="before")
    @classmethod
    def _bare_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _something_to_replay(self) -> Self:
        if self.kv_replay and not self.kv_events:
            raise ValueError("kv_replay without kv_events: add kv_events, or leave it out")
        return self

    @model_validator(mode="after")
    def _a_name_to_resolve(self) -> Self:
        if self.resolve is None:
            return self
        if is_address(self.host):
            raise ValueError(f"{self.host} is an address already, not a name; leave resolve out")
        for key, url in (("kv_events", self.kv_events), ("kv_replay", self.kv_replay)):
            if url is not None and tcp_host(url) != self.host:
                raise ValueError(f"{key} must name {self.host} too: with resolve it stands for each of its addresses")
        return self

    @property
    def host(self) -> str:
        return host_of(self.url)

    def sites(self, names: Addresses | None) -> tuple[Site, ...]:
        """The endpoints of this entry: one, or one per address of the name, once resolved."""
        if self.resolve is None or names is None:
            return (Site(self.url, "", self.region, self.kv_events, self.kv_replay),)
        return tuple(self._at(address) for address in names.get(self.host, ()))

    def _at(self, address: str) -> Site:
        events, replay = (url and tcp_at(url, address) for url in (self.kv_events, self.kv_replay))
        return Site(self.url, address, self.region, events, replay)


class PriceSection(Section):
    """USD per million tokens."""

    input: float = Field(default=0.0, ge=0)
    output: float = Field(default=0.0, ge=0)


class KeepWarm(Section):
    idle: Positive
    """Send a one-token request after this long without a request."""


class PoolSection(Section):
    """Interchangeable endpoints that serve one model."""

    backend: Annotated[str, WithJsonSchema({"type": "string", "enum": sorted(KINDS)})]
    """Dialect of the servers."""
    model: str = ""
    """The model name that the servers know."""
    endpoints: tuple[EndpointSection, ...] = ()
    """Servers: URLs, or {url, region, kv_events, kv_replay, resolve}."""
    base_url: HttpUrl | None = None
    """In place of endpoints, for an API; each API backend has a default."""
    api_key: SecretStr = SecretStr("")
    """Sent to the servers; write "${NAME}" and keep the key in the environment."""
    headers: Mapping[HeaderName, HeaderValue] = {}
    """Sent to the servers with every request."""
    tokenizer: str = "o200k_base"
    """o200k_base, cl100k_base, o200k_harmony, or the path of a tokenizer.json."""
    context_window: int | None = Field(default=None, gt=0)
    """Tokens of prompt and output together."""
    capabilities: frozenset[Literal["tools", "images", "json_schema"]] | None = None
    """Features of the model; absent: unknown, and nothing is filtered by them."""
    price: PriceSection = PriceSection()
    block_size: int = Field(default=16, gt=0, le=4096)
    """Tokens of a prefix cache block, until the server reports its own."""
    keep_warm: KeepWarm | None = None
    priority_scheduling: bool = False
    """The servers take the smallest `priority` first: requests get a priority made from their deadline."""
    profile: ProfileName = None
    """Profile of the servers in `replay`: 8b-h100, 8b-a100, 8b-l4, 32b-2xh100, 70b-4xh100 or api."""

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
            raise ValueError("endpoints and base_url say the same thing; keep one")
        if not self.urls:
            raise ValueError(f"a {self.backend} pool needs endpoints, the URLs of its servers")
        return self

    @model_validator(mode="after")
    def _authorized(self) -> Self:
        if self.kind.needs_key and not self.api_key.get_secret_value() and "authorization" not in self.headers:
            mend = f'write api_key: "${{{self.backend.upper()}_API_KEY}}" (a server without keys: backend: compatible)'
            raise ValueError(f"{self.backend} needs a key; {mend}")
        return self

    @model_validator(mode="after")
    def _askable(self) -> Self:
        if self.keep_warm and not self.model:
            raise ValueError("keep_warm asks for the pool's model; name it with model, or leave keep_warm out")
        return self

    @model_validator(mode="after")
    def _can_order(self) -> Self:
        if self.priority_scheduling and self.backend not in PRIORITY:
            raise ValueError(f"a {self.backend} server knows no priority; leave priority_scheduling out")
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

    def sites(self, name: str, names: Addresses | None = None) -> Mapping[str, Site]:
        """By endpoint id. `names`: addresses of the names to resolve; None: each name is one endpoint."""
        if self.endpoints:
            found = [server for endpoint in self.endpoints for server in endpoint.sites(names)]
        else:
            found = [Site(url) for url in self.urls]
        return {f"{name}/{server.authority}": server for server in found}

    def as_facts(self, name: str, names: Addresses | None = None) -> facts.Pool:
        """This pool as a value for decisions."""
        return facts.Pool(
            name=name,
            model=self.model,
            endpoints=tuple(facts.Endpoint(id, name, server.region) for id, server in self.sites(name, names).items()),
            local=self.kind.local,
            context_window=self.context_window,
            capabilities=self.capabilities,
            price=facts.Price(self.price.input, self.price.output),
            block_size=self.block_size,
        )


def endpoint_id(pool: str, url: str) -> str:
    """`small/10.0.0.11:8000`: unique in the fleet, and the same after a reload."""
    return f"{pool}/{authority(url)}"
