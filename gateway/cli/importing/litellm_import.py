"""LiteLLM's proxy configuration as one of ours: deployments become pools, model names routes, fallbacks tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gateway.cli.importing import litellm_reasons as reasons
from gateway.cli.importing.imported_config import ImportedConfig
from gateway.cli.importing.imported_values import Variables, is_host, pool_name, referenced, route_name, seconds
from gateway.cli.importing.key_account import KeyAccount
from gateway.cli.importing.litellm_deployments import DeploymentReader
from gateway.cli.importing.litellm_providers import API_VARIABLES
from gateway.cli.importing.pool_drafts import Deployment, PoolDraft, joined
from gateway.config.config_errors import ConfigError, Path

TABLES = {
    "litellm_settings": reasons.LITELLM,
    "router_settings": reasons.ROUTER,
    "general_settings": reasons.GENERAL,
}
STRATEGIES = {"latency-based-routing": "latency", "cost-based-routing": "cost"}  # `prefer` of all routes
FALLBACKS = ("fallbacks", "context_window_fallbacks", "content_policy_fallbacks")
WILDCARD = "a passthrough takes every other model name, unchanged, and there is one: list the models as routes"
MAX_ATTEMPTS = 10
REMARKS = (
    "Routes have the budgets of workload chat, 1s to the first token: set `ttft` and `workload` of each.",
    "A pool of backend compatible whose servers are vLLM or SGLang: name that backend, and load and caches are read.",
    "`firsttoken check --live` asks every endpoint whether its URL, key and model are right.",
)


def import_litellm(document: Any) -> ImportedConfig:
    """Raises ConfigError where there is nothing to import."""
    if not isinstance(document, dict) or not isinstance(document.get("model_list"), list):
        raise ConfigError(["no model_list: this is not a configuration of LiteLLM's proxy"])
    found = _LitellmImport(document)
    found.run()
    return ImportedConfig("litellm", found.result(), found.account, found.variables, REMARKS)


class _LitellmImport:
    def __init__(self, document: dict[str, Any]) -> None:
        self.account, self.variables = KeyAccount(document), Variables({*API_VARIABLES, *referenced(document)})
        self.pools: dict[str, PoolDraft] = {}
        self.routes: dict[str, dict[str, Any]] = {}
        self.names: dict[str, str] = {}  # of routes, by model_name
        self.own_tiers: dict[str, list[str]] = {}  # without fallbacks, by model_name
        self.passthrough: str | None = None
        self.more: dict[str, Any] = {}  # other sections
        self._document = document
        self._wildcards: list[tuple[Deployment, Path]] = []

    def run(self) -> None:
        for group, deployments in self._groups().items():
            self._add_group(group, deployments)
        for one, path in self._wildcards:
            self._add_wildcard(one, path)
        if not self.pools:
            raise ConfigError(["no model of this file has a counterpart here:", *self.account.report()])
        for section in ("router_settings", "litellm_settings"):
            self._add_settings(section)
        self._account_for_the_rest()

    def result(self) -> dict[str, Any]:
        document: dict[str, Any] = {"pools": {name: draft.section for name, draft in self.pools.items()}}
        if self.routes:
            document["routes"] = self.routes
        if self.passthrough is not None:
            document["passthrough"] = self.passthrough
        return {**document, **self.more}

    # -- models

    def _groups(self) -> dict[str, list[Deployment]]:
        reader = DeploymentReader(self.account, self.variables)
        groups: dict[str, list[Deployment]] = {}
        for i, entry in enumerate(self._document["model_list"]):
            path: Path = ("model_list", i)
            if (one := reader.read(entry, path)) is None:
                continue
            if "*" in one.group or "*" in one.settings["model"]:
                self._wildcards.append((one, path))
            else:
                groups.setdefault(one.group, []).append(one)
        return groups

    def _add_wildcard(self, one: Deployment, path: Path) -> None:
        prefix = one.group.removesuffix("/*")
        settings = {key: value for key, value in one.settings.items() if key != "model"}
        if one.settings["model"] == "*" and one.group == "*" and self.passthrough is None:
            self.passthrough = self._add_pool("any-model", PoolDraft.of(replace(one, settings=settings)))
            self.account.moved((*path, "model_name"), "passthrough")
        elif one.settings["model"] == "*" and pool_name(prefix, self.pools) == prefix:  # answers to PREFIX/MODEL
            self._add_pool(prefix, PoolDraft.of(replace(one, settings={**settings, "models": ["*"]})))
            self.account.moved((*path, "model_name"), "pools", prefix, "models")
        else:
            self.account.dropped(path, f"{one.group}: {WILDCARD}")

    def _add_group(self, group: str, deployments: list[Deployment]) -> None:
        name = self.names[group] = route_name(group, self.routes)
        tiers = [self._add_pool(group, draft) for draft in joined(deployments)]
        self.own_tiers[group] = list(dict.fromkeys(tiers))
        self.routes[name] = {"tiers": list(self.own_tiers[group])}
        limits = [one.output_tokens for one in deployments if one.output_tokens is not None]
        if limits:
            self.routes[name]["limits"] = {"output_tokens": max(limits)}
        for i, entry in enumerate(self._document["model_list"]):
            if self.account.known(("model_list", i)) or not isinstance(entry, dict):
                continue
            if str(entry.get("model_name")) == group:
                self.account.moved(("model_list", i, "model_name"), "routes", name)
                path = ("model_list", i, "litellm_params", "max_tokens")
                self.account.moved(path, "routes", name, "limits", "output_tokens")
                self.account.moved((*path[:-1], "order"), "routes", name, "tiers")

    def _add_pool(self, group: str, draft: PoolDraft) -> str:
        """The name of the pool; a pool with the same servers, keys and settings is used again."""
        name = next((known for known, other in self.pools.items() if other.section == draft.section), None)
        if name is None:
            name = pool_name(group, self.pools)
            self.pools[name] = draft
        for one in draft.deployments:
            for path, key in one.moves:
                self.account.moved(path, "pools", name, *draft.target(key).split("."))
        return name

    # -- settings

    def _add_settings(self, section: str) -> None:
        settings = self._document.get(section)
        if not isinstance(settings, dict):
            return
        for key in FALLBACKS:
            self._add_fallbacks((section, key), settings.get(key))
        self._add_default_fallbacks((section, "default_fallbacks"), settings.get("default_fallbacks"))
        self._add_aliases((section, "model_group_alias"), settings.get("model_group_alias"))
        self._add_strategy((section, "routing_strategy"), settings.get("routing_strategy"))
        self._add_defaults(section, settings)
        if section == "router_settings":
            self._add_redis(settings)

    def _add_fallbacks(self, path: Path, listed: Any) -> None:
        for at, group, targets in _fallbacks(listed):
            groups = list(self.names) if group == "*" else [group]
            names = [self.names[each] for each in groups if each in self.names]
            if not names:
                self.account.dropped((*path, at, group), "there is no route of this name")
            for name in names:
                self._append_tiers(name, targets)
                self.account.moved((*path, at, group), "routes", name, "tiers")
                if path[-1] == "content_policy_fallbacks":
                    self.routes[name]["fallback"] = {"content_filter": True}

    def _add_default_fallbacks(self, path: Path, targets: Any) -> None:
        if isinstance(targets, list) and targets:
            for name in self.routes:
                self._append_tiers(name, targets)
            self.account.moved(path, "routes", "*", "tiers")

    def _append_tiers(self, name: str, targets: list[Any]) -> None:
        """Pools of the routes that are named, as they were before any fallback."""
        for target in targets:
            group = target.get("model") if isinstance(target, dict) else target
            for pool in self.own_tiers.get(str(group), ()):
                if pool not in self.routes[name]["tiers"]:
                    self.routes[name]["tiers"].append(pool)

    def _add_aliases(self, path: Path, aliases: Any) -> None:
        if not isinstance(aliases, dict):
            return
        for alias, target in aliases.items():
            group = str(target.get("model") if isinstance(target, dict) else target)
            known, name = self.names.get(group), route_name(str(alias), self.routes)
            if known is None:
                self.account.dropped((*path, str(alias)), "there is no route of this name")
            elif name in self._taken() or "*" in name:
                self.account.dropped((*path, str(alias)), "the name is that of a route already, or a pattern")
            else:
                self.routes[known].setdefault("aliases", []).append(name)
                self.account.moved((*path, str(alias)), "routes", known, "aliases")

    def _taken(self) -> set[str]:
        """Names of routes, and their aliases."""
        return {*self.routes, *(alias for route in self.routes.values() for alias in route.get("aliases", ()))}

    def _add_strategy(self, path: Path, strategy: Any) -> None:
        if isinstance(strategy, str) and strategy in STRATEGIES:
            for route in self.routes.values():
                route["prefer"] = STRATEGIES[strategy]
            self.account.moved(path, "routes", "*", "prefer")
        elif strategy is not None:
            self.account.dropped(path, "endpoints are ranked by the TTFT predicted of load and caches: docs/routing.md")

    def _add_defaults(self, section: str, settings: Mapping[str, Any]) -> None:
        retries = settings.get("num_retries")
        if isinstance(retries, int) and not isinstance(retries, bool) and retries >= 0:
            self._add_default((section, "num_retries"), "max_attempts", min(retries + 1, MAX_ATTEMPTS))
        if (silence := seconds(settings.get("request_timeout"))) is not None:
            self._add_default((section, "request_timeout"), "first_token", silence)

    def _add_default(self, path: Path, name: str, value: Any) -> None:
        """The router's own setting goes before the one of the whole program."""
        defaults = self.more.setdefault("defaults", {})
        if name in defaults:
            self.account.dropped(path, f"defaults.{name} is of the router's setting, which goes before this one")
        else:
            defaults[name] = value
            self.account.moved(path, "defaults", name)

    def _add_redis(self, settings: Mapping[str, Any]) -> None:
        url, host = settings.get("redis_url"), settings.get("redis_host")
        if url:
            known = self.variables.of(url)
            text = known or self.variables.in_place_of_literal(url, "REDIS_URL")
        elif host:
            host, port = self._word(host, is_host), self._word(settings.get("redis_port") or 6379, str.isdecimal)
            if not host or not port:
                return
            text = f"redis://{self._credentials(settings)}{host}:{port}"
        else:
            return
        self.more["state"] = {"redis": text}
        for key in ("redis_url", "redis_host", "redis_port", "redis_password", "redis_username"):
            self.account.moved(("router_settings", key), "state", "redis")

    def _credentials(self, settings: Mapping[str, Any]) -> str:
        password = settings.get("redis_password")
        if not password:
            return ""
        user = self._word(settings.get("redis_username") or "", is_host)
        return f"{user}:{self.variables.secret(password, 'REDIS_PASSWORD')}@"

    def _word(self, value: Any, valid: Callable[[str], bool]) -> str:
        """A variable, or a word of a URL; empty: neither."""
        return self.variables.of(value) or (str(value) if valid(str(value)) else "")

    # -- all other keys

    def _account_for_the_rest(self) -> None:
        for section, value in self._document.items():
            if section in TABLES and isinstance(value, dict) and value:
                for key in value:
                    reason = reasons.reason_for(str(key), TABLES[section])
                    if reason and not self.account.known((section, str(key))):
                        self.account.dropped((section, str(key)), reason)
            elif not value:
                self.account.dropped((str(section),), "empty")
            elif reason := reasons.reason_for(str(section), reasons.SECTIONS):
                self.account.dropped((str(section),), reason)


def _fallbacks(listed: Any) -> Iterator[tuple[int, str, list[Any]]]:
    """Position, model and targets of each rule."""
    for at, rule in enumerate(listed if isinstance(listed, list) else ()):
        for group, targets in rule.items() if isinstance(rule, dict) else ():
            yield at, str(group), targets if isinstance(targets, list) else [targets]
