"""LiteLLM's proxy configuration as one of ours: deployments become pools, model names routes, fallbacks tiers.

What LiteLLM does is kept: no budget is added, deployments of a name share its requests, attempts are repeated there
before a fallback is asked, and a fallback is asked for its own cause alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

from gateway.cli.importing import litellm_reasons as reasons
from gateway.cli.importing.imported_config import UNPROMISED, ImportedConfig, KeyAccount
from gateway.cli.importing.imported_values import Variables, pool_name, referenced, route_name
from gateway.cli.importing.litellm_deployments import DeploymentReader
from gateway.cli.importing.litellm_fallbacks import CAUSES, UNKNOWN_NAME, Fallbacks, Level, TierPlan
from gateway.cli.importing.litellm_settings import ProxySettings
from gateway.cli.importing.pool_drafts import API_VARIABLES, Deployment, PoolDraft, joined
from gateway.config.config_errors import ConfigError, Path
from policies.routes.levels import MOST_ATTEMPTS
from policies.routes.route import is_model_name

TABLES = {
    "litellm_settings": reasons.LITELLM,
    "router_settings": reasons.ROUTER,
    "general_settings": reasons.GENERAL,
}
STRATEGIES = {"latency-based-routing": "latency", "cost-based-routing": "cost"}  # `prefer` of all routes
SHUFFLE = "simple-shuffle"
DROPPED = (  # members that other dialects may lack, left out with LiteLLM's `drop_params`
    "frequency_penalty logit_bias logprobs n parallel_tool_calls prediction presence_penalty seed service_tier store "
    "top_logprobs verbosity"
).split()
OF_POOLS = "passthrough, and models of a pool, have the budget of workload chat: with one pool it is measured alone."
WILDCARD = "a passthrough takes every other model name, unchanged, and there is one: list the models as routes"
NO_USE = "a member of routes, and no route of this file has a use for it; a passthrough has none"
NO_KEY = "The file has no master_key: LiteLLM takes LITELLM_MASTER_KEY; here write keys: [{name, sha256}]."
REMARKS = (
    "Routes have no budgets, as in LiteLLM: with `ttft: {budget: 1s}` a route goes where its first token is in time.",
    "A pool of backend compatible whose servers are vLLM or SGLang: name that backend, and load and caches are read.",
    "`firsttoken check --live` asks every endpoint whether its URL, key and model are right.",
    "LiteLLM listens on port 4000 of every address, this gateway on 127.0.0.1:8080: server: {listen: ...}.",
)


def import_litellm(document: Any) -> ImportedConfig:
    """Raises ConfigError where there is nothing to import."""
    if not isinstance(document, dict) or not isinstance(document.get("model_list"), list):
        raise ConfigError(["no model_list: this is not a configuration of LiteLLM's proxy"])
    found = _LitellmImport(document)
    found.run()
    remarks = (*REMARKS, *found.remarks)
    return ImportedConfig("litellm", found.result(), found.account, found.variables, remarks)


class _LitellmImport:
    def __init__(self, document: dict[str, Any]) -> None:
        self.account, self.variables = KeyAccount(document), Variables({*API_VARIABLES, *referenced(document)})
        self.pools: dict[str, PoolDraft] = {}
        self.routes: dict[str, dict[str, Any]] = {}
        self.names: dict[str, str] = {}  # of routes, by model_name
        self.passthrough: str | None = None
        self.remarks: list[str] = []
        self._document = document
        self._groups: dict[str, list[Deployment]] = {}
        self._levels: dict[str, list[Level]] = {}  # without fallbacks, by model_name
        self._wildcards: list[tuple[Deployment, Path]] = []
        self._settings = ProxySettings(document, self.account, self.variables)
        self._fallbacks = Fallbacks(document, self.account)
        self._strategy = str(self._settings.router.get("routing_strategy") or SHUFFLE)

    def run(self) -> None:
        self._read_groups()
        for group, deployments in self._groups.items():
            self._add_group(group, deployments)
        for one, path in self._wildcards:
            self._add_wildcard(one, path)
        if not self.pools:
            raise ConfigError(["no model of this file has a counterpart here:", *self.account.report()])
        self._add_routes()
        self._fallbacks.account_for(self.names)
        for section in TABLES:
            aliases = self._section(section).get("model_group_alias")
            self._add_aliases((section, "model_group_alias"), aliases)
        self._add_strategy()
        self._settings.add_times({name: draft.settings for name, draft in self.pools.items()})
        self._account_for_the_rest()
        self.account.withdraw_unused(self.routes.values(), NO_USE)
        if "keys" not in self._settings.more:
            self.remarks.append(NO_KEY)
        if self._wildcards:
            self.remarks.append(OF_POOLS)

    def result(self) -> dict[str, Any]:
        document: dict[str, Any] = {"pools": {name: draft.section for name, draft in self.pools.items()}}
        if self.routes:
            document["routes"] = self.routes
        if self.passthrough is not None:
            document["passthrough"] = self.passthrough
        return {**document, **self._settings.more}

    def _section(self, name: str) -> dict[str, Any]:
        found = self._document.get(name)
        return found if isinstance(found, dict) else {}

    # -- models

    def _read_groups(self) -> None:
        reader = DeploymentReader(self.account, self.variables)
        for i, entry in enumerate(self._document["model_list"]):
            path: Path = ("model_list", i)
            if (one := reader.read(entry, path)) is None:
                continue
            if "*" in one.group or "*" in one.settings["model"]:
                self._wildcards.append((one, path))
            else:
                self._groups.setdefault(one.group, []).append(one)

    def _add_group(self, group: str, deployments: list[Deployment]) -> None:
        """Add a level of equal pools for each `order`; with LiteLLM's shuffle their weights decide."""
        self._levels[group] = []
        for level in self._by_order(deployments):
            pools: dict[str, float] = {}
            for draft in joined(level, several_apis=self._strategy in STRATEGIES):
                pools[self._add_pool(group, draft)] = draft.share
            self._levels[group].append(list(pools.items()))

    def _by_order(self, deployments: list[Deployment]) -> Iterator[list[Deployment]]:
        """Deployments without an order, and those without a weight beside others with one, are the last resort."""
        for order in sorted({inf if one.order is None else one.order for one in deployments}):
            level = [one for one in deployments if (inf if one.order is None else one.order) == order]
            weighted = [*self._weighed(level)]
            never = [replace(one, share=1.0) for one in weighted if not one.share]
            yield from filter(None, ([one for one in weighted if one.share], never))

    def _weighed(self, level: list[Deployment]) -> list[Deployment]:
        """With shares: weights, or where there are none `rpm`, or `tpm`, as LiteLLM's shuffle draws."""
        kinds = range(len(level[0].weights)) if self._strategy == SHUFFLE else ()
        kind = next((kind for kind in kinds if any(one.weights[kind] for one in level)), None)
        return level if kind is None else [replace(one, share=one.weights[kind]) for one in level]

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

    # -- routes

    def _add_routes(self) -> None:
        self._settings.add_redis()
        retries, cache, key = self._settings.retries(), self._settings.cache(), self._settings.add_master_key()
        if key:
            self.remarks.append(key)
        for group in self._levels:
            name = self.names[group] = route_name(group, {*self.routes, *self._levels})
            own = next((one.retries for one in self._groups[group] if one.retries is not None), retries)
            self.routes[name] = self._route(group, own) | ({"cache": dict(cache)} if cache else {})
            if name != group and is_model_name(group) and "*" not in group:
                self.routes[name]["aliases"] = [self.variables.literal(group)]
            self._account_for_entries(group, name)

    def _route(self, group: str, retries: int) -> dict[str, Any]:
        plan = TierPlan()
        for number, level in enumerate(self._levels[group]):
            plan.add(level, "failure" if number else "")
        for cause in CAUSES.values():
            for other in self._fallbacks.chain(group, cause):
                for level in self._levels.get(other, ()):
                    plan.add(level, cause)
        tiers = plan.sections()
        attempts = {"retries": retries, "max_attempts": min((retries + 1) * plan.levels, MOST_ATTEMPTS)}
        return {"tiers": tiers, **UNPROMISED, **attempts, **self._refusals(group), **self._members(group, plan)}

    def _refusals(self, group: str) -> dict[str, Any]:
        """Consequences of a refused prompt: a list for this cause alone, or every fallback without one."""
        found: dict[str, Any] = {}
        allowed = {
            cause: bool(self._fallbacks.chain(group, cause if self._fallbacks.has_list(cause) else "failure"))
            for cause in ("context", "content_filter")
        }
        if self._fallbacks.has_list("context") and not allowed["context"]:
            found["fallback"] = {"context": False}
        if allowed["content_filter"]:
            found["fallback"] = {**found.get("fallback", {}), "content_filter": True}
            if self._fallbacks.has_list("content_filter"):
                found["escalate"] = ["refusal"]  # an answer that ends by the filter is one too
        return found

    def _members(self, group: str, plan: TierPlan) -> dict[str, Any]:
        """Members of requests: the output limit, and those that may be dropped."""
        limits = [one.output_tokens for one in self._groups[group] if one.output_tokens is not None]
        found: dict[str, Any] = {"limits": {"output_tokens": max(limits)}} if limits else {}
        if self._drops(group) and any(self.pools[pool].settings["backend"] == "anthropic" for pool in plan.tiers):
            found["drop"] = list(DROPPED)
        return found

    def _drops(self, group: str) -> bool:
        """`drop_params`: of all models, or of one."""
        path = ("litellm_settings", "drop_params")
        if self._settings.program.get("drop_params") is True:
            self.account.moved(path, "routes", "*", "drop")
            return True
        entries = [entry for _, entry in self._entries(group)]
        return any(entry["litellm_params"].get("drop_params") is True for entry in entries)

    def _entries(self, group: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Entries of the file that became deployments of the group."""
        for i, entry in enumerate(self._document["model_list"]):
            is_read = isinstance(entry, dict) and not self.account.known(("model_list", i))
            if is_read and str(entry.get("model_name")) == group:
                yield i, entry

    def _account_for_entries(self, group: str, name: str) -> None:
        for i, _ in self._entries(group):
            self.account.moved(("model_list", i, "model_name"), "routes", name, *([] if name == group else ["aliases"]))
            params = ("model_list", i, "litellm_params")
            self.account.moved((*params, "max_tokens"), "routes", name, "limits", "output_tokens")
            self.account.moved((*params, "order"), "routes", name, "tiers")
            self.account.moved((*params, "num_retries"), "routes", name, "retries")
            self.account.moved(("model_list", i, "model_info", "order"), "routes", name, "tiers")
            if self._strategy == SHUFFLE:
                self.account.moved((*params, "weight"), "routes", name, "tiers")
            else:
                self.account.dropped((*params, "weight"), "LiteLLM has weights with simple-shuffle alone")

    def _add_aliases(self, path: Path, aliases: Any) -> None:
        if not isinstance(aliases, dict):
            return
        for alias, target in aliases.items():
            group = str(target.get("model") if isinstance(target, dict) else target)
            known, name = self.names.get(group), str(alias)
            if known is None:
                self.account.dropped((*path, name), UNKNOWN_NAME)
            elif name in self._taken() or "*" in name or not is_model_name(name):
                self.account.dropped((*path, name), "the name is that of a route already, or a pattern")
            else:
                self.routes[known].setdefault("aliases", []).append(self.variables.literal(name))
                self.account.moved((*path, name), "routes", known, "aliases")

    def _taken(self) -> set[str]:
        """Names of routes, and their aliases."""
        return {*self.routes, *(alias for route in self.routes.values() for alias in route.get("aliases", ()))}

    def _add_strategy(self) -> None:
        path: Path = ("router_settings", "routing_strategy")
        if self._strategy in STRATEGIES:
            for route in self.routes.values():
                route["prefer"] = STRATEGIES[self._strategy]
            self.account.moved(path, "routes", "*", "prefer")
        elif self._strategy == SHUFFLE:
            self.account.moved(path, "routes", "*", "tiers")
        else:
            self.account.dropped(path, "servers of a pool are ranked by the TTFT predicted of load and caches")

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
