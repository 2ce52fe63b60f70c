"""Findings of `check --live` at one endpoint, and parsing of possibly hostile replies.

Rules:
- Server text is truncated, put on one line without control characters, and masked if it contains a configured key.
- Parsing never raises, whatever a server sends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import msgspec

from backends.interface import Failure
from gateway.config.models import Config

LARGEST_WINDOW = 100_000_000  # largest plausible window, tokens
MAX_NAMES = 2_000  # of models, of one list
MAX_NAME = 100  # characters of a model's name
MAX_TEXT = 160  # characters of a server's message
MASK = "[key]"
SHORTEST = 4  # characters of a key that is masked
_OPERATIONS = ("/chat/completions", "/completions", "/responses", "/messages", "/embeddings", "/models")


@dataclass(frozen=True, slots=True)
class ListingFacts:
    """The reply to the request for the models. `status` 0: there was none. `names` None: the reply is no list."""

    status: int = 0
    names: frozenset[str] | None = None
    failure: Failure | None = None  # of the connection, or by the status
    certificate: str = ""  # the fault of the certificate, in OpenSSL's words
    skew: float | None = None  # s that the server's clock is ahead
    window: int | None = None  # tokens of context, as listed
    ends: Mapping[str, date] = field(default_factory=dict)  # last days of models, as listed
    elsewhere: str = ""  # URL of the API, if not the configured URL


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """The reply to the request for one token. Without `ttft` and `failure` there was silence."""

    ttft: float | None = None  # s
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class PageFacts:
    """Findings on the engine's load page. `fault` empty: the load is readable."""

    fault: str = ""
    other_ranks: bool = False
    asleep: bool = False


@dataclass(frozen=True, slots=True)
class EndpointFacts:
    """Findings at one endpoint. `token` None: no token was requested. `overdue`: the time limit was reached."""

    id: str
    pool: str
    url: str
    models: tuple[str, ...]  # models of the pool
    local: bool
    listing: ListingFacts
    token: TokenFacts | None = None
    overdue: bool = False
    page: PageFacts = PageFacts()

    @property
    def missing(self) -> list[str]:
        """Configured models that the server does not list; empty where the list is unknown."""
        listed = self.listing.names
        return [] if listed is None else [name for name in self.models if not is_listed(name, listed)]


def is_listed(model: str, listed: Collection[str]) -> bool:
    """Ollama appends `:latest`, Gemini prepends `models/`."""
    return not {model, f"{model}:latest", f"models/{model}"}.isdisjoint(listed)


def read_names(body: bytes) -> frozenset[str] | None:
    """Names in a list of models: OpenAI's object, or Together's bare list. None: the body is neither."""
    try:
        reply: Any = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None
    entries = reply.get("data") if isinstance(reply, dict) else reply
    if not isinstance(entries, list):
        return None
    ids = (entry.get("id") for entry in entries[:MAX_NAMES] if isinstance(entry, dict))
    return frozenset(id for id in ids if isinstance(id, str) and 0 < len(id) <= MAX_NAME and id.isprintable())


def least_window(entries: Iterable[Mapping[str, Any]]) -> int | None:
    """Smallest context window, in tokens, in a list of models (`max_model_len` of vLLM and SGLang); None: an entry has
    none."""
    told = [entry.get("max_model_len") for entry in entries]
    known = [tokens for tokens in told if type(tokens) is int and 0 < tokens <= LARGEST_WINDOW]
    return min(known) if known and len(known) == len(told) else None


def read_window(body: bytes, models: Collection[str]) -> int | None:
    """Of the models, in a list that `read_names` can read."""
    reply: Any = msgspec.json.decode(body)
    entries = (reply.get("data") if isinstance(reply, dict) else reply) or []
    return least_window(entry for entry in entries if isinstance(entry, dict) and entry.get("id") in models)


def read_ends(body: bytes) -> Mapping[str, date]:
    """Days on which models end (`shutdown_date` of OpenAI), in a list that `read_names` can read."""
    reply: Any = msgspec.json.decode(body)
    entries = (reply.get("data") if isinstance(reply, dict) else reply) or []
    told = {entry["id"]: entry.get("shutdown_date") for entry in entries if _has_name(entry)}
    return {name: end for name, said in told.items() if (end := _day(said)) is not None}


def _has_name(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("id"), str)


def _day(said: Any) -> date | None:
    try:
        return date.fromisoformat(said[:10]) if isinstance(said, str) else None
    except ValueError:
        return None


def secrets_of(config: Config) -> tuple[str, ...]:
    """Values of the configuration that must not be shown, the longest first."""
    found: set[str] = set()
    for pool in config.pools.values():
        values = [*pool.keys, *(value.get_secret_value() for value in (*pool.headers.values(), *pool.query.values()))]
        found.update(part for value in values for part in (value, *value.split()))
        if pool.proxy is not None:
            found.add(pool.proxy.get_secret_value())
    return tuple(sorted((value for value in found if len(value) >= SHORTEST), key=len, reverse=True))


def harmless(text: str, secrets: Iterable[str]) -> str:
    """Text of a server as it may be printed."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text[:4_000]).split())
    for secret in secrets:
        line = line.replace(secret, MASK)
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 3] + "..."


def likely_urls(url: str, known: str | None) -> list[str]:
    """Base URLs to look for the API at, where it is not at `url`. `known`: the default of the backend."""
    scheme, _, rest = url.rstrip("/").partition("://")
    host, slash, path = rest.partition("/")
    root, path = f"{scheme}://{host}", slash + path
    trimmed = path
    for operation in _OPERATIONS:
        trimmed = trimmed.removesuffix(operation)
    found = [known] if known is not None and known.partition("://")[2].partition("/")[0] == host else []
    found += [f"{root}{trimmed}", f"{root}{trimmed.removesuffix('/v1')}/v1", f"{root}/v1"]
    found += [f"{root}/openai/v1", f"{root}/api/v1"]
    same = {url.rstrip("/"), f"{url.rstrip('/')}/v1" if not path else ""}
    return [other for other in dict.fromkeys(found) if other not in same]
