"""The `pools:` section: what there is to send requests to.

A pool is the same to callers whether it is one API or forty engines: endpoints that serve one model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, WithJsonSchema, field_validator, model_validator

from backends.catalog import KINDS, Kind
from gateway.config.addresses import HttpUrl, TcpUrl, authority
from gateway.config.problems import did_you_mean
from gateway.config.values import HeaderName, HeaderValue, Positive, ProfileName, Section
from policies import facts

PRIORITY = ("vllm", "simulated")  # backends whose servers can be told to take the smallest number first
# Those of gateway.estimate.encoders, which is slow to import.
ENCODINGS = ("o200k_base", "cl100k_base", "o200k_harmony")


class Endpoint(Section):
    """One server of a pool; its bare URL will do."""

    url: HttpUrl
    region: str = ""
    """A label, for affinity and metrics."""
    kv_events: TcpUrl | None = None
    """Where the engine publishes its cache events."""
    kv_replay: TcpUrl | None = None
    """Where it sends those again that were missed."""
    profile: ProfileName = None
    """What `replay` takes this server for, where it differs from its pool's."""

    @model_validator(mode="before")
    @classmethod
    def _bare_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _something_to_replay(self) -> Self:
        if self.kv_replay and not self.kv_events:
            raise ValueError("kv_replay without kv_events: add kv_events, or leave it out")
        return self


class Price(Section):
    """USD per million tokens."""

    input: float = Field(default=0.0, ge=0)
    output: float = Field(default=0.0, ge=0)


class KeepWarm(Section):
    idle: Positive
    """Send a one-token request after this long without one."""


class Pool(Section):
    """Interchangeable endpoints that serve one model."""

    backend: Annotated[str, WithJsonSchema({"type": "string", "enum": sorted(KINDS)})]
    """What its servers speak."""
    model: str = ""
    """The name its servers know."""
    endpoints: tuple[Endpoint, ...] = ()
    """Its servers: URLs, or {url, region, kv_events, kv_replay}."""
    base_url: HttpUrl | None = None
    """In place of endpoints, for an API; each API backend has a default."""
    api_key: SecretStr = SecretStr("")
    """Sent to its servers; write "${NAME}" and keep the key in the environment."""
    headers: Mapping[HeaderName, HeaderValue] = {}
    """Sent to its servers with every request."""
    tokenizer: str = "o200k_base"
    """o200k_base, cl100k_base, o200k_harmony, or the path of a tokenizer.json."""
    context_window: int | None = Field(default=None, gt=0)
    """Tokens of prompt and output together."""
    capabilities: frozenset[Literal["tools", "images", "json_schema"]] | None = None
    """What the model can take; absent: unknown, nothing is filtered on it."""
    price: Price = Price()
    block_size: int = Field(default=16, gt=0, le=4096)
    """Tokens of a prefix cache block, until the server says its own."""
    keep_warm: KeepWarm | None = None
    priority_scheduling: bool = False
    """Its servers take the smallest `priority` first: requests are sent with one, made from their deadline."""
    profile: ProfileName = None
    """What `replay` takes its servers for: 8b-h100, 8b-a100, 8b-l4, 32b-2xh100, 70b-4xh100 or api."""

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
    def kind(self) -> Kind:
        return KINDS[self.backend]

    @cached_property
    def urls(self) -> tuple[str, ...]:
        if self.endpoints:
            return tuple(endpoint.url for endpoint in self.endpoints)
        base = self.base_url or self.kind.base_url
        return (base,) if base else ()

    def as_facts(self, name: str) -> facts.Pool:
        """This pool as decisions see it."""
        regions = [endpoint.region for endpoint in self.endpoints] or [""]
        return facts.Pool(
            name=name,
            model=self.model,
            endpoints=tuple(
                facts.Endpoint(endpoint_id(name, url), name, region)
                for url, region in zip(self.urls, regions, strict=True)
            ),
            local=self.kind.local,
            context_window=self.context_window,
            capabilities=self.capabilities,
            price=facts.Price(self.price.input, self.price.output),
            block_size=self.block_size,
        )


def endpoint_id(pool: str, url: str) -> str:
    """`small/10.0.0.11:8000`: unique in the fleet, and the same after a reload."""
    return f"{pool}/{authority(url)}"
