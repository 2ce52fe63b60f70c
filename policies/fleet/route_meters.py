"""Meters of routes with a hook that limits their use of APIs. Kept over reloads, by the name of the route."""

from __future__ import annotations

from policies.route_hooks import Meter
from policies.routes.route import Route


class RouteMeters:
    def __init__(self) -> None:
        self._meters: dict[str, Meter] = {}

    def of(self, route: Route) -> Meter | None:
        """None: no hook of the route has a meter."""
        if (new := route.new_meter) is None:
            return None
        if (known := self._meters.get(route.name)) is None:
            known = self._meters[route.name] = new()
        return known
