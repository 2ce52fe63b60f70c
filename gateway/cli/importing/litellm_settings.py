"""Settings of LiteLLM's proxy that hold for all models: retries, limits of time, the cache, Redis, the master key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from gateway.cli.importing.imported_config import KeyAccount
from gateway.cli.importing.imported_values import Variables, is_host, number, seconds
from gateway.config.config_errors import Path
from policies.routes.levels import MOST_RETRIES

SDK_RETRIES = 2  # of LiteLLM, where the file does not say
LONGEST = "10m"  # a limit of silence where the file has none: LiteLLM's own is 100 minutes
TTLS = {"local": "10m", "redis": "1m"}  # LiteLLM's defaults, by the kind of cache
LONGEST_CACHED = 7 * 86_400
BEFORE = "{} of router_settings goes before this one"


class ProxySettings:
    """Reads the sections of one file. `more`: sections of the written file beside pools and routes."""

    def __init__(self, document: Mapping[str, Any], account: KeyAccount, variables: Variables) -> None:
        self._document = document
        self._account, self._variables = account, variables
        self.more: dict[str, Any] = {}
        self.router, self.program = _section(document, "router_settings"), _section(document, "litellm_settings")

    # -- attempts

    def retries(self) -> int:
        """Attempts after the first in a group."""
        found = None
        for section, settings in (("router_settings", self.router), ("litellm_settings", self.program)):
            value = settings.get("num_retries")
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                continue
            if found is None:
                found = min(value, MOST_RETRIES)
                self._account.moved((section, "num_retries"), "routes", "*", "retries")
            else:
                self._account.dropped((section, "num_retries"), BEFORE.format("num_retries"))
        return SDK_RETRIES if found is None else found

    def add_times(self, pools: Mapping[str, dict[str, Any]]) -> None:
        """Limits of silence, for pools without one of their own."""
        silence = self._silence()
        self.more["defaults"] = {"first_token": silence or LONGEST, "stream_idle": silence or LONGEST}
        for settings in pools.values():
            if own := settings.get("first_token"):
                settings["stream_idle"] = own

    def _silence(self) -> str | None:
        """Of a stream: `stream_timeout` of the router, else what holds for every request."""
        router = ("router_settings", self.router)
        found = None
        for (section, settings), key in (
            (router, "stream_timeout"),
            (("litellm_settings", self.program), "request_timeout"),
            (router, "timeout"),
            (router, "request_timeout"),
        ):
            if (value := seconds(settings.get(key))) is None:
                continue
            if found is None:
                found = value
                self._account.moved((section, key), "defaults", "first_token")
            else:
                self._account.dropped(
                    (section, key), "streams and whole answers have one limit of silence: first_token"
                )
        return found

    # -- cache

    def cache(self) -> dict[str, Any] | None:
        """`cache` of every route; None: off, or of a kind that has no counterpart."""
        params = self.program.get("cache_params")
        path: Path = ("litellm_settings", "cache_params")
        params = params if isinstance(params, dict) else {}
        if self.program.get("cache") is not True:
            self._account.dropped(path, "the cache is off in this file")
            return None
        kind = str(params.get("type", "redis"))
        if kind not in TTLS or params.get("mode") == "default_off":
            self._account.dropped(path, self._why_not(kind))
            self._account.dropped((*path[:1], "cache"), self._why_not(kind))
            return None
        self._account.moved((*path[:1], "cache"), "routes", "*", "cache")
        self._account.moved((*path, "type"), "state", "answers")
        ttl = self._ttl(params, path) or TTLS[kind]
        if kind == "redis":
            self._add_cache_server(params, path)
        self._account.dropped(path, "of this cache only its kind, its server and its ttl have counterparts")
        return {"ttl": ttl, "any_temperature": True}

    @staticmethod
    def _why_not(kind: str) -> str:
        if kind in TTLS:
            return "callers ask for each answer to be kept (default_off): a route keeps all or none"
        return f"a cache of type {kind} has no counterpart: write cache: {{ttl: 10m}} on the routes"

    def _ttl(self, params: Mapping[str, Any], path: Path) -> str | None:
        for key in ("ttl", "default_in_memory_ttl", "default_in_redis_ttl"):
            found = number(params.get(key))
            if found is not None and found <= LONGEST_CACHED:
                self._account.moved((*path, key), "routes", "*", "cache", "ttl")
                return seconds(found)
        return None

    def _add_cache_server(self, params: Mapping[str, Any], path: Path) -> None:
        """The server of the cache is that of the state, where there is one; there is one."""
        state = self.more.setdefault("state", {})
        if "redis" not in state and (url := self._redis(params, path, "")):
            state["redis"] = url
        elif "redis" not in state:
            state["redis"] = (
                f"redis://{self._variables.reference('REDIS_HOST')}:{self._variables.reference('REDIS_PORT')}"
            )
        state["answers"] = "redis"

    # -- Redis

    def add_redis(self) -> None:
        if url := self._redis(self.router, ("router_settings",), "redis_"):
            self.more["state"] = {"redis": url}

    def _redis(self, settings: Mapping[str, Any], path: Path, prefix: str) -> str | None:
        """The URL of the server that the settings name."""
        whole, host = settings.get(f"{prefix}url"), settings.get(f"{prefix}host")
        if whole:
            text = self._variables.of(whole) or self._variables.in_place_of_literal(whole, "REDIS_URL")
        elif host:
            host = self._word(host, is_host)
            port = self._word(settings.get(f"{prefix}port") or 6379, str.isdecimal)
            if not host or not port:
                return None
            text = f"redis://{self._credentials(settings, prefix)}{host}:{port}"
        else:
            return None
        for key in ("url", "host", "port", "password", "username"):
            if prefix + key in settings:
                self._account.moved((*path, prefix + key), "state", "redis")
        return text

    def _credentials(self, settings: Mapping[str, Any], prefix: str) -> str:
        password = settings.get(f"{prefix}password")
        if not password:
            return ""
        user = self._word(settings.get(f"{prefix}username") or "", is_host)
        return f"{user}:{self._variables.secret(password, 'REDIS_PASSWORD')}@"

    def _word(self, value: Any, valid: Callable[[str], bool]) -> str:
        """A variable, or a word of a URL; empty: neither."""
        return self._variables.of(value) or (str(value) if valid(str(value)) else "")

    # -- the master key

    def add_master_key(self) -> str | None:
        """Its digest, as the one key of callers; a remark where the operator has to compute the digest."""
        value = _section(self._document, "general_settings").get("master_key")
        if not isinstance(value, str) or not value:
            return None
        self._account.moved(("general_settings", "master_key"), "keys", "sha256")
        name = self._variables.name_of(value)
        digest = self._variables.reference(f"{name}_SHA256") if name else sha256(value.encode()).hexdigest()
        self.more["keys"] = [{"name": "master-key", "sha256": digest}]
        return name and f'{name}_SHA256 is the digest of the master key: printf %s "${name}" | sha256sum'


def _section(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}
