"""Route lookup: a dictionary by model name, and an optional route for every other name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.admission.auth import Tenant
from gateway.api.api_error import ApiError
from policies.routes.route import Route


@dataclass(frozen=True, slots=True)
class Routes:
    """`passthrough` takes every model name without a route, unchanged, to one pool (zero-config).

    `open`: no keys are configured, so an unknown name may be answered with the names of all routes.
    """

    by_name: Mapping[str, Route]
    passthrough: Route | None = None
    open: bool = True

    @property
    def all(self) -> tuple[Route, ...]:
        """Every route, `passthrough` last."""
        return (*self.by_name.values(), *([self.passthrough] if self.passthrough else []))

    def match(self, model: str) -> Route:
        """Raises ApiError (404 model_not_found)."""
        route = self.by_name.get(model) or self.passthrough
        if route is None:
            raise unknown(model, sorted(self.by_name)[:20] if self.open else ())
        return route

    def wanted_headers(self) -> frozenset[str]:
        """Request headers read by a tier's `when`."""
        conditions = [tier.when for route in self.all for tier in route.tiers if tier.when is not None]
        return frozenset(name for when in conditions for name in when.headers())


def admit(tenant: Tenant, route: Route, model: str) -> Route:
    """Raises ApiError (404): a forbidden route is reported as missing."""
    if not tenant.may_use(route.name):
        raise unknown(model)
    return route


def unknown(model: str, known: Sequence[str] = ()) -> ApiError:
    shown = model if len(model) <= 100 else model[:100] + "…"
    hint = f" Known: {', '.join(known)}." if known else ""
    message = f"The model '{shown}' does not exist here.{hint}"
    return ApiError(404, message, code="model_not_found", param="model", logged="unknown model")
