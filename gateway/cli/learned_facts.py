"""Lessons of a running gateway on a model, for `firsttoken facts show --admin`: what refusals have shown it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from backends.facts.lookup import plain
from gateway.cli.gateway_client import ask_admin
from gateway.cli.tables import printable, within
from gateway.config.config_errors import ConfigError

HEADS = ("pool", "operation", "learned", "for", "until")


def learned(admin: str, model: str, pool: str | None, width: int | None) -> list[str]:
    """Table of the lessons on a model, which hold above the rows. `pool`: of this pool alone. Raises ConfigError."""
    rows = sorted({row for endpoint in _fleet(admin) for row in _lessons(endpoint, model, pool)})
    if not rows:
        return ["", f"{admin} has learned nothing of {model} by refusals"]
    return ["", f"learned by {admin} by refusals", *within([HEADS, *rows], width)]


def _fleet(admin: str) -> Sequence[Mapping[str, Any]]:
    found = ask_admin(admin, "/fleet")
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ConfigError([f"{admin}: this is not the admin port of a running gateway: GET /fleet is no list"])
    return found


def _lessons(endpoint: Mapping[str, Any], model: str, pool: str | None) -> Iterator[tuple[str, ...]]:
    name = endpoint.get("endpoint", {}).get("pool")
    if pool not in (None, name):
        return
    for each in endpoint.get("lessons", ()):
        if plain(each["model"]) == plain(model):
            until = datetime.now(UTC) + timedelta(seconds=each["left_s"])
            whom = "all callers" if each["callers"] == "all" else f"{each['callers']} of the callers"
            cells = (name, each["operation"], each["lesson"], whom, f"{until:%Y-%m-%d %H:%M} UTC")
            yield tuple(printable(str(cell)) for cell in cells)
