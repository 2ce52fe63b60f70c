"""Reads the table of what the APIs of the field verify (`rules.yaml`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("rules.yaml")


@dataclass(frozen=True)
class Violation:
    """A rule that a request breaks. `kind`: a row of the table of results; `at`: path of the member, as the API names
    it; `means`: no gateway can mend it without a loss of meaning."""

    kind: str
    at: str
    message: str
    code: str | None = None
    means: bool = False


@dataclass(frozen=True)
class Target:
    """A model at an API. `rules`: of the API, with those of the model on top."""

    api: str
    model: str
    rules: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.api}:{self.model}"

    @property
    def pool(self) -> str:
        """Name of the pool and the route."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name.lower())

    def rule(self, name: str, dialect: str = "") -> Any:
        """A rule, or its value in a dialect; None: not verified."""
        found = self.rules.get(name)
        if dialect and isinstance(found, dict):
            return found.get(dialect, found.get("chat") if name == "efforts" else None)
        return found


@cache
def table() -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = yaml.safe_load(TABLE.read_text("utf-8"))
    return loaded


@cache
def targets() -> tuple[Target, ...]:
    """All models of all APIs."""
    found = []
    for api, row in table()["apis"].items():
        for model, more in row["models"].items():
            found.append(Target(api, model, {**row, **more}))
    return tuple(found)


@cache
def by_api() -> Mapping[str, tuple[Target, ...]]:
    return {api: tuple(each for each in targets() if each.api == api) for api in table()["apis"]}


def is_meaning(rule: str) -> bool:
    return rule in table()["meaning"]
