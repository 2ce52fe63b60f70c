"""Request to Route: a dictionary, and one way through for names that no route has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.admission.auth import Tenant
from gateway.api.api_error import ApiError
from policies.routes.route import Route


@dataclass(frozen=True, slots=True)
class Routes:
    """`passthrough` takes every other model name, unchanged, to one pool (zero-config).

    `open`: no keys are configured, so that every name is everybody's to know.
    """

    by_name: Mapping[str, Route]
    passthrough: Route | None = None
    open: bool = True

    def match(self, model: str) -> Route:
        """Raises Refusal (404 model_not_found)."""
        route = self.by_name.get(model) or self.passthrough
        if route is None:
            raise unknown(model, sorted(self.by_name)[:20] if self.open else ())
        return route


def admit(tenant: Tenant, route: Route, model: str) -> Route:
    """Raises Refusal (404): a route that is not this key's is one that does not exist."""
    if not tenant.may_use(route.name):
        raise unknown(model)
    return route


def unknown(model: str, known: Sequence[str] = ()) -> ApiError:
    shown = model if len(model) <= 100 else model[:100] + "…"
    hint = f" Known: {', '.join(known)}." if known else ""
    message = f"The model '{shown}' does not exist here.{hint}"
    return ApiError(404, message, code="model_not_found", param="model", logged="unknown model")
