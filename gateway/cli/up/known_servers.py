"""Servers that `firsttoken up` asks: APIs with a key in the environment, and the usual ports of this machine.

Pure: the environment and the answers of servers are arguments. An answer is not trusted: a model name is visible ASCII
of at most LONGEST_NAME characters, of a list the first MOST_MODELS count, and no other text of a server is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from backends.catalog import KINDS
from backends.facts.fact_rows import tier_rules
from backends.http.connection_pool import BackendAddress
from gateway.cli.live.live_facts import least_window
from gateway.config.config_errors import ConfigError

# Ollama; vLLM, TensorRT-LLM; SGLang; llama.cpp, TGI; LM Studio; TGI in a container.
LOCAL_PORTS = (11434, 8000, 30000, 8080, 1234, 3000)
LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "")  # hosts of OLLAMA_HOST that mean this machine
GATEWAY = "firsttoken"  # owner of models that another gateway lists
MOST_MODELS = 400
LONGEST_NAME = 128  # characters
_NAME = re.compile(rf"[!-)+-~]{{1,{LONGEST_NAME}}}")  # visible ASCII without `*`
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "tensorrt_llm": "trtllm"}
_LM_STUDIO = "organization_owner"
_KEYS = {  # variables with the key of an API, where it is not NAME_API_KEY alone
    "azure": ("AZURE_API_KEY", "AZURE_OPENAI_API_KEY"),
    "gemini": ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    "together": ("TOGETHER_API_KEY", "TOGETHERAI_API_KEY"),
}
_URLS = {"azure": ("AZURE_BASE_URL", "AZURE_OPENAI_ENDPOINT")}


class Reach(Enum):
    """Result of asking a server."""

    OK = "ok"
    UNLISTED = "answers, without a list of models"
    REFUSED = "refuses the key"
    SILENT = "no answer in time"
    DOWN = "cannot be reached"
    GARBAGE = "no answer of a model server"
    GATEWAY = "another firsttoken gateway; left out"
    EMPTY = "has no models"


@dataclass(frozen=True, slots=True)
class KnownServer:
    """A server to be asked. `kind`: its backend; empty: to be found out. The key is in no repr."""

    name: str
    kind: str
    url: str
    key: str = field(default="", repr=False)
    key_variable: str = ""
    url_variable: str = ""

    @property
    def port(self) -> int:
        return BackendAddress.parse(self.url).port


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A probed server. `models`: usable names; `loaded`: a model in memory; `window`: context tokens, if reported;
    `ttfts`: seconds by model, None on timeout."""

    server: KnownServer
    kind: str
    reach: Reach
    models: Sequence[str] = ()
    left_out: int = 0
    loaded: str = ""
    window: int | None = None
    ttfts: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def is_api(self) -> bool:
        return bool(self.server.key)

    @property
    def is_usable(self) -> bool:
        """True for a server to configure. An API is kept even if unreachable: the key or the network may recover."""
        return self.reach is Reach.OK or (self.is_api and self.reach is not Reach.GATEWAY)


def apis(environ: Mapping[str, str], own_port: int) -> Iterator[KnownServer]:
    """APIs with a key in the environment. Raises ConfigError for a wrong URL.

    A URL of this gateway itself, set for clients in the environment, is ignored.
    """
    for name, kind in KINDS.items():
        if not kind.needs_key:
            continue
        key = _first(environ, _KEYS.get(name, (f"{name.upper()}_API_KEY",)))
        url = _first(environ, _URLS.get(name, (f"{name.upper()}_BASE_URL",)))
        if url and _is_own(environ[url], url, own_port):
            url = ""
        base = environ[url].rstrip("/") if url else kind.base_url
        if key and base:
            yield KnownServer(name, name, base, environ[key], key, url)


def _first(environ: Mapping[str, str], names: Sequence[str]) -> str:
    return next((name for name in names if environ.get(name)), "")


def _is_own(url: str, variable: str, own_port: int) -> bool:
    try:
        address = BackendAddress.parse(url)
    except ValueError as error:
        raise ConfigError([f"environment variable {variable}: {error}".replace(repr(url), "its value")]) from None
    return address.host in LOOPBACK and address.port == own_port


def local_servers(environ: Mapping[str, str], ports: Sequence[int] | None) -> list[KnownServer]:
    """Local ports to probe. `ports` None: the usual ports, and the port of OLLAMA_HOST."""
    asked = LOCAL_PORTS if ports is None else tuple(ports)
    if ports is None and (port := _ollama_port(environ.get("OLLAMA_HOST", ""))):
        asked = (port, *asked)
    return [KnownServer("", "", f"http://127.0.0.1:{port}") for port in dict.fromkeys(asked)]


def _ollama_port(host: str) -> int | None:
    """Of `127.0.0.1:11435`, `:11435` or `http://127.0.0.1:11435`; None for another machine."""
    try:
        parts = urlsplit(host if "//" in host else f"//{host}")
        return parts.port if (parts.hostname or "") in LOOPBACK else None
    except ValueError:
        return None


# --------------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class ListedModels:
    """Usable names in GET /v1/models, the number left out, and the owner of the first model."""

    names: Sequence[str]
    left_out: int
    owner: str
    window: int | None = None  # context tokens, the smallest that the models report


def listed_models(answer: Any) -> ListedModels | None:
    """None: not a list of models. Together's API lists them without an envelope."""
    data = answer.get("data") if isinstance(answer, dict) else answer
    if not isinstance(data, list):
        return None
    entries = [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    names = dict.fromkeys(entry["id"].removeprefix("models/") for entry in entries)
    other_work = tier_rules().other_work
    usable = [name for name in names if _NAME.fullmatch(name) and not re.search(other_work, name)][:MOST_MODELS]
    owner = entries[0].get("owned_by") if entries else ""
    window = least_window(entry for entry in entries if entry["id"].removeprefix("models/") in usable)
    return ListedModels(usable, len(data) - len(usable), owner if isinstance(owner, str) else "", window)


def identified(port: int, listed: ListedModels, version: Any, info: Any) -> tuple[str, str]:
    """Backend and name of a server of this machine. `version`: of GET /api/version, `info`: of GET /info."""
    if (kind := _OWNERS.get(listed.owner)) is not None:
        return kind, kind
    if isinstance(version, dict) and isinstance(version.get("version"), str):
        return "ollama", "ollama"
    if isinstance(info, dict) and isinstance(info.get("model_id"), str):
        return "tgi", "tgi"
    return "compatible", "lmstudio" if listed.owner == _LM_STUDIO else f"local-{port}"


def loaded_model(running: Any, names: Sequence[str]) -> str:
    """A listed model in the memory of an Ollama, by its GET /api/ps."""
    models = running.get("models") if isinstance(running, dict) else None
    found = [entry.get("name") for entry in models if isinstance(entry, dict)] if isinstance(models, list) else []
    return next((name for name in names if name in found), "")
