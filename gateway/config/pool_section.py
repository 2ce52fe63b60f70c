"""The `pools` section: models, their servers, and the way there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from backends.catalog import KINDS, BackendKind
from backends.facts.fact_rows import edition
from backends.facts.lookup import LIKE, api_of, facts_of, is_known, maker_at, with_overrides
from backends.facts.model_facts import Facts
from backends.facts.priors import prior_ttft
from backends.http.tls_files import TlsFiles
from backends.http.tunnel import ProxyAddress
from backends.interface import BackendConfig
from gateway.config import field_types as fields
from gateway.config.config_errors import did_you_mean
from gateway.config.endpoint_section import Discovered, EndpointAddress, EndpointSection
from gateway.config.field_types import Positive, Section, authority, written
from gateway.config.price_section import PriceSection, listed, prompt_cache, today, with_speeds
from policies import types as facts
from policies.adapters.adapter_slots import AdapterFacts

CALLER = "caller"  # in place of a key
RANKS = ("vllm", "simulated")  # backends with data-parallel ranks behind one URL
WITH_ADAPTERS = ("vllm", "sglang", "simulated")  # backends with LoRA adapters
CONTINUING = ("vllm", "sglang", "simulated")  # backends that can continue a broken answer
KEYED = frozenset({"authorization", "api-key", "x-api-key"})  # headers with a key
PRIORITY = ("vllm", "simulated")  # backends with priority scheduling, smallest number first
# The encodings of gateway.tokenize.tokenizers, which is slow to import.
ENCODINGS = ("o200k_base", "cl100k_base", "o200k_harmony")


_SECRET = token_bytes(16)
_YES_NO = {"yes": True, "no": False}
_VARIABLE_NAME = re.compile(r"(?:\$|os\.environ/|env\.|ENV:)[A-Z][A-Z0-9_]*")  # references in other programs' syntax


class TlsSection(Section):
    """Certificates of the connections to the servers, PEM files."""

    ca: str = ""
    """Certificates that the servers' are verified against, in place of the system's."""
    certificate: str = ""
    """Client certificate (mutual TLS), with its chain."""
    key: str = ""
    """Private key of the certificate, without a passphrase; absent: in the file of the certificate."""
    _files: TlsFiles = TlsFiles()

    @model_validator(mode="after")
    def _loadable(self) -> Self:
        if self.key and not self.certificate:
            raise ValueError("key requires certificate: add certificate, or remove key")
        for name in ("ca", "certificate", "key"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise ValueError(f"{name}: there is no file '{path}'")
        try:
            self._files = TlsFiles.of(self.ca, self.certificate, self.key)
            self._files.context()
        except OSError as error:
            raise ValueError(f"the certificates cannot be used: {error.strerror or error}") from None
        return self

    @property
    def files(self) -> TlsFiles:
        """As found when the configuration was read."""
        return self._files


class AdaptersSection(Section):
    """LoRA adapters that the servers hold beside the model."""

    names: fields.Names = Field(min_length=1)
    """As the servers know them; callers ask for them as models."""
    slots: int = Field(default=1, gt=0, le=10_000)
    """Adapters that a server holds ready at a time (vLLM: --max-loras), until learned from the server."""
    load: Positive = written("300ms")
    """Time that a server takes to load another one, until learned."""

    @property
    def facts(self) -> AdapterFacts:
        return AdapterFacts(frozenset(self.names), self.slots, self.load)


class KeepWarm(Section):
    idle: Positive
    """Send a one-token request after this time without requests."""


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Seconds of silence before the first token, and in mid-stream. None: the defaults of all servers."""

    first_token: float | None = None
    stream_idle: float | None = None


class PoolSection(Section):
    """Interchangeable endpoints of one model."""

    backend: fields.BackendName
    """Kind of server."""
    model: str = ""
    """Model name that the servers know."""
    models: fields.ModelNames = ()
    """Models that callers may ask for as POOL/MODEL: names, and `*` for every other one."""
    endpoints: tuple[EndpointSection, ...] = ()
    """Servers: URLs, or {url, region, kv_events, kv_replay, profile, resolve, dp_rank}; {kubernetes: {service, port}}:
    the ready pods of a service."""
    base_url: fields.HttpUrl | None = None
    """For an API, in place of endpoints; each API backend has a default."""
    api_key: SecretStr = SecretStr("")
    """Sent to the servers; write "${NAME}" and keep the key in the environment. `caller`: each caller's own key."""
    api_keys: tuple[SecretStr, ...] = ()
    """In place of api_key, for an API: keys that share the load, each with its own rate limit."""
    headers: Mapping[fields.HeaderName, fields.HeaderValue] = {}
    """Sent to the servers with every request."""
    query: Mapping[fields.QueryName, SecretStr] = {}
    """Query parameters, added to the URL of every request."""
    rename: Mapping[fields.ParameterName, fields.ParameterName] = {}
    """Parameters of the body that the servers know by another name: {max_tokens: max_completion_tokens}."""
    drop: frozenset[fields.ParameterName] = frozenset()
    """Parameters of the body that the servers do not know, and are not sent."""
    accepts: Mapping[str, Any] = {}
    """Facts of the servers in place of the known ones: members of a request (yes or no), and facts of docs/facts.md."""
    reasoning: Literal["returned", "refused"] | None = None
    """Whether the servers want the reasoning of earlier turns back, or refuse it; absent: as known of the model."""
    prompt_caching: Literal["on", "off"] = "on"
    """Requests to Anthropic carry cache breakpoints at their stable prefixes where the caller sets none."""
    tls: TlsSection | None = None
    proxy: fields.ProxyUrl | None = None
    """HTTP proxy through which the servers are reached (CONNECT): http://[USER:PASSWORD@]HOST:PORT."""
    adapters: AdaptersSection | None = None
    concurrent_requests: int | None = Field(default=None, gt=0, le=1_000_000)
    """Maximum of requests in progress at each endpoint, or key; further requests go elsewhere or wait."""
    requests_per_minute: int | None = Field(default=None, gt=0, le=1_000_000_000)
    """Limit of requests to each endpoint of an API, or key, shared by the workers."""
    tokens_per_minute: int | None = Field(default=None, gt=0, le=1_000_000_000_000)
    """The same, of the tokens of prompts and answers."""
    first_token: Positive | None = None
    """Hard timeout of the first token from these servers, in place of defaults.first_token."""
    stream_idle: Positive | None = None
    """Timeout between two chunks of an answer of these servers, in place of defaults.stream_idle."""
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
    wake: bool = False
    """Wake a sleeping engine (vLLM's sleep mode) for a request that no other endpoint of the pool can take."""
    priority_scheduling: bool = False
    """The servers schedule by `priority`, smallest first: requests are sent with a priority from their deadline."""
    profile: fields.ProfileName | None = None
    """Simulation profile for `replay`: 8b-h100, 8b-a100, 8b-l4, 32b-2xh100, 70b-4xh100 or api."""
    _listed: facts.Price | None = None

    @field_validator("endpoints", mode="before")
    @classmethod
    def _one_endpoint(cls, value: Any) -> Any:
        return [value] if isinstance(value, Mapping) and "kubernetes" in value else value

    @field_validator("accepts")
    @classmethod
    def _known_facts(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        said = {name: _YES_NO.get(word, word) if isinstance(word, str) else word for name, word in value.items()}
        with_overrides(Facts(), said)
        return said

    @field_validator("tokenizer")
    @classmethod
    def _known_tokenizer(cls, value: str) -> str:
        if value not in ENCODINGS and not Path(value).exists():
            raise ValueError(f"'{value}' is neither an encoding nor a file{did_you_mean(value, ENCODINGS)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.endpoints and self.base_url:
            raise ValueError("endpoints and base_url exclude each other; keep one")
        if not self.urls:
            needed = (
                "base_url, the URL of your resource" if self.kind.needs_key else "endpoints, the URLs of its servers"
            )
            raise ValueError(f"a {self.backend} pool needs {needed}")
        self._check_keys()
        if self.kind.local and (self.requests_per_minute or self.tokens_per_minute):
            raise ValueError(
                f"{self.backend} servers are limited by concurrent_requests; limits per minute are of APIs"
            )
        if taken := self.rename.keys() & self.drop:
            raise ValueError(f"{min(taken)} is both renamed and dropped; keep one")
        if self.tls and all(url.startswith("http:") for url in self.urls):
            raise ValueError("tls is of no use: every URL of this pool is http, not https")
        if self.keep_warm and not self.model:
            raise ValueError("keep_warm requires model: add model, or remove keep_warm")
        if self.wake and self.backend not in RANKS:
            raise ValueError(f"{self.backend} servers do not tell that they sleep; remove wake")
        if self.priority_scheduling and self.backend not in PRIORITY:
            raise ValueError(f"{self.backend} servers have no priority scheduling; remove priority_scheduling")
        if any(endpoint.dp_rank is not None for endpoint in self.endpoints) and self.backend not in RANKS:
            raise ValueError(f"{self.backend} servers take no dp_rank; remove it")
        if self.adapters is not None:
            self._check_adapters(self.adapters)
        self._check_servers()
        like = self.accepts.get(LIKE)
        if like is not None and not is_known(self.api, like):
            raise ValueError(f"nothing is known of '{like}' at {self.api}; write the name of a model in accepts.like")
        self._listed = self._listed_on(today())
        return self

    def _check_adapters(self, adapters: AdaptersSection) -> None:
        if self.backend not in WITH_ADAPTERS:
            raise ValueError(f"{self.backend} servers have no LoRA adapters here; remove adapters")
        if not self.model:
            raise ValueError("adapters requires model: add model, the name of the model that they belong to")
        if self.model in adapters.names:
            raise ValueError(f"'{self.model}' is the model itself, not an adapter")

    def _check_keys(self) -> None:
        if self.caller_keys:
            self._check_caller_keys()
        elif self.kind.needs_key and not any(self.keys) and not {"authorization", "api-key"} & self.headers.keys():
            hint = f'write api_key: "${{{self.backend.upper()}_API_KEY}}" (a server without keys: backend: compatible)'
            raise ValueError(f"{self.backend} needs a key; {hint}")
        if any(map(_VARIABLE_NAME.fullmatch, self.keys)):
            raise ValueError('a key is the name of a variable, not its value; write "${NAME}"')
        if self.api_keys and self.api_key.get_secret_value():
            raise ValueError("api_key and api_keys exclude each other; keep one")
        if self.api_keys and self.kind.local:
            raise ValueError(f"{self.backend} servers have one api_key; several share the load of an API")
        if self.api_keys and (len({*self.keys}) < len(self.keys) or not all(self.keys)):
            raise ValueError("a key in api_keys is empty, or is there twice")

    def _check_caller_keys(self) -> None:
        if self.kind.local:
            raise ValueError(f"{self.backend} servers take no key of a caller's; callers' keys are for APIs")
        if taken := KEYED & {name.lower() for name in self.headers}:
            raise ValueError(f"the header {min(taken)} would replace the callers' keys; remove it from headers")
        if self.keep_warm:
            raise ValueError("keep_warm requires a key of the gateway's: remove keep_warm, or write the key")
        if self.price != PriceSection():
            raise ValueError("price is of what the gateway's keys cost, and callers pay here; remove price")

    def _check_servers(self) -> None:
        servers = [(authority(one.url), one.dp_rank) for one in self.endpoints]
        for i, (server, rank) in enumerate(servers):
            first = next(
                j for j, (other, of) in enumerate(servers) if other == server and (of == rank or None in (of, rank))
            )
            if first != i:
                raise ValueError(f"endpoints[{i}] and endpoints[{first}] are both {server}; keep one")

    @property
    def keys(self) -> tuple[str, ...]:
        if self.caller_keys:
            return ("",)
        return tuple(key.get_secret_value() for key in self.api_keys or (self.api_key,))

    @property
    def caller_keys(self) -> bool:
        """Each caller's own key is passed on."""
        return self.api_key.get_secret_value() == CALLER

    @property
    def keeps_groups_apart(self) -> bool:
        """The prompt caches of cache groups differ: by a salt, or by the caller's own key, which has a cache of its own
        at a provider."""
        return self.kind.dialect.salted or self.caller_keys

    @property
    def mixes_groups(self) -> bool:
        """One prompt cache serves keys of any caller."""
        return self.caller_keys and not self.kind.needs_key

    @property
    def credentials(self) -> Sequence[object]:
        """Accounts with a provider, which keeps a cache for each. An engine of ours has one cache for all."""
        if not self.kind.needs_key:
            return [()]
        headers = tuple(sorted((name, value.get_secret_value()) for name, value in self.headers.items()))
        return [(key, headers) for key in self.keys]

    def account(self, address: EndpointAddress) -> str:
        """The server and the key and headers there, equal in every pool. A digest, keyed by a secret of the process."""
        key = self.keys[(address.key_number or 1) - 1]
        headers = sorted((name, value.get_secret_value()) for name, value in self.headers.items())
        named = repr((replace(address, key_number=None).id(""), key, headers))
        return blake2b(named.encode(), key=_SECRET, digest_size=8).hexdigest()

    @property
    def kind(self) -> BackendKind:
        return KINDS[self.backend]

    @cached_property
    def urls(self) -> tuple[str, ...]:
        if self.endpoints:
            return tuple(endpoint.url for endpoint in self.endpoints)
        base = self.base_url or self.kind.base_url
        return (base,) if base else ()

    def addresses(self, name: str, found: Discovered | None) -> Mapping[str, EndpointAddress]:
        """Addresses by endpoint id, stable across reloads. `found`: discovered addresses; None: not yet discovered."""
        if self.endpoints:
            known = [address for endpoint in self.endpoints for address in endpoint.addresses(found)]
        else:
            known = [EndpointAddress(url) for url in self.urls]
        if len(self.api_keys) > 1:
            numbers = range(1, len(self.api_keys) + 1)
            known = [replace(address, key_number=number) for address in known for number in numbers]
        return {address.id(name): address for address in known}

    def backend_config(self, dp_rank: int | None = None, key_number: int | None = None) -> BackendConfig:
        return BackendConfig(
            self.backend,
            self.model,
            self.keys[(key_number or 1) - 1],
            {name: value.get_secret_value() for name, value in self.headers.items()},
            query={name: value.get_secret_value() for name, value in self.query.items()},
            rename=self.rename,
            drop=self.drop,
            dp_rank=dp_rank,
            prompt_caching=self.prompt_caching == "on",
            adapters=frozenset(() if self.adapters is None else self.adapters.names),
            caller_keys=self.caller_keys,
            api=self.api,
            accepts=self.own_facts,
            edition=edition(),
        )

    @cached_property
    def api(self) -> str:
        """Row of the facts of the API."""
        return api_of(self.backend, urlsplit(self.urls[0]).hostname or "" if self.urls else "")

    @property
    def own_facts(self) -> Mapping[str, Any]:
        """Facts stated in the configuration."""
        return {**self.accepts, **({} if self.reasoning is None else {"reasoning": self.reasoning})}

    def is_repriced_on(self, day: date) -> bool:
        return self._listed_on(day) != self._listed

    def _listed_on(self, day: date) -> facts.Price | None:
        """Price by the facts. None: unknown, set in the configuration, paid by callers, or callers choose the model."""
        is_open = self.caller_keys or self.models or "price" in self.model_fields_set
        return None if is_open or not self.model else listed(self.urls, self.model, day)

    @property
    def price_in_force(self) -> facts.Price:
        """Configured price, else the price by the facts on the day when the configuration was read."""
        price = self.price.value if self._listed is None else self._listed
        return with_speeds(price, self._facts.speeds)

    @property
    def _facts(self) -> Facts:
        return facts_of(self.api, self.model, self.own_facts)

    @property
    def lacks_price(self) -> bool:
        """True for a paid API, by the pool's kind or address, whose price is neither configured nor known."""
        if not self.model or self.caller_keys or self._listed is not None or "price" in self.model_fields_set:
            return False
        return self.kind.needs_key or any(maker_at(urlsplit(url).hostname or "") for url in self.urls)

    @property
    def proxy_address(self) -> ProxyAddress | None:
        return None if self.proxy is None else ProxyAddress.parse(self.proxy.get_secret_value())

    def to_pool(self, name: str, found: Discovered | None, of_apis: SilenceLimits, processes: int = 1) -> facts.Pool:
        """Convert to the policies' Pool. `processes`: number that share the limits per minute."""
        own = SilenceLimits() if self.kind.local else of_apis
        return facts.Pool(
            name=name,
            model=self.model,
            endpoints=tuple(
                facts.Endpoint(
                    id,
                    name,
                    address.region,
                    self.first_token or own.first_token,
                    address.shared_server(name),
                    self.stream_idle or own.stream_idle,
                    address.host,
                    account=self.account(address),
                    limit_is_meant=self.first_token is not None,
                )
                for id, address in self.addresses(name, found).items()
            ),
            local=self.kind.local,
            wakes=self.wake,
            context_window=self.context_window,
            default_output=self.kind.dialect.default_output,
            capabilities=self.capabilities,
            price=self.price_in_force,
            prompt_cache=prompt_cache(self.price_in_force, self._facts, marks=self.prompt_caching == "on"),
            block_size=self.block_size,
            concurrent_requests=self.concurrent_requests,
            variants=None if self.adapters is None else self.adapters.facts,
            requests_per_minute=self.requests_per_minute and self.requests_per_minute / processes,
            tokens_per_minute=self.tokens_per_minute and self.tokens_per_minute / processes,
            prior_ttft=prior_ttft(self.api, self.accepts.get(LIKE, self.model)),
        )
