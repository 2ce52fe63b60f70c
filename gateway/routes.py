"""Request to Route: a dictionary, and one way through for names that no route has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.refusal import Refusal
from policies.route import Route


@dataclass(frozen=True, slots=True)
class Routes:
    """`passthrough` takes every other model name, unchanged, to one pool (zero-config)."""

    by_name: Mapping[str, Route]
    passthrough: Route | None = None

    def match(self, model: str) -> Route:
        """Raises Refusal (404 model_not_found)."""
        route = self.by_name.get(model) or self.passthrough
        if route is None:
            shown = model if len(model) <= 100 else model[:100] + "…"
            known = ", ".join(sorted(self.by_name)[:20])
            raise Refusal(
                404, f"The model '{shown}' does not exist here. Known: {known}.", code="model_not_found", param="model"
            )
        return route
