"""Finds the route of a caller's model name: a route, an alias, a model of a pool, or the passthrough.

Names, in the order in which they are tried (`policies.routes.model_names` orders the patterns):
- exact: a route, an alias, `POOL/MODEL` for a model that the pool lists, and MODEL alone where one pool lists it;
- patterns: aliases with `*`, and `POOL/*` for a pool that takes every model;
- a model's name without its tag, with or without the pool: `llama3.2` of a listed `llama3.2:latest`, or the only tag;
- `passthrough`, which takes every other name.

A name that means several models, of those that the caller may use, is a 404 with all of them. Any other 404 names the
nearest names among those that the caller may use, which GET /v1/models lists too. Its log line has the name that was
asked for, if it looks like one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gateway.admission.auth import ANYONE, Tenant, sent_keys
from gateway.api.api_error import ApiError
from policies.routes.model_names import ANY, by_precedence, by_untagged, is_pattern, matches, nearest, own_names
from policies.routes.route import Route

SHOWN_NAME = 100  # characters of an unknown name in messages and logs
UNKNOWN = "unknown model"
SHORTEST_KEY = 8  # characters; a shorter text in a header of keys is a placeholder, such as `none`
_PLAIN_NAME = re.compile(rf"[\w./:@+*-]{{1,{SHOWN_NAME}}}", re.ASCII)
_KNOWN_KEY = re.compile(r"(?:^|\W)(?:sk|pk|rk|gsk|xai|fw|hf|nvapi|ft)[-_][\w-]{16}|AIza[\w-]{16}")
NO_HEADERS: Mapping[str, str] = {}
SHOWN_NAMES = 20  # names in a 404 without a near one


def logged_name(model: str, keys: Iterable[str]) -> str:
    """An unknown name with a space before it, for the log; empty where it may be a prompt or a key, put into the wrong
    member: it has no form of a name, or holds a text of the caller's headers of keys."""
    if not _PLAIN_NAME.fullmatch(model) or _KNOWN_KEY.search(model):
        return ""
    return "" if any(len(key) >= SHORTEST_KEY and key in model for key in keys) else f" {model}"


@dataclass(frozen=True, slots=True)
class RoutedName:
    """A route, and how a caller's name leads to it. `model`: the name that servers receive; empty: the pool's own.
    `via`: the alias, pattern or model that has matched; empty: the name of the route."""

    route: Route
    model: str = ""
    via: str = ""


@dataclass(frozen=True, slots=True)
class PoolModels:
    """The models of a pool that callers may name. `names`: as listed; `*` among them: any other model too."""

    route: Route
    names: Sequence[str]


class Routes:
    """`passthrough` takes every model name without a route, unchanged, to one pool. `models`: by pool."""

    def __init__(
        self,
        by_name: Mapping[str, Route],
        passthrough: Route | None = None,
        models: Mapping[str, PoolModels] | None = None,
    ) -> None:
        self.by_name, self.passthrough = by_name, passthrough
        self.models: Mapping[str, PoolModels] = models or {}
        self._exact: dict[str, RoutedName] = {}
        for name, found in (*self._own_names(), *self._pool_models(), *self._aliases()):
            self._exact[name] = found
        self._patterns = [(name, self._exact.pop(name)) for name in by_precedence(filter(is_pattern, self._exact))]
        self._exact |= {name: RoutedName(route) for name, route in by_name.items()}
        self._shared = self._shared_names()

    def _aliases(self) -> Iterator[tuple[str, RoutedName]]:
        for route in self.by_name.values():
            for alias in route.aliases:
                yield alias, RoutedName(route, via=alias)

    def _pool_models(self) -> Iterator[tuple[str, RoutedName]]:
        for pool, found in self.models.items():
            for model in found.names:
                name = f"{pool}/{model}"
                yield name, RoutedName(found.route, model, via=name)

    def _own_names(self) -> Iterator[tuple[str, RoutedName]]:
        for model, pool in own_names({pool: found.names for pool, found in self.models.items()}).items():
            yield model, RoutedName(self.models[pool].route, model, via=f"{pool}/{model}")

    def _shared_names(self) -> dict[str, list[RoutedName]]:
        """Names that may mean several models: without a tag, and those that several pools list."""
        shared: dict[str, list[RoutedName]] = {}
        for pool, found in self.models.items():
            listed = [model for model in found.names if model != ANY]
            for name, models in (*by_untagged(listed).items(), *((model, [model]) for model in listed)):
                routed = [RoutedName(found.route, model, via=f"{pool}/{model}") for model in models]
                shared.setdefault(name, []).extend(routed)
                shared.setdefault(f"{pool}/{name}", []).extend(routed)
        return shared

    @property
    def all(self) -> tuple[Route, ...]:
        """Every route, those of models after the named ones, `passthrough` last."""
        of_models = (found.route for found in self.models.values())
        return (*self.by_name.values(), *of_models, *([self.passthrough] if self.passthrough else []))

    def takes_any_model(self, route: Route) -> bool:
        """Requests of this route name their model themselves."""
        return route is self.passthrough or any(route is found.route for found in self.models.values())

    def match(self, model: str, tenant: Tenant = ANYONE, headers: Mapping[str, str] = NO_HEADERS) -> RoutedName:
        """Raises ApiError (404 model_not_found). `headers`: the caller's, whose keys are not to be logged."""
        found = self._exact.get(model) or self._by_pattern(model) or self._by_shared_name(model, tenant)
        if found is None and self.passthrough is not None:
            found = RoutedName(self.passthrough, model)
        if found is None:
            raise self.unknown(model, tenant, headers)
        return found

    def _by_pattern(self, model: str) -> RoutedName | None:
        for pattern, found in self._patterns:
            if matches(pattern, model):
                if found.model != ANY:
                    return found
                if rest := model[len(pattern) - 1 :]:
                    return RoutedName(found.route, rest, pattern)
        return None

    def _by_shared_name(self, model: str, tenant: Tenant) -> RoutedName | None:
        """Raises ApiError (404) for a name of several models, unless `passthrough` takes it."""
        found = [each for each in self._shared.get(model, ()) if tenant.may_use(each.route.name)]
        if len(found) == 1:
            return found[0]
        if not found or self.passthrough is not None:
            return None
        names = " or ".join(each.via for each in found[:SHOWN_NAMES])
        message = f"The model '{model}' is several here: {names}. Name one of them."
        raise ApiError(404, message, code="model_not_found", param="model", logged="ambiguous model")

    def listed(self, tenant: Tenant) -> list[str]:
        """Names that the caller may send, for GET /v1/models: routes, aliases, models of pools. A pattern of aliases is
        a name too; that of a pool is not."""
        names = dict.fromkeys(name for name, route in self.by_name.items() if tenant.may_use(route.name))
        for name, found in (*self._aliases(), *self._pool_models()):
            if found.model != ANY and tenant.may_use(found.route.name):
                names[name] = None
        return list(names)

    def unknown(self, model: str, tenant: Tenant, headers: Mapping[str, str] = NO_HEADERS) -> ApiError:
        """The nearest names, or else the first of all."""
        shown = model if len(model) <= SHOWN_NAME else model[:SHOWN_NAME] + "…"
        names = sorted(self.listed(tenant))
        near = nearest(model, names)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        if not near and names:
            hint = f" Known: {', '.join(names[:SHOWN_NAMES])}."
        message = f"The model '{shown}' does not exist here.{hint}"
        logged = f"{UNKNOWN}{logged_name(model, sent_keys(headers))}"
        return ApiError(404, message, code="model_not_found", param="model", logged=logged)

    def wanted_headers(self) -> frozenset[str]:
        """Request headers read by a tier's `when`."""
        conditions = [tier.when for route in self.all for tier in route.tiers if tier.when is not None]
        return frozenset(name for when in conditions for name in when.headers())

    def admit(self, tenant: Tenant, route: Route, model: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """Raises ApiError (404): a forbidden route is reported as missing. `headers`: as for `match`."""
        if not tenant.may_use(route.name):
            raise self.unknown(model, tenant, headers)
