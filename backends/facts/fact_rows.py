"""Rows of the files of facts, read once a process, when the first model is looked up."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from backends.facts.model_facts import Facts, SchemaRules

_HERE = Path(__file__).parent
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml reads ten times as fast
FACTS = frozenset(field.name for field in fields(Facts))
_RULES = frozenset(field.name for field in fields(SchemaRules))
Version = tuple[int, ...]
_VERSION = r"(?P<v>\d{1,2}(?:[.-]\d{1,2}(?![\d]))?)(?!\d)"  # eight digits behind a name are a date


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Facts of models of a family. `since`: the least version."""

    family: str
    name: str  # `match` as written, and `since`
    match: re.Pattern[str]
    since: Version
    facts: Mapping[str, Any]
    source: str
    note: str

    def holds(self, name: str) -> bool:
        """`name`: as `lookup.plain` writes it."""
        found = self.match.search(name)
        return found is not None and (not self.since or version(found["v"]) >= self.since)


@dataclass(frozen=True, slots=True)
class ApiRow:
    """Facts of an API, whatever the model. `over`: whatever the model's row says."""

    name: str
    hosts: tuple[str, ...]
    families: tuple[str, ...] | None  # that are looked through; None: all
    facts: Mapping[str, Any]
    over: Mapping[str, Any]


def version(text: str) -> Version:
    return tuple(int(part) for part in re.split("[.-]", text))


@cache
def families() -> Mapping[str, Sequence[ModelRow]]:
    """Rows by family, in the order of the file."""
    return {name: [_model_row(name, row) for row in rows] for name, rows in _read("models.yaml")["families"].items()}


@cache
def apis() -> Mapping[str, ApiRow]:
    """Rows by name."""
    rows: dict[str, ApiRow] = {}
    for name, written in _read("apis.yaml")["apis"].items():
        rows[name] = _api_row(name, dict(written), rows)
    return rows


@cache
def schema_rules(name: str) -> SchemaRules:
    """The subset of JSON schema of `Facts.schema` and `Facts.strict_schema`."""
    rules = _read("apis.yaml")["schemas"][name] if name else {}
    _refuse_unknown(name, rules.keys(), _RULES)
    return msgspec.convert(rules, SchemaRules)


@cache
def _read(file: str) -> Mapping[str, Any]:
    read: Mapping[str, Any] = yaml.load((_HERE / file).read_bytes(), _LOADER)
    return read


def _model_row(family: str, written: Mapping[str, Any]) -> ModelRow:
    said = {name: value for name, value in written.items() if name in FACTS}
    _refuse_unknown(family, written.keys() - FACTS - {"match", "since", "source", "note"})
    return ModelRow(
        family,
        f"{family} {written['match']}" + (f" since {written['since']}" if "since" in written else ""),
        re.compile(r"(?<![a-z0-9])" + written["match"].replace("{v}", _VERSION)),
        version(str(written["since"])) if "since" in written else (),
        said,
        str(written["source"]),
        written.get("note", ""),
    )


def _api_row(name: str, written: dict[str, Any], before: Mapping[str, ApiRow]) -> ApiRow:
    """`like` names a row before, whose facts hold where this row has none."""
    like = before[written.pop("like")] if "like" in written else None
    hosts, names, over = written.pop("hosts", ()), written.pop("families", None), written.pop("over", {})
    _refuse_unknown(name, written.keys() | over.keys())
    if names is None and like is not None:
        names = like.families
    inherited = like.facts if like is not None else {}
    return ApiRow(name, tuple(hosts), None if names is None else tuple(names), {**inherited, **written}, over)


def _refuse_unknown(row: str, names: Set[str], known: Set[str] = FACTS) -> None:
    if unknown := names - known:
        raise ValueError(f"the row of {row} has a fact that does not exist: {min(unknown)}")
