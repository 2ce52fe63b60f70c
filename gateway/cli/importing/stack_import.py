"""Helm values of vLLM's production-stack as a configuration: its engines become pools, its models routes.

Only the router has a counterpart. The engines stay as the chart deploys them, and are reached by the services of the
chart: `RELEASE-NAME-engine-service`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.cli.importing.imported_config import UNPROMISED, ImportedConfig, KeyAccount
from gateway.cli.importing.imported_values import Variables, is_host, pool_name, route_name, server_url, whole
from gateway.cli.importing.pool_drafts import Deployment, joined
from gateway.config.config_errors import ConfigError, Path
from policies.routes.route import is_model_name

PORT = 8000  # of the chart's engines
SERVED_NAME = "--served-model-name"
KEY = "VLLM_API_KEY"
REMARKS = (
    "Each URL is a service of the chart, in the namespace of the release; behind one are all replicas of an engine.",
    "An endpoint for each replica: endpoints: {kubernetes: {service: NAMESPACE/NAME, port: PORT}}.",
    "Routes have no budgets, as there: with `ttft: {budget: 1s}` requests wait and are ordered for their first tokens.",
)
_ENGINE = "how the engines are deployed, which stays with the chart"
_ROUTER = "how the chart deploys its router, in whose place the gateway runs"
_ROUTING = "endpoints are ranked by the TTFT predicted of load, queue and prefix cache: docs/routing.md"
_DISCOVERY = "endpoints: {kubernetes: {service: NAMESPACE/NAME, port: http}}, the ready pods of a service"
ROUTER: Mapping[str, str] = {
    "routingLogic": _ROUTING,
    "prefixMinMatchLength": _ROUTING,
    "sessionKey": "a session returns to its endpoint by its cached prefix; APIs read x-session-id and others",
    "engineScrapeInterval": "defaults.scrape; 500ms was kept, because predictions need recent loads",
    "requestStatsWindow": "statistics are learned and forgotten by their age: docs/routing.md",
    "otel": "telemetry: {otlp: http://HOST:4318}, over HTTP, not gRPC",
    "serviceDiscovery": _DISCOVERY,
    "k8sServiceDiscoveryType": _DISCOVERY,
    "vllmApiKey": 'callers\' keys are digests: printf %s "$KEY" | sha256sum, then keys: [{name, sha256}]',
    "rootPath": "the paths are those of the APIs; a proxy in front may strip a prefix",
    "enablePD": "prefill and decode on different engines is not routed here",
    "lmcacheConfig": "LMCache's controller is not asked: kv_events of an endpoint tell what is cached",
    "lmcacheControllerPort": "LMCache's controller is not asked: kv_events of an endpoint tell what is cached",
    "lmcacheControllerReplyPort": "LMCache's controller is not asked: kv_events of an endpoint tell what is cached",
    "lmcacheControllerHeartbeatPort": "LMCache's controller is not asked: kv_events of an endpoint tell what is cached",
    "serviceMonitor": "/metrics of the admin port: docs/metrics.md",
    "replicaCount": "replicas share their state over state: {redis: URL}",
    "autoscaling": "replicas share their state over state: {redis: URL}",
    "ingress": "nginx and HAProxy in front: docs/ports.md, Behind a proxy",
    "route": "nginx and HAProxy in front: docs/ports.md, Behind a proxy",
}
SECTIONS: Mapping[str, str] = {
    "cacheserverSpec": "the cache server stays with the chart",
    "loraController": "the controller of adapters stays with the chart",
    "sharedPvcStorage": "storage stays with the chart",
    "extraObjects": "objects of Kubernetes stay with the chart",
    "grafanaDashboards": "dashboards of the gateway are generated: docs/seeing.md, Dashboards",
    "kube-prometheus-stack": "Prometheus stays with the chart; it scrapes /metrics of the admin port",
    "prometheus-adapter": "Prometheus stays with the chart; it scrapes /metrics of the admin port",
    "keda": "scaling of engines stays with the chart",
}


def import_stack(document: Any, release: str) -> ImportedConfig:
    """`release`: the name of the Helm release. Raises ConfigError where there is nothing to import."""
    if not isinstance(document, dict) or not ({"servingEngineSpec", "routerSpec"} & document.keys()):
        raise ConfigError(["neither servingEngineSpec nor routerSpec: these are no values of vLLM's production-stack"])
    return _StackImport(document, release).run()


class _StackImport:
    def __init__(self, document: dict[str, Any], release: str) -> None:
        self.account, self.variables = KeyAccount(document), Variables()
        self._document, self._release = document, release
        self._engines = _mapping(document.get("servingEngineSpec"))
        self._router = _mapping(document.get("routerSpec"))

    def run(self) -> ImportedConfig:
        deployments = [*self._from_engines(), *self._from_static()]
        groups: dict[str, list[Deployment]] = {}
        for one in deployments:
            groups.setdefault(one.group, []).append(one)
        pools, routes = self._joined(groups)
        self._account_for_the_rest()
        if not pools:
            raise ConfigError(["no engine of this file has a URL here: modelSpec is empty", *self.account.report()])
        document = {"pools": pools, "routes": routes}
        return ImportedConfig("production-stack", document, self.account, self.variables, REMARKS)

    def _joined(self, groups: Mapping[str, list[Deployment]]) -> tuple[dict[str, Any], dict[str, Any]]:
        pools: dict[str, Any] = {}
        routes: dict[str, Any] = {}
        for group, deployments in groups.items():
            tiers: list[Any] = []
            for draft in joined(deployments):
                name = pool_name(group.rpartition("/")[2], pools)
                pools[name] = draft.section
                tiers.append({"pool": name, "beside": True} if tiers else name)  # the router there tells none apart
                for one in draft.deployments:
                    for path, key in one.moves:
                        self.account.moved(path, "pools", name, *draft.target(key).split("."))
            name = route_name(group, {*routes, *groups})
            routes[name] = {"tiers": tiers, **UNPROMISED}
            if name != group and is_model_name(group) and "*" not in group:
                routes[name]["aliases"] = [self.variables.literal(group)]
        return pools, routes

    # -- engines of the chart

    def _from_engines(self) -> Iterator[Deployment]:
        specs = self._engines.get("modelSpec")
        for i, spec in enumerate(specs if isinstance(specs, list) else ()):
            path: Path = ("servingEngineSpec", "modelSpec", i)
            if not isinstance(spec, dict) or not is_host(str(spec.get("name", ""))) or not spec.get("modelURL"):
                self.account.dropped(path, "an engine has a name, of letters, digits and hyphens, and a modelURL")
            elif self._engines.get("enableEngine") is False or spec.get("enabled") is False:
                self.account.dropped(path, "the engine is switched off")
            else:
                yield self._of_spec(spec, path)

    def _of_spec(self, spec: dict[str, Any], path: Path) -> Deployment:
        config = _mapping(spec.get("vllmConfig"))
        served = _argument(config.get("extraArgs"), SERVED_NAME)
        model = served or str(spec["modelURL"])
        moves = [((*path, "name"), "url")]
        moves.append(((*path, "vllmConfig", "extraArgs"), "model") if served else ((*path, "modelURL"), "model"))
        settings: dict[str, Any] = {"backend": "vllm", "model": self.variables.literal(model)}
        if (window := whole(config.get("maxModelLen"))) is not None:
            settings["context_window"] = window
            moves.append(((*path, "vllmConfig", "maxModelLen"), "context_window"))
        if adapters := self._adapters(spec, moves):
            settings["adapters"] = adapters
            if (slots := whole(config.get("maxLoras"))) is not None:
                adapters["slots"] = min(slots, 10_000)
                moves.append(((*path, "vllmConfig", "maxLoras"), "adapters.slots"))
        return Deployment(model, settings, self._url(spec), self._api_key(moves), moves=tuple(moves))

    def _url(self, spec: Mapping[str, Any]) -> str:
        port = whole(self._engines.get("servicePort")) or whole(self._engines.get("containerPort")) or PORT
        for key in ("servicePort", "containerPort"):
            if key in self._engines:
                self.account.moved(("servingEngineSpec", key), "pools", "*", "endpoints")
        return f"http://{self._release}-{spec['name']}-engine-service:{port}"

    def _api_key(self, moves: list[tuple[Path, str]]) -> str | None:
        """A literal, or a secret of Kubernetes: either is a variable here."""
        value = self._engines.get("vllmApiKey")
        if not value:
            return None
        moves.append((("servingEngineSpec", "vllmApiKey"), "api_key"))
        return self.variables.reference(KEY) if isinstance(value, dict) else self.variables.secret(value, KEY)

    def _adapters(self, spec: Mapping[str, Any], moves: list[tuple[Path, str]]) -> dict[str, Any]:
        names = []
        listed = self._document.get("loraAdapters")
        for i, adapter in enumerate(listed if isinstance(listed, list) else ()):
            source = _mapping(_mapping(adapter).get("adapterSource"))
            name = str(source.get("adapterName") or "")
            if (
                re.fullmatch(r"[!-~]+", name)
                and name not in names
                and _mapping(adapter).get("baseModel") in (spec["name"], spec["modelURL"])
            ):
                names.append(self.variables.literal(name))
                moves.append((("loraAdapters", i, "adapterSource", "adapterName"), "adapters.names"))
        return {"names": names} if names else {}

    # -- engines elsewhere

    def _from_static(self) -> Iterator[Deployment]:
        urls, models = (_listed(self._router.get(key)) for key in ("staticBackends", "staticModels"))
        for text, model in zip(urls, models, strict=False):
            url = server_url(text) or self.variables.in_place_of_literal(text, model, "base_url")
            settings = {"backend": "vllm", "model": self.variables.literal(model)}
            moves: list[tuple[Path, str]] = [
                (("routerSpec", "staticBackends"), "endpoints"),
                (("routerSpec", "staticModels"), "model"),
            ]
            yield Deployment(model, settings, url, moves=tuple(moves))

    # -- all other keys

    def _account_for_the_rest(self) -> None:
        for section, value in self._document.items():
            if section == "servingEngineSpec":
                self.account.dropped((section,), _ENGINE)
            elif section == "routerSpec":
                for key in ROUTER.keys() & _mapping(value).keys():
                    self.account.dropped((section, key), ROUTER[key])
                self.account.dropped((section,), _ROUTER)
            elif section == "loraAdapters":
                self.account.dropped((section,), "adapters are loaded by the chart; their names belong to a pool")
            elif section in SECTIONS:
                self.account.dropped((section,), SECTIONS[section])


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _listed(value: Any) -> list[str]:
    """Values of a comma-separated text."""
    return [part.strip() for part in str(value).split(",") if part.strip()] if value else []


def _argument(arguments: Any, name: str) -> str:
    """Value of a command line's option, in either form; empty: it is not there."""
    words = [str(word) for word in arguments] if isinstance(arguments, list) else []
    for i, word in enumerate(words):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name and i + 1 < len(words):
            return words[i + 1]
    return ""
